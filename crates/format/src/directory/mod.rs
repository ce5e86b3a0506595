//! The names in a directory: a B+ tree of slots, ordered by the hash of the names.
//!
//! ```text
//!  level 2                  ┌ from 0 ┬ from h ┐                       root: `FileInode::part`; 0 while there is no name
//!                           └───┬────┴────┬───┘
//!  level 1        ┌ from 0 ┬ from f ┐   ┌ from 0 ┬ from k ┬ from m ┐      the first child begins where its node begins
//!                 └───┬────┴───┬────┘   └───┬────┴───┬────┴───┬────┘
//!  leaves            a b      f g          h i      k l      m n          names by hash; all of one hash in one leaf
//! ```
//!
//! [`Node`] is a slot of it. The tree does not depend on a pool: it reads and changes slots through
//! [`ReadSlots`] and [`ChangeSlots`], which show them as of one moment. Its only state is the number of its root.
//!
//! # Cost of a change
//! Every changed slot takes 512 bytes in the log, so a change stays in one leaf if possible. A full
//! leaf is split where its halves become most equal, which touches at most three leaves and the
//! nodes above them. A node that is less than half full is merged with a neighbour under the same
//! parent if the result is at most three quarters full, so that creating and removing one name
//! repeatedly does not split and merge nodes each time. An empty node is given back. An empty tree
//! has no slots, so removing a directory needs no work here.
//!
//! # Concurrent readers
//! [`Tree::lookup`] and [`Tree::read_from`] run without a lock, possibly while slots are being
//! written; the caller drops the result if anything was changed during the call. So they terminate
//! on any bytes: levels decrease on the way down, positions increase along the leaves. Lookups do
//! not verify checksums, but everything that changes a node does: otherwise damage would get a new,
//! valid checksum.
//!
//! # Invariants
//! All leaves have level 0, and a child is one level below its parent. The hashes of a node lie
//! within the bounds that its parent has for it. No node is empty. A slot is the child of one node
//! only. [`Tree::check`] verifies all of these.
//!
//! ```
//! # use aquifer_format::{file::FileKind, slot_bytes::{SLOT_BYTES, SlotBytes}};
//! # use aquifer_format::slots::{ChangeSlots, ReadSlots, StructureError};
//! use aquifer_format::directory::{Referent, Tree};
//!
//! # struct Slots(std::collections::BTreeMap<u64, SlotBytes>);
//! # impl ReadSlots for Slots {
//! #     type Error = StructureError;
//! #     fn slot(&self, number: u64) -> Result<SlotBytes, StructureError> {
//! #         Ok(self.0.get(&number).copied().unwrap_or([0; SLOT_BYTES]))
//! #     }
//! # }
//! # impl ChangeSlots for Slots {
//! #     fn put(&mut self, number: u64, bytes: SlotBytes) { self.0.insert(number, bytes); }
//! #     fn take_slot(&mut self) -> Result<u64, StructureError> {
//! #         Ok((2..).find(|number| !self.0.contains_key(number)).unwrap())
//! #     }
//! #     fn new_generation(&self, _: u64) -> Result<u64, StructureError> { Ok(1) }
//! #     fn give_back(&mut self, number: u64) -> Result<(), StructureError> {
//! #         self.0.remove(&number);
//! #         Ok(())
//! #     }
//! # }
//! # fn main() -> Result<(), StructureError> {
//! # let mut slots = Slots(Default::default()); // a transaction of a pool, usually
//! let mut tree = Tree { owner: 1, seed: 7, root: 0 };
//! let readme = Referent { inode: 12, kind: FileKind::File };
//! tree.insert(&mut slots, b"README", readme)?;
//! assert_eq!(tree.lookup(&slots, b"README")?, Some(readme));
//! assert_eq!(tree.remove(&mut slots, b"README")?, Some(readme));
//! assert_eq!(tree.root, 0);
//! # Ok(())
//! # }
//! ```

mod check;
mod descend;
mod insert;
mod node;
mod read;
mod remove;
#[cfg(test)]
mod tests;

