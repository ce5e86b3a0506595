//! The fixed parts of requests, as they are in memory.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Declares structures of the protocol, with their length.
macro_rules! layouts {
    ($($(#[$about:meta])* $name:ident $len_bytes:literal { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[allow(missing_docs, reason = "the names are the kernel's own")]
        pub struct $name { $(pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $len_bytes);
    )*};
}
pub(super) use layouts;

layouts! {
    /// Of every request.
    InHeader 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64,
        uid: u32, gid: u32, pid: u32, extensions_len: u16, padding: u16,
    }
    /// Before an extension.
    ExtensionHeader 8 { len: u32, kind: u32, }
    ForgetIn 8 { count: u64, }
    /// One of those that a `BATCH_FORGET` lists.
    ForgetOne 16 { nodeid: u64, count: u64, }
    BatchForgetIn 8 { count: u32, padding: u32, }
    StatxIn 24 { getattr_flags: u32, reserved: u32, fh: u64, flags: u32, mask: u32, }
    /// What a `SETATTR` sets: those that `valid` says ([`super::set`]).
    SetAttributesIn 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64,
        atime: u64, mtime: u64, ctime: u64, atime_nsec: u32, mtime_nsec: u32, ctime_nsec: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    MakeNodeIn 16 { mode: u32, rdev: u32, umask: u32, padding: u32, }
    MakeDirectoryIn 8 { mode: u32, umask: u32, }
    RenameIn 8 { to: u64, }
    Rename2In 16 { to: u64, flags: u32, padding: u32, }
    LinkIn 8 { nodeid: u64, }
    OpenIn 8 { flags: u32, open_flags: u32, }
    CreateIn 16 { flags: u32, mode: u32, umask: u32, open_flags: u32, }
    /// A `RELEASE` or `RELEASEDIR`.
    ReleaseIn 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64, }
    FlushIn 24 { fh: u64, unused: u32, padding: u32, lock_owner: u64, }
    /// A `READ`, `READDIR` or `READDIRPLUS`.
    ReadIn 40 {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    /// A `WRITE`.
    WriteIn 40 {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    SyncIn 16 { fh: u64, flags: u32, padding: u32, }
    SetXattrIn 16 { size: u32, flags: u32, more_flags: u32, padding: u32, }
    GetXattrIn 8 { size: u32, padding: u32, }
    /// A `GETLK`, `SETLK` or `SETLKW`.
    LockIn 48 {
        fh: u64, owner: u64, start: u64, end: u64, kind: u32, pid: u32, lock_flags: u32, padding: u32,
    }
    /// The first request, with the flags of [`super::init`]. Before 7.36 it ends behind the first
    /// word of flags.
    InitIn 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11],
    }
    InterruptIn 8 { unique: u64, }
    /// A `FALLOCATE`.
    AllocateIn 32 { fh: u64, offset: u64, len: u64, mode: u32, padding: u32, }
    /// A `COPY_FILE_RANGE`.
    CopyIn 56 {
        fh_in: u64, offset_in: u64, to: u64, fh_out: u64, offset_out: u64, len: u64, flags: u64,
    }
}
