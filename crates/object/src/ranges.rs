//! The ranges of an object that a psync names.
//!
//! A [`NamedRanges`] is what the caller named, in order, without overlaps, and widened to whole
//! grains, the unit of a patch. Pages that the ranges cover completely are committed whole; of all
//! others, exactly the named bytes are.

use std::ops::Range;

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::patch::GRAIN_BYTES;
use aquifer_vm::dirty::PageIndex;

use crate::error::{ObjectError, Result};
use crate::memory::Object;

const GRAIN: u64 = GRAIN_BYTES as u64;

/// Ascending offsets in an object: no range is empty or touches another one.
#[derive(Debug)]
pub(crate) struct NamedRanges(Vec<Range<u64>>);

/// Bytes of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PagePart {
    pub page: PageIndex,
    /// The first byte, in the page.
    pub offset: usize,
    pub len_bytes: usize,
}

impl PagePart {
    pub fn is_whole(self) -> bool {
        self.len_bytes == PAGE_BYTES as usize
    }
}

impl NamedRanges {
    /// Checks the ranges that a caller has named.
    pub fn new(object: &Object, ranges: &[Range<u64>]) -> Result<NamedRanges> {
        let len_bytes = object.media.len_bytes;
        if let Some(bad) =
            ranges.iter().find(|range| range.start > range.end || range.end > len_bytes)
        {
            return Err(ObjectError::OutsideObject {
                name: object.name_text(),
                start: bad.start,
                end: bad.end,
                len_bytes,
            });
        }
        Ok(NamedRanges::of(ranges))
    }

    fn of(ranges: &[Range<u64>]) -> NamedRanges {
        let grains = |range: &Range<u64>| {
            // An object ends with a page, so the end stays inside.
            range.start / GRAIN * GRAIN..range.end.next_multiple_of(GRAIN)
        };
        let mut named: Vec<Range<u64>> =
            ranges.iter().filter(|range| !range.is_empty()).map(grains).collect();
        named.sort_unstable_by_key(|range| range.start);
        named.dedup_by(|next, before| {
            let touches = next.start <= before.end;
            if touches {
                before.end = before.end.max(next.end);
            }
            touches
        });
        NamedRanges(named)
    }

    /// Whether no byte is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The named bytes, page by page.
    pub fn parts(&self) -> impl Iterator<Item = PagePart> {
        self.0.iter().flat_map(|range| {
            let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
            pages.map(|page| {
                let start = page * PAGE_BYTES;
                let from = range.start.max(start);
                let to = range.end.min(start + PAGE_BYTES);
                PagePart {
                    page: PageIndex(page),
                    offset: (from - start) as usize,
                    len_bytes: (to - from) as usize,
                }
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_parts_of_pages() {
        let parts = |ranges: &[Range<u64>]| -> Vec<(u64, usize, usize)> {
            let named = NamedRanges::of(ranges);
            named.parts().map(|part| (part.page.0, part.offset, part.len_bytes)).collect()
        };
        assert_eq!(parts(&[]), []);
        assert_eq!(parts(&[5..5, 8192..8192]), []);
        assert_eq!(parts(&[9..10, 3..4]), [(0, 0, 16)], "grains that touch are one part");
        assert_eq!(parts(&[24..25, 3..4]), [(0, 0, 8), (0, 24, 8)]);
        assert_eq!(parts(&[0..100, 8..16, 50..60]), [(0, 0, 104)]);
        assert_eq!(
            parts(&[4000..12290, 12288..12300]),
            [(0, 4000, 96), (1, 0, 4096), (2, 0, 4096), (3, 0, 16)]
        );
    }
}
