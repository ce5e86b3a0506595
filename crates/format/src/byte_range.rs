//! Ranges of bytes of a pool.

/// A range of bytes of the media.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteRange {
    /// First byte.
    pub offset_bytes: u64,
    /// The length.
    pub len_bytes: u64,
}

impl ByteRange {
    /// The first byte after the range.
    #[inline]
    pub fn end_bytes(self) -> u64 {
        self.offset_bytes.saturating_add(self.len_bytes)
    }

    /// The common part; of length 0 if there is none.
    #[inline]
    pub fn intersection(self, other: ByteRange) -> ByteRange {
        let offset_bytes = self.offset_bytes.max(other.offset_bytes);
        let end_bytes = self.end_bytes().min(other.end_bytes());
        ByteRange { offset_bytes, len_bytes: end_bytes.saturating_sub(offset_bytes) }
    }
}
