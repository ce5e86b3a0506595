//! Where a range has markers: places that are left unmapped, so that the page tables show when the reader comes by.
//!
//! ```text
//!  advised    ├───────────────────┆───────────────────┆───────────────────┆──      every `stretch`
//!  seen       ├─┆─┆──┆────┆───────┆───────────────┆───────────────────────┆──      at twice the distance, up to `most`
//! ```
//! Advice is believed, so its markers only bound what lies in memory unread. Without advice a range is what its reader has made
//! of it so far, and each marker doubles what is believed of it: the window of the paper ([`super::aquifer_vm::readahead`]),
//! in the units that a look at a page table can tell.

use aquifer_sys::memory::SMALL_PAGE_BYTES;

/// What is left unmapped at a marker: as much as the kernel maps at one fault.
pub(super) const MARKER_BYTES: usize = 16 * SMALL_PAGE_BYTES;
/// So much is read in order before a reader is taken for one that goes on.
pub(super) const FIRST_BYTES: usize = 1 << 20;

/// The markers of a range, offsets in its span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Markers {
    /// None: what may lie unread in memory holds the range.
    None,
    /// One every so many bytes of the span.
    Every(usize),
    /// The first one [`FIRST_BYTES`] behind the start of the range, each as far again, until they are `most` apart: a power
    /// of two, and `FIRST_BYTES` at least.
    Doubling {
        /// Where the range begins.
        start: usize,
        /// Longest distance.
        most: usize,
    },
}

impl Markers {
    /// The next one behind an offset of the range.
    pub fn after(self, at: usize) -> usize {
        match self {
            Markers::None => usize::MAX,
            Markers::Every(stretch) => (at / stretch + 1) * stretch,
            Markers::Doubling { start, most } => {
                let read = at - start;
                start
                    + match read {
                        _ if read < FIRST_BYTES => FIRST_BYTES,
                        _ if read < most => (read + 1).next_power_of_two(),
                        _ => (read / most + 1) * most,
                    }
            }
        }
    }

    /// Whether one begins at this offset, which is not the start of the range.
    pub fn is_at(self, at: usize) -> bool {
        self.after(at - 1) == at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn places(markers: Markers, start: usize, count: usize) -> Vec<usize> {
        let mut at = start;
        let next = |_| {
            at = markers.after(at);
            assert!(markers.is_at(at) && !markers.is_at(at + 1), "{at}");
            at / MIB
        };
        (0..count).map(next).collect()
    }

    #[test]
    fn they_are_at_equal_or_at_doubling_distances() {
        assert_eq!(Markers::None.after(7), usize::MAX);
        assert_eq!(places(Markers::Every(6 * MIB), 2 * MIB, 3), [6, 12, 18]);
        let from = |start| Markers::Doubling { start, most: 8 * MIB };
        assert_eq!(places(from(0), 0, 7), [1, 2, 4, 8, 16, 24, 32]);
        assert_eq!(places(from(100 * MIB), 100 * MIB, 5), [101, 102, 104, 108, 116]);
        assert_eq!(places(Markers::Doubling { start: 0, most: FIRST_BYTES }, 0, 3), [1, 2, 3]);
    }
}
