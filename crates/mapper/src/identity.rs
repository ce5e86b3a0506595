//! Which file a mapping is of, and whether a path still names it.
//!
//! A file is identified by device and inode number. That is sound as long as a mapping of the inode
//! exists: the mapping pins the inode, so its number cannot be reused, and a path with the same
//! numbers names the same file. All changes of the file's content show in the mapping, which is its
//! page cache.
//!
//! It is not sound where a file system makes up numbers, or may serve a file from different inodes
//! over time (overlayfs after a copy-up, network file systems, FUSE). Mappings of those are never
//! parked.
//!
//! Opening checks permissions, `stat` does not. So a parked mapping is reused for a path only if
//! owner, group and mode are unchanged since it was opened, and the process has the same effective
//! user ([`CacheKey`]). A change of the access list alone goes unnoticed until the mapping is
//! evicted, as with a descriptor that stays open.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use aquifer_sys::file_system;
use aquifer_sys::residency::{self, FileIdentity, FileStatus};

use super::by_device::ByDevice;

/// A file and its permissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    identity: FileIdentity,
    mode: u32,
    owner: u32,
    group: u32,
}

/// What must match for a parked mapping to be reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    file: FileId,
    user: u32,
}

impl CacheKey {
    /// The key of a file for the current effective user.
    pub fn of(file: FileId) -> CacheKey {
        // SAFETY: `geteuid` has no preconditions.
        CacheKey { file, user: unsafe { libc::geteuid() } }
    }

    /// The file alone, without permissions.
    pub fn identity(&self) -> FileIdentity {
        self.file.identity
    }
}

impl FileId {
    /// The file alone, without permissions.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }
}

/// The status of a file when it was read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Status {
    pub id: FileId,
    pub len_bytes: u64,
    block_bytes: u32,
    /// For other than regular files: the kind, and what to do instead.
    pub other: Option<(&'static str, &'static str)>,
}

impl Status {
    /// The status of the file that a path names.
    pub fn of_path(path: &Path) -> io::Result<Status> {
        residency::path_status(path).map(Status::new)
    }

    /// The status of an open file.
    pub fn of_file(file: &File) -> io::Result<Status> {
        residency::file_status(file.as_fd()).map(Status::new)
    }

    /// Converts a status returned by the system.
    pub fn new(status: FileStatus) -> Status {
        let FileStatus { identity, mode, owner, group, len_bytes, block_bytes } = status;
        Status {
            id: FileId { identity, mode, owner, group },
            len_bytes,
            block_bytes,
            other: other_than_regular(mode),
        }
    }
}

fn other_than_regular(mode: u32) -> Option<(&'static str, &'static str)> {
    let read = "read it instead";
    match mode & libc::S_IFMT {
        libc::S_IFREG => None,
        libc::S_IFDIR => Some(("a directory", "name a file in it")),
        libc::S_IFIFO => Some(("a pipe", read)),
        libc::S_IFSOCK => Some(("a socket", read)),
        libc::S_IFCHR => Some(("a character device", read)),
        libc::S_IFBLK => Some(("a block device", "map it through a Cache")),
        _ => Some(("no regular file", read)),
    }
}

/// File systems on which device and inode number identify a file as long as the inode is in use.
const KEEPING_INODES: [u64; 6] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
];

/// Whether a mapping of this file may be parked.
pub(crate) fn may_be_parked(file: &File) -> bool {
    file_system::magic(file.as_fd()).is_ok_and(|magic| KEEPING_INODES.contains(&magic))
}

/// Whether this file system, if it refuses a mapping, does so before the kernel removes the old
/// mapping at the address. Files of other file systems are mapped at a free address first, as a
/// trial.
pub(crate) fn refuses_early(file: &File, id: FileId) -> bool {
    const YES: u32 = 1;
    const NO: u32 = 2;
    static KNOWN: ByDevice = ByDevice::new();
    let device = id.identity.device;
    let found = KNOWN.get(device).unwrap_or_else(|| {
        let found = if may_be_parked(file) { YES } else { NO };
        KNOWN.remember(device, found);
        found
    });
    found == YES
}

/// Whether a file consists of huge pages: a missing one cannot be replaced by a small page.
pub(crate) fn has_huge_pages(file: &File, status: &Status) -> bool {
    // No machine has smaller huge pages.
    status.block_bytes >= 64 << 10
        && file_system::magic(file.as_fd()).is_ok_and(|magic| magic == file_system::HUGETLBFS)
}

/// Whether a file of length 0 may have content: some file systems generate it when it is read.
/// Returns the kind.
pub(crate) fn is_made_up(file: &File) -> Option<&'static str> {
    file_system::magic(file.as_fd()).ok().and_then(file_system::made_up)
}
