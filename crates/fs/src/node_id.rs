//! Inodes by number and generation.

use std::fmt;
use std::path::PathBuf;

use aquifer_pool::format::file::{FileInode, ROOT_INODE};

use crate::error::FsError;

/// An inode: its number, and the generation that tells it from all other inodes that ever have this
/// number. Both together identify one file for the lifetime of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node {
    /// The inode number; not 0.
    pub number: u64,
    /// The generation.
    pub generation: u64,
}

impl fmt::Display for Node {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "(inode {})", self.number)
    }
}

impl Node {
    /// The number of the root directory, in every pool.
    pub const ROOT_NUMBER: u64 = ROOT_INODE;

    pub(crate) fn of(inode: &FileInode) -> Node {
        Node { number: inode.number, generation: inode.generation }
    }

    /// For messages, in place of a path.
    pub(crate) fn to_path(self) -> PathBuf {
        self.to_string().into()
    }

    pub(crate) fn stale(self) -> FsError {
        FsError::Stale { number: self.number, generation: self.generation }
    }
}

/// An inode that lost a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Removed {
    /// The inode.
    pub node: Node,
    /// How many names it still has. Without any, it is gone unless it was kept or, except for a
    /// directory, a process has it open.
    pub links: u32,
}
