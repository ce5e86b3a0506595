//! How much of files is in memory, and for whom.
//!
//! | question | source | limits |
//! |---|---|---|
//! | file pages this process has mapped in | [`MappedFilePages`], `/proc/self/statm` | whole process; cheap |
//! | which pages of a range are mapped in | [`Pagemap`], `/proc/self/pagemap` | 8 bytes a page |
//! | pages of a file in the page cache | [`cachestat`](crate::memory::cachestat) | Linux 6.5; own files from 6.15 |

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use crate::file_system;
pub use crate::io::read_at;
pub use crate::pagemap::Pagemap;

/// The number of file pages in this process's page tables, shared memory included.
pub struct MappedFilePages(File);

impl MappedFilePages {
    /// Opens the source once: asking then costs about a microsecond.
    pub fn open() -> io::Result<MappedFilePages> {
        File::open("/proc/self/statm").map(MappedFilePages)
    }

    /// The number now.
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

/// What identifies a file: its file system's device number and its inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

fn status(file: BorrowedFd<'_>) -> io::Result<libc::stat64> {
    // SAFETY: all-zero is a valid `stat`.
    let mut status: libc::stat64 = unsafe { std::mem::zeroed() };
    // SAFETY: `status` is valid for the call to fill in.
    crate::check(unsafe { libc::fstat64(file.as_raw_fd(), &raw mut status) }.into())?;
    Ok(status)
}

/// Present length of a regular file. Async-signal-safe.
///
/// Asks for nothing else: who asks for the times of a file makes its next write change them, and then the next
/// synchronous write of data writes the inode as well (an I/O more, 80 instead of 45 µs on ext4 without a journal).
pub fn file_len_bytes(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: all-zero is a valid `statx`.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path, and `status` is valid for the call to fill in.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_SIZE,
            &raw mut status,
        )
    };
    crate::check(result.into())?;
    Ok(status.stx_size)
}

/// Which file a descriptor is open on.
pub fn file_identity(file: BorrowedFd<'_>) -> io::Result<FileIdentity> {
    status(file).map(|status| FileIdentity { device: status.st_dev, inode: status.st_ino })
}

/// What kind of file system a file is on, as far as its page cache is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// The page cache is a copy that can be dropped.
    Storage,
    /// The page cache is the file (tmpfs, ramfs).
    Memory,
    /// Huge pages, mapped and advised about in their own size only.
    HugePages,
}

/// Where a file's pages come from.
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
