//! Frames for the threads that miss: taken, evicted for, or waited for.
//!
//! A miss takes a free frame. If there is none, it evicts a small batch itself: clean pages, and
//! dirty ones where write-back does not block. Only if that frees nothing does it wait for the
//! evictor. It fails when a census of all granted frames finds each of them pinned or dirty beyond
//! writing.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::registry::{Cleaning, Evicted, Keeps, UsedBy};
use super::{Engine, FRAME_WAIT};
use aquifer_vm::worker::Ticket;

use crate::engine::duties;
use crate::frames::{BATCH, FramePool};
use crate::ids::{FrameId, PageId, PageKey, StoreId};
use crate::stats::count;

/// How many times a thread that is writing back waits like this before it fails.
const MOST_WAITS: u32 = 500;
/// Full passes of the evictor that must free nothing before a caller without a frame fails.
const STUCK_PASSES: u32 = 3;

/// No frame can be freed: every one is pinned or cannot be written back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoFrame {
    pub pinned: u64,
    pub unwritable: u64,
}

/// The frames of a pool, counted by what keeps them.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Census {
    pub pinned: u64,
    pub unwritable: u64,
    /// Pages being written to a device.
    pub writing: u64,
    /// Other frames that will become free on their own.
    pub coming: u64,
}

/// Per-pool state of the evictor.
#[derive(Default)]
pub(super) struct Reclaim {
    /// Counts of pinned and unwritable frames in the last full pass that freed nothing.
    pub stuck_pinned: AtomicU64,
    pub stuck_unwritable: AtomicU64,
    pub stuck_passes: AtomicU32,
    /// Whether the last batch of victims contained dirty pages.
    pub dirty: AtomicBool,
    /// Whether other threads preempted the evictor recently.
    pub crowded: AtomicBool,
}

impl Engine {
    /// Acquires a frame for `page`. Waits until a frame is free or none can be freed.
    pub fn acquire(
        &self,
        pool: &FramePool,
        page: PageKey,
    ) -> std::result::Result<FrameId, NoFrame> {
        if duties::is_in_a_call()
            && let Some(store) = self.store(page.store)
        {
            duties::with_caller(store.height(), |above| above.is_above(store.height().get()));
        }
        let mut stalled_at = None;
        loop {
            let ticket = pool.ticket();
            if let Some(frame) = pool.take(page) {
                if pool.free() < pool.low_watermark() && self.wants_evictor(pool) {
                    self.wake_evictor();
                }
                return Ok(frame);
            }
            if self.wants_evictor(pool) {
                self.wake_evictor();
            }
            // Cleaning a dirty region frees many more frames than its victims: ask for few, to keep
            // the wait short.
            let dirty = self.reclaim_of(pool).dirty.load(Ordering::Relaxed);
            let want = if dirty { BATCH / 4 } else { BATCH };
            if self.evict(pool, want, Cleaning::IfCopying).freed > 0 {
                continue;
            }
            if duties::writing().is_some() {
                return self.acquire_to_write_back(pool, page);
            }
            let stalled_at = *stalled_at.get_or_insert_with(|| {
                count(&self.counters.stalls, 1);
                self.reclaim_of(pool).stuck_passes.load(Ordering::Acquire)
            });
            self.wake_evictor();
            if let Some(no_frame) = self.stuck(pool, stalled_at) {
                return Err(no_frame);
            }
            self.wait_with_frames_in_hand(pool, ticket);
        }
    }

    /// Acquires a frame for `page`, which the calling thread needs to complete a write-back.
    ///
    /// If the heights in `duties` are right, a frame is free or will be. But heights are learnt,
    /// and a device may touch memory from its own threads. So the thread waits a bounded number of
    /// times and then fails. The write fails with it; its page stays dirty and is written again
    /// later.
    #[cold]
    fn acquire_to_write_back(
        &self,
        pool: &FramePool,
        page: PageKey,
    ) -> std::result::Result<FrameId, NoFrame> {
        let height = self.store(page.store).map_or(0, |store| store.height().get());
        let mut waits = 0;
        loop {
            let ticket = pool.ticket();
            if let Some(frame) = pool.take(page).or_else(|| pool.take_reserved(page, height)) {
                return Ok(frame);
            }
            if self.evict_a_pass(pool) {
                continue;
            }
            let census = self.census(pool);
            if census.coming == 0 || waits == MOST_WAITS {
                return Err(NoFrame { pinned: census.pinned, unwritable: census.unwritable });
            }
            waits += 1;
            self.wait_with_frames_in_hand(pool, ticket);
        }
    }

