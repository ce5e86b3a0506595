//! From the root down to a leaf.

use aquifer_pool::ReadSlots;
use aquifer_pool::format::directory::{MAX_LEVEL, NodeView};
use aquifer_pool::format::inode::SlotBytes;

use super::Tree;
use crate::error::Result;

/// An interior node on the way down.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Step {
    pub slot: u64,
    /// Which child the way goes on with.
    pub index: usize,
}

/// The way from the root to a leaf.
pub(super) struct Path {
    steps: [Step; MAX_LEVEL as usize],
    len: usize,
}

impl Path {
    /// The interior nodes, from the root on.
    pub fn steps(&self) -> &[Step] {
        &self.steps[..self.len]
    }
}

impl Tree {
    /// Loads the leaf in which names of a hash belong, and returns its slot. `pass` is shown every interior node on the way,
    /// with its slot, and which of its children is next. The tree is not empty.
    #[inline]
    pub(super) fn descend(
        &self,
        slots: &impl ReadSlots,
        hash: u64,
        bytes: &mut SlotBytes,
        mut pass: impl FnMut(u64, NodeView<'_>, usize),
    ) -> Result<u64> {
        let (mut number, mut parent_level) = (self.root, None);
        loop {
            slots.load(number, bytes)?;
            let node = self.view(bytes, number)?;
            // What ends the loop on any bytes.
            if parent_level.is_some_and(|level| level != node.level() + 1) {
                return Err(self.damaged(number, "its level is not the one below its parent's"));
            }
            let index = node.child_index(hash);
            let Some(child) = node.child(index) else { return Ok(number) };
            pass(number, node, index);
            (number, parent_level) = (child.slot, Some(node.level()));
        }
    }

    /// Loads the leaf in which names of a hash belong, and returns the way to it and its slot.
    pub(super) fn path_to(
        &self,
        slots: &impl ReadSlots,
        hash: u64,
        bytes: &mut SlotBytes,
    ) -> Result<(Path, u64)> {
        let mut path = Path { steps: Default::default(), len: 0 };
        let number = self.descend(slots, hash, bytes, |slot, _, index| {
            // Levels are at most the last one and become smaller, so there is room for every step.
            path.steps[path.len] = Step { slot, index };
            path.len += 1;
        })?;
        Ok((path, number))
    }
}
