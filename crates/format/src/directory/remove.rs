//! Removing names, and merging and freeing nodes.

use super::descend::Step;
use super::{Interior, Key, Leaf, MAX_CHILDREN, NODE_BYTES, Referent, Tree};
use crate::slot_bytes::SLOT_BYTES;
use crate::slots::ChangeSlots;

/// A leaf with more bytes is not merged.
const FEW_BYTES: usize = NODE_BYTES / 2;
/// Two leaves are merged if they have at most this many bytes together.
const MERGED_BYTES: usize = NODE_BYTES / 4 * 3;
/// An interior node with more children is not merged.
const FEW_CHILDREN: usize = MAX_CHILDREN / 2;
/// Two interior nodes are merged if they have at most this many children together.
const MERGED_CHILDREN: usize = MAX_CHILDREN / 4 * 3;

/// The pairs of neighbours that a child is part of: with the child before it, then with the one
/// after it.
fn neighbours(index: usize, children: usize) -> impl Iterator<Item = (usize, usize)> {
    let before = index.checked_sub(1).map(|left| (left, left));
    let behind = (index + 1 < children).then_some((index, index + 1));
    before.into_iter().chain(behind)
}

impl Tree {
    /// Removes a name, and returns what it referred to; `None` if the name does not exist, and then
    /// nothing has happened.
    ///
    /// # Errors
    /// [`StructureError::Damaged`](crate::slots::StructureError::Damaged), and those of reading slots
    /// and giving them back.
    pub fn remove<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        name: &[u8],
    ) -> Result<Option<Referent>, S::Error> {
        self.remove_key(slots, self.key(name))
    }

    pub(super) fn remove_key<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        key: Key<'_>,
    ) -> Result<Option<Referent>, S::Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let mut bytes = [0; SLOT_BYTES];
        let (path, number) = self.path_to(slots, key.hash, &mut bytes)?;
        let leaf = self.leaf(&bytes, number, key)?;
        let Some(entry) = leaf.entry else { return Ok(None) };
        let referent = self.referent(number, &entry)?;
        let steps = path.steps();
        if leaf.count == 1 {
            slots.give_back(number)?;
            self.remove_child(slots, steps, steps.last().map_or(0, |step| step.index))?;
        } else if !self.merge_leaf(slots, steps, number, &leaf)? {
            self.put_leaf(slots, number, leaf.count - 1, &[leaf.before, leaf.behind])?;
        }
        Ok(Some(referent))
    }

    /// Merges the rest of a leaf with a neighbour, if both are small enough together.
    fn merge_leaf<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        steps: &[Step],
        number: u64,
        leaf: &Leaf<'_>,
    ) -> Result<bool, S::Error> {
        let rest_bytes = leaf.before.len() + leaf.behind.len();
        let Some(step) = steps.last().filter(|_| rest_bytes <= FEW_BYTES) else {
            return Ok(false);
        };
        let parent_bytes = slots.slot(step.slot)?;
        let parent = self.view(&parent_bytes, step.slot)?;
        for (left, neighbour) in neighbours(step.index, parent.count()) {
            let Some(child) = parent.child(neighbour) else { return Ok(false) };
            let neighbour_slot = child.slot;
            let bytes = slots.slot(neighbour_slot)?;
            let view = self.view(&bytes, neighbour_slot)?;
            if view.level() != 0 || neighbour_slot == number {
                let reason = "it cannot be the neighbour of a leaf";
                return Err(self.damaged(neighbour_slot, reason).into());
            }
            let wrong = |error| self.damaged(neighbour_slot, error);
            let entries = view.entry_bytes().map_err(wrong)?;
            if entries.len() + rest_bytes > MERGED_BYTES {
                continue;
            }
            self.sealed_view(&bytes, neighbour_slot)?;
            let count = view.count() + leaf.count - 1;
            let (into, from, parts) = if left == neighbour {
                (neighbour_slot, number, [entries, leaf.before, leaf.behind])
            } else {
                (number, neighbour_slot, [leaf.before, leaf.behind, entries])
            };
            self.put_leaf(slots, into, count, &parts)?;
            // Each leaf is in order, and both together may not be.
            let merged = slots.slot(into)?;
            let in_order = self.view(&merged, into)?.decode_entries();
            in_order.map_err(|error| self.damaged(from, error))?;
            slots.give_back(from)?;
            self.remove_child(slots, steps, left + 1)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Removes a child, whose slot was given back, from the last node of `steps`; if `steps` is
    /// empty, the child was the root. The neighbour before it, or else the one after it, takes over
    /// its hash range.
    fn remove_child<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        steps: &[Step],
        index: usize,
    ) -> Result<(), S::Error> {
        let Some((step, above)) = steps.split_last() else {
            self.root = 0;
            return Ok(());
        };
        let mut node = self.interior(slots, step.slot)?;
        node.children.remove(index);
        let Some(first) = node.children.first_mut() else {
            slots.give_back(node.number)?;
            return self.remove_child(slots, above, above.last().map_or(0, |step| step.index));
        };
        first.from_hash = 0;
        match above.last() {
            None => self.put_root(slots, node),
            Some(parent) if node.children.len() <= FEW_CHILDREN => {
                let parent = self.interior(slots, parent.slot)?;
                self.merge_interior(slots, above, parent, node)
            }
            Some(_) => self.put_interior(slots, node),
        }
    }

    /// Puts a node, merged with a neighbour if both are small enough together.
    fn merge_interior<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        above: &[Step],
        parent: Interior,
        node: Interior,
    ) -> Result<(), S::Error> {
        let index = above.last().map_or(0, |step| step.index);
        for (left, neighbour) in neighbours(index, parent.children.len()) {
            let other = self.interior(slots, parent.children[neighbour].slot)?;
            if other.level != node.level || other.number == node.number {
                let reason = "it cannot be the neighbour of a node";
                return Err(self.damaged(other.number, reason).into());
            }
            if other.children.len() + node.children.len() > MERGED_CHILDREN {
                continue;
            }
            let (mut into, mut from) =
                if left == neighbour { (other, node) } else { (node, other) };
            from.children[0].from_hash = parent.children[left + 1].from_hash;
            into.children.append(&mut from.children);
            self.put_interior(slots, into)?;
            slots.give_back(from.number)?;
            return self.remove_child(slots, above, left + 1);
        }
        self.put_interior(slots, node)
    }

    /// Puts the root; if it has only one child, that becomes the root.
    fn put_root<S: ChangeSlots>(
        &mut self,
        slots: &mut S,
        mut node: Interior,
    ) -> Result<(), S::Error> {
        if node.children.len() > 1 {
            return self.put_interior(slots, node);
        }
        loop {
            slots.give_back(node.number)?;
            self.root = node.children[0].slot;
            let bytes = slots.slot(self.root)?;
            let child = self.view(&bytes, self.root)?;
            if child.level() + 1 != node.level {
                return Err(self.damaged(self.root, "it cannot be the child of its parent").into());
            }
            if child.level() == 0 || child.count() > 1 {
                return Ok(());
            }
            node = self.interior(slots, self.root)?;
        }
    }
}
