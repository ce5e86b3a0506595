//! The budget of private copies: the memory of pages that were stored to through private views, and
//! of what a flush remembers of them.
//!
//! Without it a copy stays until it is flushed, and longer where the program has a pointer to store
//! through: a program that writes a file larger than memory runs out of it. With it, copies are
//! written to the file and dropped, in the order of their addresses and round and round, so that the
//! next access finds the page cache's content ([`super::flush`] says how that is safe while threads
//! store). The kernel then bounds the dirty page cache and slows the writing thread down.
//!
//! ```text
//!  0            3/4         7/8          budget       + 1/8, at least 16 MiB
//!  ├─────────────┼───────────┼─────────────┼─────────────┼──────────▶ private copies
//!                ◀── written out until here
//!                            └ from here on
//!                                          └ calls that store wait
//!                                                        └ stores through pointers wait
//! ```
//! Two threads, because one of them waits for the disk: *budget* measures, has stores wait and go
//! on; *room* writes out and drops.
//!
//! # Cost
//! A copy is made in a page fault. The kernel counts the faults of the process, so the number of
//! faults since the last measurement bounds the number of copies since, and as long as that bound is
//! below the mark nothing is measured: one system call per tick. The tick is the time in which
//! [`FASTEST_BYTES_PER_SECOND`] would use up what is left.
//!
//! # What it cannot do
//! * A system call that stores to a page in the moment in which its copy is dropped, or while stores
//!   wait, fails with EFAULT or is cut short.
//! * A device that stores to a page without the page tables (O_DIRECT) is not noticed: reading so
//!   into pages whose copy is dropped meanwhile loses what it read.
//! * Locked memory cannot be dropped, nor can copies that cannot be written. Then the budget is
//!   exceeded, and nothing waits.
//!
//! Lock order: `views` is locked alone; it is released before the lock of a view is taken.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use aquifer_sys::futex;
use aquifer_sys::memory::SMALL_PAGE_BYTES;
use aquifer_sys::page_faults::faults_of_process;
use aquifer_vm::VmError;
use aquifer_vm::dirty::PrivateCopies;
use aquifer_vm::worker::{Bell, Ticket, Worker};

use super::error::{MapError, Result};
use super::private::PrivateFile;

const PAGE: u64 = SMALL_PAGE_BYTES as u64;
/// What the threads of a large machine may store, at most.
const FASTEST_BYTES_PER_SECOND: f64 = 8e9;
const TICKS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];
/// The longest tick, at the latest, while the process has no page faults: 60 looks a second cost 0.1 % of a
/// processor, and what is stored first after that exceeds a mark by what fits into this time.
const QUIET: Duration = Duration::from_millis(16);
/// Between two attempts if nothing can be dropped.
const AGAIN: Duration = Duration::from_millis(200);
/// Copies dropped before the next look at the views.
const MOST_BYTES: u64 = 64 << 20;
const LEAST_BYTES: u64 = 1 << 20;
/// Least memory between the budget and where stores through pointers wait.
const LEAST_SLACK_BYTES: u64 = 16 << 20;

/// Budgets that are exceeded, and views whose trouble was not reported.
static EXCEEDED: AtomicU64 = AtomicU64::new(0);

/// Whether a store to some private view has to wait, or a view has an error to report
/// ([`FileView::wait_for_room`](crate::FileView::wait_for_room)): one load, for callers that store through pointers.
#[inline]
pub fn is_any_exceeded() -> bool {
    // Relaxed: a call that misses it is followed by others.
    EXCEEDED.load(Ordering::Relaxed) > 0
}

