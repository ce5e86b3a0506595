//! The evictor: a thread that frees frames ahead of the threads that miss.
//!
//! It keeps free frames between two watermarks where eviction means write-back, completes shrinks,
//! and has the budget rebalanced. It pauses when it does not get a CPU to itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_sys::cpu;

use super::{Cleaning, Engine, Evicted};
use crate::frames::{BATCH, FramePool, Shrink};
use crate::ids::{FrameId, PageKey};

/// How long the evictor pauses after it was preempted.
const CROWDED_NAP: Duration = Duration::from_millis(20);
const TICK: Duration = Duration::from_millis(200);

/// Counts for which events were emitted.
#[derive(Default)]
struct Reported {
    stalls: u64,
    load_errors: u64,
    write_errors: u64,
}

impl Engine {
    /// The loop of the evictor thread.
    pub fn run_evictor(&self) {
        let mut last_tick = Instant::now();
        let mut misses_seen = [0; 3];
        let mut shrinks = <[Shrink; 2]>::default();
        let mut reported = Reported::default();
        while !self.is_stopping() {
            let ticket = self.evictor_bell.ticket();
            let busy = [&self.mapped, &self.arena].map(|pool| self.keep_free(pool));
            let shrinking =
                self.shrinking.load(Ordering::SeqCst) > 0 && !self.finish_shrinks(&mut shrinks);
            if last_tick.elapsed() >= TICK {
                last_tick = Instant::now();
                self.rebalance(&mut misses_seen);
                self.report(&mut reported);
            }
            if busy.contains(&true) {
                continue;
            }
            let crowded = || self.reclaim.iter().any(|r| r.crowded.load(Ordering::Relaxed));
            let nap = match () {
                () if shrinking => Duration::from_millis(5),
                () if crowded() => CROWDED_NAP,
                () => TICK,
            };
            self.evictor_bell.sleep(ticket, Some(nap));
            for reclaim in &self.reclaim {
                reclaim.crowded.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Emits events for what happened since the last call: it may have happened in a signal handler,
    /// which must not.
    fn report(&self, reported: &mut Reported) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        let now = Reported {
            stalls: count(&counters.stalls),
            load_errors: count(&counters.load_errors),
            write_errors: count(&counters.write_errors),
        };
        if now.stalls > reported.stalls {
            aquifer_sys::event!(
                debug,
                stalls = now.stalls - reported.stalls,
                budget_bytes = self.budget_bytes(),
                "misses waited for a free frame"
            );
        }
        if now.load_errors > reported.load_errors {
            aquifer_sys::event!(
                warn,
                failed = now.load_errors - reported.load_errors,
                "pages could not be loaded"
            );
        }
        if now.write_errors > reported.write_errors {
            aquifer_sys::event!(
                warn,
                failed = now.write_errors - reported.write_errors,
                "write-back failed; the pages stay dirty"
            );
        }
        *reported = now;
    }

    /// Evicts until free frames reach the high watermark. Returns whether to call it again at once.
    fn keep_free(&self, pool: &FramePool) -> bool {
        let reclaim = self.reclaim_of(pool);
        if pool.limit() == 0 || pool.free() >= pool.low_watermark() {
            reclaim.stuck_passes.store(0, Ordering::Release);
            return false;
        }
        let mut pass = Evicted::default();
        let mut asked = 0;
        let pushed_off = cpu::involuntary_switches();
        while pool.free() < pool.high_watermark() && !self.is_stopping() {
            let want = (pool.high_watermark().saturating_sub(pool.free())).clamp(1, BATCH);
            pass.add(self.evict(pool, want, Cleaning::Yes));
            if cpu::involuntary_switches() > pushed_off {
                reclaim.crowded.store(true, Ordering::Relaxed);
                if pass.freed > 0 {
                    break;
                }
            }
            asked += want;
            // A whole pass without enough success: every remaining page is pinned or cannot be
            // written.
            if asked > 2 * pool.limit() + BATCH {
                break;
            }
        }
        if pass.freed > 0 || pool.free() > 0 {
            reclaim.stuck_passes.store(0, Ordering::Release);
            return false;
        }
        let census = self.census(pool);
        if census.coming + census.writing > 0 {
            // Held by a loader, a thread that writes, or a teardown: these frames will become free.
            reclaim.stuck_passes.store(0, Ordering::Release);
            return false;
        }
        reclaim.stuck_pinned.store(census.pinned, Ordering::Relaxed);
        reclaim.stuck_unwritable.store(census.unwritable, Ordering::Relaxed);
        reclaim.stuck_passes.fetch_add(1, Ordering::Release);
        // Wake the waiting threads: they check whether to give up.
        pool.give(&[]);
        false
    }

    /// Evicts the pages of frames above the limits. True when no shrink is left.
    fn finish_shrinks(&self, shrinks: &mut [Shrink; 2]) -> bool {
        let before = self.shrinking.load(Ordering::SeqCst);
        let mut done = true;
        for (pool, shrink) in [&self.mapped, &self.arena].into_iter().zip(shrinks) {
            pool.look_above_limit(shrink);
            self.vacate(pool, shrink.in_use());
            done &= shrink.in_use().is_empty()
                && pool.finish_shrink(shrink, |limit| {
                    if std::ptr::eq(pool, &self.arena) {
                        self.arena_memory.release_above(limit);
                    }
                });
        }
        if done {
            self.shrinking.fetch_sub(before, Ordering::SeqCst);
        }
        done
    }

    /// Evicts the pages of given frames.
    fn vacate(&self, pool: &FramePool, frames: &[FrameId]) {
        let mut owned: Vec<PageKey> = frames.iter().filter_map(|&f| pool.owner(f)).collect();
        owned.sort_unstable();
        for run in owned.chunk_by(|a, b| a.store == b.store) {
            if let Some(store) = self.store(run[0].store) {
                store.vacate(&run.iter().map(|key| key.page).collect::<Vec<_>>());
            }
        }
    }
}
