//! Creating, linking, moving and removing names, each in one transaction.
//!
//! # Invariants between transactions
//! * A directory has as many `entries` as its tree has names, and 2 links plus one for each
//!   subdirectory; its `parent` is the directory that holds its only name.
//! * Any other inode has as many links as names. An inode without links stays in use as long as a
//!   process has it open, and is then *reaped*.
//! * A name has the kind of its inode.

use aquifer_pool::format::file::{FileInode, FileKind, INLINE_TARGET_BYTES, ROOT_INODE};
use aquifer_pool::format::inode::SlotBytes;
use aquifer_pool::{ChangeSlots, PoolError};

use crate::directory::{Referent, Tree};
use crate::error::{FsError, Result};
use crate::walk::{self, Last, Place, owned, walk};
use crate::{attributes, byte_chain, file_table};

/// The most names that one inode can have.
pub(crate) const MAX_LINKS: u32 = 1 << 30;
/// `S_ISGID`.
const SET_GROUP: u32 = 0o2000;
/// A file with at most this many runs is freed in the transaction that removes its last name.
const REAPED_AT_ONCE_RUNS: usize = 512;
/// The same limit for slots with runs, and for slots with attributes: the smallest log fits a
/// record of 16 KiB, with 56 bytes for each.
const REAPED_AT_ONCE_SLOTS: usize = 96;

/// Where a repair gives names to inodes that have lost theirs.
pub(crate) const LOST_AND_FOUND: &[u8] = b"/lost+found";

/// What to create.
#[derive(Debug, Clone, Copy)]
pub(crate) struct New<'a> {
    pub kind: FileKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// The target of a symbolic link; else empty.
    pub target: &'a [u8],
    /// The random seed of the hashes in a directory.
    pub seed: u64,
}

/// What happened to an inode when a name was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// It still has a name.
    Linked,
    /// It was freed.
    Freed,
    /// It has no links. A later transaction reaps it when no process has it open: a process that
    /// opens it now may have seen a link, and not yet published its pin.
    Orphan(u64),
}

/// A transaction on names: its slots and its time.
pub(crate) struct Names<'s, S> {
    pub slots: &'s mut S,
    pub now_ns: i64,
}

fn tree_of(directory: &FileInode) -> Tree {
    Tree { owner: directory.number, seed: directory.seed, root: directory.part }
}

