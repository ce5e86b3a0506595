//! Frames: the DRAM budget in units of pages, who holds them, and which one leaves next.
//!
//! A [`FramePool`] is a number of frames with a policy. What a frame *is* depends on the pool: for
//! mappings it is a credit to have one page installed (the kernel allocates the page itself), for `Pages`
//! it is memory at `frame × page size` of an arena. Everything else is the same: free lists by core,
//! owners, hits, victims, growing and shrinking.
//!
//! ```text
//!   take ──► core list ──► shared list ──► steal from other cores ──► none: evict
//!   give ──► core list ──► shared list (in batches)
//! ```
//!
//! # Invariants
//! * A frame below the limit is in exactly one place: a free list, the hands of a loader, the policy, or
//!   the hands of one evictor. The last is marked in its owner word, so that of two evictors that come
//!   upon a page only one takes its frame.
//! * A few free frames are a reserve for threads that need one to free others (see `duties`). It is filled before
//!   any other list, and counts neither as free nor as used.
//! * A frame at or above the limit is never handed out. Shrinking lowers the limit; such frames are
//!   retired when they come back, and the evictor makes them come back.
//!
//! Lock order: policy, then a free list. All are leaves towards everything else, and none is held while
//! mapped memory is touched, so the fault path may take them.

use std::io;

use aquifer_sys::futex::Mutex;

use crate::doorbell::Doorbell;
use crate::frame_word::{self, CLAIMED, FREE, RETIRED};
use crate::ids::{FrameId, PageId, PageKey, StoreId};
use crate::lazy::LazyArray;
use crate::policy::{HitMode, HitTable, Policy};
use crate::sync::{AtomicU64, AtomicUsize, Ordering};

/// Frames moved between lists, and evicted, at a time. More per call gains little (0.23 µs a page with 512
/// against 0.28 with 64) and lengthens the tail of the misses that have to wait for it.
pub const BATCH: usize = 64;
const CORE_LIST_FRAMES: usize = 2 * BATCH;
/// Frames of the reserve, where the pool has many times as many.
const RESERVE_FRAMES: usize = 16;
const RESERVED_ONE_IN: usize = 32;

struct PolicyState {
    policy: Box<dyn Policy>,
    victims: Vec<FrameId>,
}

/// A list that is filled and emptied under its lock; padded so that cores do not share its line.
#[repr(align(128))]
struct List(Mutex<Vec<u32>>);

/// A pool of frames. See the module documentation.
pub struct FramePool {
    policy: Mutex<PolicyState>,
    hits: HitTable,
    owners: LazyArray<AtomicU64>,
    cores: Box<[List]>,
    shared: List,
    reserve: List,
    /// How many frames the reserve lacks. A hint: changed with the reserve's lock held, read without.
    reserve_lacks: AtomicUsize,
    free: AtomicUsize,
    used: AtomicUsize,
    insertions: AtomicU64,
    limit: AtomicUsize,
    /// No frame at or above this was ever granted.
    high_water: AtomicUsize,
    max_frames: usize,
    /// Rings whenever frames come back; threads out of frames sleep on it.
    returned: Doorbell,
}

impl FramePool {
    /// A pool without frames that can grow up to `max_frames`.
    pub fn new(policy: Box<dyn Policy>, max_frames: usize) -> io::Result<FramePool> {
        let hits = HitTable::new(policy.hit_mode(), max_frames);
        let cores = aquifer_sys::cpu::count().next_power_of_two();
        let list = |capacity| List(Mutex::new(Vec::with_capacity(capacity)));
        Ok(FramePool {
            policy: Mutex::new(PolicyState { policy, victims: Vec::with_capacity(BATCH) }),
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
            high_water: AtomicUsize::new(0),
            max_frames,
            returned: Doorbell::new(),
        })
    }

    /// Records a hit on a frame.
    #[inline]
    pub fn hit(&self, frame: FrameId) {
        self.hits.hit(frame);
    }

    /// Whether a frame was hit since the policy last looked, where hits are counted.
    pub fn is_hot(&self, frame: FrameId) -> bool {
        matches!(self.hits.mode(), HitMode::Count { .. }) && self.hits.get(frame) > 0
    }

    /// Frames that may be in use.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Frames in free lists.
    pub fn free(&self) -> usize {
        self.free.load(Ordering::Relaxed)
    }

