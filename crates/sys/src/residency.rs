//! How much of a file is in memory, and mapped.
//!
//! | question | source | limits |
//! |---|---|---|
//! | file pages this process has mapped in | [`MappedFilePages`], `/proc/self/statm` | whole process; cheap |
//! | which pages of a range are mapped in | [`Pagemap`], `/proc/self/pagemap` | 8 bytes a page |
//! | pages of a file in the page cache | [`cachestat`](crate::memory::cachestat) | Linux 6.5; own files from 6.15 |

use std::ffi::{CStr, CString, c_int};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::file_system;
pub use crate::io::read_at;
pub use crate::pagemap::Pagemap;

/// The number of file pages in this process's page tables, shared memory included.
pub struct MappedFilePages(File);

impl MappedFilePages {
    /// Opens the source once: a reading then costs about a microsecond.
    pub fn open() -> io::Result<MappedFilePages> {
        File::open("/proc/self/statm").map(MappedFilePages)
    }

    /// Returns the current number.
    pub fn read(&self) -> io::Result<u64> {
        let mut text = [0u8; 128];
        let len = self.0.read_at(&mut text, 0)?;
        // "size resident shared …", in pages.
        std::str::from_utf8(&text[..len])
            .ok()
            .and_then(|text| text.split_ascii_whitespace().nth(2)?.parse().ok())
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// The bytes that this process has caused to be read from storage, read-ahead included.
pub struct StorageReads(File);

impl StorageReads {
    /// Opens the source once: a reading then costs a few microseconds.
    ///
    /// # Errors
    /// If the kernel was built without the accounting of I/O (`CONFIG_TASK_IO_ACCOUNTING`).
    pub fn open() -> io::Result<StorageReads> {
        let reads = StorageReads(File::open("/proc/self/io")?);
        reads.read().map(|_| reads)
    }

    /// Returns the current number. File systems without a block device below them may not count.
    pub fn read(&self) -> io::Result<u64> {
        let mut text = [0u8; 512];
        let len = self.0.read_at(&mut text, 0)?;
        std::str::from_utf8(&text[..len])
            .ok()
            .and_then(|text| text.lines().find_map(|line| line.strip_prefix("read_bytes: ")))
            .and_then(|number| number.parse().ok())
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// Identifies a file: its file system's device number and its inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// A file's type, permissions, owner and length: its status without the times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStatus {
    /// Identifies the file.
    pub identity: FileIdentity,
    /// `st_mode`: type and permissions.
    pub mode: u32,
    /// The owning user.
    pub owner: u32,
    /// The owning group.
    pub group: u32,
    /// Its length.
    pub len_bytes: u64,
    /// Preferred I/O size (`st_blksize`). On hugetlbfs: the huge page size.
    pub block_bytes: u32,
}

/// Returns the status of the file at a path.
pub fn path_status(path: &Path) -> io::Result<FileStatus> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    ask(libc::AT_FDCWD, &path, libc::AT_STATX_SYNC_AS_STAT, IDENTIFYING)
        .map(|s| FileStatus::new(&s))
}

/// Returns the status of an open file.
pub fn file_status(file: BorrowedFd<'_>) -> io::Result<FileStatus> {
    ask(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH, IDENTIFYING).map(|s| FileStatus::new(&s))
}

/// Returns the current length of a regular file. Async-signal-safe.
pub fn file_len_bytes(file: BorrowedFd<'_>) -> io::Result<u64> {
    ask(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH, libc::STATX_SIZE).map(|status| status.stx_size)
}

/// The `statx` fields of [`FileStatus`].
const IDENTIFYING: u32 = libc::STATX_TYPE
    | libc::STATX_MODE
    | libc::STATX_UID
    | libc::STATX_GID
    | libc::STATX_INO
    | libc::STATX_SIZE;

impl FileStatus {
    fn new(status: &libc::statx) -> FileStatus {
        let device = libc::makedev(status.stx_dev_major, status.stx_dev_minor);
        FileStatus {
            identity: FileIdentity { device, inode: status.stx_ino },
            mode: u32::from(status.stx_mode),
            owner: status.stx_uid,
            group: status.stx_gid,
            len_bytes: status.stx_size,
            block_bytes: status.stx_blksize,
        }
    }
}

/// Requests only the fields of `mask`: reading a file's times makes its next write change them, and
/// then the next synchronous write of data writes the inode as well (one more I/O, 80 instead of 45
/// µs on ext4 without a journal).
fn ask(directory: c_int, path: &CStr, flags: c_int, mask: u32) -> io::Result<libc::statx> {
    // SAFETY: all-zero is a valid `statx`.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a string, and `status` is valid for the call to fill in.
    let result = unsafe { libc::statx(directory, path.as_ptr(), flags, mask, &raw mut status) };
    crate::check(result.into())?;
    Ok(status)
}

/// Returns the identity of an open file.
pub fn file_identity(file: BorrowedFd<'_>) -> io::Result<FileIdentity> {
    file_status(file).map(|status| status.identity)
}

/// Whether the kernel tells the calling thread which pages of a file are in the page cache
/// ([`residency`](crate::memory::residency)): only about files that it owns or may write. About
/// others it says that all pages are.
pub fn is_revealed(file: BorrowedFd<'_>) -> bool {
    // SAFETY: no preconditions.
    let user = unsafe { libc::geteuid() };
    if file_status(file).is_ok_and(|status| status.owner == user) {
        return true;
    }
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let path = path.expect("no zero byte");
    // SAFETY: the path is a string.
    unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) == 0 }
}

/// The kind of a file system, with regard to its page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// The page cache is a copy that can be dropped.
    Storage,
    /// The page cache is the file (tmpfs, ramfs).
    Memory,
    /// Huge pages, which can be mapped and advised only at huge page granularity.
    HugePages,
}

/// Returns the kind of file system that holds a file.
pub fn backing(file: BorrowedFd<'_>) -> io::Result<Backing> {
    let magic = file_system::magic(file)?;
    Ok(match file_system::in_memory(magic) {
        _ if magic == file_system::HUGETLBFS => Backing::HugePages,
        Some(_) => Backing::Memory,
        None => Backing::Storage,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{self, Protection};
    use std::os::fd::AsFd;

    #[test]
    fn mapped_file_pages_are_counted() {
        let counter = MappedFilePages::open().unwrap();
        assert!(counter.read().unwrap() > 0, "this program is itself mapped");
        let program = File::open("/proc/self/exe").unwrap();
        let len = file_len_bytes(program.as_fd()).unwrap();
        assert!(len > 0);
        let mut start = [0u8; 4];
        assert_eq!(read_at(program.as_fd(), &mut start, 0).unwrap(), 4);
        assert_eq!(&start, b"\x7fELF");
        assert_eq!(read_at(program.as_fd(), &mut start, len - 1).unwrap(), 1);
        assert!(memory::map_file(4096, Protection::Read, program.as_fd(), 0).is_ok());
    }
}
