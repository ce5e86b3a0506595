//! Descending from the root to a leaf.

use super::{MAX_LEVEL, NodeView, Tree};
use crate::slot_bytes::SlotBytes;
use crate::slots::ReadSlots;

/// An interior node on the path.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Step {
    pub slot: u64,
    /// The index of the child that the path continues with.
    pub index: usize,
}

/// The path from the root to a leaf.
pub(super) struct Path {
    steps: [Step; MAX_LEVEL as usize],
    len: usize,
}

impl Path {
    /// The interior nodes, starting with the root.
    pub fn steps(&self) -> &[Step] {
        &self.steps[..self.len]
    }
}

impl Tree {
    /// Loads the leaf for names of a hash, and returns its slot. Calls `pass` for every interior
    /// node on the path, with its slot and the index of the next child. The tree must not be empty.
    #[inline]
    pub(super) fn descend<S: ReadSlots>(
        &self,
        slots: &S,
        hash: u64,
        bytes: &mut SlotBytes,
        mut pass: impl FnMut(u64, NodeView<'_>, usize),
    ) -> Result<u64, S::Error> {
        let (mut number, mut parent_level) = (self.root, None);
        loop {
            slots.load(number, bytes)?;
            let node = self.view(bytes, number)?;
            // Terminates the loop on any bytes.
            if parent_level.is_some_and(|level| level != node.level() + 1) {
                let reason = "its level is not the one below its parent's";
                return Err(self.damaged(number, reason).into());
            }
            let index = node.child_index(hash);
            let Some(child) = node.child(index) else { return Ok(number) };
            pass(number, node, index);
            (number, parent_level) = (child.slot, Some(node.level()));
        }
    }

    /// Loads the leaf for names of a hash, and returns the path to it and its slot.
    pub(super) fn path_to<S: ReadSlots>(
        &self,
        slots: &S,
        hash: u64,
        bytes: &mut SlotBytes,
    ) -> Result<(Path, u64), S::Error> {
        let mut path = Path { steps: Default::default(), len: 0 };
        let number = self.descend(slots, hash, bytes, |slot, _, index| {
            // Levels start at most at the maximum and decrease, so there is room for every step.
            path.steps[path.len] = Step { slot, index };
            path.len += 1;
        })?;
        Ok((path, number))
    }
}
