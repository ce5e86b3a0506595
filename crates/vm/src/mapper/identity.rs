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
//! they were when it was opened, and the process has the same effective user. An access list that changed alone goes
//! unnoticed until the mapping is forgotten, as it does for a descriptor that stays open.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use aquifer_sys::file_system;
use aquifer_sys::residency::FileIdentity;

/// What must be the same for a parked mapping to be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
    mode: u32,
    owner: u32,
    group: u32,
    user: u32,
}

impl FileId {
    /// The file alone, whoever may read it.
    pub fn identity(&self) -> FileIdentity {
        FileIdentity { device: self.device, inode: self.inode }
    }
}

/// A file as it is now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Status {
    pub id: FileId,
    pub len_bytes: u64,
    /// Whether no path leads to it.
    pub is_removed: bool,
    /// What it is, if it is no regular file, and what to do instead.
    pub other: Option<(&'static str, &'static str)>,
}

impl Status {
    /// Of the file that a path leads to.
    pub fn of_path(path: &Path) -> io::Result<Status> {
        std::fs::metadata(path).map(|metadata| Status::new(&metadata))
    }

    /// Of an open file.
    pub fn of_file(file: &File) -> io::Result<Status> {
        file.metadata().map(|metadata| Status::new(&metadata))
    }

    fn new(metadata: &Metadata) -> Status {
        Status {
            id: FileId {
                device: metadata.dev(),
                inode: metadata.ino(),
                mode: metadata.mode(),
                owner: metadata.uid(),
                group: metadata.gid(),
                // SAFETY: asks for a number.
                user: unsafe { libc::geteuid() },
            },
            len_bytes: metadata.len(),
            is_removed: metadata.nlink() == 0,
            other: other_than_regular(metadata),
        }
    }
}

fn other_than_regular(metadata: &Metadata) -> Option<(&'static str, &'static str)> {
    let kind = metadata.file_type();
    let read = "read it instead";
    match () {
        () if kind.is_file() => None,
        () if kind.is_dir() => Some(("a directory", "name a file in it")),
        () if kind.is_fifo() => Some(("a pipe", read)),
        () if kind.is_socket() => Some(("a socket", read)),
        () if kind.is_char_device() => Some(("a character device", read)),
        () if kind.is_block_device() => Some(("a block device", "map it through a Cache")),
        () => Some(("no regular file", read)),
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

/// Whether a file of length 0 may have content all the same: it is made up when it is read.
pub(crate) fn is_made_up(file: &File) -> Option<&'static str> {
    file_system::magic(file.as_fd()).ok().and_then(file_system::made_up)
}
