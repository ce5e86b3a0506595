//! A part of a file, mapped shared for a moment, to write what is between dirty pages onto itself.
//!
//! Why not out of the view: a page of it may hold zeros for a moment, where a load failed ([`aquifer_vm::guard`]), or an older
//! private copy. Here each page is the page cache's own, so a write copies it to where it is already. One that
//! cannot be had fails the write. Only while no other description of the file is open: others' stores in that moment would be lost.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use aquifer_sys::memory::{self, Advice, Protection, SMALL_PAGE_BYTES, cachestat};

/// A shared mapping of whole pages of a file, to read from.
pub(super) struct CacheWindow {
    start: *mut u8,
    bytes: Range<u64>,
}

impl CacheWindow {
    /// Of a range that begins at a page. `None` unless all of it is in the page cache: what has to be read first is not
    /// worth it.
    pub fn new(file: BorrowedFd<'_>, bytes: Range<u64>) -> Option<CacheWindow> {
        let len_bytes = bytes.end.checked_sub(bytes.start).filter(|len_bytes| *len_bytes > 0)?;
        let pages = len_bytes.div_ceil(SMALL_PAGE_BYTES as u64);
        if cachestat(file, bytes.start, len_bytes).ok()?.cached < pages {
            return None;
        }
        CacheWindow::map(file, bytes).ok()
    }

    fn map(file: BorrowedFd<'_>, bytes: Range<u64>) -> io::Result<CacheWindow> {
        let len_bytes = (bytes.end - bytes.start) as usize;
        let start = memory::map_file(len_bytes, Protection::Read, file, bytes.start)?;
        let window = CacheWindow { start, bytes };
        for advice in [Advice::DontFork, Advice::DontDump] {
            // SAFETY: mapped just now; contents stay.
            unsafe { memory::advise(start, len_bytes, advice) }?;
        }
        // Once for all pages, and not a fault for every few. A kernel without it (before 5.14) has the faults.
        // SAFETY: as above.
        let _ = unsafe { memory::advise(start, len_bytes, Advice::PopulateRead) };
        Ok(window)
    }

    /// Where a range of the file inside the window is.
    pub fn part(&self, bytes: Range<u64>) -> memory::Range {
        assert!(self.bytes.start <= bytes.start && bytes.end <= self.bytes.end);
        memory::Range {
            address: self.start.wrapping_add((bytes.start - self.bytes.start) as usize),
            len_bytes: (bytes.end - bytes.start) as usize,
        }
    }
}

impl Drop for CacheWindow {
    fn drop(&mut self) {
        let len_bytes = (self.bytes.end - self.bytes.start) as usize;
        // SAFETY: mapped by `map`, and nobody else knows it.
        let _ = unsafe { memory::unmap(self.start, len_bytes) };
    }
}
