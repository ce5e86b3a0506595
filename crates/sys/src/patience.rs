//! How long somebody has been waited for.
//!
//! A process that was stopped, or a machine that was asleep, has not waited meanwhile: those it waits for may have been
//! stopped with it, and need a moment to go on. So a waiter looks at the clock now and then, and of the time between two
//! looks at most [`LONGEST_STEP`] counts.

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

#[cfg(test)]
mod tests {
    use super::*;

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
