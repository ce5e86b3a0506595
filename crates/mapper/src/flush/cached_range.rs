//! A part of a file, mapped shared for a short time, to write the gaps between dirty pages onto
//! themselves.
//!
//! The view cannot serve as the source: a page of it may temporarily hold zeros after a failed load
//! ([`aquifer_vm::guard`]), or an older private copy. Here each page is the page cache's own, so a
//! write copies it onto itself, and a page that cannot be read fails the write. Used only while no
//! other description of the file is open: a concurrent store through one would be lost.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use aquifer_sys::memory::{self, Advice, Protection, SMALL_PAGE_BYTES, cachestat};

/// A shared, read-only mapping of whole pages of a file.
pub(super) struct CachedRange {
    start: *mut u8,
    bytes: Range<u64>,
}

impl CachedRange {
    /// Maps a range that begins at a page. `None` unless all of it is in the page cache: reading it
    /// first is not worthwhile.
    pub fn new(file: BorrowedFd<'_>, bytes: Range<u64>) -> Option<CachedRange> {
        let len_bytes = bytes.end.checked_sub(bytes.start).filter(|len_bytes| *len_bytes > 0)?;
        let pages = len_bytes.div_ceil(SMALL_PAGE_BYTES as u64);
        if cachestat(file, bytes.start, len_bytes).ok()?.cached < pages {
            return None;
        }
        CachedRange::map(file, bytes).ok()
    }

    fn map(file: BorrowedFd<'_>, bytes: Range<u64>) -> io::Result<CachedRange> {
        let len_bytes = (bytes.end - bytes.start) as usize;
        let start = memory::map_file(len_bytes, Protection::Read, file, bytes.start)?;
        let cached = CachedRange { start, bytes };
        for advice in [Advice::DontFork, Advice::DontDump] {
            // SAFETY: mapped above; contents stay.
            unsafe { memory::advise(start, len_bytes, advice) }?;
        }
        // One call instead of a fault for every few pages. Kernels without it (before 5.14) fault.
        // SAFETY: as above.
        let _ = unsafe { memory::advise(start, len_bytes, Advice::PopulateRead) };
        Ok(cached)
    }

    /// The memory of a range of the file, which must lie inside this one.
    pub fn memory_of(&self, bytes: Range<u64>) -> memory::Range {
        assert!(self.bytes.start <= bytes.start && bytes.end <= self.bytes.end);
        memory::Range {
            address: self.start.wrapping_add((bytes.start - self.bytes.start) as usize),
            len_bytes: (bytes.end - bytes.start) as usize,
        }
    }
}

impl Drop for CachedRange {
    fn drop(&mut self) {
        let len_bytes = (self.bytes.end - self.bytes.start) as usize;
        // SAFETY: mapped by `map`; the caller of `memory_of` does not use it longer than this.
        let _ = unsafe { memory::unmap(self.start, len_bytes) };
    }
}