    /// Evicts a few frames of a pool in the calling thread. Returns false if a whole pass freed
    /// none.
    fn evict_a_pass(&self, pool: &FramePool) -> bool {
        let mut asked = 0;
        while asked <= 2 * pool.limit() + BATCH {
            if self.evict(pool, BATCH / 4, Cleaning::Serially).freed > 0 {
                return true;
            }
            asked += BATCH / 4;
        }
        false
    }

    fn wait_with_frames_in_hand(&self, pool: &FramePool, ticket: Ticket) {
        self.count_as_held(pool, |held, frames| _ = held.fetch_add(frames, Ordering::Relaxed));
        pool.wait_for_frame(ticket, FRAME_WAIT);
        self.count_as_held(pool, |held, frames| _ = held.fetch_sub(frames, Ordering::Relaxed));
    }

    /// Applies `change` to the counters of the frames that this thread holds while it waits for a
    /// frame of `pool`.
    fn count_as_held(&self, pool: &FramePool, change: impl Fn(&AtomicUsize, usize)) {
        duties::for_each_load(|of, frames| {
            // SAFETY: the load borrows the pool and has not returned.
            let held = unsafe { &(*of).held };
            let held = if ptr::eq(of, pool) {
                &held.own
            } else if ptr::eq(of, &self.mapped) || ptr::eq(of, &self.arena) {
                &held.beside
            } else {
                &held.elsewhere
            };
            change(held, frames);
        });
    }

    /// Counts the granted frames of a pool by what keeps them.
    pub(super) fn census(&self, pool: &FramePool) -> Census {
        let (mut census, loading) = self.count_frames(pool);
        let mut held = self.held_up(pool);
        let beside = pool.held.beside.load(Ordering::Relaxed);
        // A thread that waits for the other pool proceeds if that pool gets a frame by itself.
        let other = if ptr::eq(pool, &self.arena) { &self.mapped } else { &self.arena };
        if beside > 0 && loading > held {
            let (there, loading_there) = self.count_frames(other);
            let held_there = self.held_up(other) + other.held.beside.load(Ordering::Relaxed);
            if there.coming + there.writing == 0 && loading_there <= held_there {
                held += beside;
            }
        }
        census.coming += loading.saturating_sub(held) as u64;
        census
    }

    /// The number of frames held by threads that wait for a frame of this pool or of another cache,
    /// and by this thread, which cannot proceed during the census.
    fn held_up(&self, pool: &FramePool) -> usize {
        let (own, elsewhere) = (&pool.held.own, &pool.held.elsewhere);
        let waiting = own.load(Ordering::Relaxed) + elsewhere.load(Ordering::Relaxed);
        waiting + duties::frames_in_hand(pool)
    }

