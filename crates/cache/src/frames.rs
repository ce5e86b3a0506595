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

use std::io;

use aquifer_sys::futex::Mutex;
use aquifer_vm::worker::{Bell, Ticket};

use crate::frame_word::{self, FREE, HELD};
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

/// A shrink in progress, as the thread that completes it sees it.
#[derive(Default)]
pub struct Shrink {
    /// The count of limit changes that this shrink belongs to.
    change: Option<usize>,
    in_use: Vec<FrameId>,
}

impl Shrink {
    /// The frames above the limit that were in use at the last check.
    pub fn in_use(&self) -> &[FrameId] {
        &self.in_use
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
    pub fn granted(&self) -> impl Iterator<Item = FrameId> + use<> {
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

    /// Sets the limit. Growing takes effect at once; shrinking when the frames above the limit have
    /// been given back, see [`FramePool::look_above_limit`]. Allocates, so it is not for the fault
    /// path.
    pub fn set_limit(&self, frames: usize) {
        let frames = frames.min(self.max_frames);
        let mut state = self.policy.lock();
        let old = self.limit.load(Ordering::SeqCst);
        let high_water = self.high_water.load(Ordering::SeqCst).max(frames);
        self.high_water.store(high_water, Ordering::SeqCst);
        if frames > old {
            // The policy may still hold frames of an unfinished shrink.
            state.resize(frames, high_water);
        }
        let granted = {
            let mut shared = self.shared.0.lock();
            let more = high_water.saturating_sub(shared.len());
            shared.reserve(more);
            // Relaxed: the lock orders it with `grant_next`, which changes it.
            let granted = self.granted.load(Ordering::Relaxed);
            self.limit.store(frames, Ordering::SeqCst);
            // After the limit: a thread that sees this change sees the new limit
            // (`look_above_limit`).
            self.changes.fetch_add(1, Ordering::SeqCst);
            let to_grant = |limit: usize| limit.saturating_sub(granted);
            // Wraps around when the limit falls; `free` wraps in the same way.
            let change = to_grant(frames).wrapping_sub(to_grant(old));
            self.free.fetch_add(change, Ordering::Relaxed);
            granted
        };
        if frames > old {
            // Empty, unless the previous shrink is unfinished. It cannot finish now, because the
            // policy lock is held.
            let returned = old..frames.min(granted);
            self.looked_at(returned.len());
            let regained: Vec<u32> = returned
                .filter(|&frame| {
                    let owner = &self.owners[frame];
                    frame_word::regain(owner) || frame_word::grant(owner)
                })
                .map(|frame| frame as u32)
                .collect();
            // The larger pool has a larger reserve.
            self.count_reserve(&self.reserve.0.lock());
            let rest = self.fill_reserve(&regained);
            self.free.fetch_add(rest.len(), Ordering::Relaxed);
            self.shared.0.lock().extend(rest);
            self.grant_to_reserve();
            drop(state);
            self.returned.ring_all();
        }
    }

    /// Retires free frames above the limit and finds those in use.
    ///
    /// A shrink is complete when none is in use and [`FramePool::finish_shrink`] returns true. The
    /// first call after a change of the limit visits all granted frames above the limit, later
    /// calls only those that were in use then. Allocates, so it is not for the fault path.
    pub fn look_above_limit(&self, shrink: &mut Shrink) {
        // Before the limit is read: if the limit changes in between, the next call sees that.
        let change = self.changes.load(Ordering::SeqCst);
        let word = |frame: usize| self.owners[frame].load(Ordering::SeqCst);
        if shrink.change != Some(change) {
            shrink.change = Some(change);
            self.retire_free();
            let above = self.limit()..self.granted.load(Ordering::SeqCst);
            self.looked_at(above.len());
            let frames = above.map(|frame| FrameId(frame as u32));
            shrink.in_use = frames
                .filter(|frame| frame_word::is_in_circulation(word(frame.0 as usize)))
                .collect();
            return;
        }
        self.looked_at(shrink.in_use.len());
        if shrink.in_use.iter().any(|frame| word(frame.0 as usize) == FREE) {
            // It was between its owner and a free list during the first check.
            self.retire_free();
        }
        shrink.in_use.retain(|frame| frame_word::is_in_circulation(word(frame.0 as usize)));
    }

    /// Retires the frames above the limit that are in free lists or in the reserve. The reserve
    /// keeps what the smaller pool's reserve needs.
    fn retire_free(&self) {
        let stays = |frame: u32| {
            let index = frame as usize;
            frame_word::is_granted(&self.limit, index)
                || frame_word::retire(&self.owners[index], &self.limit, index)
        };
        let mut reserve = self.reserve.0.lock();
        self.looked_at(reserve.len());
        reserve.retain(|&frame| stays(frame));
        let wanted = self.reserve_wanted();
        let kept = wanted.min(reserve.len());
        let too_many = reserve.split_off(kept);
        // As in `give`.
        self.free.fetch_add(too_many.len(), Ordering::Relaxed);
        self.shared.0.lock().extend(too_many);
        for list in self.cores.iter().chain(std::iter::once(&self.shared)) {
            let mut list = list.0.lock();
            self.looked_at(list.len());
            let before = list.len();
            list.retain(|&frame| stays(frame));
            let to_reserve = wanted.saturating_sub(reserve.len()).min(list.len());
            let kept = list.len() - to_reserve;
            reserve.extend(list.drain(kept..));
            self.free.fetch_sub(before - kept, Ordering::Relaxed);
        }
        self.count_reserve(&reserve);
    }

    /// Finishes a shrink if no frame at or above the limit is in use; returns whether it did.
    ///
    /// Resizes the policy for the smaller pool. Calls `release` with the limit, which cannot change
    /// during the call, if frames above it were granted.
    pub fn finish_shrink(&self, shrink: &mut Shrink, release: impl FnOnce(usize)) -> bool {
        let mut state = self.policy.lock();
        let limit = self.limit();
        // No frame above the limit is granted now, and the limit stays: the policy lock is held.
        let granted = self.granted.load(Ordering::SeqCst);
        self.looked_at((limit..granted).len());
        if !(limit..granted).all(|frame| frame_word::withdraw(&self.owners[frame])) {
            // A frame is in use, or was granted again since the last check: start over.
            shrink.change = None;
            return false;
        }
        if granted > limit {
            let shared = self.shared.0.lock();
            self.granted.store(limit, Ordering::SeqCst);
            drop(shared);
        }
        state.resize(limit, self.high_water.load(Ordering::SeqCst));
        if granted > limit {
            release(limit);
        }
        true
    }

    /// The name of the policy.
    pub fn policy_name(&self) -> &'static str {
        self.policy.lock().policy.name()
    }

    /// The share of the budget that the policy wants for probation.
    pub fn probation_share(&self) -> f32 {
        self.policy.lock().policy.probation_share()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyKind;

    fn key(page: u64) -> PageKey {
        PageKey { store: StoreId(3), page: PageId(page) }
    }

    fn pool(frames: usize) -> FramePool {
        let pool = FramePool::new(PolicyKind::Clock.build(), 4096).unwrap();
        pool.set_limit(frames);
        pool
    }

    /// Takes every available frame, the reserve last.
    fn take_all(pool: &FramePool) -> Vec<FrameId> {
        let usual = std::iter::from_fn(|| pool.take(key(9)));
        usual.chain(std::iter::from_fn(|| pool.take_reserved(key(9), 0))).collect()
    }

    #[test]
    fn every_frame_is_handed_out_once() {
        let pool = pool(1000);
        let mut frames: Vec<u32> = take_all(&pool).iter().map(|frame| frame.0).collect();
        frames.sort_unstable();
        assert_eq!(frames, (0..1000).collect::<Vec<_>>());
        assert_eq!(pool.free(), 0);
        assert_eq!(pool.owner(FrameId(frames[7])).unwrap().store, StoreId(3));
    }

    #[test]
    fn a_shrink_waits_for_frames_in_use_and_a_growth_takes_them_back() {
        let pool = pool(200);
        let held = take_all(&pool);
        for (page, &frame) in held.iter().enumerate() {
            pool.inserted(frame, key(page as u64));
        }
        pool.set_limit(150);
        let mut shrink = Shrink::default();
        pool.look_above_limit(&mut shrink);
        let above = shrink.in_use().to_vec();
        assert_eq!(above.len(), 50);
        for &frame in &above[..20] {
            assert!(pool.claim(frame) && !pool.claim(frame));
        }
        pool.give(&above[..20]);
        assert!(pool.take(key(500)).is_none(), "frames above the limit are not handed out");
        pool.set_limit(200);
        assert_eq!(take_all(&pool).len(), 20);
    }

    /// So a lower store finds a frame after the stores above it have taken theirs.
    #[test]
    fn the_reserve_is_shared_out_by_height_and_filled_first() {
        let pool = pool(32 * RESERVE_FRAMES);
        let usual: Vec<FrameId> = std::iter::from_fn(|| pool.take(key(9))).collect();
        assert_eq!(usual.len(), 31 * RESERVE_FRAMES);
        assert_eq!(pool.free(), 0);
        let taken: Vec<usize> = [6, 5, 4, 3, 2, 1, 0]
            .map(|height| std::iter::from_fn(|| pool.take_reserved(key(9), height)).count())
            .into();
        assert_eq!(taken, [0, 0, 1, 1, 2, 4, 8]);
        pool.give(&usual[..RESERVE_FRAMES]);
        assert!(pool.take(key(9)).is_none(), "the reserve comes first");
        pool.give(&usual[RESERVE_FRAMES..][..3]);
        assert_eq!(std::iter::from_fn(|| pool.take(key(9))).count(), 3);
        // A smaller pool has a smaller reserve; the other free frames below the limit go to the
        // free lists.
        pool.set_limit(64);
        pool.look_above_limit(&mut Shrink::default());
        let below = |frame: &&FrameId| (frame.0 as usize) < 64;
        let free = usual[..RESERVE_FRAMES].iter().filter(below).count();
        assert_eq!(pool.free(), free.saturating_sub(2));
    }

    /// The reserve is filled from frames that were never granted, from frames that are given back,
    /// and, when a shrink retires those of the reserve, from free frames below the limit.
    #[test]
    fn the_reserve_is_full_whenever_frames_are_free() {
        let pool = pool(64);
        let in_reserve = || pool.reserve.0.lock().len();
        assert_eq!((in_reserve(), pool.free()), (2, 62));
        pool.set_limit(4096);
        assert_eq!((in_reserve(), pool.free()), (16, 4080));
        assert_eq!(pool.granted().count(), 16, "the others are not wanted yet");
        let held = take_all(&pool);
        assert_eq!((held.len(), pool.free()), (4096, 0));
        pool.set_limit(2048);
        let (above, below) = held.iter().partition::<Vec<_>, _>(|frame| frame.0 >= 2048);
        pool.set_limit(4096);
        pool.give(&above);
        assert_eq!((in_reserve(), pool.free()), (16, 2032));
        // All free frames, and the reserve, lie above this limit.
        pool.set_limit(1024);
        let mut shrink = Shrink::default();
        pool.look_above_limit(&mut shrink);
        assert_eq!((in_reserve(), pool.free(), shrink.in_use().len()), (0, 0, 1024));
        pool.give(&below);
        assert_eq!((in_reserve(), pool.free()), (16, 1008));
        pool.look_above_limit(&mut shrink);
        assert!(pool.finish_shrink(&mut shrink, |limit| assert_eq!(limit, 1024)));
        // The reserve is taken while frames below the limit are free: the next shrink fills it.
        let taken: Vec<FrameId> = std::iter::from_fn(|| pool.take_reserved(key(9), 0)).collect();
        assert_eq!(taken.len(), 16);
        pool.set_limit(1000);
        pool.look_above_limit(&mut shrink);
        let free = 1000 - 16 - taken.iter().filter(|frame| frame.0 < 1000).count();
        assert_eq!((in_reserve(), pool.free()), (16, free));
        pool.give(&taken);
        let all = take_all(&pool);
        assert_eq!((all.len(), pool.free()), (1000, 0));
    }

    #[test]
    fn what_a_change_of_the_limit_costs_depends_on_what_is_in_use() {
        const MANY: usize = 1 << 20;
        let pool = FramePool::new(PolicyKind::Fifo.build(), MANY).unwrap();
        let looked_at = pool.looked_at_so_far();
        pool.set_limit(MANY);
        assert_eq!(pool.looked_at_so_far() - looked_at, RESERVE_FRAMES);
        const FREE: usize = MANY - RESERVE_FRAMES;
        assert_eq!(pool.free(), FREE);
        let held: Vec<FrameId> = (0..200).map(|page| pool.take(key(page)).unwrap()).collect();
        assert_eq!(pool.free(), FREE - 200);
        let before = pool.looked_at_so_far();
        for round in 0..10 {
            pool.set_limit(0);
            let mut shrink = Shrink::default();
            pool.look_above_limit(&mut shrink);
            assert_eq!(shrink.in_use().len(), 200);
            assert!(!pool.finish_shrink(&mut shrink, |_| panic!("frames are in use")));
            pool.set_limit(MANY - round);
            assert_eq!(pool.free(), FREE - round - 200);
        }
        let looked_at = pool.looked_at_so_far() - before;
        assert!(looked_at <= 10 * 4 * 256, "{looked_at} frames were looked at");
        pool.give(&held);
        let mut all: Vec<u32> = take_all(&pool).iter().map(|frame| frame.0).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..(MANY - 9) as u32));
    }

