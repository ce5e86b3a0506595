//! Frames: the DRAM budget in units of pages, their owners, and which one is evicted next.
//!
//! A [`FramePool`] is a number of frames with a policy. What a frame *is* depends on the pool. For
//! mappings it is a credit to have one page installed (the kernel allocates the page itself). For
//! `Pages` it is memory at `frame × page size` of an arena. Everything else is the same: per-core
//! free lists, owners, hits, victims, growing and shrinking.
//!
//! ```text
//!   take ──► core list ──► shared list ──► grant new ones ──► steal from other cores ──► none: evict
//!   give ──► core list ──► shared list (in batches)
//! ```
//!
//! # Invariants
//! * A frame below the limit is in exactly one place: a free list, held by a loader, held by the
//!   policy, or held by one evictor. A bit in its owner word marks that the policy holds it. So of
//!   two evictors that reach the same page only one takes its frame, and a policy that names frames
//!   it does not hold does no harm.
//! * A few free frames are a reserve for threads that need one to free others (see `duties`). It is
//!   filled before any other list, and counts neither as free nor as used.
//! * A frame at or above the limit is never handed out. Shrinking lowers the limit. Such frames are
//!   retired when they are given back; the evictor evicts their pages.
//! * Frames are *granted* in order, when they are first needed; those of the reserve at once. So
//!   raising the limit costs only the granting of the reserve, and lowering it costs time
//!   proportional to the frames in use, however large the pool may be.
//!
//! Lock order: policy, then the reserve, then another free list. No other lock is taken while one
//! of these is held, and no mapped memory is touched, so the fault path may take them.

pub(crate) mod arena;
pub(crate) mod frame_word;
mod resize;
#[cfg(test)]
mod tests;

use std::io;

use aquifer_sys::futex::Mutex;
use aquifer_vm::worker::{Bell, Ticket};

pub use resize::Shrink;

use self::frame_word::{FREE, HELD};
use crate::ids::{FrameId, PageId, PageKey, StoreId};
use crate::lazy::LazyArray;
use crate::policy::{HitMode, HitTable, Policy};
use crate::sync::{AtomicU64, AtomicUsize, Ordering};

/// Frames moved between lists, and evicted, at a time. More per call gains little (0.23 µs a page
/// with 512 against 0.28 with 64) and lengthens the tail latency of the misses that wait for it.
pub const BATCH: usize = 64;
const CORE_LIST_FRAMES: usize = 2 * BATCH;
/// Frames of the reserve in a large pool. A small pool reserves one frame in `RESERVED_ONE_IN`.
const RESERVE_FRAMES: usize = 16;
const RESERVED_ONE_IN: usize = 32;

struct PolicyState {
    policy: Box<dyn Policy>,
    victims: Vec<FrameId>,
    /// The number of frames, and of frame identifiers, that the policy was last sized for.
    sized_for: (usize, usize),
}

impl PolicyState {
    fn resize(&mut self, frames: usize, max_frames: usize) {
        // A pool without frames leaves its policy as it is: it may soon be as large as before.
        if frames > 0 && self.sized_for != (frames, max_frames) {
            self.sized_for = (frames, max_frames);
            self.policy.resize(frames, max_frames);
        }
    }
}

/// A free list and its lock, aligned so that no two lists share a cache line.
#[repr(align(128))]
struct List(Mutex<Vec<u32>>);

/// Counts the frames of a pool that loading threads hold while they wait for another frame, by the
/// pool that they wait for. Relaxed: a census that reads a stale value is repeated.
#[derive(Default)]
pub struct HeldByWaiters {
    /// Waiting for a frame of this pool.
    pub own: std::sync::atomic::AtomicUsize,
    /// Waiting for a frame of the cache's other pool.
    pub beside: std::sync::atomic::AtomicUsize,
    /// Waiting for a frame of another cache.
    pub elsewhere: std::sync::atomic::AtomicUsize,
}

/// A pool of frames. See the module documentation.
pub struct FramePool {
    policy: Mutex<PolicyState>,
    hits: HitTable,
    owners: LazyArray<AtomicU64>,
    cores: Box<[List]>,
    shared: List,
    reserve: List,
    /// How many frames the reserve lacks. A hint: written with the reserve's lock held, read
    /// without.
    reserve_lacks: AtomicUsize,
    free: AtomicUsize,
    used: AtomicUsize,
    insertions: AtomicU64,
    limit: AtomicUsize,
    /// Number of limit changes so far.
    changes: AtomicUsize,
    /// No frame at or above this index is granted. Written with the lock of the shared list held.
    granted: AtomicUsize,
    /// The highest limit so far.
    high_water: AtomicUsize,
    max_frames: usize,
    /// Rings whenever frames are given back; threads waiting for a frame sleep on it.
    returned: Bell,
    /// Its frames that are held by waiting threads.
    pub held: HeldByWaiters,
    /// Frames, and pages of a store that is emptied, looked at one after the other.
    #[cfg(test)]
    looked_at: AtomicUsize,
}

