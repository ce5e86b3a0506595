//! What changes names and inodes: a transaction, its time, and what it creates.
//!
//! The layers above add what they do in one: [`permission`](crate::permission), [`rules`](crate::rules),
//! [`names`](crate::names).

use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::format::slot_bytes::SlotBytes;
use aquifer_pool::{ChangeSlots, PoolError};

use crate::acl::Acl;
use crate::attributes;
use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::walk;

/// Nanoseconds since 1970, by the coarse clock that file systems use: it ticks every few
/// milliseconds.
pub(crate) fn now_ns() -> i64 {
    aquifer_sys::clock::coarse_ns()
}

/// A transaction on names: its slots and its time.
pub(crate) struct Names<'s, S> {
    pub slots: &'s mut S,
    pub now_ns: i64,
}

impl<S: ChangeSlots<Error = PoolError>> Names<'_, S> {
    pub fn inode(&self, number: u64) -> Result<FileInode> {
        walk::inode(self.slots, number)
    }

    pub fn put(&mut self, inode: &FileInode) -> Result<()> {
        let stored = walk::as_stored(inode);
        let encode = |bytes: &mut SlotBytes| stored.encode_unsealed(bytes);
        self.slots.put_with(inode.number, encode).map_err(|error| FsError::Damaged {
            structure: format!("inode {}", inode.number),
            reason: error.to_string(),
        })
    }

    /// The list in an attribute; `None` if there is none.
    pub(crate) fn acl(&self, inode: &FileInode, name: &str) -> Result<Option<Acl>> {
        if inode.attributes == 0 {
            return Ok(None);
        }
        match attributes::get(inode, self.slots, name.as_bytes()) {
            Err(FsError::NoAttribute { .. }) => Ok(None),
            // A damaged list counts as none.
            value => Ok(Acl::decode(&value?).ok().flatten()),
        }
    }
}

/// What to create, and for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct New<'a> {
    pub kind: FileKind,
    /// Permissions, before the umask.
    pub mode: u32,
    /// The target of a symbolic link; else empty.
    pub target: &'a [u8],
    /// The number of a device, as in its inode; else 0.
    pub device: u64,
    /// The random seed of the hashes in a directory.
    pub seed: u64,
    pub by: &'a Caller,
}

impl<'a> New<'a> {
    pub fn of(kind: FileKind, mode: u32, target: &'a [u8], by: &'a Caller) -> New<'a> {
        // If the system has no random numbers, an attacker can choose names that collide; nothing
        // worse.
        let seed = match kind {
            FileKind::Directory => aquifer_sys::random::next_u64().unwrap_or(now_ns() as u64),
            _ => 0,
        };
        New { kind, mode, target, device: 0, seed, by }
    }
}
