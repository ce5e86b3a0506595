//! Runs: contiguous pages of the pool in eight bytes, 40 bits of start and 24 of length.
//!
//! A hole of a file has no start, so its length takes the 40 bits, and the bits of the length are
//! zero: however sparse a file is, each of its holes is one run.

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{ByteRange, FormatError, PAGE_BYTES};

const START_BITS: u32 = 40;
const LEN_BITS: u32 = 24;

/// The most pages one run can name. A hole can be as long as the longest file.
pub const MAX_RUN_PAGES: u64 = (1 << LEN_BITS) - 1;
/// The number of pages that can be addressed.
pub const MAX_PAGES: u64 = 1 << START_BITS;

/// A range of pages of the pool; an empty one names no page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Run {
    /// The first page.
    pub start_page: u64,
    /// How many pages.
    pub pages: u64,
}

impl Run {
    /// No pages.
    pub const EMPTY: Run = Run { start_page: 0, pages: 0 };

    /// Whether it names no page.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.pages == 0
    }

    /// Whether it is a hole, which stands for pages of a file without content: page 0 is the
    /// superblock's.
    #[inline]
    pub fn is_hole(self) -> bool {
        self.start_page == 0
    }

    /// The first page after it.
    #[inline]
    pub fn end_page(self) -> u64 {
        self.start_page.saturating_add(self.pages)
    }

    /// Whether the two have a page in common.
    #[inline]
    pub fn overlaps(self, other: Run) -> bool {
        !self.is_empty()
            && !other.is_empty()
            && self.start_page < other.end_page()
            && other.start_page < self.end_page()
    }

    /// Whether all bytes of `range` lie in this run.
    #[inline]
    pub fn contains(self, range: ByteRange) -> bool {
        let own = self.bytes();
        range.offset_bytes >= own.offset_bytes && range.end_bytes() <= own.end_bytes()
    }

    /// The same range in bytes of the media.
    #[inline]
    pub fn bytes(self) -> ByteRange {
        ByteRange {
            offset_bytes: self.start_page.saturating_mul(PAGE_BYTES),
            len_bytes: self.pages.saturating_mul(PAGE_BYTES),
        }
    }
}

/// A run as encoded on media.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(transparent)]
pub struct RawRun(U64);

const _: () = assert!(size_of::<RawRun>() == 8);

impl RawRun {
    /// The run without pages.
    pub const EMPTY: RawRun = RawRun(U64::ZERO);

    /// Packs a run.
    ///
    /// # Errors
    /// [`FormatError::Field`] if it is too long, starts too far out, or is empty but has a start.
    pub fn pack(run: Run) -> Result<RawRun, FormatError> {
        if run.is_hole() {
            return if run.pages < MAX_PAGES {
                Ok(RawRun(U64::new(run.pages)))
            } else {
                Err(FormatError::Field { field: "hole length", value: run.pages })
            };
        }
        if run.is_empty() || run.pages > MAX_RUN_PAGES {
            return Err(FormatError::Field { field: "run length", value: run.pages });
        }
        if run.start_page >= MAX_PAGES {
            return Err(FormatError::Field { field: "run start", value: run.start_page });
        }
        Ok(RawRun(U64::new(run.start_page | run.pages << START_BITS)))
    }

    /// Unpacks it; any bits are a valid run.
    #[inline]
    pub fn unpack(self) -> Run {
        let bits = self.0.get();
        match (bits & (MAX_PAGES - 1), bits >> START_BITS) {
            (pages, 0) => Run { start_page: 0, pages },
            (start_page, pages) => Run { start_page, pages },
        }
    }

    /// Whether the bits are those that [`RawRun::pack`] gives for the same run. False for a hole
    /// whose length is in the bits of other runs' lengths.
    pub fn is_canonical(self) -> bool {
        RawRun::pack(self.unpack()) == Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_keeps_both_fields() {
        for run in [
            Run::EMPTY,
            Run { start_page: 1, pages: 1 },
            Run { start_page: MAX_PAGES - 1, pages: MAX_RUN_PAGES },
            Run { start_page: 0, pages: 1 },
            Run { start_page: 0, pages: MAX_PAGES - 1 },
        ] {
            assert_eq!(RawRun::pack(run).unwrap().unpack(), run);
            assert!(RawRun::pack(run).unwrap().is_canonical());
        }
        assert!(RawRun::pack(Run { start_page: MAX_PAGES, pages: 1 }).is_err());
        assert!(RawRun::pack(Run { start_page: 1, pages: MAX_RUN_PAGES + 1 }).is_err());
        assert!(RawRun::pack(Run { start_page: 1, pages: 0 }).is_err());
        assert!(RawRun::pack(Run { start_page: 0, pages: MAX_PAGES }).is_err());
        let long_form = RawRun(U64::new(3 << START_BITS));
        assert_eq!(long_form.unpack(), Run { start_page: 0, pages: 3 });
        assert!(!long_form.is_canonical());
    }

    #[test]
    fn overlap_needs_a_common_page() {
        let run = Run { start_page: 10, pages: 5 };
        assert!(run.overlaps(Run { start_page: 14, pages: 1 }));
        assert!(!run.overlaps(Run { start_page: 15, pages: 1 }));
        assert!(!run.overlaps(Run { start_page: 12, pages: 0 }));
    }
}
