//! Creating, linking, moving and removing names, and setting attributes, each in one transaction.
//!
//! All of it works on a [`Place`]: a directory and a name in it, found by a path (`by_path`) or in a
//! directory that is already known (`node`). The `path` beside a place is for messages.
//!
//! # Invariants between transactions
//! * A directory has as many `entries` as its tree has names, and 2 links plus one for each
//!   subdirectory; its `parent` is the directory that holds its only name.
//! * Any other inode has as many links as names. An inode without links stays in use as long as a
//!   process has it open, and is then *reaped*.
//! * A name has the kind of its inode.
//! * A removed directory that is kept has no links, no names and no content; on media it is a file.

mod remove;
mod rename;

use aquifer_format::byte_chain;
use aquifer_format::directory::{Referent, Tree};
use aquifer_pool::format::file::{FileInode, FileKind, INLINE_TARGET_BYTES, ROOT_INODE};
use aquifer_pool::{ChangeSlots, PoolError};

pub use rename::RenameMode;

use crate::error::{FsError, Result};
use crate::node_id::{Node, Removed};
use crate::transaction::{Names, New};
use crate::walk::{Place, owned};

/// The most names that one inode can have.
pub(crate) const MAX_LINKS: u32 = 1 << 30;

/// What happened when a name was removed or replaced; nothing by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Gone {
    /// The inode that lost the name.
    pub removed: Option<Removed>,
    /// An inode without links. A later transaction reaps it when no process has it open: a process
    /// that opens it now may have seen a link, and not yet published its pin.
    pub orphan: Option<Node>,
}

/// Called with an inode that is about to lose its last name, possibly several times and with
/// different ones, with the metadata mutex held: whether it is kept, because the caller has pinned
/// it in this call.
pub(crate) type Keep<'k> = &'k mut dyn FnMut(Node) -> Result<bool>;

/// Keeps nothing but what processes have open.
pub(crate) fn keep_none(_: Node) -> Result<bool> {
    Ok(false)
}

fn tree_of(directory: &FileInode) -> Tree {
    Tree { owner: directory.number, seed: directory.seed, root: directory.part }
}

