//! Figures about a heap.

use super::layout::{Header, PAGE_BYTES};

/// What the bytes of a heap are used for; see [`ObjectHeap::check`](super::ObjectHeap::check).
///
/// `allocated_bytes`, `free_block_bytes`, `free_page_bytes` and `metadata_bytes` add up to `len_bytes`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// The heap's length.
    pub len_bytes: u64,
    /// Allocations there are.
    pub allocations: u64,
    /// What they may use, which is more than what was asked for.
    pub allocated_bytes: u64,
    /// Bytes in free blocks of slabs, for small allocations of their sizes only.
    pub free_block_bytes: u64,
    /// Bytes in free pages, for anything.
    pub free_page_bytes: u64,
    /// Bytes in the longest run of free pages.
    pub largest_run_bytes: u64,
    /// The heap's own: header, page maps, headers and unused ends of slabs.
    pub metadata_bytes: u64,
}

impl Statistics {
    /// The figures of a heap before its data pages are counted.
    pub(crate) fn of_header(header: &Header) -> Statistics {
        let maps: u64 = header.zones.iter().map(|zone| zone.map_pages).sum();
        Statistics {
            len_bytes: header.len_bytes,
            metadata_bytes: (1 + maps) * PAGE_BYTES,
            ..Statistics::default()
        }
    }
}
