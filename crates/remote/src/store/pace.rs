//! How many requests of one stream are in flight.
//!
//! All of them share the line, so each takes the longer the more there are; on a slow line too many would all reach the
//! timeout. So a stream begins with few, adds one with each answer that came quickly, as TCP does, and halves them when
//! one took a considerable part of the timeout.

use std::time::Duration;

const FIRST: usize = 4;
/// An answer that took this part of the timeout was slow.
const SLOW_PART: u32 = 4;

pub(crate) struct Pace {
    allowed: usize,
    most: usize,
    slow: Duration,
}

impl Pace {
    pub fn new(most: usize, timeout: Duration) -> Pace {
        let most = most.max(1);
        Pace { allowed: FIRST.min(most), most, slow: timeout / SLOW_PART }
    }

    /// How many may be in flight now.
    pub fn allowed(&self) -> usize {
        self.allowed
    }

    pub fn answered(&mut self, took: Duration) {
        self.allowed = match took > self.slow {
            true => (self.allowed / 2).max(1),
            false => (self.allowed + 1).min(self.most),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_answers_add_requests_and_slow_ones_take_half() {
        let (quick, slow) = (Duration::from_secs(1), Duration::from_secs(9));
        let mut pace = Pace::new(9, Duration::from_secs(30));
        assert_eq!(pace.allowed(), 4);
        for allowed in [5, 6, 7, 8, 9, 9] {
            pace.answered(quick);
            assert_eq!(pace.allowed(), allowed);
        }
        for allowed in [4, 2, 1, 1] {
            pace.answered(slow);
            assert_eq!(pace.allowed(), allowed);
        }
        assert_eq!(Pace::new(0, quick).allowed(), 1);
    }
}
