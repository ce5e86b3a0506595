//! Measures how long a thread has waited, without counting time in which it did not run.
//!
//! While a process was stopped or the machine was suspended, the waiter did not run, and neither
//! perhaps did the thread it waits for, which then needs a moment to continue. So a waiter reads
//! the clock periodically, and of the time between two readings at most [`LONGEST_STEP`] counts.
//!
//! Some work takes as long as the storage is slow. A wait does not time out while the other side
//! makes progress: [`WaitedFor`] restarts at each step of progress.

use std::time::{Duration, Instant};

/// If more than this passes between two readings, the waiter did not run. Waiters poll much more
/// often.
pub const LONGEST_STEP: Duration = Duration::from_millis(100);

/// A wait in progress.
#[derive(Debug, Clone, Copy)]
pub struct Waited {
    last_look: Instant,
    total: Duration,
}

impl Waited {
    /// Starts the wait now.
    #[allow(clippy::new_without_default, reason = "a wait begins at a moment")]
    pub fn new() -> Waited {
        Waited { last_look: Instant::now(), total: Duration::ZERO }
    }

    /// Returns how long the wait has lasted.
    pub fn look(&mut self) -> Duration {
        self.look_at(Instant::now())
    }

    fn look_at(&mut self, now: Instant) -> Duration {
        self.total += now.saturating_duration_since(self.last_look).min(LONGEST_STEP);
        self.last_look = now;
        self.total
    }
}

/// A wait for a thread or process that reports progress.
#[derive(Debug, Clone, Copy)]
pub struct WaitedFor<P> {
    progress: P,
    waited: Waited,
}

impl<P: PartialEq> WaitedFor<P> {
    /// Starts the wait now, with the current progress.
    pub fn new(progress: P) -> WaitedFor<P> {
        WaitedFor { progress, waited: Waited::new() }
    }

    /// Returns how long the wait has lasted since the last progress.
    pub fn look(&mut self, progress: P) -> Duration {
        self.look_at(Instant::now(), progress)
    }

    fn look_at(&mut self, now: Instant, progress: P) -> Duration {
        if self.progress != progress {
            *self =
                WaitedFor { progress, waited: Waited { last_look: now, total: Duration::ZERO } };
        }
        self.waited.look_at(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_begins_anew_when_something_was_done() {
        let mut waited = WaitedFor::new(7);
        let start = waited.waited.last_look;
        let after = |ms| start + Duration::from_millis(ms);
        assert_eq!(waited.look_at(after(30), 7), Duration::from_millis(30));
        assert_eq!(waited.look_at(after(90), 8), Duration::ZERO);
        assert_eq!(waited.look_at(after(150), 8), Duration::from_millis(60));
        assert_eq!(waited.look_at(after(180), 7), Duration::ZERO);
    }

    #[test]
    fn unobserved_time_counts_little() {
        let mut waited = Waited::new();
        let start = waited.last_look;
        let after = |ms| start + Duration::from_millis(ms);
        assert_eq!(waited.look_at(after(30)), Duration::from_millis(30));
        assert_eq!(waited.look_at(after(90)), Duration::from_millis(90));
        assert_eq!(waited.look_at(after(60_000)), Duration::from_millis(190));
        assert_eq!(waited.look_at(after(60_010)), Duration::from_millis(200));
    }
}
