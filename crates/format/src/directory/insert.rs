//! Inserting names, and splitting nodes.

use super::descend::Path;
use super::{
    Child, ENTRY_BYTES, Entries, Interior, Key, MAX_CHILDREN, MAX_LEVEL, NODE_BYTES, Referent,
    Tree, check_name,
};
use crate::inode::MAX_NAME_BYTES;
use crate::slot_bytes::SLOT_BYTES;
use crate::slots::{ChangeSlots, StructureError};

/// A full leaf and the longest entry.
const MOST_BYTES: usize = NODE_BYTES + ENTRY_BYTES + MAX_NAME_BYTES;

/// Where the names of one hash start, in a leaf that is to be split.
#[derive(Debug, Clone, Copy)]
struct Boundary {
    offset: usize,
    /// The number of entries before it.
    index: usize,
    hash: u64,
}

impl Tree {
    /// Adds a name.
    ///
    /// # Errors
    /// [`StructureError::Exists`] if the name exists, [`StructureError::BadName`],
    /// [`StructureError::NameTooLong`], [`StructureError::TooManyCollisions`],
    /// [`StructureError::Damaged`], and those of reading and taking slots.
    pub fn insert<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        name: &[u8],
        referent: Referent,
    ) -> Result<(), S::Error> {
        check_name(name)?;
        self.insert_key(slots, self.key(name), referent)
    }

    pub(super) fn insert_key<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        key: Key<'_>,
        referent: Referent,
    ) -> Result<(), S::Error> {
        let head = self.entry_head(key, referent)?;
        if self.is_empty() {
            let number = slots.take_slot()?;
            self.put_leaf(slots, number, 1, &[&head, key.name])?;
            self.root = number;
            return Ok(());
        }
        let mut bytes = [0; SLOT_BYTES];
        let (path, number) = self.path_to(slots, key.hash, &mut bytes)?;
        let leaf = self.leaf(&bytes, number, key)?;
        if leaf.entry.is_some() {
            return Err(StructureError::Exists { name: key.name.to_vec() }.into());
        }
        let parts = [leaf.before, &head, key.name, leaf.behind];
        let count = leaf.count + 1;
        let len_bytes = parts.iter().map(|part| part.len()).sum();
        if len_bytes <= NODE_BYTES {
            return self.put_leaf(slots, number, count, &parts);
        }
        let mut joined = [0; MOST_BYTES];
        let mut end = 0;
        for part in parts {
            joined[end..end + part.len()].copy_from_slice(part);
            end += part.len();
        }
        let added = self.split_leaf(slots, number, count, &joined[..len_bytes], key.hash)?;
        self.add_children(slots, &path, added)
    }

    /// Distributes entries, which are too many for one leaf, over leaf `number` and new ones after
    /// it, which are returned.
    fn split_leaf<S: ChangeSlots>(
        &self,
        slots: &mut S,
        number: u64,
        count: usize,
        entries: &[u8],
        new_hash: u64,
    ) -> Result<Vec<Child>, S::Error> {
        let mut boundaries = self.boundaries(number, count, entries, new_hash)?;
        let first = boundaries[0];
        boundaries.push(Boundary { offset: entries.len(), index: count, hash: u64::MAX });
        self.put_leaf(slots, number, first.index, &[&entries[..first.offset]])?;
        let mut added = Vec::new();
        for pair in boundaries.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let slot = slots.take_slot()?;
            let bytes = &entries[from.offset..to.offset];
            self.put_leaf(slots, slot, to.index - from.index, &[bytes])?;
            added.push(Child { from_hash: from.hash, slot });
        }
        Ok(added)
    }

    /// Where to split entries: at the place that makes both halves most equal. If no place makes
    /// both halves fit, the new entry is long and in the middle, and gets a leaf to itself and the
    /// other names of its hash.
    fn boundaries(
        &self,
        number: u64,
        count: usize,
        entries: &[u8],
        new_hash: u64,
    ) -> Result<Vec<Boundary>, StructureError> {
        let mut all: Vec<Boundary> = Vec::new();
        let mut last_hash = None;
        for (index, entry) in Entries::new(entries, count).enumerate() {
            let entry = entry.map_err(|error| self.damaged(number, error))?;
            if last_hash.is_some_and(|last| last != entry.hash) {
                all.push(Boundary { offset: entry.offset, index, hash: entry.hash });
            }
            last_hash = Some(entry.hash);
        }
        let halves_fit = |boundary: &&Boundary| {
            boundary.offset <= NODE_BYTES && entries.len() - boundary.offset <= NODE_BYTES
        };
        let unlikeness = |boundary: &&Boundary| (2 * boundary.offset).abs_diff(entries.len());
        if let Some(&best) = all.iter().filter(halves_fit).min_by_key(unlikeness) {
            return Ok(vec![best]);
        }
        let next = all.iter().position(|boundary| boundary.hash > new_hash);
        let around_new = match next {
            Some(next @ 1..) => &all[next - 1..=next],
            _ => return Err(StructureError::TooManyCollisions),
        };
        if around_new[1].offset - around_new[0].offset <= NODE_BYTES {
            Ok(around_new.to_vec())
        } else {
            Err(StructureError::TooManyCollisions)
        }
    }

    /// Adds children after the ones that `path` goes through.
    fn add_children<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        path: &Path,
        mut added: Vec<Child>,
    ) -> Result<(), S::Error> {
        let mut level = 1;
        for step in path.steps().iter().rev() {
            let mut node = self.interior(slots, step.slot)?;
            level = node.level + 1;
            let behind = step.index + 1;
            node.children.splice(behind..behind, added);
            if node.children.len() <= MAX_CHILDREN {
                return self.put_interior(slots, node);
            }
            let mut children = node.children.split_off(node.children.len() / 2);
            let from_hash = std::mem::take(&mut children[0].from_hash);
            let right_level = node.level;
            self.put_interior(slots, node)?;
            let slot = slots.take_slot()?;
            self.put_interior(slots, Interior { number: slot, level: right_level, children })?;
            added = vec![Child { from_hash, slot }];
        }
        if level > MAX_LEVEL {
            let reason = "the tree is deeper than its names can make it";
            return Err(self.damaged(self.root, reason).into());
        }
        let number = slots.take_slot()?;
        let mut children = vec![Child { from_hash: 0, slot: self.root }];
        children.extend(added);
        self.put_interior(slots, Interior { number, level, children })?;
        self.root = number;
        Ok(())
    }
}
