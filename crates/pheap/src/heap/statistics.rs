//! Statistics of a heap.

use super::layout::{Header, PAGE_BYTES};

/// The use of a heap's bytes; see [`ObjectHeap::check`](super::ObjectHeap::check).
///
/// `allocated_bytes`, `free_block_bytes`, `free_page_bytes` and `metadata_bytes` add up to
/// `len_bytes`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// The heap's length.
    pub len_bytes: u64,
    /// Number of allocations.
    pub allocations: u64,
    /// Their usable bytes, which may exceed the requested bytes.
    pub allocated_bytes: u64,
    /// Bytes in free blocks of slabs, usable only for small allocations of their size classes.
    pub free_block_bytes: u64,
    /// Bytes in free pages, usable for any allocation.
    pub free_page_bytes: u64,
    /// Bytes in the longest run of free pages.
    pub largest_run_bytes: u64,
    /// The heap's metadata: header, page maps, slab headers and unused ends of slabs.
    pub metadata_bytes: u64,
}

impl Statistics {
    /// The statistics of a heap before its data pages are counted.
    pub(crate) fn of_header(header: &Header) -> Statistics {
        let maps: u64 = header.zones.iter().map(|zone| zone.map_pages).sum();
        Statistics {
            len_bytes: header.len_bytes,
            metadata_bytes: (1 + maps) * PAGE_BYTES,
            ..Statistics::default()
        }
    }
}
