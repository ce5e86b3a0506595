//! Sizes of a store, in bytes, pages and regions.

use std::ops::Range;

use aquifer_device::Device;
use aquifer_sys::memory::REGION_BYTES;

use crate::error::{CacheError, Result};

/// Pages of a region at the smallest page size.
pub(crate) const MAX_REGION_PAGES: usize = REGION_BYTES / 4096;

/// Sizes of a store. Values that a hit needs are precomputed: a division costs as much as the rest
/// of the hit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    /// Length of the device when it was attached.
    pub len_bytes: u64,
    /// Size of a page: a power of two.
    pub page_bytes: usize,
    page_shift: u32,
    pages: u64,
}

impl Geometry {
    pub fn new(len_bytes: u64, page_bytes: usize) -> Geometry {
        let page_shift = page_bytes.trailing_zeros();
        Geometry { len_bytes, page_bytes, page_shift, pages: len_bytes.div_ceil(page_bytes as u64) }
    }

    /// The geometry of a device that is about to be attached, or why it cannot be.
    pub fn of_device(device: &dyn Device, page_bytes: usize) -> Result<Geometry> {
        let name = || device.name().to_owned();
        let len_bytes =
            device.len_bytes().map_err(|source| CacheError::Device { device: name(), source })?;
        if len_bytes == 0 {
            return Err(CacheError::Empty { device: name() });
        }
        let alignment_bytes = device.alignment_bytes();
        if !alignment_bytes.is_power_of_two() || !page_bytes.is_multiple_of(alignment_bytes) {
            return Err(CacheError::Alignment { device: name(), alignment_bytes });
        }
        Ok(Geometry::new(len_bytes, page_bytes))
    }

    #[inline]
    pub fn pages(self) -> u64 {
        self.pages
    }

    /// The page that contains an offset.
    #[inline]
    pub fn page_of(self, offset_bytes: u64) -> u64 {
        offset_bytes >> self.page_shift
    }

    pub fn pages_per_region(self) -> u64 {
        (REGION_BYTES / self.page_bytes) as u64
    }

    pub fn regions(self) -> usize {
        self.pages().div_ceil(self.pages_per_region()) as usize
    }

    pub fn region_of(self, page: u64) -> usize {
        (page / self.pages_per_region()) as usize
    }

    pub fn pages_of_region(self, region: usize) -> Range<u64> {
        let first = region as u64 * self.pages_per_region();
        first..(first + self.pages_per_region()).min(self.pages())
    }

    pub fn offset_of(self, page: u64) -> u64 {
        page << self.page_shift
    }

    /// Bytes of the device that a run of pages covers. The device's last page may be partial.
    pub fn bytes_in(self, pages: Range<u64>) -> usize {
        let end = self.offset_of(pages.end).min(self.len_bytes);
        (end - self.offset_of(pages.start)) as usize
    }

    /// The pages that a byte range touches, after checking that the range lies inside the device.
    pub fn pages_of(self, offset_bytes: u64, len_bytes: u64) -> Result<Range<u64>> {
        let out_of_bounds =
            CacheError::OutOfBounds { offset_bytes, len_bytes, mapped_bytes: self.len_bytes };
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => {
                let first = self.page_of(offset_bytes);
                Ok(first..end.div_ceil(self.page_bytes as u64).max(first))
            }
            _ => Err(out_of_bounds),
        }
    }
}
