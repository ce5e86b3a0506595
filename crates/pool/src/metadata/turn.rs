//! Turns: a call that needs many reservations at once waits for those of other calls.
//!
//! A handle can hold [`RESERVATIONS`](crate::shared::segment::RESERVATIONS) runs, and a page is reserved
//! once. Two calls that each hold half of the free pages and need more would deadlock. So a call
//! that cannot get all it needs releases what it holds and takes a *turn*: one call at a time, of
//! all processes, keeps what it has reserved and waits for more. All other calls either use what
//! they hold or release it, so the call that has the turn gets everything that it could get alone.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_sys::lock::LockKind;

use crate::error::{PoolError, Result};
use crate::metadata::alloc::from_word;
use crate::metadata::reservation::Reservation;
use crate::metadata::space::Space;
use crate::shared::heartbeat::Held;
use crate::shared::membership::Byte;

/// A process that dies releases its reservations without a signal, so a waiter checks again after
/// this time.
const LOOK_AFTER: Duration = Duration::from_millis(100);

/// The right to wait for the reservations of other calls while keeping its own, held by one call of
/// all processes. Ends when dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    space: &'a Space,
    _alone_in_process: MutexGuard<'a, ()>,
    has_byte: bool,
    until: Instant,
    /// Reserved by the call that has the turn.
    own_runs: usize,
    own_pages: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.has_byte {
            self.space.handle.members.locks.unlock(Byte::Turn);
        }
    }
}

impl Space {
    /// Waits for the turn. The caller must hold no reservations.
    pub fn take_turn(&self) -> Result<Turn<'_>> {
        self.handle.check_writable()?;
        let alone = self.reserving.lock().unwrap_or_else(|broken| broken.into_inner());
        // Without the byte, two processes may wait for each other, but only until their timeouts.
        let has_byte = self
            .handle
            .members
            .locks
            .lock(Byte::Turn, LockKind::Exclusive, self.handle.members.stall_timeout)
            .unwrap_or(false);
        let until = Instant::now() + self.handle.members.stall_timeout;
        Ok(Turn {
            space: self,
            _alone_in_process: alone,
            has_byte,
            until,
            own_runs: 0,
            own_pages: 0,
        })
    }
}

impl Turn<'_> {
    /// Counts pages that the caller has reserved by other means.
    pub fn add(&mut self, reservation: &Reservation<'_>) {
        self.own_runs += reservation.runs().len();
        self.own_pages += reservation.whole().pages;
    }

    /// Reserves with `reserve`, and waits for releases by other calls as long as that can help: the
    /// caller needs `needed_pages` pages besides those that it has reserved in this turn, in any
    /// number of pieces.
    ///
    /// # Errors
    /// Those of `reserve`: [`PoolError::Full`] and [`PoolError::TooManyReservations`] only if there
    /// would not be enough even without the reservations of other calls, or these were not released
    /// within the [`PoolOptions::stall_timeout`](crate::PoolOptions::stall_timeout).
    pub fn reserve<'r>(
        &mut self,
        needed_pages: u64,
        reserve: impl Fn() -> Result<Reservation<'r>>,
    ) -> Result<Reservation<'r>> {
        loop {
            let seen = self.space.control().given_back.now();
            let error = match reserve() {
                Ok(reservation) => {
                    self.add(&reservation);
                    return Ok(reservation);
                }
                Err(error) => error,
            };
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.can_wait(&error, needed_pages, seen)? {
                return Err(error);
            }
            // The caller holds a file's mutex, so the waiters for that mutex wait for these
            // releases too.
            self.space.handle.heartbeat.while_media_work(Held::Files, || {
                self.space.control().given_back.wait(seen, left.min(LOOK_AFTER))
            });
        }
    }

    /// Whether a retry may succeed: pages were released since `seen`, or other calls hold
    /// reservations that would suffice.
    fn can_wait(&self, error: &PoolError, needed_pages: u64, seen: u32) -> Result<bool> {
        // With the lock, under which other calls release and signal: each release is either seen
        // here or still held.
        let locked = self.space.log.lock()?;
        let control = locked.control();
        let is_given_back = control.given_back.now() != seen;
        Ok(match error {
            PoolError::TooManyReservations { .. } => {
                let handle = locked.handle();
                let process = handle.segment.process(handle.members.locks.index());
                let runs = process.reservations.iter().filter(|word| word.load(Relaxed) != 0);
                is_given_back || runs.count() > self.own_runs
            }
            PoolError::Full { .. } => {
                let processes = locked.handle().segment.processes();
                let reserved = processes.flat_map(|(_, process)| &process.reservations);
                let reserved =
                    reserved.map(|word| from_word(word.load(Relaxed)).pages).sum::<u64>();
                let of_others = reserved.saturating_sub(self.own_pages);
                let free = control.free_count.load(Relaxed);
                (is_given_back || of_others > 0) && free + of_others >= needed_pages
            }
            _ => false,
        })
    }
}