impl FramePool {
    /// A pool without frames that can grow up to `max_frames`.
    pub fn new(policy: Box<dyn Policy>, max_frames: usize) -> io::Result<FramePool> {
        let hits = HitTable::new(policy.hit_mode(), max_frames);
        let cores = aquifer_sys::cpu::count().next_power_of_two();
        let list = |capacity| List(Mutex::new(Vec::with_capacity(capacity)));
        Ok(FramePool {
            policy: Mutex::new(PolicyState {
                policy,
                victims: Vec::with_capacity(BATCH),
                sized_for: (0, 0),
            }),
            hits,
            owners: LazyArray::new(max_frames)?,
            cores: (0..cores).map(|_| list(CORE_LIST_FRAMES)).collect(),
            shared: list(0),
            reserve: list(RESERVE_FRAMES),
            reserve_lacks: AtomicUsize::new(0),
            free: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            insertions: AtomicU64::new(0),
            limit: AtomicUsize::new(0),
            changes: AtomicUsize::new(0),
            granted: AtomicUsize::new(0),
            high_water: AtomicUsize::new(0),
            max_frames,
            returned: Bell::new(),
            held: HeldByWaiters::default(),
            #[cfg(test)]
            looked_at: AtomicUsize::new(0),
        })
    }

    /// Records a hit on a frame.
    #[inline]
    pub fn hit(&self, frame: FrameId) {
        self.hits.hit(frame);
    }

    /// Whether a frame was hit since the policy last checked, for policies that count hits.
    pub fn is_hot(&self, frame: FrameId) -> bool {
        matches!(self.hits.mode(), HitMode::Count { .. }) && self.hits.get(frame) > 0
    }

    /// The number of frames that may be in use.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Free frames below which the evictor starts.
    pub fn low_watermark(&self) -> usize {
        self.high_watermark() / 2
    }

    /// Free frames at which the evictor stops: enough for a burst, few enough not to be missed.
    pub fn high_watermark(&self) -> usize {
        (self.limit() / 64).clamp(16, 16 * BATCH)
    }

    /// The number of frames in free lists, and of those that can still be granted.
    pub fn free(&self) -> usize {
        self.free.load(Ordering::Relaxed)
    }

