//! Ranges of a kernel-backed mapping that the drop manager must not drop.
//!
//! Pins are few and long-lived, so a table under a lock suffices. Short accesses are not pinned:
//! with this backend losing a page only costs a fault.

use std::collections::BTreeMap;
use std::ops::Range;

/// The pinned ranges of a mapping, in bytes, rounded to whole pages. They may overlap.
#[derive(Default)]
pub(crate) struct Pins {
    next: u64,
    ranges: BTreeMap<u64, Range<u64>>,
    bytes: u64,
}

impl Pins {
    /// Total bytes pinned; a byte pinned twice counts twice.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn insert(&mut self, range: Range<u64>) -> u64 {
        self.bytes += range.end - range.start;
        self.next += 1;
        self.ranges.insert(self.next, range);
        self.next
    }

    pub fn remove(&mut self, id: u64) {
        if let Some(range) = self.ranges.remove(&id) {
            self.bytes -= range.end - range.start;
        }
    }

    /// The parts of a range that no pin covers.
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut covering: Vec<_> = self
            .ranges
            .values()
            .filter(|pin| pin.start < range.end && range.start < pin.end)
            .cloned()
            .collect();
        covering.sort_unstable_by_key(|pin| pin.start);
        let mut gaps = vec![];
        let mut at = range.start;
        for pin in covering {
            if at < pin.start {
                gaps.push(at..pin.start);
            }
            at = at.max(pin.end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_leave_pins_out() {
        let mut pins = Pins::default();
        assert_eq!(pins.gaps(0..10).len(), 1);
        pins.insert(2..4);
        let second = pins.insert(3..5);
        pins.insert(9..12);
        assert_eq!(pins.gaps(0..10), [0..2, 5..9]);
        assert_eq!(pins.bytes(), 7);
        pins.remove(second);
        assert_eq!(pins.gaps(0..10), [0..2, 4..9]);
        pins.insert(0..20);
        assert_eq!(pins.gaps(0..10), []);
    }
}