pub(crate) fn note_trouble() {
    EXCEEDED.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn forget_trouble() {
    EXCEEDED.fetch_sub(1, Ordering::Relaxed);
}

/// The threads, started with the first view under a budget. They end when this is dropped.
pub(crate) struct PrivateBudget {
    pressure: Arc<Pressure>,
    worker: Worker,
    room: Worker,
}

/// What views and threads share.
pub(crate) struct Pressure {
    copies: PrivateCopies,
    budget_bytes: AtomicU64,
    /// Private copies, and what is remembered of them, as last measured.
    used_bytes: AtomicU64,
    /// Faults of the process before that.
    faults: AtomicU64,
    dropped_bytes: AtomicU64,
    /// 1 while calls that store wait.
    waits: AtomicU32,
    /// Nothing could be dropped: nothing waits until something can.
    is_stuck: AtomicBool,
    views: Mutex<Vec<Weak<PrivateFile>>>,
    /// Rung when a view is added or the budget changes.
    bell: Bell,
    /// Rung when room is wanted.
    wanted: Bell,
}

impl PrivateBudget {
    /// # Errors
    /// [`MapError::Memory`] if copies cannot be counted.
    pub fn new(budget_bytes: u64) -> Result<PrivateBudget> {
        let pressure = Pressure {
            copies: PrivateCopies::new()?,
            budget_bytes: AtomicU64::new(budget_bytes),
            used_bytes: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            dropped_bytes: AtomicU64::new(0),
            waits: AtomicU32::new(0),
            is_stuck: AtomicBool::new(false),
            views: Mutex::default(),
            bell: Bell::new(),
            wanted: Bell::new(),
        };
        let (worker, room) = (Worker::new(), Worker::new());
        Ok(PrivateBudget { pressure: Arc::new(pressure), worker, room })
    }

    /// Counts the copies of a view, for as long as it lives.
    ///
    /// # Errors
    /// [`MapError::Memory`] if a thread cannot be started; [`MapError::Forked`].
    pub fn add(&self, view: &Arc<PrivateFile>) -> Result<()> {
        if !self.worker.is_current() {
            return Err(MapError::Forked);
        }
        view.count_towards(&self.pressure);
        self.pressure
            .views
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::downgrade(view));
        let (first, second) = (self.pressure.clone(), self.pressure.clone());
        let thread = |source| VmError::Thread { source };
        self.room.start_once(c"aquifer-room", move || second.keep_making_room()).map_err(thread)?;
        self.worker.start_once(c"aquifer-budget", move || first.keep_looking()).map_err(thread)?;
        self.pressure.bell.ring();
        Ok(())
    }

    pub fn set(&self, budget_bytes: u64) {
        self.pressure.budget_bytes.store(budget_bytes, Ordering::Relaxed);
        self.pressure.bell.ring();
    }

    pub fn used_bytes(&self) -> u64 {
        self.pressure.used_bytes.load(Ordering::Relaxed)
    }

    pub fn dropped_bytes(&self) -> u64 {
        self.pressure.dropped_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for PrivateBudget {
    fn drop(&mut self) {
        self.pressure.bell.stop();
        self.pressure.wanted.stop();
    }
}

impl Pressure {
    fn views(&self) -> Vec<Arc<PrivateFile>> {
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        views.retain(|view| view.strong_count() > 0);
        views.iter().filter_map(Weak::upgrade).collect()
    }

    fn budget(&self) -> u64 {
        self.budget_bytes.load(Ordering::Relaxed)
    }

    /// From here on copies are written out.
    fn starts_at(&self) -> u64 {
        self.budget() - self.budget() / 8
    }

    fn used(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of a view's copies in memory, and of what is remembered of them.
    ///
    /// # Errors
    /// [`MapError::Memory`].
    pub fn count(&self, view: &PrivateFile) -> Result<u64> {
        Ok(self.copies.count(view.mapping().addresses())? * PAGE + view.base_bytes())
    }

    /// At most so many bytes are used.
    fn bound(&self) -> u64 {
        let new = |faults: u64| faults.saturating_sub(self.faults.load(Ordering::Relaxed));
        let new_bytes = faults_of_process().map_or(u64::MAX, |now| new(now).saturating_mul(PAGE));
        self.used().saturating_add(new_bytes)
    }

    fn measure(&self, views: &[Arc<PrivateFile>]) {
        // Before the copies are counted: those made meanwhile count twice rather than not at all.
        let faults = faults_of_process().unwrap_or(0);
        // A view that cannot be measured counts nothing.
        let used_bytes = views.iter().map(|view| self.count(view).unwrap_or(0)).sum();
        self.used_bytes.store(used_bytes, Ordering::Relaxed);
        self.faults.store(faults, Ordering::Relaxed);
    }

    /// Whether there is room for as much again as is used.
    pub fn has_room_for_twice(&self) -> bool {
        let fits = |bytes: u64| bytes.saturating_mul(2) <= self.budget();
        fits(self.bound()) || {
            self.measure(&self.views());
            fits(self.bound())
        }
    }

    /// Waits for a while, if calls that store are to; returns whether they were.
    pub fn wait(&self) -> bool {
        let waits = self.waits.load(Ordering::Relaxed) == 1;
        if waits {
            futex::wait(&self.waits, 1, Some(AGAIN));
        }
        waits
    }

    fn set_waits(&self, waits: bool) {
        let before = self.waits.swap(waits.into(), Ordering::Relaxed);
        if before == 0 && waits {
            EXCEEDED.fetch_add(1, Ordering::Relaxed);
        } else if before == 1 && !waits {
            EXCEEDED.fetch_sub(1, Ordering::Relaxed);
            futex::wake(&self.waits, u32::MAX);
        }
    }

    fn keep_looking(&self) {
        let mut heard = Ticket::default();
        let mut tick = Some(Duration::ZERO);
        let (mut faults, mut quiet) = (0, TICKS[0]);
        while self.bell.wait(&mut heard, tick) {
            tick = self.look();
            let now = faults_of_process().unwrap_or(0);
            quiet = if now == faults { (quiet * 2).min(QUIET) } else { TICKS[0] };
            faults = now;
            // Nothing waits, and nothing stores.
            if self.used() <= self.starts_at() {
                tick = tick.map(|tick| tick.max(quiet));
            }
        }
        self.set_waits(false);
        self.views().iter().for_each(|view| view.let_store(true));
    }

    /// Measures, if the bound has passed the mark, and has stores wait or go on. Returns when to look
    /// again; `None` when there is something new.
    fn look(&self) -> Option<Duration> {
        let views = self.views();
        let budget = self.budget();
        if views.is_empty() {
            self.used_bytes.store(0, Ordering::Relaxed);
            self.set_waits(false);
            return None;
        }
        let starts_at = self.starts_at();
        let stops_at = budget.saturating_add((budget / 8).max(LEAST_SLACK_BYTES));
        // Between two measurements only passing the next mark matters: the other thread measures
        // after each step of what it drops.
        let used = self.used();
        let next = [starts_at, budget, stops_at].into_iter().find(|&mark| used <= mark);
        let started = Instant::now();
        if next.is_some_and(|mark| self.bound() > mark) {
            self.measure(&views);
        }
        let took = started.elapsed();
        let used = self.used();
        if used > starts_at {
            self.wanted.ring();
        }
        // Relaxed: looked at again at the next tick.
        let is_stuck = self.is_stuck.load(Ordering::Relaxed);
        if used <= budget || is_stuck {
            views.iter().for_each(|view| view.let_store(true));
        }
        // Behind that: what a call lets go on finds the pages writable.
        self.set_waits(used > budget && !is_stuck);
        if used > stops_at && !is_stuck {
            views.iter().for_each(|view| view.let_store(false));
        }
        if is_stuck {
            return Some(AGAIN);
        }
        let left_bytes = starts_at.saturating_sub(self.bound());
        let until_full = Duration::from_secs_f64(left_bytes as f64 / FASTEST_BYTES_PER_SECOND);
        Some(until_full.clamp(TICKS[0], TICKS[1]).max(took * 2))
    }

    fn keep_making_room(&self) {
        let mut heard = Ticket::default();
        let mut tick = None;
        while self.wanted.wait(&mut heard, tick) {
            tick = None;
            // Again each time: the budget may change.
            let target = || self.budget() - self.budget() / 4;
            while self.used() > target() && !self.wanted.is_stopped() {
                if self.make_some_room(target()) > 0 {
                    self.is_stuck.store(false, Ordering::Relaxed);
                    continue;
                }
                // Rings go unheard for so long.
                if !self.wanted.pause(AGAIN) {
                    return;
                }
            }
            self.is_stuck.store(false, Ordering::Relaxed);
        }
    }

    /// Drops copies of the view that has most, and returns how many bytes. A view that is being
    /// flushed is passed over.
    fn make_some_room(&self, target: u64) -> u64 {
        let views = self.views();
        self.measure(&views);
        let mut by_size: Vec<_> =
            views.iter().map(|view| (self.count(view).unwrap_or(0), view)).collect();
        by_size.sort_unstable_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        let (mut is_busy, mut failed) = (false, None);
        for (bytes, view) in by_size {
            let over = self.used().saturating_sub(target);
            let most = over.clamp(LEAST_BYTES, MOST_BYTES).min(bytes);
            if most == 0 {
                break;
            }
            match view.make_room(most, &|| !self.wanted.is_stopped()) {
                Some(Ok(dropped)) if dropped > 0 => {
                    self.measure(&views);
                    self.dropped_bytes.fetch_add(dropped, Ordering::Relaxed);
                    return dropped;
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => failed = Some(error),
                None => is_busy = true,
            }
        }
        // A flush ends, and then there is more to drop.
        self.is_stuck.store(!is_busy, Ordering::Relaxed);
        // Behind that: a subscriber may store to a view, which then does not wait.
        if let Some(_error) = failed {
            aquifer_sys::event!(warn, error = %_error, "copies cannot be written out; they stay");
        }
        0
    }
}

#[cfg(test)]
mod tests;
