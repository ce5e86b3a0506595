//! Where the rows of a device are.

use std::ops::Range;

use aquifer_device::Device;
use aquifer_sys::memory::REGION_BYTES;

use super::table::MOST_ROWS;
use crate::error::{CacheError, Result};

/// The rows of a device, and how they can be transferred.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub header_bytes: u64,
    pub row_bytes: usize,
    pub rows: u64,
    /// What a transfer's offset, length and memory must be multiples of.
    pub alignment_bytes: u64,
}

impl Layout {
    /// The whole rows behind the header.
    pub fn of_device(device: &dyn Device, header_bytes: u64, row_bytes: usize) -> Result<Layout> {
        let name = || device.name().to_owned();
        let len_bytes =
            device.len_bytes().map_err(|source| CacheError::Device { device: name(), source })?;
        let alignment_bytes = device.alignment_bytes();
        if !alignment_bytes.is_power_of_two() || alignment_bytes > REGION_BYTES {
            let reason = format!("transfers aligned to {alignment_bytes} bytes are not supported");
            return Err(CacheError::RowLayout { device: name(), reason });
        }
        if row_bytes == 0 {
            let reason = "a row has at least one byte".to_owned();
            return Err(CacheError::RowLayout { device: name(), reason });
        }
        // No transfer reaches further, and sums of offsets cannot overflow.
        let len_bytes = len_bytes.min(i64::MAX as u64);
        let Some(body_bytes) = len_bytes.checked_sub(header_bytes) else {
            let reason =
                format!("a header of {header_bytes} bytes exceeds the device of {len_bytes} bytes");
            return Err(CacheError::RowLayout { device: name(), reason });
        };
        Ok(Layout {
            header_bytes,
            row_bytes,
            rows: (body_bytes / row_bytes as u64).min(MOST_ROWS),
            alignment_bytes: alignment_bytes as u64,
        })
    }

    /// The bytes of a row on the device.
    #[inline]
    pub fn bytes_of(&self, row: u64) -> Range<u64> {
        let start = self.header_bytes + row * self.row_bytes as u64;
        start..start + self.row_bytes as u64
    }

    /// The transfer that reads a row.
    #[inline]
    pub fn span_of(&self, row: u64) -> Range<u64> {
        self.aligned(self.bytes_of(row), self.alignment_bytes)
    }

    /// The range widened to whole units of a transfer. The last unit may cross the device's end.
    pub fn aligned(&self, bytes: Range<u64>, unit_bytes: u64) -> Range<u64> {
        bytes.start / unit_bytes * unit_bytes..bytes.end.next_multiple_of(unit_bytes)
    }

    /// The rows that lie entirely in these bytes.
    pub fn rows_in(&self, bytes: Range<u64>) -> Range<u64> {
        let row_bytes = self.row_bytes as u64;
        let first = bytes.start.saturating_sub(self.header_bytes).div_ceil(row_bytes);
        let end = bytes.end.saturating_sub(self.header_bytes) / row_bytes;
        first..end.min(self.rows)
    }

    /// The longest transfer that a single row needs.
    pub fn span_bytes(&self) -> usize {
        let unit_bytes = self.alignment_bytes as usize;
        // A row that starts in the last byte of a unit ends one unit later than an aligned one.
        (self.row_bytes + unit_bytes - 1).next_multiple_of(unit_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_transfers_cover_each_other() {
        for (header_bytes, row_bytes, unit_bytes) in
            [(0, 1, 1), (0, 256, 512), (100, 3072, 512), (17, 700, 4096), (5000, 4096, 4096)]
        {
            let layout =
                Layout { header_bytes, row_bytes, rows: 1000, alignment_bytes: unit_bytes };
            for row in 0..1000 {
                let bytes = layout.bytes_of(row);
                let span = layout.span_of(row);
                assert!(span.start <= bytes.start && bytes.end <= span.end);
                assert!((span.end - span.start) as usize <= layout.span_bytes());
                assert_eq!(layout.rows_in(bytes), row..row + 1);
                let inside = layout.rows_in(span.clone());
                assert!(inside.contains(&row) && inside.end <= 1000);
                assert!(layout.bytes_of(inside.start).start >= span.start);
                assert!(layout.bytes_of(inside.end - 1).end <= span.end);
            }
        }
    }
}
