//! The markers of a range: places left unmapped, so that the page tables show when the reader
//! passes them.
//!
//! ```text
//!  advised    ├───────────────────┆───────────────────┆───────────────────┆──      every `stretch`
//!  detected   ├─┆─┆──┆────┆───────┆───────────────┆───────────────────────┆──      at twice the distance, up to `most`
//! ```
//! Advice is trusted, so the markers of an advised range only bound the unread bytes in memory.
//! Without advice, each marker that the reader passes doubles what is mapped ahead: the window of
//! [`aquifer_vm::readahead`], in steps that the page tables can show.

use aquifer_sys::memory::SMALL_PAGE_BYTES;

/// Bytes left unmapped at a marker: as many as the kernel maps at one fault.
pub(super) const MARKER_BYTES: usize = 16 * SMALL_PAGE_BYTES;
/// Bytes that must be read in order before a reader is taken to be sequential.
pub(super) const FIRST_BYTES: usize = 1 << 20;

/// The markers of a range, offsets in its span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Markers {
    /// None: the whole range may be in memory unread.
    None,
    /// One at every multiple of this many bytes of the span.
    Every(usize),
    /// The first is [`FIRST_BYTES`] after the start of the range, and each later one at twice the
    /// distance, until they are `most` apart: a power of two, at least `FIRST_BYTES`.
    Doubling {
        /// Where the range begins.
        start: usize,
        /// Longest distance.
        most: usize,
    },
}

impl Markers {
    /// The next marker after an offset in the range.
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

    /// Whether a marker begins at this offset, which is not the start of the range.
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