    /// The number of frames taken and not given back.
    pub fn in_use(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// The number of pages that were given a frame so far.
    pub fn insertions(&self) -> u64 {
        self.insertions.load(Ordering::Relaxed)
    }

    /// The page that holds a frame.
    pub fn owner(&self, frame: FrameId) -> Option<PageKey> {
        frame_word::owner(self.owners.get(frame.0 as usize)?.load(Ordering::Acquire))
    }

    /// The frames below the limit that were granted. All others are free.
    pub fn granted(&self) -> impl ExactSizeIterator<Item = FrameId> + use<> {
        // Acquire pairs with the release in `grant_next`: a frame that a page owns was granted
        // before.
        let granted = self.granted.load(Ordering::Acquire).min(self.limit());
        self.looked_at(granted);
        (0..granted).map(|index| FrameId(index as u32))
    }

    /// Takes a free frame for `page`. Async-signal-safe.
    pub fn take(&self, page: PageKey) -> Option<FrameId> {
        let core = aquifer_sys::cpu::current() & (self.cores.len() - 1);
        loop {
            let frame = self
                .take_from(&self.cores[core])
                .or_else(|| self.refill(core))
                .or_else(|| self.cores.iter().find_map(|list| self.take_from(list)))?;
            self.free.fetch_sub(1, Ordering::Relaxed);
            if self.hand_out(frame, page) {
                return Some(frame);
            }
        }
    }

    /// Takes a frame of the reserve for `page`, which belongs to a store of this height.
    ///
    /// For a thread that needs a frame in order to free others. Half of the reserve is for the
    /// lowest stores alone, half of the rest for stores of height at most 1, and so on, so that a
    /// higher store never makes a lower one wait. See `duties`.
    pub fn take_reserved(&self, page: PageKey, height: u32) -> Option<FrameId> {
        let wanted = self.reserve_wanted();
        let left = wanted - wanted.checked_shr(height).unwrap_or(0);
        loop {
            let frame = {
                let mut reserve = self.reserve.0.lock();
                if reserve.len() <= left {
                    return None;
                }
                let frame = reserve.pop().map(FrameId)?;
                self.count_reserve(&reserve);
                frame
            };
            if self.hand_out(frame, page) {
                return Some(frame);
            }
        }
    }

    /// Makes `page` the owner of a frame that was in a free list. False if the frame was retired.
    fn hand_out(&self, frame: FrameId, page: PageKey) -> bool {
        let (owner, index) = (&self.owners[frame.0 as usize], frame.0 as usize);
        let is_ours = frame_word::is_granted(&self.limit, index)
            || frame_word::retire(owner, &self.limit, index);
        if is_ours {
            owner.store(page.pack(), Ordering::SeqCst);
            self.used.fetch_add(1, Ordering::Relaxed);
        }
        is_ours
    }

    fn count_reserve(&self, reserve: &[u32]) {
        let lacks = self.reserve_wanted().saturating_sub(reserve.len());
        self.reserve_lacks.store(lacks, Ordering::Relaxed);
    }

    /// The number of frames that pages can have at a time.
    pub fn capacity(&self) -> usize {
        self.limit() - self.reserve_wanted()
    }

    fn reserve_wanted(&self) -> usize {
        (self.limit() / RESERVED_ONE_IN).min(RESERVE_FRAMES)
    }

    /// Puts free frames into the reserve until it is full; returns the rest.
    fn fill_reserve<'a>(&self, frames: &'a [u32]) -> &'a [u32] {
        if self.reserve_lacks.load(Ordering::Relaxed) == 0 {
            return frames;
        }
        let mut reserve = self.reserve.0.lock();
        self.count_reserve(&reserve);
        // Within its capacity, which is that of the largest reserve.
        let lacks = self.reserve_lacks.load(Ordering::Relaxed).min(frames.len());
        let (kept, rest) = frames.split_at(lacks);
        reserve.extend_from_slice(kept);
        self.count_reserve(&reserve);
        rest
    }

    /// Fills the reserve with frames that were never granted, if any are left.
    fn grant_to_reserve(&self) {
        let mut reserve = self.reserve.0.lock();
        let mut shared = self.shared.0.lock();
        for _ in reserve.len()..self.reserve_wanted() {
            let Some(frame) = self.grant_next(&mut shared) else { break };
            self.looked_at(1);
            reserve.push(frame);
            // Until now it was counted as free.
            self.free.fetch_sub(1, Ordering::Relaxed);
        }
        self.count_reserve(&reserve);
    }

    /// Grants the next frame. The caller holds the lock of the shared list.
    fn grant_next(&self, _shared: &mut Vec<u32>) -> Option<u32> {
        // Relaxed: the lock orders these loads with the changes of both in `set_limit`.
        let limit = self.limit.load(Ordering::Relaxed);
        for granted in self.granted.load(Ordering::Relaxed)..limit {
            let is_new = frame_word::grant(&self.owners[granted]);
            debug_assert!(is_new, "above the granted frames none is in circulation");
            // Release pairs with the acquire in `granted`.
            self.granted.store(granted + 1, Ordering::Release);
            if is_new {
                return Some(granted as u32);
            }
        }
        None
    }

    fn take_from(&self, list: &List) -> Option<FrameId> {
        list.0.lock().pop().map(FrameId)
    }

    /// Moves a batch from the shared list, or newly granted frames, to a core's list and takes one
    /// of it.
    fn refill(&self, core: usize) -> Option<FrameId> {
        let mut moved = [0u32; BATCH];
        let mut count = 0;
        {
            let mut shared = self.shared.0.lock();
            while count < BATCH
                && let Some(frame) = shared.pop().or_else(|| self.grant_next(&mut shared))
            {
                moved[count] = frame;
                count += 1;
            }
        }
        let (first, rest) = moved[..count].split_first()?;
        self.put(core, rest);
        Some(FrameId(*first))
    }

    fn put(&self, core: usize, frames: &[u32]) {
        let mut list = self.cores[core].0.lock();
        let room = CORE_LIST_FRAMES.saturating_sub(list.len()).min(frames.len());
        list.extend_from_slice(&frames[..room]);
        drop(list);
        if room < frames.len() {
            // Within its capacity, which `set_limit` reserves for all frames.
            self.shared.0.lock().extend_from_slice(&frames[room..]);
        }
    }

    /// Gives frames back that no page owns any more, and wakes threads waiting for one.
    /// Async-signal-safe.
    pub fn give(&self, frames: &[FrameId]) {
        self.used.fetch_sub(frames.len(), Ordering::Relaxed);
        let core = aquifer_sys::cpu::current() & (self.cores.len() - 1);
        let mut kept = [0u32; BATCH];
        for batch in frames.chunks(BATCH) {
            let mut count = 0;
            for frame in batch {
                let owner = &self.owners[frame.0 as usize];
                if frame_word::release(owner, &self.limit, frame.0 as usize) {
                    kept[count] = frame.0;
                    count += 1;
                }
            }
            let rest = self.fill_reserve(&kept[..count]);
            // Before another thread can take these frames and subtract them.
            self.free.fetch_add(rest.len(), Ordering::Relaxed);
            self.put(core, rest);
        }
        self.returned.ring_all();
    }

    /// Counts frames visited one by one, for tests of what an operation costs.
    #[inline]
    pub fn looked_at(&self, _frames: usize) {
        #[cfg(test)]
        self.looked_at.fetch_add(_frames, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub fn looked_at_so_far(&self) -> usize {
        self.looked_at.load(Ordering::Relaxed)
    }

    /// Waits until frames have been given back since `ticket` was drawn, at most `timeout`.
    pub fn wait_for_frame(&self, ticket: Ticket, timeout: std::time::Duration) {
        self.returned.sleep(ticket, Some(timeout));
    }

    /// Draws a ticket for [`FramePool::wait_for_frame`], before a [`FramePool::take`] that may
    /// fail.
    pub fn ticket(&self) -> Ticket {
        self.returned.ticket()
    }

    /// Records that `page` now owns `frame`, which was taken for it.
    pub fn inserted(&self, frame: FrameId, page: PageKey) {
        self.insertions.fetch_add(1, Ordering::Relaxed);
        let mut state = self.policy.lock();
        self.hits.reset(frame);
        // A store suffices: the frame is the loader's, so no other thread writes its word. `HELD`
        // is read under the policy lock only.
        self.owners[frame.0 as usize].store(page.pack() | HELD, Ordering::Release);
        state.policy.inserted(frame, page, &self.hits);
    }

    /// Removes a frame from the policy's hold. Returns false if the policy did not hold it.
    ///
    /// The caller holds the policy lock, which orders these accesses; SeqCst only for uniformity
    /// with the other changes of owner words.
    fn let_go(&self, frame: FrameId) -> bool {
        let Some(owner) = self.owners.get(frame.0 as usize) else { return false };
        // Load first: a frame that is not held may belong to another thread, which writes the word
        // with plain stores.
        owner.load(Ordering::SeqCst) & HELD != 0
            && owner.fetch_and(!HELD, Ordering::SeqCst) & HELD != 0
    }

    /// Takes a frame out of the policy for a caller that evicts its page without having received it
    /// as a victim.
    ///
    /// Returns false if another evictor has it. The caller holds the page in a state that no other
    /// thread ends, so the page keeps the frame in the meantime. The caller then gives the frame
    /// back or returns it to the policy.
    pub fn claim(&self, frame: FrameId) -> bool {
        let mut state = self.policy.lock();
        let held = self.let_go(frame);
        if held {
            state.policy.removed(frame);
        }
        held
    }

    /// Tells the policy that the application will not need this frame soon.
    pub fn demoted(&self, frame: FrameId) {
        self.policy.lock().policy.demoted(frame, &self.hits);
    }

    /// Takes victims out of the policy into `victims`; they belong to the caller. Returns how many.
    pub fn victims(&self, victims: &mut [FrameId]) -> usize {
        let mut state = self.policy.lock();
        let PolicyState { policy, victims: named, .. } = &mut *state;
        named.clear();
        let want = victims.len().min(BATCH);
        let page_of = |frame: FrameId| {
            self.owner(frame).unwrap_or(PageKey { store: StoreId(0), page: PageId(0) })
        };
        policy.victims(want, &self.hits, &page_of, named);
        let mut count = 0;
        for &frame in named.iter() {
            // Skip frames that the policy does not hold: an application's own policy may be wrong.
            if !self.let_go(frame) {
                continue;
            }
            if count < want {
                victims[count] = frame;
                count += 1;
            } else {
                // The policy named more than were requested: it keeps the rest.
                self.owners[frame.0 as usize].fetch_or(HELD, Ordering::SeqCst);
                policy.returned(frame, page_of(frame), &self.hits);
            }
        }
        count
    }

    /// Returns victims that could not be evicted to the policy.
    pub fn returned(&self, frames: &[FrameId]) {
        if frames.is_empty() {
            return;
        }
        let mut state = self.policy.lock();
        for &frame in frames {
            let owner = self.owners[frame.0 as usize].fetch_or(HELD, Ordering::SeqCst);
            debug_assert!(owner > FREE && owner & HELD == 0, "a claimed frame is returned once");
            if let Some(page) = frame_word::owner(owner) {
                state.policy.returned(frame, page, &self.hits);
            }
        }
    }

    /// The name of the policy.
    pub fn policy_name(&self) -> &'static str {
        self.policy.lock().policy.name()
    }
}