    #[test]
    fn a_shrink_that_is_held_up_looks_at_what_holds_it_up() {
        let pool = pool(4096);
        let held = take_all(&pool);
        assert_eq!(held.len(), 4096);
        pool.set_limit(100);
        let pinned = *held.iter().find(|frame| frame.0 == 3000).unwrap();
        let mut shrink = Shrink::default();
        pool.look_above_limit(&mut shrink);
        assert_eq!(shrink.in_use().len(), 3996);
        let rest: Vec<FrameId> = held.into_iter().filter(|&frame| frame != pinned).collect();
        pool.give(&rest);
        pool.look_above_limit(&mut shrink);
        let before = pool.looked_at_so_far();
        for _ in 0..100 {
            pool.look_above_limit(&mut shrink);
            assert_eq!(shrink.in_use(), [pinned]);
        }
        assert_eq!(pool.looked_at_so_far() - before, 100, "one frame a look");
        pool.give(&[pinned]);
        pool.look_above_limit(&mut shrink);
        assert!(shrink.in_use().is_empty());
        let mut released = None;
        assert!(pool.finish_shrink(&mut shrink, |limit| released = Some(limit)));
        assert_eq!((released, pool.free()), (Some(100), 100 - 100 / RESERVED_ONE_IN));
        // A growth followed by a shrink to the same limit starts over.
        pool.set_limit(200);
        assert_eq!(take_all(&pool).len(), 200);
        pool.set_limit(100);
        pool.look_above_limit(&mut shrink);
        assert_eq!(shrink.in_use().len(), 100);
    }

