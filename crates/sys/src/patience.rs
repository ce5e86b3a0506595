//! How long somebody has been waited for.
//!
//! A process that was stopped, or a machine that was asleep, has not waited meanwhile: those it waits for may have been
//! stopped with it, and need a moment to go on. So a waiter looks at the clock now and then, and of the time between two
//! looks at most [`LONGEST_STEP`] counts.
//!
//! Some work takes as long as the media are slow. Who is seen to go on with it is not waited for in vain: [`WaitedFor`] begins
//! anew with each step that was made meanwhile.

use std::time::{Duration, Instant};

/// More than this between two looks, and the waiter did not run. Whoever waits looks far more often.
pub const LONGEST_STEP: Duration = Duration::from_millis(100);

/// A wait under way.
#[derive(Debug, Clone, Copy)]
pub struct Waited {
    last_look: Instant,
    total: Duration,
}

impl Waited {
    /// Begins now.
    #[allow(clippy::new_without_default, reason = "a wait begins at a moment")]
    pub fn new() -> Waited {
        Waited { last_look: Instant::now(), total: Duration::ZERO }
    }

    /// How long it has lasted.
    pub fn look(&mut self) -> Duration {
        self.look_at(Instant::now())
    }

    fn look_at(&mut self, now: Instant) -> Duration {
        self.total += now.saturating_duration_since(self.last_look).min(LONGEST_STEP);
        self.last_look = now;
        self.total
    }
}

/// A wait for somebody whose steps can be seen.
#[derive(Debug, Clone, Copy)]
pub struct WaitedFor<P> {
    progress: P,
    waited: Waited,
}

impl<P: PartialEq> WaitedFor<P> {
    /// Begins now, when so much has been done.
    pub fn new(progress: P) -> WaitedFor<P> {
        WaitedFor { progress, waited: Waited::new() }
    }

    /// How long it has lasted since something was done.
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
    fn time_in_which_nobody_looked_counts_little() {
        let mut waited = Waited::new();
        let start = waited.last_look;
        let after = |ms| start + Duration::from_millis(ms);
        assert_eq!(waited.look_at(after(30)), Duration::from_millis(30));
        assert_eq!(waited.look_at(after(90)), Duration::from_millis(90));
        assert_eq!(waited.look_at(after(60_000)), Duration::from_millis(190));
        assert_eq!(waited.look_at(after(60_010)), Duration::from_millis(200));
    }
}