    /// Counts every granted frame of a pool. Returns the frames of pages in Loading separately.
    fn count_frames(&self, pool: &FramePool) -> (Census, usize) {
        let mut census = Census::default();
        let mut loading = 0;
        let mut last: Option<(StoreId, Option<UsedBy<'_>>)> = None;
        for frame in pool.granted() {
            let Some(page) = pool.owner(frame) else { continue };
            if last.as_ref().is_none_or(|&(id, _)| id != page.store) {
                last = Some((page.store, self.store(page.store)));
            }
            let store = last.as_ref().and_then(|(_, store)| store.as_ref());
            // A store that was removed from the registry is being torn down.
            let keeps = store.map_or(Keeps::Nothing, |store| store.keeps(page.page, frame));
            match keeps {
                Keeps::Loading => loading += 1,
                // Also if an evictor holds the frame: it will return it to the policy, not free it.
                Keeps::Pin => census.pinned += 1,
                Keeps::Dirt => census.unwritable += 1,
                Keeps::Writing => census.writing += 1,
                Keeps::Nothing => census.coming += 1,
            }
        }
        (census, loading)
    }

    /// Sleeps until a frame may be free. Async-signal-safe.
    pub fn wait_for_frame(&self, pool: &FramePool) {
        let ticket = pool.ticket();
        self.wake_evictor();
        if pool.free() == 0 {
            self.wait_with_frames_in_hand(pool, ticket);
        }
    }

    /// Whether the evictor should evict ahead: eviction means write-back, and the evictor gets a
    /// CPU.
    ///
    /// The thread that needs a frame evicts clean pages itself: each additional thread that changes
    /// page tables makes every change more expensive. It also evicts dirty pages while the evictor
    /// does not get a CPU to itself, because then the evictor would only take turns with the
    /// threads it works for.
    fn wants_evictor(&self, pool: &FramePool) -> bool {
        let reclaim = self.reclaim_of(pool);
        reclaim.dirty.load(Ordering::Relaxed) && !reclaim.crowded.load(Ordering::Relaxed)
    }

    pub(super) fn reclaim_of(&self, pool: &FramePool) -> &Reclaim {
        &self.reclaim[usize::from(std::ptr::eq(pool, &self.arena))]
    }

    /// Whether the evictor found nothing to evict, and no frame about to become free, in several
    /// whole passes.
    ///
    /// One of the passes must have started after the stall, at which the count was `stalled_at`:
    /// what kept pages before may no longer hold.
    fn stuck(&self, pool: &FramePool, stalled_at: u32) -> Option<NoFrame> {
        let reclaim = self.reclaim_of(pool);
        let passes = reclaim.stuck_passes.load(Ordering::Acquire);
        // The next pass to end may have started before the stall. A smaller count means a success
        // since then.
        let whole_pass_since = passes < stalled_at || passes - stalled_at >= 2;
        (passes >= STUCK_PASSES && whole_pass_since).then(|| NoFrame {
            pinned: reclaim.stuck_pinned.load(Ordering::Relaxed),
            unwritable: reclaim.stuck_unwritable.load(Ordering::Relaxed),
        })
    }

    /// Takes up to `want` victims, one batch at most, from the policy and evicts them.
    pub fn evict(&self, pool: &FramePool, want: usize, write_back: Cleaning) -> Evicted {
        let mut victims = [FrameId(0); BATCH];
        let found = pool.victims(&mut victims[..want.min(BATCH)]);
        let mut evicted = Evicted::default();
        let mut batch = [(FrameId(0), PageId(0)); BATCH];
        let store_of = |frame: FrameId| pool.owner(frame).map(|key| key.store);
        let victims = &mut victims[..found];
        // Write back victims of one store only, and last. Its device may take long to write, and
        // may drop a mapping of another store, whose teardown waits for its frames: so no frames of
        // other stores may be held then. Their victims are handled first, and the dirty ones
        // returned to the policy.
        let written = match write_back {
            Cleaning::No => None,
            _ => victims.iter().find_map(|&frame| {
                store_of(frame).filter(|&id| {
                    // While this thread writes back, it may write only to lower stores: a higher
                    // one may wait for it.
                    duties::writing().is_none_or(|height| {
                        self.store(id).is_some_and(|store| store.height().get() < height)
                    })
                })
            }),
        };
        if victims.iter().any(|&frame| store_of(frame) != written) {
            victims.sort_unstable_by_key(|&frame| {
                let store = store_of(frame);
                (store == written, store.map(|store| store.0))
            });
        }
        let mut rest = &victims[..];
        while let Some(first) = rest.first() {
            // A victim keeps its owner until its frame is given back, which only this thread does.
            let Some(id) = store_of(*first) else {
                rest = &rest[1..];
                continue;
            };
            let mut count = 0;
            while let Some((&frame, tail)) = rest.split_first()
                && let Some(key) = pool.owner(frame)
                && key.store == id
            {
                batch[count] = (frame, key.page);
                count += 1;
                rest = tail;
            }
            match self.store(id) {
                Some(store) => {
                    let write_back = if Some(id) == written { write_back } else { Cleaning::No };
                    evicted.add(store.evict(&batch[..count], write_back));
                }
                None => {
                    // Being detached: its own teardown frees these frames.
                    for &(frame, _) in &batch[..count] {
                        pool.returned(&[frame]);
                    }
                }
            }
        }
        if found > 0 {
            self.reclaim_of(pool).dirty.store(evicted.dirty > 0, Ordering::Relaxed);
        }
        evicted
    }
}