use crate::file::FileKind;
use crate::inode::MAX_NAME_BYTES;
use crate::slot_bytes::{self, SLOT_BYTES, SlotBytes};
use crate::slots::{ChangeSlots, ReadSlots, StructureError};

pub use check::{Checked, Found, Inconsistency, InconsistencyKind};
pub use node::*;
pub use read::Batch;

/// What a name refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Referent {
    /// The inode number.
    pub inode: u64,
    /// The kind of the inode.
    pub kind: FileKind,
}

/// The tree of a directory.
///
/// If a call that changes the tree fails, some slots may be changed already: abort the transaction,
/// and drop this value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tree {
    /// The inode of the directory.
    pub owner: u64,
    /// The seed of the hashes of its names.
    pub seed: u64,
    /// The slot of the root; 0 if the tree is empty.
    pub root: u64,
}

/// A name and its hash. Tests choose the hash, to make names collide.
#[derive(Debug, Clone, Copy)]
struct Key<'n> {
    hash: u64,
    name: &'n [u8],
}

impl Tree {
    /// Whether the tree has no names.
    pub fn is_empty(&self) -> bool {
        self.root == 0
    }

    /// Looks up what a name refers to. Allocates nothing.
    ///
    /// # Errors
    /// [`StructureError::Damaged`], and those of reading slots.
    #[inline]
    pub fn lookup<S: ReadSlots>(
        &self,
        slots: &S,
        name: &[u8],
    ) -> Result<Option<Referent>, S::Error> {
        self.lookup_key(slots, self.key(name))
    }

