//! Removing names, and freeing inodes that have none.

use aquifer_format::directory::Referent;
use aquifer_format::{byte_chain, file_table};
use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{ChangeSlots, PoolError};

use super::{Gone, Keep};
use crate::attributes;
use crate::error::{FsError, Result};
use crate::node_id::{Node, Removed};
use crate::transaction::{Names, New};
use crate::walk::{self, Last, Place, owned, walk};

/// A file with at most this many runs is freed in the transaction that removes its last name.
const REAPED_AT_ONCE_RUNS: usize = 512;
/// The same limit for slots with runs, and for slots with attributes: the smallest log fits a
/// record of 16 KiB, with 56 bytes for each.
const REAPED_AT_ONCE_SLOTS: usize = 96;

/// Where a repair gives names to inodes that have lost theirs.
pub(crate) const LOST_AND_FOUND: &[u8] = b"/lost+found";

impl<S: ChangeSlots<Error = PoolError>> Names<'_, S> {
    /// Removes the name at `place` to make room for an inode of kind `by`.
    pub(super) fn replace(
        &mut self,
        place: &Place<'_>,
        replaced: Referent,
        by: FileKind,
        path: &[u8],
        keep: Keep<'_>,
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
            FileKind::Directory => self.drop_directory(replaced.inode, keep),
            _ => self.drop_link(replaced.inode, path, keep),
        }
    }

    /// Removes the name of a file or a symbolic link.
    pub fn unlink(&mut self, place: &Place<'_>, path: &[u8], keep: Keep<'_>) -> Result<Gone> {
        let found = place.referent(path)?;
        if found.kind == FileKind::Directory {
            return Err(FsError::IsADirectory { path: owned(path) });
        }
        let mut directory = self.directory_of(place, path)?;
        self.take_name(&mut directory, &place.name, path)?;
        self.put(&directory)?;
        self.drop_link(found.inode, path, keep)
    }

    /// Removes an empty directory.
    pub fn remove_directory(
        &mut self,
        place: &Place<'_>,
        path: &[u8],
        keep: Keep<'_>,
    ) -> Result<Gone> {
        if place.name.is_empty() {
            return Err(not_removable(path));
        }
        let found = place.named(path)?;
        if found.kind != FileKind::Directory {
            return Err(FsError::NotADirectory { path: owned(path) });
        }
        self.check_removable(found.inode, path)?;
        let mut directory = self.directory_of(place, path)?;
        self.take_name(&mut directory, &place.name, path)?;
        self.put(&directory)?;
        self.drop_directory(found.inode, keep)
    }

    fn check_removable(&self, number: u64, path: &[u8]) -> Result<()> {
        let inode = self.inode(number)?;
        if inode.entries != 0 {
            return Err(FsError::NotEmpty { path: owned(path) });
        }
        if inode.is_immutable { Err(FsError::Immutable { path: owned(path) }) } else { Ok(()) }
    }

    /// Frees a directory that has lost its name, unless it is kept: then nothing but its attributes
    /// is left of it.
    fn drop_directory(&mut self, number: u64, keep: Keep<'_>) -> Result<Gone> {
        let mut inode = self.inode(number)?;
        let node = Node::of(&inode);
        if !keep(node)? {
            return self.free_directory(number);
        }
        inode.links = 0;
        inode.changed_ns = self.now_ns;
        self.put(&inode)?;
        Ok(Gone { removed: Some(Removed { node, links: 0 }), orphan: None })
    }

    /// Frees a directory at once, even if it is open: its handles have nothing left to read.
    fn free_directory(&mut self, number: u64) -> Result<Gone> {
        let mut inode = self.inode(number)?;
        let removed = Some(Removed { node: Node::of(&inode), links: 0 });
        attributes::give_back(&mut inode, self.slots, REAPED_AT_ONCE_SLOTS)?;
        if inode.attributes == 0 {
            self.slots.give_back(number)?;
            return Ok(Gone { removed, orphan: None });
        }
        // Too many attributes for one record. The rest goes to an unnamed file, which is reaped as
        // usual. It has a new generation, so for handles of the directory the inode no longer
        // exists.
        let generation = self.slots.new_generation(number)?;
        let file = FileInode::new(FileKind::File, number, generation);
        self.put(&FileInode { attributes: inode.attributes, ..file })?;
        Ok(Gone { removed, orphan: Some(Node { number, generation }) })
    }

    /// Removes one link of a file or symbolic link.
    fn drop_link(&mut self, number: u64, path: &[u8], keep: Keep<'_>) -> Result<Gone> {
        let mut inode = self.inode(number)?;
        if inode.is_immutable {
            return Err(FsError::Immutable { path: owned(path) });
        }
        inode.links = inode.links.checked_sub(1).ok_or_else(|| FsError::Damaged {
            structure: format!("inode {number}"),
            reason: "it has fewer links than names".to_owned(),
        })?;
        inode.changed_ns = self.now_ns;
        let node = Node::of(&inode);
        let removed = Some(Removed { node, links: inode.links });
        let is_kept = inode.links > 0 || keep(node)?;
        if !is_kept && self.slots.claim_unused(number) {
            let is_free = self.free(&mut inode)?;
            let orphan = if is_free { None } else { Some(self.put_rest(inode)?) };
            return Ok(Gone { removed, orphan });
        }
        self.put(&inode)?;
        Ok(Gone { removed, orphan: (!is_kept).then_some(node) })
    }

    /// Frees an inode without links. If it is too large for one transaction, frees a part, and
    /// returns the inode that the rest is now, for the next one.
    pub fn reap(&mut self, node: Node) -> Result<Option<Node>> {
        // Another process may have reaped it first, and the number may belong to another inode.
        let Ok(mut inode) = walk::live(self.slots, node) else { return Ok(None) };
        if inode.links > 0 || self.free(&mut inode)? {
            return Ok(None);
        }
        self.put_rest(inode).map(Some)
    }

    /// Puts an inode of which a part was freed. What is left is not its content any more: runs have
    /// moved to the front. So the rest is another inode, without content, and whatever still knows
    /// the old one finds it gone.
    fn put_rest(&mut self, inode: FileInode) -> Result<Node> {
        let generation = self.slots.new_generation(inode.number)?;
        let rest = FileInode { generation, size_bytes: 0, ..inode };
        self.put(&rest)?;
        Ok(Node::of(&rest))
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
            self.reap(Node::of(&inode))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Files;

    /// Between two steps of freeing, what is left is another inode: its content is not the file's.
    #[test]
    fn what_is_freed_in_steps_is_gone_after_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let pool = aquifer_pool::Pool::create(&path, 16 << 20).unwrap();
        let files = Files::new(pool);
        let (nodes, root) = (files.nodes(), files.nodes().root().unwrap());
        for by_reaping in [false, true] {
            let before = files.space().unwrap();
            let file = files.create_file("/f").unwrap();
            // In the middle of a hole, so that each piece is a run.
            file.set_len(4 * REAPED_AT_ONCE_RUNS as u64 * 8192).unwrap();
            for piece in 0..3 * REAPED_AT_ONCE_RUNS as u64 {
                file.write_all_at(&[1; 4096], piece * 8192).unwrap();
            }
            let node = file.node();
            drop(file);
            let mut keep = |_| Ok(by_reaping);
            let gone = files.shared.change(|names| {
                let place = walk(names.slots, b"/f", Last::Name)?;
                names.unlink(&place, b"/f", &mut keep)
            });
            let mut orphan = gone.unwrap().orphan;
            if by_reaping {
                assert_eq!((orphan, nodes.metadata(node).unwrap().nlink()), (None, 0));
                orphan = files.shared.change(|names| names.reap(node)).unwrap();
            }
            let rest = orphan.expect("it has more runs than are freed at a time");
            assert!(rest.number == node.number && rest != node);
            assert!(matches!(nodes.hold(node), Err(FsError::Stale { .. })));
            assert!(matches!(nodes.link(node, root, b"x"), Err(FsError::Stale { .. })));
            assert_eq!(nodes.metadata(rest).unwrap().len(), 0);
            assert!(nodes.reap(rest).unwrap());
            files.pool().checkpoint().unwrap();
            let after = files.space().unwrap();
            assert_eq!(
                (after.free_slots, after.free_bytes),
                (before.free_slots, before.free_bytes)
            );
        }
    }
}
