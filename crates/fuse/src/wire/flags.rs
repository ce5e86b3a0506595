//! The protocol's flags, under the kernel's names.

/// Flags of `INIT`, both words together.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    pub const NO_OPEN_SUPPORT: u64 = 1 << 17;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const SETXATTR_EXT: u64 = 1 << 29;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const CREATE_SUPP_GROUP: u64 = 1 << 34;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const NO_EXPORT_SUPPORT: u64 = 1 << 38;
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// What a `SETATTR` sets.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod set {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Flags of answers to `OPEN` and `CREATE`.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod open {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Flags of `WRITE`.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod write {
    /// From the page cache: the handle is a guess, and the offset is right.
    pub const CACHE: u32 = 1 << 0;
    pub const LOCKOWNER: u32 = 1 << 1;
    pub const KILL_SUIDGID: u32 = 1 << 2;
}

/// Flags of `READ`.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod read {
    /// Not for a page of a mapping.
    pub const LOCKOWNER: u32 = 1 << 1;
}

/// Flags of `RENAME2`.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod rename {
    pub const NOREPLACE: u32 = 1 << 0;
    pub const EXCHANGE: u32 = 1 << 1;
    pub const WHITEOUT: u32 = 1 << 2;
}

/// Flags of `SETXATTR`.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod xattr {
    pub const CREATE: u32 = 1;
    pub const REPLACE: u32 = 2;
    /// Of the second word of flags.
    pub const ACL_KILL_SGID: u32 = 1;
}

/// Flags of `GETLK`, `SETLK` and `SETLKW`.
pub mod lock {
    /// Of the whole file, by `flock`.
    pub const FLOCK: u32 = 1;
    /// The end of a range without end.
    pub const END: u64 = i64::MAX as u64;
}

/// Modes of `FALLOCATE`.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod allocate {
    pub const KEEP_SIZE: u32 = 1;
    pub const PUNCH_HOLE: u32 = 2;
    pub const ZERO_RANGE: u32 = 16;
}

/// Codes of notifications, which take the place of an error in the header of an answer to nothing.
#[allow(missing_docs, reason = "the names are the kernel's own")]
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const RESEND: i32 = 7;
}
