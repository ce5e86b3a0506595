//! A shared mapping that is unmapped when dropped, and transfers on it by raw copies.
//!
//! Never exposed as a reference: other threads, processes or the device itself may change the
//! bytes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use aquifer_sys::copy;
use aquifer_sys::memory::copy_racy;

/// Mapped bytes.
#[derive(Debug)]
pub(crate) struct Region {
    start: *mut u8,
    len_bytes: usize,
}

// SAFETY: the region owns its mapping, and is accessed only by raw copies, never by references.
unsafe impl Send for Region {}
// SAFETY: as above. Concurrent transfers to the same bytes mix, as on any device.
unsafe impl Sync for Region {}

impl Region {
    /// Maps anonymous zeroed memory. A length of 0 maps nothing.
    pub(crate) fn anonymous(len_bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map(len_bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    /// Maps the first `len_bytes` of a file, with the given sharing `flags`.
    pub(crate) fn of_file(
        file: BorrowedFd<'_>,
        len_bytes: usize,
        is_writable: bool,
        flags: libc::c_int,
    ) -> io::Result<Self> {
        let write = if is_writable { libc::PROT_WRITE } else { 0 };
        Self::map(len_bytes, libc::PROT_READ | write, flags, file.as_raw_fd())
    }

    fn map(
        len_bytes: usize,
        protection: libc::c_int,
        flags: libc::c_int,
        file: libc::c_int,
    ) -> io::Result<Self> {
        if len_bytes == 0 {
            return Ok(Region { start: std::ptr::without_provenance_mut(4096), len_bytes: 0 });
        }
        // SAFETY: a new mapping at an address of the kernel's choice; no existing one is replaced.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, protection, flags, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Region { start: start.cast(), len_bytes })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Faults every page in for reading.
    pub(crate) fn populate_for_reading(&self) -> io::Result<()> {
        if self.len_bytes == 0 {
            return Ok(());
        }
        // SAFETY: the region's own mapping; populating changes no bytes.
        let result =
            unsafe { libc::madvise(self.start.cast(), self.len_bytes, libc::MADV_POPULATE_READ) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Copies out of the region.
    ///
    /// # Panics
    /// If the range is outside.
    pub(crate) fn read(&self, offset_bytes: u64, buffer: &mut [u8]) {
        let source = self.at(offset_bytes, buffer.len());
        // SAFETY: `at` checked the range; the buffer is the caller's own, outside this mapping. Another
        // transfer may write the bytes.
        unsafe { copy_racy(source, buffer.as_mut_ptr(), buffer.len()) };
    }

    /// Copies into the region with non-temporal stores.
    ///
    /// # Panics
    /// If the range is outside.
    pub(crate) fn write(&self, offset_bytes: u64, buffer: &[u8]) {
        let destination = self.at(offset_bytes, buffer.len());
        // SAFETY: as in `read`; called only for writable devices.
        unsafe { copy::copy_to_device(destination, buffer.as_ptr(), buffer.len()) };
    }

    /// Copies into the region and flushes the stores to persistent memory.
    ///
    /// # Panics
    /// If the range is outside.
    pub(crate) fn write_persistently(&self, offset_bytes: u64, buffer: &[u8]) {
        let destination = self.at(offset_bytes, buffer.len());
        // SAFETY: as in `write`.
        let is_durable =
            unsafe { copy::copy_and_persist(destination, buffer.as_ptr(), buffer.len()) };
        assert!(is_durable, "a persistent device is only opened where cache lines can be flushed");
    }

    fn at(&self, offset_bytes: u64, len_bytes: usize) -> *mut u8 {
        let end_bytes = offset_bytes.checked_add(len_bytes as u64);
        assert!(
            end_bytes.is_some_and(|end_bytes| end_bytes <= self.len_bytes as u64),
            "callers check their range against the device's length, which is at most the region's"
        );
        self.start.wrapping_add(offset_bytes as usize)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.len_bytes > 0 {
            // SAFETY: mapped by `map` with this length, unmapped only here.
            unsafe { libc::munmap(self.start.cast(), self.len_bytes) };
        }
    }
}