    #[inline]
    fn key<'n>(&self, name: &'n [u8]) -> Key<'n> {
        Key { hash: hash_name(self.seed, name), name }
    }

    #[inline]
    fn lookup_key<S: ReadSlots>(
        &self,
        slots: &S,
        key: Key<'_>,
    ) -> Result<Option<Referent>, S::Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let mut bytes = [0; SLOT_BYTES];
        let number = self.descend(slots, key.hash, &mut bytes, |_, _, _| ())?;
        let place = self.view(&bytes, number)?.place(key.hash, key.name);
        let entry = place.map_err(|error| self.damaged(number, error))?.entry;
        Ok(entry.map(|entry| self.referent(number, &entry)).transpose()?)
    }

    /// Makes an existing name refer to something else, and returns what it referred to; `None` if
    /// the name does not exist, and then nothing has happened. Changes one slot.
    ///
    /// # Errors
    /// [`StructureError::Damaged`], and those of reading slots.
    pub fn replace<S: ChangeSlots>(
        &self,
        slots: &mut S,
        name: &[u8],
        referent: Referent,
    ) -> Result<Option<Referent>, S::Error> {
        self.replace_key(slots, self.key(name), referent)
    }

    fn replace_key<S: ChangeSlots>(
        &self,
        slots: &mut S,
        key: Key<'_>,
        referent: Referent,
    ) -> Result<Option<Referent>, S::Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let mut bytes = [0; SLOT_BYTES];
        let number = self.descend(slots, key.hash, &mut bytes, |_, _, _| ())?;
        let leaf = self.leaf(&bytes, number, key)?;
        let Some(entry) = leaf.entry else { return Ok(None) };
        let before = self.referent(number, &entry)?;
        let head = self.entry_head(key, referent)?;
        let parts = [leaf.before, &head, key.name, leaf.behind];
        self.put_leaf(slots, number, leaf.count, &parts)?;
        Ok(Some(before))
    }

    /// Decodes a leaf that is to be changed at the place of a name.
    fn leaf<'b>(
        &self,
        bytes: &'b SlotBytes,
        number: u64,
        key: Key<'_>,
    ) -> Result<Leaf<'b>, StructureError> {
        let wrong = |error| self.damaged(number, error);
        let view = self.sealed_view(bytes, number)?;
        let entries = view.entry_bytes().map_err(wrong)?;
        let place = view.place(key.hash, key.name).map_err(wrong)?;
        let behind = place.entry.map_or(place.offset, |entry| entry.end());
        Ok(Leaf {
            count: view.count(),
            before: &entries[..place.offset],
            entry: place.entry,
            behind: &entries[behind..],
        })
    }

    /// Decodes the node in a slot without verifying its checksum.
    #[inline]
    fn view<'b>(&self, bytes: &'b SlotBytes, number: u64) -> Result<NodeView<'b>, StructureError> {
        let view = NodeView::new(bytes, number).map_err(|error| self.damaged(number, error))?;
        if view.owner() == self.owner {
            Ok(view)
        } else {
            Err(self.damaged(number, format_args!("it belongs to {}", view.owner())))
        }
    }

    /// Decodes the node in a slot and verifies its checksum.
    fn sealed_view<'b>(
        &self,
        bytes: &'b SlotBytes,
        number: u64,
    ) -> Result<NodeView<'b>, StructureError> {
        slot_bytes::check(bytes, MAGIC, number).map_err(|error| self.damaged(number, error))?;
        self.view(bytes, number)
    }

    /// Decodes the interior node in a slot.
    fn interior<S: ReadSlots>(&self, slots: &S, number: u64) -> Result<Interior, S::Error> {
        let node = Node::decode(&slots.slot(number)?, number)
            .map_err(|error| self.damaged(number, error))?;
        match node.content {
            NodeContent::Interior { level, children } if node.owner == self.owner => {
                Ok(Interior { number, level, children })
            }
            _ => Err(self.damaged(number, "it is not an interior node of this directory").into()),
        }
    }

    fn put_leaf<S: ChangeSlots>(
        &self,
        slots: &mut S,
        number: u64,
        count: usize,
        parts: &[&[u8]],
    ) -> Result<(), S::Error> {
        slots
            .put_with(number, |bytes| compose_leaf(bytes, number, self.owner, count, parts))
            .map_err(|error| self.damaged(number, error).into())
    }

    fn put_interior<S: ChangeSlots>(&self, slots: &mut S, node: Interior) -> Result<(), S::Error> {
        let Interior { number, level, children } = node;
        let content = NodeContent::Interior { level, children };
        let wrong = |error| self.damaged(number, error);
        let bytes = Node { number, owner: self.owner, content }.encode().map_err(wrong)?;
        // Children that come from another node, or from names of a leaf, may be out of order.
        Node::decode(&bytes, number).map_err(wrong)?;
        slots.put(number, bytes);
        Ok(())
    }

    fn entry_head(
        &self,
        key: Key<'_>,
        referent: Referent,
    ) -> Result<[u8; ENTRY_BYTES], StructureError> {
        entry_head(key.hash, referent.inode, referent.kind, key.name)
            .map_err(|error| self.damaged(referent.inode, error))
    }

    #[inline]
    fn referent(&self, number: u64, entry: &EntryView<'_>) -> Result<Referent, StructureError> {
        let kind = entry.kind().map_err(|error| self.damaged(number, error))?;
        Ok(Referent { inode: entry.inode, kind })
    }

    #[cold]
    fn damaged(&self, number: u64, reason: impl ToString) -> StructureError {
        let structure = format!("slot {number}, a node of directory {}", self.owner);
        StructureError::damaged(structure, reason)
    }
}

fn check_name(name: &[u8]) -> Result<(), StructureError> {
    if name.len() > MAX_NAME_BYTES {
        return Err(StructureError::NameTooLong { name: name.to_vec() });
    }
    let reason = "it is empty, `.` or `..`, or has a NUL or a `/` in it";
    if is_name(name) {
        Ok(())
    } else {
        Err(StructureError::BadName { name: name.to_vec(), reason })
    }
}

/// A leaf that is to be changed: the bytes of its entries before and after the place of a name.
struct Leaf<'b> {
    count: usize,
    before: &'b [u8],
    entry: Option<EntryView<'b>>,
    behind: &'b [u8],
}

/// An interior node that is to be changed.
struct Interior {
    number: u64,
    level: u16,
    children: Vec<Child>,
}
