//! When a server that has ended is replaced, and when no longer.
//!
//! Most deaths have nothing to do with the next server, so that starts at once. If it does nothing
//! either, the reason may be one that passes, such as too little memory or media that stall: then the
//! pauses get longer, until the patience ends.

use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// So many servers in turn are tried at least, however long each takes to fail.
const LEAST: u32 = 5;

/// The servers that have done nothing since one did something.
#[derive(Debug)]
pub(super) struct Failures {
    patience: Duration,
    /// When the first one ended.
    since: Option<Instant>,
    count: u32,
}

impl Failures {
    pub fn new(patience: Duration) -> Failures {
        Failures { patience, since: None, count: 0 }
    }

    /// A server did something before it ended.
    pub fn forget(&mut self) {
        (self.since, self.count) = (None, 0);
    }

    /// A server has ended, or could not be started. Returns how long to wait before the next one
    /// starts; `None` if there is to be none.
    pub fn add(&mut self, now: Instant) -> Option<Duration> {
        let since = *self.since.get_or_insert(now);
        self.count += 1;
        if self.count >= LEAST && now.saturating_duration_since(since) >= self.patience {
            return None;
        }
        Some(match self.count {
            1 => Duration::ZERO,
            // Four times as long each time.
            count => LONGEST_PAUSE.min(FIRST_PAUSE * 4_u32.saturating_pow((count - 2).min(8))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_replaced_at_once_then_later_and_no_longer_when_the_patience_ends() {
        let patience = Duration::from_secs(30);
        let mut failures = Failures::new(patience);
        let mut now = Instant::now();
        let start = now;
        let mut pauses = Vec::new();
        while let Some(pause) = failures.add(now) {
            pauses.push(pause.as_millis());
            now += pause;
        }
        assert_eq!(pauses[..7], [0, 10, 40, 160, 640, 1000, 1000]);
        assert!(now - start >= patience && now - start <= patience + LONGEST_PAUSE);
        // One that works begins anew.
        failures.forget();
        assert_eq!(failures.add(now), Some(Duration::ZERO));
        // A few that take long are not enough.
        for _ in 2..LEAST {
            now += patience;
            assert!(failures.add(now).is_some());
        }
        assert_eq!(failures.add(now + patience), None);
        let mut none = Failures::new(Duration::ZERO);
        assert_eq!((1..=LEAST).filter(|_| none.add(now).is_some()).count(), LEAST as usize - 1);
    }
}
