//! The fixed parts of answers, as they are in memory.

use std::io::IoSlice;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::layout::layouts;

/// A part of an answer.
pub trait Bytes {
    /// Its bytes.
    fn slice(&self) -> IoSlice<'_>;
}

impl<T: IntoBytes + Immutable> Bytes for T {
    fn slice(&self) -> IoSlice<'_> {
        IoSlice::new(self.as_bytes())
    }
}

layouts! {
    /// Of every answer: `error` is 0 or a negative error number.
    OutHeader 16 { len: u32, error: i32, unique: u64, }
    /// What `stat` shows of an inode.
    Attributes 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atime_nsec: u32, mtime_nsec: u32, ctime_nsec: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    /// An inode that a name refers to; with node ID 0, that there is none.
    Entry 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attributes_valid: u64,
        entry_valid_nsec: u32, attributes_valid_nsec: u32, attributes: Attributes,
    }
    /// To a `GETATTR` or `SETATTR`.
    AttributesOut 104 { valid: u64, valid_nsec: u32, padding: u32, attributes: Attributes, }
    /// A time of [`Statx`].
    StatxTime 16 { seconds: i64, nanoseconds: u32, reserved: i32, }
    /// What `statx` shows of an inode.
    Statx 256 {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16,
        spare0: u16, ino: u64, size: u64, blocks: u64, attributes_mask: u64,
        atime: StatxTime, btime: StatxTime, ctime: StatxTime, mtime: StatxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    /// To a `STATX`.
    StatxOut 288 { valid: u64, valid_nsec: u32, flags: u32, spare: [u64; 2], statx: Statx, }
    /// To an `OPEN` or `OPENDIR`, and behind the entry to a `CREATE`: flags of [`super::open`].
    OpenOut 16 { fh: u64, open_flags: u32, backing_id: i32, }
    /// To a `WRITE`.
    WriteOut 8 { size: u32, padding: u32, }
    /// To a `STATFS`.
    Space 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64,
        bsize: u32, namelen: u32, frsize: u32, padding: u32, spare: [u32; 6],
    }
    /// To a `GETXATTR` or `LISTXATTR` that asks for the length.
    XattrOut 8 { size: u32, padding: u32, }
    /// To an `INIT`.
    InitOut 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32,
        max_background: u16, congestion_threshold: u16, max_write: u32, time_gran: u32,
        max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        request_timeout: u16, unused: [u16; 11],
    }
    /// To a `GETLK`: a lock that is in the way, or none.
    LockOut 24 { start: u64, end: u64, kind: u32, pid: u32, }
    /// Of the notification that pages are to be dropped: from `offset` on, to the end if `len` is 0.
    InvalidateInode 24 { ino: u64, offset: i64, len: i64, }
    /// To a `COPY_FILE_RANGE_64`.
    CopyOut 8 { bytes: u64, }
    /// Before the name of an entry of a directory.
    DirectoryEntry 24 { ino: u64, offset: u64, name_len: u32, kind: u32, }
}

impl Entry {
    /// That there is no such name, for this long in seconds.
    pub fn none(valid_s: u64) -> Entry {
        Entry { entry_valid: valid_s, ..Entry::new_zeroed() }
    }
}