    /// A policy that names frames it does not hold before those it holds.
    #[derive(Default)]
    struct Liar {
        lies: Vec<FrameId>,
        held: Vec<FrameId>,
    }

    impl Policy for Liar {
        fn name(&self) -> &'static str {
            "liar"
        }
        fn hit_mode(&self) -> HitMode {
            HitMode::Ignore
        }
        fn resize(&mut self, _frames: usize, _max_frames: usize) {}
        fn inserted(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
            self.held.push(frame);
        }
        fn removed(&mut self, frame: FrameId) {
            self.held.retain(|&held| held != frame);
        }
        fn victims(
            &mut self,
            _want: usize,
            _hits: &HitTable,
            page_of: &dyn Fn(FrameId) -> PageKey,
            victims: &mut Vec<FrameId>,
        ) {
            for &lie in &self.lies {
                page_of(lie);
                victims.push(lie);
            }
            for frame in self.held.drain(..) {
                victims.extend([frame, frame]);
            }
        }
        fn returned(&mut self, frame: FrameId, page: PageKey, hits: &HitTable) {
            self.inserted(frame, page, hits);
        }
    }

    #[test]
    fn frames_that_a_policy_does_not_hold_are_no_victims() {
        let [loading, free, claimed, retired] = [9, 5, 3, 99].map(FrameId);
        let lies = vec![loading, free, claimed, retired, FrameId(4096), FrameId(u32::MAX)];
        let pool = FramePool::new(Box::new(Liar { lies, held: vec![] }), 4096).unwrap();
        pool.set_limit(10);
        let taken: Vec<FrameId> = (0..10).map(|page| pool.take(key(page)).unwrap()).collect();
        for &frame in taken.iter().filter(|&&frame| frame != loading) {
            pool.inserted(frame, key(frame.0.into()));
        }
        for frame in [free, claimed] {
            assert!(pool.claim(frame));
        }
        pool.give(&[free]);
        let mut victims = [FrameId(0); BATCH];
        assert_eq!(pool.victims(&mut victims), 7, "the policy holds so many");
        let victims = &mut victims[..7];
        victims.sort_unstable();
        assert_eq!(victims, [0, 1, 2, 4, 6, 7, 8].map(FrameId));
        assert!(victims.iter().all(|&victim| !pool.claim(victim)), "all have left the policy");
        pool.returned(&victims[..2]);
        assert!(pool.claim(victims[0]) && !pool.claim(victims[0]));
        // Each victim can be taken exactly once afterwards.
        pool.give(victims);
        let mut out: Vec<FrameId> = std::iter::from_fn(|| pool.take(key(1))).collect();
        out.sort_unstable();
        assert_eq!(out, [0, 1, 2, 4, 5, 6, 7, 8].map(FrameId));
    }

    #[test]
    fn frames_survive_concurrent_use_and_resizing() {
        let pool = pool(512);
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                let pool = &pool;
                scope.spawn(move || {
                    let mut held = vec![];
                    for step in 0..20_000u64 {
                        match pool.take(key(thread << 32 | step)) {
                            Some(frame) => held.push(frame),
                            None => pool.give(&std::mem::take(&mut held)),
                        }
                        if step % 97 == 0 {
                            pool.give(&std::mem::take(&mut held));
                        }
                    }
                    pool.give(&held);
                });
            }
            let mut shrink = Shrink::default();
            for round in 0..200 {
                pool.set_limit(if round % 2 == 0 { 100 } else { 512 });
                if round % 3 == 0 {
                    pool.look_above_limit(&mut shrink);
                    pool.finish_shrink(&mut shrink, |limit| assert_eq!(limit, pool.limit()));
                }
            }
        });
        let mut shrink = Shrink::default();
        pool.look_above_limit(&mut shrink);
        assert!(shrink.in_use().is_empty());
        assert_eq!(pool.free(), 512 - RESERVE_FRAMES);
        let mut all: Vec<u32> = take_all(&pool).iter().map(|frame| frame.0).collect();
        all.sort_unstable();
        assert_eq!(all, (0..512).collect::<Vec<_>>());
    }
}
