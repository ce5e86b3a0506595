//! The protocol of `/dev/fuse`: the bytes of requests and answers, version 7.34 (Linux 5.15) and
//! later.
//!
//! ```text
//!  request:  InHeader │ fixed part of the operation │ names, data │ extensions       one read(2)
//!  answer:   OutHeader │ fixed part │ data                                            one write(2)
//! ```
//!
//! Pure: no system call, no allocation, no state. [`parse`] is total: any bytes become a [`Request`]
//! or a [`Malformed`], so that a kernel with a defect, or a program that holds the other end of a
//! device it should not have, ends no server. All numbers are those of the host.
//!
//! The layouts are those that the kernel publishes in `include/uapi/linux/fuse.h` (under a
//! permissive license, for implementations like this one); their sizes are asserted.

mod answer;
mod directory;
mod flags;
mod layout;
mod request;

pub use answer::{
    Attributes, AttributesOut, Bytes, CopyOut, Entry, InitOut, InvalidateInode, LockOut, OpenOut,
    OutHeader, Space, Statx, StatxOut, StatxTime, WriteOut, XattrOut,
};
pub use directory::Listing;
pub use flags::{allocate, init, lock, notify, open, read, rename, set, write, xattr};
pub use layout::{
    AllocateIn, CopyIn, InHeader, InitIn, LockIn, ReadIn, ReleaseIn, SetAttributesIn, WriteIn,
};
pub use request::{Defect, Forget, Forgets, Malformed, Operation, Request, Unique, parse};

/// The node ID of the root of the mount.
pub const ROOT: u64 = 1;
/// The major version of the protocol.
pub const MAJOR: u32 = 7;
/// The least minor version: that of Linux 5.15. It has all structures in their present length.
pub const LEAST_MINOR: u32 = 34;
/// The newest minor version whose structures and operations are known here.
pub const NEWEST_MINOR: u32 = 45;
/// A read of the device needs at least this much room.
pub const LEAST_BUFFER_BYTES: usize = 8192;
/// Errors from here on are the kernel's own, and refused in answers.
pub const ERRNO_END: i32 = 512;
