//! What a scan of the pins has found.

use std::ops::Range;

use super::locks;
use super::word::PinValue;

/// All pins that one scan found.
#[derive(Debug, Default)]
pub(crate) struct PinSet {
    /// Ascending.
    values: Vec<PinValue>,
    /// The ranges that readers have locked: see [`locks`].
    locked: Vec<Range<u64>>,
}

impl PinSet {
    pub fn new(mut values: Vec<PinValue>, locked: Vec<Range<u64>>) -> PinSet {
        values.sort_unstable();
        PinSet { values, locked }
    }

    /// The number of pins; a range that readers have locked counts as one.
    pub fn len(&self) -> usize {
        self.values.len() + self.locked.len()
    }

    fn of_inode(&self, inode: u64) -> &[PinValue] {
        let first = self.values.partition_point(|value| value.inode() < inode);
        let count = self.values[first..].partition_point(|value| value.inode() == inode);
        &self.values[first..first + count]
    }

    /// Whether pages that a change of `freed.inode()` freed are pinned: as of the version before
    /// the change, or an older one. `current_version` is the inode's current version; `None` if the
    /// inode has no versions.
    ///
    /// Pins hold only the low half of a version, so "older" is tested by exclusion: a pin is newer
    /// only if it pins one of the few versions since the change. A pin would have to outlive 2³²
    /// changes to be mistaken for one of these.
    pub fn covers(&self, freed: PinValue, current_version: Option<u64>) -> bool {
        let since = current_version.map_or(0, |now| (now as u32).wrapping_sub(freed.low()));
        // An inode that is reused starts at a lower version.
        let since = if since > u32::MAX / 2 { 0 } else { since };
        self.of_inode(freed.inode()).iter().any(|pin| {
            let after = pin.low().wrapping_sub(freed.low());
            pin.is_of_pages() && (after == 0 || after > since)
        }) || self.locked.iter().any(|locked| locks::covers(locked, freed, since))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::pins::InodeUse;

    fn freed(version: u64) -> PinValue {
        PinValue::of_freed(7, version)
    }

    fn pins(versions: &[u64]) -> PinSet {
        PinSet::new(versions.iter().map(|v| PinValue::of_version(7, *v).unwrap()).collect(), vec![])
    }

    #[test]
    fn a_pin_covers_what_was_freed_after_it() {
        let pins = pins(&[5]);
        assert!(!pins.covers(freed(4), Some(9)), "freed before: the reader cannot have seen it");
        assert!(pins.covers(freed(5), Some(9)));
        assert!(pins.covers(freed(8), Some(9)));
        assert!(!pins.covers(PinValue::of_freed(8, 8), Some(9)), "another inode");
        // The inode was freed and perhaps reused: nothing is known, so the pages are kept.
        assert!(pins.covers(freed(4), None));
        assert!(pins.covers(freed(4), Some(1)) && pins.covers(freed(8), Some(1)));
    }

    #[test]
    fn versions_may_wrap() {
        let wrap = 1 << 32;
        for current in wrap - 6..wrap + 4 {
            for version in wrap - 6..current {
                for pinned in wrap - 6..=current {
                    let is_covered = pins(&[pinned]).covers(freed(version), Some(current));
                    // The last versions before the wrap count as the version before them.
                    let is_doubtful = pinned < wrap && (wrap - 5..pinned).contains(&version);
                    assert_eq!(
                        is_covered,
                        pinned <= version || is_doubtful,
                        "{pinned} {version} {current}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_pin_of_an_inode_covers_no_pages() {
        let used = PinValue::of_use(7, InodeUse::Open).unwrap();
        let lent = PinValue::of_lent(7).unwrap();
        assert!(!PinSet::new(vec![used, lent], vec![]).covers(freed(3), None));
    }
}
