//! Checks that the tree of a directory is intact: for `aquifer pool check`, on arbitrary bytes.
//!
//! Every node is decoded with its checksum, and everything that lookups rely on is verified.
//! Nothing below an inconsistent node is checked; its siblings are. Each slot is checked once, so the
//! check terminates and needs memory for only one number per node.

use std::collections::HashSet;
use std::ops::Range;

use super::{Child, DirectoryEntry, LAST_HASH, Node, NodeContent, Tree, hash_name};
use crate::FormatError;
use crate::slots::ReadSlots;

/// What [`Tree::check`] reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found<'a> {
    /// A slot that is a node of this tree and of nothing else.
    Slot(u64),
    /// A name in its place, where lookups find it.
    Entry(&'a DirectoryEntry),
    /// An inconsistency.
    Inconsistency(Inconsistency),
}

/// An inconsistency in the tree of a directory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot}, a node of directory {owner}: {kind}")]
pub struct Inconsistency {
    /// The inode of the directory.
    pub owner: u64,
    /// The slot.
    pub slot: u64,
    /// What is wrong.
    pub kind: InconsistencyKind,
}

/// What is wrong with a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InconsistencyKind {
    /// The slot is not a valid node. Everything below it is unreachable.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// The node belongs to another directory.
    #[error("it belongs to {found}")]
    Owner {
        /// The directory that it belongs to.
        found: u64,
    },
    /// The node is not one level below its parent.
    #[error("its level is {found} where {expected} belongs")]
    Level {
        /// The node's level.
        found: u16,
        /// The level of its parent, minus one.
        expected: u16,
    },
    /// The node is the child of two nodes, or a child of one node twice.
    #[error("the tree leads to it twice")]
    Twice,
    /// A child starts outside the bounds of its parent. Everything below the parent is unreachable.
    #[error("it has a child from {from_hash:#x} on, outside of its bounds")]
    ChildMisplaced {
        /// The hash at which the child starts.
        from_hash: u64,
    },
    /// A name lies where no lookup finds it.
    #[error("the name {} lies where it cannot be found", name.escape_ascii())]
    NameMisplaced {
        /// The name.
        name: Vec<u8>,
    },
}

/// The size of a tree, from [`Tree::check`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checked {
    /// Number of names in their places.
    pub entries: u64,
    /// Number of slots.
    pub slots: u64,
    /// Number of inconsistencies.
    pub inconsistencies: u64,
}

impl Tree {
    /// Checks the whole tree, and calls `visit` for every slot, every name in its place, and every
    /// inconsistency.
    ///
    /// The caller must compare [`Checked::entries`] with the inode.
    ///
    /// # Errors
    /// Those of reading slots. Damage is reported as an inconsistency, not as an error.
    pub fn check<S: ReadSlots>(
        &self,
        slots: &S,
        visit: impl FnMut(Found<'_>),
    ) -> Result<Checked, S::Error> {
        self.check_hashes(slots, |name| hash_name(self.seed, name), visit)
    }

    pub(super) fn check_hashes<S: ReadSlots>(
        &self,
        slots: &S,
        hash_of: impl Fn(&[u8]) -> u64,
        visit: impl FnMut(Found<'_>),
    ) -> Result<Checked, S::Error> {
        let mut check = Check {
            slots,
            hash_of,
            visit,
            owner: self.owner,
            reached: HashSet::new(),
            checked: Checked::default(),
        };
        if !self.is_empty() {
            check.node(self.root, None, 0..LAST_HASH + 1)?;
        }
        Ok(check.checked)
    }
}

struct Check<'s, S, H, V> {
    slots: &'s S,
    hash_of: H,
    visit: V,
    owner: u64,
    reached: HashSet<u64>,
    checked: Checked,
}

impl<S: ReadSlots, H: Fn(&[u8]) -> u64, V: FnMut(Found<'_>)> Check<'_, S, H, V> {
    /// Checks a node and everything below it. Levels decrease, so the recursion is no deeper than a
    /// tree can be.
    fn node(&mut self, slot: u64, level: Option<u16>, hashes: Range<u64>) -> Result<(), S::Error> {
        let bytes = self.slots.slot(slot)?;
        let content = match self.content(slot, Node::decode(&bytes, slot), level) {
            Ok(content) => content,
            Err(kind) => {
                self.inconsistency(slot, kind);
                return Ok(());
            }
        };
        self.checked.slots += 1;
        (self.visit)(Found::Slot(slot));
        match content {
            NodeContent::Leaf(entries) => self.leaf(slot, &entries, &hashes),
            NodeContent::Interior { level, children } => {
                let is_outside = |child: &&Child| {
                    child.from_hash <= hashes.start || child.from_hash >= hashes.end
                };
                if let Some(&Child { from_hash, .. }) = children[1..].iter().find(is_outside) {
                    self.inconsistency(slot, InconsistencyKind::ChildMisplaced { from_hash });
                    return Ok(());
                }
                for (index, child) in children.iter().enumerate() {
                    let end = children.get(index + 1).map_or(hashes.end, |next| next.from_hash);
                    let start = child.from_hash.max(hashes.start);
                    self.node(child.slot, Some(level - 1), start..end)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the content of a node if it belongs to this tree, has this level, and was not
    /// reached before.
    fn content(
        &mut self,
        slot: u64,
        node: Result<Node, FormatError>,
        level: Option<u16>,
    ) -> Result<NodeContent, InconsistencyKind> {
        let Node { owner, content, .. } = node?;
        if owner != self.owner {
            return Err(InconsistencyKind::Owner { found: owner });
        }
        let found = match content {
            NodeContent::Leaf(_) => 0,
            NodeContent::Interior { level, .. } => level,
        };
        match level {
            Some(expected) if expected != found => {
                Err(InconsistencyKind::Level { found, expected })
            }
            _ if !self.reached.insert(slot) => Err(InconsistencyKind::Twice),
            _ => Ok(content),
        }
    }

    fn leaf(&mut self, slot: u64, entries: &[DirectoryEntry], hashes: &Range<u64>) {
        for entry in entries {
            if hashes.contains(&entry.hash) && (self.hash_of)(&entry.name) == entry.hash {
                self.checked.entries += 1;
                (self.visit)(Found::Entry(entry));
            } else {
                self.inconsistency(
                    slot,
                    InconsistencyKind::NameMisplaced { name: entry.name.clone() },
                );
            }
        }
    }

    fn inconsistency(&mut self, slot: u64, kind: InconsistencyKind) {
        self.checked.inconsistencies += 1;
        (self.visit)(Found::Inconsistency(Inconsistency { owner: self.owner, slot, kind }));
    }
}
