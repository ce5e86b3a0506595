//! Owners of locks, and what keeps their locks for the next server.

use std::io;
use std::os::fd::BorrowedFd;

/// The most owners with locks.
pub(crate) const MOST_HOLDERS: usize = 4096;
/// The most open files of an owner that are remembered, the last ones.
pub(crate) const MOST_OPEN: usize = 8;

/// An owner of locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LockOwner {
    /// The number of the inode.
    pub node: u64,
    pub name: OwnerName,
}

/// What tells an owner from all others of an inode. See [`super::locks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum OwnerName {
    /// Of a lock on the whole file: the number of the open file.
    OpenFile(u64),
    /// Of ranges: the kernel's name.
    Address(u64),
}

/// An owner, and the open files through which it has locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenOwner {
    pub owner: LockOwner,
    pub open: Vec<u64>,
}

/// What keeps the descriptions of locks for the next server.
pub(crate) trait KeepsLocks: Send + Sync {
    /// Keeps another descriptor of it; without one, what it has is through these open files now.
    fn keep(&self, owner: OpenOwner, file: Option<BorrowedFd<'_>>) -> io::Result<()>;
    /// Closes it again.
    fn give_up(&self, owner: LockOwner);
}

/// Where there is no next server.
pub(super) struct KeepsNone;

impl KeepsLocks for KeepsNone {
    fn keep(&self, _: OpenOwner, _: Option<BorrowedFd<'_>>) -> io::Result<()> {
        Ok(())
    }

    fn give_up(&self, _: LockOwner) {}
}