impl<S: ChangeSlots<Error = PoolError>> Names<'_, S> {
    pub fn inode(&self, number: u64) -> Result<FileInode> {
        walk::inode(self.slots, number)
    }

    pub fn put(&mut self, inode: &FileInode) -> Result<()> {
        let encode = |bytes: &mut SlotBytes| inode.encode_unsealed(bytes);
        self.slots.put_with(inode.number, encode).map_err(|error| FsError::Damaged {
            structure: format!("inode {}", inode.number),
            reason: error.to_string(),
        })
    }

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
        let is_directory = new.kind == FileKind::Directory;
        // As on Linux: a new entry of a directory with this bit gets the directory's group, and a
        // subdirectory inherits the bit.
        let (gid, inherited) = match directory.mode & SET_GROUP {
            0 => (new.gid, 0),
            _ if is_directory => (directory.gid, SET_GROUP),
            _ => (directory.gid, 0),
        };
        let new = New { gid, mode: new.mode | inherited, ..new };
        let links = if is_directory { 2 } else { 1 };
        let inode = self.make_inode(new, directory.number, links)?;
        let referent = Referent { inode: inode.number, kind: inode.kind };
        self.add_name(&mut directory, &place.name, referent, path)?;
        self.put(&directory)?;
        Ok(inode)
    }

    /// Creates a file or a symbolic link without a name.
    pub fn make_unnamed(&mut self, new: New<'_>) -> Result<FileInode> {
        self.make_inode(new, ROOT_INODE, 0)
    }

    fn make_inode(&mut self, new: New<'_>, parent: u64, links: u32) -> Result<FileInode> {
        let number = self.slots.take_slot()?;
        let generation = self.slots.new_generation(number)?;
        let mut inode = FileInode {
            mode: new.mode & 0o7777,
            uid: new.uid,
            gid: new.gid,
            links,
            created_ns: self.now_ns,
            changed_ns: self.now_ns,
            modified_ns: self.now_ns,
            accessed_ns: self.now_ns,
            ..FileInode::new(new.kind, number, generation)
        };
        match new.kind {
            FileKind::Directory => (inode.parent, inode.seed) = (parent, new.seed),
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
        self.put(&inode)?;
        Ok(inode)
    }

    /// Adds another name for a file.
    pub fn link(&mut self, from: &[u8], to: &[u8]) -> Result<()> {
        let source = walk(self.slots, from, Last::Keep)?.referent(from)?;
        let place = walk(self.slots, to, Last::Name)?;
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
        self.add_link(inode, &place, from, to)
    }

    /// Adds a name for an existing inode; `path` names it in messages.
    fn add_link(
        &mut self,
        mut inode: FileInode,
        place: &Place<'_>,
        path: &[u8],
        to: &[u8],
    ) -> Result<()> {
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
        self.put(&directory)
    }

    /// Adds a name for an open file or symbolic link, which may have none. An existing file with
    /// that name is replaced.
    pub fn link_open(&mut self, inode: FileInode, to: &[u8], may_replace: bool) -> Result<Gone> {
        let place = walk(self.slots, to, Last::Name)?;
        if place.name.is_empty() || (place.found.is_some() && !may_replace) {
            return Err(FsError::Exists { path: owned(to) });
        }
        place.check_name(to)?;
        if place.wants_directory {
            return Err(FsError::NotFound { path: owned(to) });
        }
        let mut gone = Gone::Linked;
        if let Some(replaced) = place.found {
            if replaced.inode == inode.number {
                return Ok(Gone::Linked);
            }
            gone = self.replace(&place, replaced, inode.kind, to)?;
        }
        self.add_link(inode, &place, to, to)?;
        Ok(gone)
    }

    /// Removes the name at `place` to make room for an inode of kind `by`.
    fn replace(
        &mut self,
        place: &Place<'_>,
        replaced: Referent,
        by: FileKind,
        path: &[u8],
    ) -> Result<Gone> {
        match (by == FileKind::Directory, replaced.kind == FileKind::Directory) {
            (true, true) => self.check_removable(replaced.inode, path)?,
            (true, false) => return Err(FsError::NotADirectory { path: owned(path) }),
            (false, true) => return Err(FsError::IsADirectory { path: owned(path) }),
            (false, false) => {}
        }
        let mut directory = self.directory_of(place, path)?;
        self.take_name(&mut directory, &place.name, path)?;
        self.put(&directory)?;
        match replaced.kind {
            FileKind::Directory => self.free_directory(replaced.inode),
            _ => self.drop_link(replaced.inode, path),
        }
    }

    /// Removes the name of a file or a symbolic link.
    pub fn unlink(&mut self, path: &[u8]) -> Result<Gone> {
        let place = walk(self.slots, path, Last::Name)?;
        let found = place.referent(path)?;
        self.unlink_at(&place, found, path)
    }

    fn unlink_at(&mut self, place: &Place<'_>, found: Referent, path: &[u8]) -> Result<Gone> {
        if found.kind == FileKind::Directory {
            return Err(FsError::IsADirectory { path: owned(path) });
        }
        let mut directory = self.directory_of(place, path)?;
        self.take_name(&mut directory, &place.name, path)?;
        self.put(&directory)?;
        self.drop_link(found.inode, path)
    }

    /// Removes an empty directory.
    pub fn remove_directory(&mut self, path: &[u8]) -> Result<Gone> {
        let place = walk(self.slots, path, Last::Name)?;
        if place.name.is_empty() {
            return Err(not_removable(path));
        }
        let found = place.named(path)?;
        self.remove_directory_at(&place, found, path)
    }

    fn remove_directory_at(
        &mut self,
        place: &Place<'_>,
        found: Referent,
        path: &[u8],
    ) -> Result<Gone> {
        if found.kind != FileKind::Directory {
            return Err(FsError::NotADirectory { path: owned(path) });
        }
        self.check_removable(found.inode, path)?;
        let mut directory = self.directory_of(place, path)?;
        self.take_name(&mut directory, &place.name, path)?;
        self.put(&directory)?;
        self.free_directory(found.inode)
    }

    /// Removes a name from the directory given by number and generation, wherever that directory
    /// is: the name of an empty directory if `is_directory`, else of anything else. `path` is for
    /// messages.
    pub fn remove_entry(
        &mut self,
        directory: (u64, u64),
        name: &[u8],
        is_directory: bool,
        path: &[u8],
    ) -> Result<Gone> {
        let place = walk::entry(self.slots, directory, name, path)?;
        let found = place.named(path)?;
        if is_directory {
            self.remove_directory_at(&place, found, path)
        } else {
            self.unlink_at(&place, found, path)
        }
    }

    fn check_removable(&self, number: u64, path: &[u8]) -> Result<()> {
        let inode = self.inode(number)?;
        if inode.entries != 0 {
            return Err(FsError::NotEmpty { path: owned(path) });
        }
        if inode.is_immutable { Err(FsError::Immutable { path: owned(path) }) } else { Ok(()) }
    }

    /// Frees a directory at once, even if it is open: its handles have nothing left to read.
    fn free_directory(&mut self, number: u64) -> Result<Gone> {
        let mut inode = self.inode(number)?;
        attributes::give_back(&mut inode, self.slots, REAPED_AT_ONCE_SLOTS)?;
        if inode.attributes == 0 {
            self.slots.give_back(number)?;
            return Ok(Gone::Freed);
        }
        // Too many attributes for one record. The rest goes to an unnamed file, which is reaped as
        // usual. It has a new generation, so for handles of the directory the inode no longer
        // exists.
        let generation = self.slots.new_generation(number)?;
        let file = FileInode::new(FileKind::File, number, generation);
        self.put(&FileInode { attributes: inode.attributes, ..file })?;
        Ok(Gone::Orphan(number))
    }

    /// Removes one link of a file or symbolic link.
    fn drop_link(&mut self, number: u64, path: &[u8]) -> Result<Gone> {
        let mut inode = self.inode(number)?;
        if inode.is_immutable {
            return Err(FsError::Immutable { path: owned(path) });
        }
        inode.links = inode.links.checked_sub(1).ok_or_else(|| FsError::Damaged {
            structure: format!("inode {number}"),
            reason: "it has fewer links than names".to_owned(),
        })?;
        inode.changed_ns = self.now_ns;
        if inode.links > 0 {
            self.put(&inode)?;
            return Ok(Gone::Linked);
        }
        if self.slots.claim_unused(number) && self.free(&mut inode)? {
            return Ok(Gone::Freed);
        }
        self.put(&inode)?;
        Ok(Gone::Orphan(number))
    }

    /// Frees an inode without links. If it is too large for one transaction, frees a part; the
    /// caller continues in the next one. Returns whether nothing is left.
    pub fn reap(&mut self, number: u64) -> Result<bool> {
        // Another process may have reaped it first, and the number may belong to another inode.
        let Ok(mut inode) = self.inode(number) else { return Ok(true) };
        if inode.links > 0 {
            return Ok(true);
        }
        let is_free = self.free(&mut inode)?;
        if !is_free {
            self.put(&inode)?;
        }
        Ok(is_free)
    }

    /// Frees the inode and everything it owns, or, if that is too much for one transaction, a part.
    /// Returns whether nothing is left.
    fn free(&mut self, inode: &mut FileInode) -> Result<bool> {
        let number = inode.number;
        if inode.kind == FileKind::File {
            file_table::give_back(inode, self.slots, REAPED_AT_ONCE_RUNS, REAPED_AT_ONCE_SLOTS)?;
            if inode.part != 0 {
                return Ok(false);
            }
        }
        if inode.kind == FileKind::Symlink && inode.part != 0 {
            // A target is short, so it is freed whole. A symbolic link without target is invalid,
            // so the rest becomes a file.
            byte_chain::give_back(self.slots, number, inode.part, usize::MAX)?;
            (inode.part, inode.kind, inode.size_bytes) = (0, FileKind::File, 0);
        }
        attributes::give_back(inode, self.slots, REAPED_AT_ONCE_SLOTS)?;
        if inode.attributes != 0 {
            return Ok(false);
        }
        self.slots.give_back(number)?;
        Ok(true)
    }

    /// Moves a name. An existing file with the new name is replaced.
    pub fn rename(&mut self, from: &[u8], to: &[u8], may_replace: bool) -> Result<Gone> {
        let (source, moved, target) = self.both_names(from, to, may_replace)?;
        target.check_name(to)?;
        if target.found.is_some() && !may_replace {
            return Err(FsError::Exists { path: owned(to) });
        }
        source.check_slash(moved, from)?;
        target.check_slash(moved, to)?;
        self.check_not_inside(target.directory, moved, to)?;
        let mut gone = Gone::Linked;
        if let Some(replaced) = target.found {
            if self.is_inside(source.directory, replaced)? {
                return Err(FsError::NotEmpty { path: owned(to) });
            }
            if replaced.inode == moved.inode {
                // Two names of one file: POSIX requires that nothing happens.
                return Ok(Gone::Linked);
            }
            gone = self.replace(&target, replaced, moved.kind, to)?;
        }
        self.check_movable(moved, from)?;
        let mut directory = self.directory_of(&source, from)?;
        self.take_name(&mut directory, &source.name, from)?;
        self.put(&directory)?;
        // Read it only now: it may be the same directory.
        let mut directory = self.directory_of(&target, to)?;
        self.add_name(&mut directory, &target.name, moved, to)?;
        self.put(&directory)?;
        self.note_moved(moved, target.directory)?;
        Ok(gone)
    }

    /// Exchanges the inodes that two names refer to.
    pub fn exchange(&mut self, one: &[u8], other: &[u8]) -> Result<()> {
        let (first, first_found, second) = self.both_names(one, other, true)?;
        let second_found = second.named(other)?;
        second.check_slash(second_found, other)?;
        first.check_slash(first_found, one)?;
        self.check_not_inside(second.directory, first_found, other)?;
        self.check_not_inside(first.directory, second_found, one)?;
        if first_found.inode == second_found.inode {
            return Ok(());
        }
        self.check_movable(first_found, one)?;
        self.check_movable(second_found, other)?;
        for (place, path, now) in [(&first, one, second_found), (&second, other, first_found)] {
            let mut directory = self.directory_of(place, path)?;
            self.take_name(&mut directory, &place.name, path)?;
            self.add_name(&mut directory, &place.name, now, path)?;
            self.put(&directory)?;
        }
        self.note_moved(first_found, second.directory)?;
        self.note_moved(second_found, first.directory)
    }

    /// Resolves the two names of a rename or exchange, and checks them in the order of Linux.
    /// Returns both places, and what the first name refers to.
    fn both_names<'p>(
        &self,
        from: &'p [u8],
        to: &'p [u8],
        may_replace: bool,
    ) -> Result<(Place<'p>, Referent, Place<'p>)> {
        let source = walk(self.slots, from, Last::Name)?;
        let target = walk(self.slots, to, Last::Name)?;
        if source.name.is_empty() {
            return Err(FsError::NotByName { path: owned(from) });
        }
        if target.name.is_empty() {
            return Err(if may_replace {
                FsError::NotByName { path: owned(to) }
            } else {
                FsError::Exists { path: owned(to) }
            });
        }
        let moved = source.named(from)?;
        Ok((source, moved, target))
    }

    fn check_movable(&self, moved: Referent, path: &[u8]) -> Result<()> {
        if self.inode(moved.inode)?.is_immutable {
            Err(FsError::Immutable { path: owned(path) })
        } else {
            Ok(())
        }
    }

    /// Fails if a directory would be moved into itself.
    fn check_not_inside(&self, directory: u64, moved: Referent, path: &[u8]) -> Result<()> {
        if self.is_inside(directory, moved)? {
            Err(FsError::IntoItself { path: owned(path) })
        } else {
            Ok(())
        }
    }

    /// Whether a directory is `of`, or lies anywhere below it.
    fn is_inside(&self, directory: u64, of: Referent) -> Result<bool> {
        if of.kind != FileKind::Directory {
            return Ok(false);
        }
        // Brent's cycle detection: remember a slot, and replace it after twice as many steps each
        // time. A cycle returns to the remembered slot.
        let (mut here, mut passed, mut steps_left, mut steps) = (directory, 0, 1_u64, 1_u64);
        while here != of.inode {
            if here == ROOT_INODE {
                return Ok(false);
            }
            if here == passed || here == 0 {
                return Err(FsError::Damaged {
                    structure: format!("inode {directory}"),
                    reason: "the directories above it do not lead to the root".to_owned(),
                });
            }
            steps_left -= 1;
            if steps_left == 0 {
                (passed, steps) = (here, steps * 2);
                steps_left = steps;
            }
            here = self.inode(here)?.parent;
        }
        Ok(true)
    }

    /// Gives an inode without a name one in [`LOST_AND_FOUND`], or frees it if it is empty. Returns
    /// the name.
    pub fn adopt(&mut self, number: u64, home: New<'_>) -> Result<Option<Vec<u8>>> {
        let mut inode = self.inode(number)?;
        let is_empty = match inode.kind {
            FileKind::File => inode.size_bytes == 0 && inode.pages == 0,
            FileKind::Directory => inode.entries == 0,
            _ => false,
        };
        if is_empty && inode.kind == FileKind::Directory {
            self.free_directory(number)?;
            return Ok(None);
        }
        if is_empty {
            inode.links = 0;
            self.put(&inode)?;
            self.reap(number)?;
            return Ok(None);
        }
        let mut directory = self.lost_and_found(home)?;
        let name = format!("#{number}").into_bytes();
        let referent = Referent { inode: number, kind: inode.kind };
        match inode.kind {
            FileKind::Directory => inode.parent = directory.number,
            _ => inode.links = 1,
        }
        inode.changed_ns = self.now_ns;
        self.put(&inode)?;
        self.add_name(&mut directory, &name, referent, &name)?;
        self.put(&directory)?;
        Ok(Some(name))
    }

    /// Returns the directory [`LOST_AND_FOUND`], created if missing. Fails if that name belongs to
    /// something else.
    fn lost_and_found(&mut self, new: New<'_>) -> Result<FileInode> {
        let place = walk(self.slots, LOST_AND_FOUND, Last::Keep)?;
        match place.found {
            None => self.make(&place, LOST_AND_FOUND, new),
            Some(Referent { inode, kind: FileKind::Directory }) => self.inode(inode),
            Some(_) => Err(FsError::NotADirectory { path: owned(LOST_AND_FOUND) }),
        }
    }

    fn note_moved(&mut self, moved: Referent, directory: u64) -> Result<()> {
        let mut inode = self.inode(moved.inode)?;
        inode.changed_ns = self.now_ns;
        if moved.kind == FileKind::Directory {
            inode.parent = directory;
        }
        self.put(&inode)
    }
}

/// The error for a path that names no removable directory.
fn not_removable(path: &[u8]) -> FsError {
    let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
    match path[..end].rsplit(|&byte| byte == b'/').next() {
        Some(b"..") => FsError::NotEmpty { path: owned(path) },
        Some(b".") => FsError::BadName {
            path: owned(path),
            reason: "a directory is removed by its name in the directory that it is in",
        },
        _ => FsError::NotByName { path: owned(path) },
    }
}
