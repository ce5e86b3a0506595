//! The properties of file systems that decide how a file can be accessed and made durable.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::fstatfs;

/// File systems whose files are memory.
const IN_MEMORY: [(u64, &str); 3] = [(TMPFS, "tmpfs"), (RAMFS, "ramfs"), (HUGETLBFS, "hugetlbfs")];

/// File systems whose files the kernel generates when they are read.
const MADE_UP: [(u64, &str); 8] = [
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x0027_e0eb, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x7363_6673, "securityfs"),
    (0x6165_676c, "pstore"),
];

/// File systems on which `sync_file_range` and a later sync of any one page make a range durable.
/// See [`commits_whole_inodes`].
const COMMITTING_WHOLE_INODES: [u64; 2] = [EXT, XFS];

const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;
/// ext2, ext3 and ext4 share one number.
const EXT: u64 = 0xef53;
const XFS: u64 = 0x5846_5342;
const F2FS: u64 = 0xf2f5_2010;

/// hugetlbfs, which has no write system call.
pub const HUGETLBFS: u64 = 0x9584_58f6;

/// Returns the magic number of the file system of `file`. For a device node: that of the file
/// system with the node.
pub fn magic(file: BorrowedFd<'_>) -> io::Result<u64> {
    // Magic numbers are 32 bits wide; the field's type and sign differ between architectures.
    Ok(fstatfs(file)?.f_type as u64 & 0xffff_ffff)
}

/// Returns the huge page size of the hugetlbfs that holds `file`; for another file system its block
/// size.
pub fn block_bytes(file: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(fstatfs(file)?.f_bsize as u64)
}

/// Returns the name of an in-memory file system, if it is one.
pub fn in_memory(magic: u64) -> Option<&'static str> {
    IN_MEMORY.iter().find(|known| known.0 == magic).map(|known| known.1)
}

/// Returns the name of a file system without storage, if it is one.
pub fn made_up(magic: u64) -> Option<&'static str> {
    MADE_UP.iter().find(|known| known.0 == magic).map(|known| known.1)
}

/// Returns the directory of `/sys/fs` that has an entry for each mounted file system of this kind,
/// named after its device, if there is one.
pub(crate) fn with_instances_in_sysfs(magic: u64) -> Option<&'static str> {
    match magic {
        EXT => Some("ext4"),
        XFS => Some("xfs"),
        F2FS => Some("f2fs"),
        _ => None,
    }
}

/// Returns whether ranges written with `sync_file_range` are durable after a sync of *any* page of
/// the file.
///
/// `sync_file_range` starts and awaits the I/O of data, but covers neither the metadata needed to
/// read it (a newly allocated block, an extent no longer unwritten) nor the flush of the device. On
/// the file systems named here (ext2 to ext4, XFS) a sync of one clean page supplies both for the
/// whole file: it commits the transaction of the *inode's* last change, which I/O completion has
/// joined before the wait returns, and flushes the device where the commit does not (ext4:
/// `ext4_sync_file` by `i_datasync_tid` and `jbd2_trans_will_send_data_barrier`; XFS:
/// `xfs_file_fsync` by `ili_datasync_seq` and `log_flushed`). This follows from their sources; it
/// was run on ext4 with Linux 6.18 only, without power-failure tests.
///
/// Not so elsewhere: copy-on-write and log-structured file systems (btrfs, bcachefs, ZFS, F2FS) may
/// log only the metadata of the synced range; on overlayfs `sync_file_range` acts on the overlay's
/// inode, which has no pages; network and FUSE servers have their own caches. There each range
/// needs its own sync. Unknown file systems are treated the same.
pub fn commits_whole_inodes(magic: u64) -> bool {
    COMMITTING_WHOLE_INODES.contains(&magic)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn known_places_are_recognised() {
        let made = File::open("/proc/self/stat").unwrap();
        assert_eq!(made_up(magic(made.as_fd()).unwrap()), Some("proc"));
        assert_eq!(in_memory(magic(made.as_fd()).unwrap()), None);
        assert!(!commits_whole_inodes(magic(made.as_fd()).unwrap()));
        assert!(block_bytes(made.as_fd()).unwrap().is_power_of_two());
        assert_eq!(in_memory(HUGETLBFS), Some("hugetlbfs"));
        let numbers = [libc::EXT4_SUPER_MAGIC as u64, libc::XFS_SUPER_MAGIC as u64];
        assert!(numbers.into_iter().all(commits_whole_inodes));
        let others = [libc::BTRFS_SUPER_MAGIC as u64, libc::OVERLAYFS_SUPER_MAGIC as u64];
        assert!(!others.into_iter().any(commits_whole_inodes));
    }
}
