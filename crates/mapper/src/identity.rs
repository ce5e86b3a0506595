//! Which file a mapping is of, and whether a path still leads to it.
//!
//! A file is its device and inode number. That is sound as long as a mapping of the inode exists, because the mapping keeps
//! the inode, and so its number, from being used again: a path that leads to the same numbers leads to the same file. What
//! changes in it, by whoever, shows in the mapping, which is its page cache.
//!
//! It is not sound where a file system makes up numbers, or serves a file from one inode today and from another tomorrow
//! (overlayfs after a copy-up, network file systems, FUSE). Mappings of those are never parked.
//!
//! Opening checks permissions, asking does not. So a parked mapping is taken for a path only if owner, group and mode are what
//! they were when it was opened, and the process has the same effective user ([`CacheKey`]). An access list that changed
//! alone goes unnoticed until the mapping is forgotten, as it does for a descriptor that stays open.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use aquifer_sys::file_system;
use aquifer_sys::residency::{self, FileIdentity, FileStatus};

use super::by_device::ByDevice;

/// A file, and who may do what with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    identity: FileIdentity,
    mode: u32,
    owner: u32,
    group: u32,
}

/// What must be the same for a parked mapping to be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    file: FileId,
    user: u32,
}

impl CacheKey {
    /// Of a file, for the user this process is now.
    pub fn of(file: FileId) -> CacheKey {
        // SAFETY: asks for a number.
        CacheKey { file, user: unsafe { libc::geteuid() } }
    }

    /// The file alone, whoever may read it.
    pub fn identity(&self) -> FileIdentity {
        self.file.identity
    }
}

impl FileId {
    /// The file alone, whoever may read it.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }
}

/// A file as it is now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Status {
    pub id: FileId,
    pub len_bytes: u64,
    block_bytes: u32,
    /// What it is, if it is no regular file, and what to do instead.
    pub other: Option<(&'static str, &'static str)>,
}

impl Status {
    /// Of the file that a path leads to.
    pub fn of_path(path: &Path) -> io::Result<Status> {
        residency::path_status(path).map(Status::new)
    }

    /// Of an open file.
    pub fn of_file(file: &File) -> io::Result<Status> {
        residency::file_status(file.as_fd()).map(Status::new)
    }

    /// Of what the system said.
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

/// File systems on which a device and an inode number stand for a file as long as the inode is in use.
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

/// Whether the kernel refuses to map a file of this file system, if it does, before what was at the place is gone. Others may
/// be asked at a free place first.
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

/// Whether a file consists of huge pages: one that is missing cannot be replaced by a small one.
pub(crate) fn has_huge_pages(file: &File, status: &Status) -> bool {
    // No huge page is smaller on any machine.
    status.block_bytes >= 64 << 10
        && file_system::magic(file.as_fd()).is_ok_and(|magic| magic == file_system::HUGETLBFS)
}

/// Whether a file of length 0 may have content all the same: it is made up when it is read.
pub(crate) fn is_made_up(file: &File) -> Option<&'static str> {
    file_system::magic(file.as_fd()).ok().and_then(file_system::made_up)
}