    /// Frames taken and not given back.
    pub fn in_use(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Pages that were given a frame so far.
    pub fn insertions(&self) -> u64 {
        self.insertions.load(Ordering::Relaxed)
    }

    /// The page that holds a frame.
    pub fn owner(&self, frame: FrameId) -> Option<PageKey> {
        frame_word::owner(self.owners[frame.0 as usize].load(Ordering::Acquire))
    }

    /// Which page holds a frame, and whether an evictor decides about it.
    pub fn holder(&self, frame: FrameId) -> Option<(PageKey, bool)> {
        // Acquire: what is known of a page that got the frame is not older than that.
        let word = self.owners[frame.0 as usize].load(Ordering::Acquire);
        frame_word::owner(word).map(|page| (page, word & CLAIMED != 0))
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
            if self.grant(frame, page) {
                return Some(frame);
            }
        }
    }

    /// Takes a frame of the reserve for `page`: for a thread on which it depends that others become free. Where
    /// that thread serves itself through several devices, `depth` tells how deep it is: half of the reserve is
    /// for the first, half of the rest for the second. So the last device in the row finds a frame, and frees
    /// those of the others.
    pub fn take_reserved(&self, page: PageKey, depth: u32) -> Option<FrameId> {
        let left = self.reserve_wanted().checked_shr(depth).unwrap_or(0);
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
            if self.grant(frame, page) {
                return Some(frame);
            }
        }
    }

    /// Makes `page` the owner of a frame that was in a free list. False if the frame was retired.
    fn grant(&self, frame: FrameId, page: PageKey) -> bool {
        let (owner, index) = (&self.owners[frame.0 as usize], frame.0 as usize);
        let granted = frame_word::is_granted(&self.limit, index)
            || frame_word::retire(owner, &self.limit, index);
        if granted {
            owner.store(page.pack(), Ordering::SeqCst);
            self.used.fetch_add(1, Ordering::Relaxed);
        }
        granted
    }

    fn count_reserve(&self, reserve: &[u32]) {
        let lacks = self.reserve_wanted().saturating_sub(reserve.len());
        self.reserve_lacks.store(lacks, Ordering::Relaxed);
    }

    fn reserve_wanted(&self) -> usize {
        (self.limit() / RESERVED_ONE_IN).min(RESERVE_FRAMES)
    }

    /// Puts what the reserve lacks of free frames into it; returns the rest.
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

    fn take_from(&self, list: &List) -> Option<FrameId> {
        list.0.lock().pop().map(FrameId)
    }

    /// Moves a batch from the shared list to a core's and takes one of it.
    fn refill(&self, core: usize) -> Option<FrameId> {
        let mut moved = [0u32; BATCH];
        let mut count = 0;
        {
            let mut shared = self.shared.0.lock();
            while count < BATCH
                && let Some(frame) = shared.pop()
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
            // Within its capacity: it was reserved for all frames when the pool grew.
            self.shared.0.lock().extend_from_slice(&frames[room..]);
        }
    }

    /// Gives frames back that belong to no page any more, and wakes threads waiting for one.
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
            // Before a taker can subtract them.
            self.free.fetch_add(rest.len(), Ordering::Relaxed);
            self.put(core, rest);
        }
        self.returned.ring(u32::MAX);
    }

    /// Frames that pages of a store hold, by a scan. Not for the fault path.
    pub fn frames_of(&self, store: StoreId) -> Vec<FrameId> {
        (0..self.high_water.load(Ordering::SeqCst))
            .map(|frame| FrameId(frame as u32))
            .filter(|&frame| self.owner(frame).is_some_and(|key| key.store == store))
            .collect()
    }

    /// Waits until frames have come back since `ticket` was drawn, at most `timeout`.
    pub fn wait_for_frame(&self, ticket: u32, timeout: std::time::Duration) {
        self.returned.sleep(ticket, Some(timeout));
    }

    /// To be drawn before a failing [`FramePool::take`], for [`FramePool::wait_for_frame`].
    pub fn ticket(&self) -> u32 {
        self.returned.ticket()
    }

    /// `page` now holds `frame`, which was taken for it.
    pub fn inserted(&self, frame: FrameId, page: PageKey) {
        self.insertions.fetch_add(1, Ordering::Relaxed);
        let mut state = self.policy.lock();
        self.hits.reset(frame);
        state.policy.inserted(frame, page, &self.hits);
    }

    /// Takes a frame out of the policy for a caller who evicts its page without having been given it as a
    /// victim. False if another evictor has it. The caller holds the page in a state that nobody else ends,
    /// so the page keeps the frame meanwhile; it then gives the frame back, or returns it to the policy.
    pub fn claim(&self, frame: FrameId) -> bool {
        let mut state = self.policy.lock();
        // The policy lock orders claims; SeqCst only for uniformity with the other owner words.
        let owner = self.owners[frame.0 as usize].fetch_or(CLAIMED, Ordering::SeqCst);
        debug_assert!(owner > FREE, "a page in use holds a frame in use");
        if owner & CLAIMED != 0 {
            return false;
        }
        state.policy.removed(frame);
        true
    }

    /// The application will not need this frame soon.
    pub fn demoted(&self, frame: FrameId) {
        self.policy.lock().policy.demoted(frame, &self.hits);
    }

    /// Asks the policy for victims; they leave it and belong to the caller. Returns how many.
    pub fn victims(&self, victims: &mut [FrameId]) -> usize {
        let mut state = self.policy.lock();
        let PolicyState { policy, victims: scratch } = &mut *state;
        scratch.clear();
        let want = victims.len().min(BATCH);
        let page_of = |frame: FrameId| {
            self.owner(frame).unwrap_or(PageKey { store: StoreId(0), page: PageId(0) })
        };
        policy.victims(want, &self.hits, &page_of, scratch);
        let count = scratch.len().min(want);
        victims[..count].copy_from_slice(&scratch[..count]);
        for frame in &scratch[..count] {
            let owner = self.owners[frame.0 as usize].fetch_or(CLAIMED, Ordering::SeqCst);
            debug_assert!(owner > FREE && owner & CLAIMED == 0, "the policy holds frames in use");
        }
        // A policy that names more than it was asked for keeps them.
        for &extra in &scratch[count..] {
            policy.returned(extra, page_of(extra), &self.hits);
        }
        count
    }

    /// Victims that could not be evicted.
    pub fn returned(&self, frames: &[FrameId]) {
        if frames.is_empty() {
            return;
        }
        let mut state = self.policy.lock();
        for &frame in frames {
            let owner = self.owners[frame.0 as usize].fetch_and(!CLAIMED, Ordering::SeqCst);
            debug_assert!(owner & CLAIMED != 0, "only a claimed frame is returned");
            if let Some(page) = frame_word::owner(owner) {
                state.policy.returned(frame, page, &self.hits);
            }
        }
    }

    /// Sets the limit. Growing takes effect at once; shrinking when the frames above the limit have come
    /// back, see [`FramePool::in_use_above_limit`]. Not for the fault path: allocates.
    pub fn set_limit(&self, frames: usize) {
        let frames = frames.min(self.max_frames);
        let mut state = self.policy.lock();
        let old = self.limit.load(Ordering::SeqCst);
        let high_water = self.high_water.load(Ordering::SeqCst).max(frames);
        self.high_water.store(high_water, Ordering::SeqCst);
        if frames > old {
            // The policy may still hold frames of an unfinished shrink.
            state.policy.resize(frames, high_water);
            self.reserve_shared(high_water);
            self.limit.store(frames, Ordering::SeqCst);
            drop(state);
            let fresh: Vec<u32> = (old..frames)
                .filter(|&frame| frame_word::regain(&self.owners[frame]))
                .map(|frame| frame as u32)
                .collect();
            self.count_reserve(&self.reserve.0.lock());
            let rest = self.fill_reserve(&fresh);
            self.free.fetch_add(rest.len(), Ordering::Relaxed);
            self.shared.0.lock().extend(rest);
            self.returned.ring(u32::MAX);
        } else {
            self.limit.store(frames, Ordering::SeqCst);
        }
    }

    fn reserve_shared(&self, frames: usize) {
        let mut shared = self.shared.0.lock();
        let more = frames.saturating_sub(shared.len());
        shared.reserve(more);
    }

    /// Retires free frames above the limit and appends those in use to `in_use`: a shrink is complete
    /// when there are none. Not for the fault path.
    pub fn in_use_above_limit(&self, in_use: &mut Vec<FrameId>) {
        let limit = self.limit();
        {
            let mut reserve = self.reserve.0.lock();
            reserve.retain(|&frame| {
                let index = frame as usize;
                index < limit || frame_word::retire(&self.owners[index], &self.limit, index)
            });
            let wanted = self.reserve_wanted().min(reserve.len());
            let too_many = reserve.split_off(wanted);
            self.count_reserve(&reserve);
            // As in `give`.
            self.free.fetch_add(too_many.len(), Ordering::Relaxed);
            self.shared.0.lock().extend(too_many);
        }
        for list in self.cores.iter().chain(std::iter::once(&self.shared)) {
            list.0.lock().retain(|&frame| {
                let index = frame as usize;
                let stays =
                    index < limit || frame_word::retire(&self.owners[index], &self.limit, index);
                if !stays {
                    self.free.fetch_sub(1, Ordering::Relaxed);
                }
                stays
            });
        }
        let above = limit..self.high_water.load(Ordering::SeqCst);
        in_use.extend(
            above
                .filter(|&frame| self.owners[frame].load(Ordering::SeqCst) != RETIRED)
                .map(|frame| FrameId(frame as u32)),
        );
    }

    /// Ends a shrink if nothing at or above the limit is in use: lets the policy size itself for the smaller
    /// pool, and calls `release` with the limit, which does not change meanwhile.
    pub fn finish_shrink(&self, release: impl FnOnce(usize)) {
        let mut state = self.policy.lock();
        let limit = self.limit();
        let high_water = self.high_water.load(Ordering::SeqCst);
        let retired = |frame: usize| self.owners[frame].load(Ordering::SeqCst) == RETIRED;
        if (limit..high_water).all(retired) {
            state.policy.resize(limit, high_water);
            release(limit);
        }
    }

    /// The name of the policy.
    pub fn policy_name(&self) -> &'static str {
        self.policy.lock().policy.name()
    }

    /// The share of the budget the policy wants for probation.
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

    /// Takes every frame there is, the reserve last.
    fn take_all(pool: &FramePool) -> Vec<FrameId> {
        let usual = std::iter::from_fn(|| pool.take(key(9)));
        usual.chain(std::iter::from_fn(|| pool.take_reserved(key(9), u32::MAX))).collect()
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
        let mut above = vec![];
        pool.in_use_above_limit(&mut above);
        assert_eq!(above.len(), 50);
        for &frame in &above[..20] {
            assert!(pool.claim(frame) && !pool.claim(frame));
        }
        pool.give(&above[..20]);
        assert!(pool.take(key(500)).is_none(), "frames above the limit are not handed out");
        pool.set_limit(200);
        assert_eq!(take_all(&pool).len(), 20);
    }

    /// So that a thread deep in a row of devices finds a frame that those before it left.
    #[test]
    fn the_reserve_is_shared_out_by_depth_and_filled_first() {
        let pool = pool(32 * RESERVE_FRAMES);
        let usual: Vec<FrameId> = std::iter::from_fn(|| pool.take(key(9))).collect();
        assert_eq!(usual.len(), 31 * RESERVE_FRAMES);
        assert_eq!(pool.free(), 0);
        let taken: Vec<usize> = [0, 1, 2, 3, 4, 5, 6]
            .map(|depth| std::iter::from_fn(|| pool.take_reserved(key(9), depth)).count())
            .into();
        assert_eq!(taken, [0, 8, 4, 2, 1, 1, 0]);
        pool.give(&usual[..RESERVE_FRAMES]);
        assert!(pool.take(key(9)).is_none(), "the reserve comes first");
        pool.give(&usual[RESERVE_FRAMES..][..3]);
        assert_eq!(std::iter::from_fn(|| pool.take(key(9))).count(), 3);
        // A smaller pool has a smaller reserve; the rest of it is free.
        pool.set_limit(64);
        pool.in_use_above_limit(&mut vec![]);
        let below = |frame: &&FrameId| (frame.0 as usize) < 64;
        let free = usual[..RESERVE_FRAMES].iter().filter(below).count();
        assert_eq!(pool.free(), free.saturating_sub(2));
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
            for round in 0..200 {
                pool.set_limit(if round % 2 == 0 { 100 } else { 512 });
            }
        });
        let mut above = vec![];
        pool.in_use_above_limit(&mut above);
        assert!(above.is_empty());
        let mut all: Vec<u32> = take_all(&pool).iter().map(|frame| frame.0).collect();
        all.sort_unstable();
        assert_eq!(all, (0..512).collect::<Vec<_>>());
    }
}
