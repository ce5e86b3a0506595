//! The ranges that an owner has locked, as the system counts them: neighbours of the same mode are one.
//!
//! All locks of a pool are in one list of the system, which each lock goes through. So there is a limit
//! of their number, and this tells it before the system is asked.

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_pool::LockMode;

/// The ranges of one owner: their ends and modes by their starts. They do not overlap.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, (u64, LockMode)>);

/// What a lock, or its end, makes of them.
#[derive(Debug)]
pub(super) struct Change {
    removed: Vec<u64>,
    added: Vec<(u64, u64, LockMode)>,
    /// Whether others may get a lock that they could not get before.
    pub frees: bool,
}

impl Change {
    /// How many more there are then.
    pub fn growth(&self) -> usize {
        self.added.len().saturating_sub(self.removed.len())
    }
}

impl Ranges {
    /// Where it is not known: at most all is locked.
    pub fn of_unknown() -> Ranges {
        Ranges(BTreeMap::from([(0, (u64::MAX, LockMode::Exclusive))]))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// What locking this range makes of them, or unlocking it (without a mode).
    pub fn change(&self, range: Range<u64>, mode: Option<LockMode>) -> Change {
        let Range { mut start, mut end } = range.clone();
        let mut change = Change { removed: Vec::new(), added: Vec::new(), frees: false };
        // Also those that only touch it.
        let near = self.0.range(..=range.end).rev();
        for (&from, &(to, held)) in near.take_while(|(_, (to, _))| *to >= range.start) {
            let overlaps = from < range.end && range.start < to;
            if Some(held) == mode {
                (start, end) = (start.min(from), end.max(to));
                change.removed.push(from);
            } else if overlaps {
                change.removed.push(from);
                if from < range.start {
                    change.added.push((from, range.start, held));
                }
                if range.end < to {
                    change.added.push((range.end, to, held));
                }
                change.frees |= mode.is_none() || held == LockMode::Exclusive;
            }
        }
        change.added.extend(mode.map(|mode| (start, end, mode)));
        change
    }

    /// Changes them.
    pub fn apply(&mut self, change: &Change) {
        for start in &change.removed {
            self.0.remove(start);
        }
        for &(start, end, mode) in &change.added {
            self.0.insert(start, (end, mode));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTES: usize = 24;

    /// Runs of the same mode.
    fn runs(bytes: &[Option<LockMode>]) -> usize {
        bytes.chunk_by(|one, next| one == next).filter(|run| run[0].is_some()).count()
    }

    proptest! {
        #[test]
        fn they_are_counted_as_the_bytes_say(
            steps in proptest::collection::vec((0..BYTES, 1..BYTES, 0..3_u8), 1..60)
        ) {
            let (mut ranges, mut model) = (Ranges::default(), [None; BYTES]);
            for (start, len, mode) in steps {
                let end = (start + len).min(BYTES);
                let mode = [None, Some(LockMode::Shared), Some(LockMode::Exclusive)][mode as usize];
                let before = runs(&model);
                let frees = model[start..end].iter().any(|held| match (held, mode) {
                    (Some(_), None) => true,
                    (Some(held), Some(mode)) => {
                        *held == LockMode::Exclusive && mode == LockMode::Shared
                    }
                    (None, _) => false,
                });
                let change = ranges.change(start as u64..end as u64, mode);
                prop_assert_eq!(change.frees, frees);
                model[start..end].fill(mode);
                prop_assert_eq!(change.growth(), runs(&model).saturating_sub(before));
                ranges.apply(&change);
                prop_assert_eq!(ranges.count(), runs(&model));
            }
        }
    }

    #[test]
    fn of_what_is_unknown_each_end_counts() {
        let mut ranges = Ranges::of_unknown();
        for at in 0..100 {
            let change = ranges.change(2 * at + 1..2 * at + 2, None);
            assert_eq!((change.growth(), change.frees), (1, true));
            ranges.apply(&change);
        }
        let all = ranges.change(0..u64::MAX, None);
        ranges.apply(&all);
        assert_eq!(ranges.count(), 0);
    }
}
