//! The system calls of a file device, with their results converted.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::DeviceIdentity;

/// The fields of `fstat` that a device needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct FileStatus {
    pub mode: libc::mode_t,
    pub len_bytes: u64,
    /// Identity of the file.
    pub file: DeviceIdentity,
    /// Device number, if it is a device node.
    pub number: u64,
}

/// Converts the result of a call that returns -1 on error.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Opens `path` with `flags`, close-on-exec.
pub(super) fn open(path: &Path, flags: libc::c_int) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    loop {
        // SAFETY: `path` is a NUL-terminated string that outlives the call.
        match check(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) }) {
            // SAFETY: just opened, so nothing else owns the descriptor.
            Ok(descriptor) => return Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns type and length of an open file.
pub(super) fn status(file: BorrowedFd<'_>) -> io::Result<FileStatus> {
    // SAFETY: all-zero is a valid `stat`.
    let mut status: libc::stat64 = unsafe { std::mem::zeroed() };
    // SAFETY: `status` is valid for the call to fill in.
    check(unsafe { libc::fstat64(file.as_raw_fd(), &raw mut status) })?;
    Ok(FileStatus {
        mode: status.st_mode,
        len_bytes: u64::try_from(status.st_size).unwrap_or(0),
        file: DeviceIdentity::File { file_system: status.st_dev, inode: status.st_ino },
        number: status.st_rdev,
    })
}

/// Returns the type of the file at `path` without opening it: opening a FIFO would block.
pub(super) fn mode_of(path: &Path) -> io::Result<libc::mode_t> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata(path)?.mode())
}

/// Returns the logical block size of a block device.
pub(super) fn block_device_block_bytes(file: BorrowedFd<'_>) -> io::Result<usize> {
    let mut block_bytes: libc::c_int = 0;
    // SAFETY: the request writes one `int`, which outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::BLKSSZGET, &raw mut block_bytes) })?;
    usize::try_from(block_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// One `pread` into raw memory; `Err` is an errno.
///
/// # Safety
/// `memory` is valid for writes of `len_bytes`, and no other code accesses it during the call.
pub(super) unsafe fn read(
    file: BorrowedFd<'_>,
    offset_bytes: u64,
    memory: *mut u8,
    len_bytes: usize,
) -> Result<usize, i32> {
    let offset = libc::off64_t::try_from(offset_bytes).map_err(|_| libc::EINVAL)?;
    // SAFETY: `memory` is valid by the caller's contract.
    let result = unsafe { libc::pread64(file.as_raw_fd(), memory.cast(), len_bytes, offset) };
    usize::try_from(result).map_err(|_| last_errno())
}

/// One `pwrite` from raw memory; `Err` is an errno.
///
/// # Safety
/// `memory` is valid for reads of `len_bytes`.
pub(super) unsafe fn write(
    file: BorrowedFd<'_>,
    offset_bytes: u64,
    memory: *const u8,
    len_bytes: usize,
) -> Result<usize, i32> {
    let offset = libc::off64_t::try_from(offset_bytes).map_err(|_| libc::EINVAL)?;
    // SAFETY: `memory` is valid by the caller's contract.
    let result = unsafe { libc::pwrite64(file.as_raw_fd(), memory.cast(), len_bytes, offset) };
    usize::try_from(result).map_err(|_| last_errno())
}

/// `fdatasync`, retried on `EINTR`; `Err` is an errno.
pub(super) fn sync_data(file: BorrowedFd<'_>) -> Result<(), i32> {
    aquifer_sys::io::sync_data(file).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
