//! A part of a file, mapped shared for a moment, to store many pages into it.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use aquifer_sys::fallible;
use aquifer_sys::memory::{self, Advice, Protection};

/// A shared mapping of whole pages of a file.
pub(super) struct StoreWindow {
    start: *mut u8,
    bytes: Range<u64>,
}

impl StoreWindow {
    /// Of a range that begins at a page.
    pub fn new(file: BorrowedFd<'_>, bytes: Range<u64>) -> io::Result<StoreWindow> {
        let len_bytes = (bytes.end - bytes.start) as usize;
        let start = memory::map_file(len_bytes, Protection::ReadWrite, file, bytes.start)?;
        let window = StoreWindow { start, bytes };
        for advice in [Advice::DontFork, Advice::DontDump] {
            // SAFETY: mapped just now; contents stay.
            unsafe { memory::advise(start, len_bytes, advice) }?;
        }
        Ok(window)
    }

    /// Copies to a range of the file, inside the window. False if some of it could not be stored: why, a write tells.
    ///
    /// # Safety
    /// `source` is mapped readable for as many bytes, whether or not what is behind the mapping can be read.
    pub unsafe fn store(&self, source: *const u8, bytes: Range<u64>) -> bool {
        assert!(self.bytes.start <= bytes.start && bytes.end <= self.bytes.end);
        let target = self.start.wrapping_add((bytes.start - self.bytes.start) as usize);
        // SAFETY: the target is this window's; the source is the caller's promise.
        unsafe { fallible::try_store(source, target, (bytes.end - bytes.start) as usize) }
    }
}

impl Drop for StoreWindow {
    fn drop(&mut self) {
        let len_bytes = (self.bytes.end - self.bytes.start) as usize;
        // SAFETY: mapped by `new`, and nobody else knows it.
        let _ = unsafe { memory::unmap(self.start, len_bytes) };
    }
}
