//! Units for pages and bytes of a file, as opposed to those of the pool.
//!
//! A [`Run`] and a [`ByteRange`] are places in the pool; the types here are places in a file. Only
//! the file table converts one to the other.

use crate::ByteRange;
use crate::PAGE_BYTES;
use crate::run::Run;

/// A page of a file: the bytes from 4,096 times this number on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FilePage(pub u64);

/// Adjacent pages of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct FilePages {
    /// The first of them.
    pub first: FilePage,
    /// How many.
    pub pages: u64,
}

impl FilePages {
    /// The pages from `first` up to, but not including, `end`.
    pub fn between(first: FilePage, end: FilePage) -> FilePages {
        FilePages { first, pages: end.0.saturating_sub(first.0) }
    }

    /// All pages from one on, however long the file is.
    pub fn all_from(first: FilePage) -> FilePages {
        FilePages::between(first, FilePage(u64::MAX))
    }

    /// The first page after them.
    pub fn end(self) -> FilePage {
        FilePage(self.first.0.saturating_add(self.pages))
    }
}

/// A range of bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct FileBytes {
    /// The first byte.
    pub offset_bytes: u64,
    /// How many.
    pub len_bytes: u64,
}

impl FileBytes {
    /// The first byte after the range.
    pub fn end_bytes(self) -> u64 {
        self.offset_bytes.saturating_add(self.len_bytes)
    }

    /// The pages that the range touches.
    pub fn pages(self) -> FilePages {
        match self.len_bytes {
            0 => FilePages { first: FilePage(self.offset_bytes / PAGE_BYTES), pages: 0 },
            _ => FilePages::between(
                FilePage(self.offset_bytes / PAGE_BYTES),
                FilePage(self.end_bytes().div_ceil(PAGE_BYTES)),
            ),
        }
    }
}

/// Consecutive pages of a file that are also consecutive in the pool, or a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first page.
    pub first: FilePage,
    /// Where they lie. It may be longer than
    /// [`MAX_RUN_PAGES`](crate::run::MAX_RUN_PAGES), because runs that continue each
    /// other are one extent.
    pub run: Run,
}

impl Extent {
    /// The pages.
    pub fn pages(self) -> FilePages {
        FilePages { first: self.first, pages: self.run.pages }
    }

    /// The part of `range` that lies in the extent.
    pub(super) fn piece(self, range: FileBytes) -> Piece {
        let own_offset_bytes = self.first.0.saturating_mul(PAGE_BYTES);
        let own_end_bytes = self.pages().end().0.saturating_mul(PAGE_BYTES);
        let offset_bytes = range.offset_bytes.max(own_offset_bytes);
        let len_bytes = range.end_bytes().min(own_end_bytes).saturating_sub(offset_bytes);
        let pool_offset_bytes = self.run.bytes().offset_bytes + (offset_bytes - own_offset_bytes);
        Piece {
            file: FileBytes { offset_bytes, len_bytes },
            pool: (!self.run.is_hole())
                .then_some(ByteRange { offset_bytes: pool_offset_bytes, len_bytes }),
        }
    }
}

/// Consecutive bytes of a file that are also consecutive in the pool, or a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The bytes of the file.
    pub file: FileBytes,
    /// Where they lie in the pool, with the same length. `None` for a hole, which reads as zeros.
    pub pool: Option<ByteRange>,
}