impl<S: ChangeSlots<Error = PoolError>> Names<'_, S> {
    /// Reads the directory that holds a place, and checks that it can be changed.
    fn directory_of(&self, place: &Place<'_>, path: &[u8]) -> Result<FileInode> {
        let directory = self.inode(place.directory)?;
        if directory.kind != FileKind::Directory || directory.links == 0 {
            return Err(FsError::NotFound { path: owned(path) });
        }
        if directory.is_immutable {
            Err(FsError::Immutable { path: owned(path) })
        } else {
            Ok(directory)
        }
    }

    /// Adds a name to a directory; the caller puts the directory's inode.
    fn add_name(
        &mut self,
        directory: &mut FileInode,
        name: &[u8],
        referent: Referent,
        path: &[u8],
    ) -> Result<()> {
        let mut tree = tree_of(directory);
        let inserted = tree.insert(self.slots, name, referent);
        inserted.map_err(|error| FsError::from(error).at(path))?;
        directory.part = tree.root;
        directory.entries += 1;
        if referent.kind == FileKind::Directory {
            if directory.links >= MAX_LINKS {
                return Err(FsError::TooManyLinks { path: owned(path) });
            }
            directory.links += 1;
        }
        self.stamp(directory);
        Ok(())
    }

    /// Removes a name from a directory; the caller puts the directory's inode.
    fn take_name(&mut self, directory: &mut FileInode, name: &[u8], path: &[u8]) -> Result<()> {
        let mut tree = tree_of(directory);
        let removed = tree.remove(self.slots, name)?;
        let removed = removed.ok_or_else(|| FsError::NotFound { path: owned(path) })?;
        directory.part = tree.root;
        directory.entries = directory.entries.saturating_sub(1);
        if removed.kind == FileKind::Directory {
            directory.links = directory.links.saturating_sub(1);
        }
        self.stamp(directory);
        Ok(())
    }

    fn stamp(&self, inode: &mut FileInode) {
        inode.modified_ns = self.now_ns;
        inode.changed_ns = self.now_ns;
    }

    /// Creates an inode and its name at a place that is vacant.
    pub fn make(&mut self, place: &Place<'_>, path: &[u8], new: New<'_>) -> Result<FileInode> {
        place.check_name(path)?;
        if place.found.is_some() {
            return Err(FsError::Exists { path: owned(path) });
        }
        if place.wants_directory && new.kind != FileKind::Directory {
            return Err(FsError::NotFound { path: owned(path) });
        }
        let mut directory = self.directory_of(place, path)?;
        let links = if new.kind == FileKind::Directory { 2 } else { 1 };
        let inode = self.make_inode(new, Some(&directory), links)?;
        let referent = Referent { inode: inode.number, kind: inode.kind };
        self.add_name(&mut directory, &place.name, referent, path)?;
        self.put(&directory)?;
        Ok(inode)
    }

    /// Creates a file or a symbolic link without a name, as if in this directory.
    pub fn make_unnamed(
        &mut self,
        new: New<'_>,
        directory: Option<&FileInode>,
    ) -> Result<FileInode> {
        self.make_inode(new, directory, 0)
    }

    fn make_inode(
        &mut self,
        new: New<'_>,
        directory: Option<&FileInode>,
        links: u32,
    ) -> Result<FileInode> {
        let number = self.slots.take_slot()?;
        let generation = self.slots.new_generation(number)?;
        let mut inode = FileInode {
            links,
            created_ns: self.now_ns,
            changed_ns: self.now_ns,
            modified_ns: self.now_ns,
            accessed_ns: self.now_ns,
            device: new.device,
            ..FileInode::new(new.kind, number, generation)
        };
        match new.kind {
            FileKind::Directory => {
                inode.parent = directory.map_or(ROOT_INODE, |directory| directory.number);
                inode.seed = new.seed;
            }
            FileKind::Symlink => {
                inode.size_bytes = new.target.len() as u64;
                if new.target.len() <= INLINE_TARGET_BYTES {
                    inode.target = new.target.to_vec()
                } else {
                    inode.part = byte_chain::replace(self.slots, number, 0, new.target)?
                }
            }
            _ => {}
        }
        self.inherit(&mut inode, &new, directory)?;
        self.put(&inode)?;
        Ok(inode)
    }

    /// Adds another name for a file.
    pub fn link(
        &mut self,
        source: Referent,
        from: &[u8],
        place: &Place<'_>,
        to: &[u8],
    ) -> Result<FileInode> {
        place.check_name(to)?;
        if place.found.is_some() {
            return Err(FsError::Exists { path: owned(to) });
        }
        if place.wants_directory {
            return Err(FsError::NotFound { path: owned(to) });
        }
        if source.kind == FileKind::Directory {
            return Err(FsError::DirectoryLink { path: owned(from) });
        }
        let inode = self.inode(source.inode)?;
        self.add_link(inode, place, from, to)
    }

    /// Adds a name for an existing inode; `path` names it in messages.
    fn add_link(
        &mut self,
        mut inode: FileInode,
        place: &Place<'_>,
        path: &[u8],
        to: &[u8],
    ) -> Result<FileInode> {
        if inode.is_immutable {
            return Err(FsError::Immutable { path: owned(path) });
        }
        if inode.links >= MAX_LINKS {
            return Err(FsError::TooManyLinks { path: owned(path) });
        }
        inode.links += 1;
        inode.changed_ns = self.now_ns;
        self.put(&inode)?;
        let mut directory = self.directory_of(place, to)?;
        let referent = Referent { inode: inode.number, kind: inode.kind };
        self.add_name(&mut directory, &place.name, referent, to)?;
        self.put(&directory)?;
        Ok(inode)
    }

    /// Adds a name for an open file or symbolic link, which may have none. An existing file with
    /// that name is replaced.
    pub fn link_open(
        &mut self,
        inode: FileInode,
        place: &Place<'_>,
        to: &[u8],
        may_replace: bool,
    ) -> Result<Gone> {
        if place.name.is_empty() || (place.found.is_some() && !may_replace) {
            return Err(FsError::Exists { path: owned(to) });
        }
        place.check_name(to)?;
        if place.wants_directory {
            return Err(FsError::NotFound { path: owned(to) });
        }
        let mut gone = Gone::default();
        if let Some(replaced) = place.found {
            if replaced.inode == inode.number {
                return Ok(gone);
            }
            gone = self.replace(place, replaced, inode.kind, to, &mut keep_none)?;
        }
        self.add_link(inode, place, to, to)?;
        Ok(gone)
    }
}
