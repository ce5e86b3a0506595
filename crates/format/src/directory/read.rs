//! Reading a directory in batches, while it changes.
//!
//! A position is a hash: a batch has all names from one position up to the next, as of one moment.
//! Names never change their hash, so a reader that continues at the next position sees each name
//! that existed all the time exactly once, whatever happened in between. A name that was added or
//! removed in between may or may not be seen, as with any directory.

use super::{DirectoryEntry, Tree};
use crate::slot_bytes::SLOT_BYTES;
use crate::slots::ReadSlots;

/// A batch of names of a directory, as of one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// All names from the requested position up to the next, ascending by hash.
    pub entries: Vec<DirectoryEntry>,
    /// Where to continue; `None` at the end.
    pub next_hash: Option<u64>,
}

impl Tree {
    /// Reads names from a position on; 0 is the first. Returns at least `at_least` names, if that
    /// many follow, and at most one leaf's names more, since the names of a leaf are returned
    /// together.
    ///
    /// # Errors
    /// [`StructureError::Damaged`](crate::slots::StructureError::Damaged), and those of reading slots.
    pub fn read_from<S: ReadSlots>(
        &self,
        slots: &S,
        from_hash: u64,
        at_least: usize,
    ) -> Result<Batch, S::Error> {
        let mut batch = Batch { entries: Vec::new(), next_hash: None };
        if self.is_empty() {
            return Ok(batch);
        }
        let (mut position, mut bytes) = (from_hash, [0; SLOT_BYTES]);
        loop {
            let mut bound: Option<u64> = None;
            let number = self.descend(slots, position, &mut bytes, |_, node, index| {
                let next = node.child(index + 1).map(|child| child.from_hash);
                bound = bound.into_iter().chain(next).min();
            })?;
            let leaf = self.view(&bytes, number)?.decode_entries();
            let mut leaf = leaf.map_err(|error| self.damaged(number, error))?;
            let last_hash = leaf.last().map_or(0, |entry| entry.hash);
            leaf.retain(|entry| entry.hash >= position);
            // The position increases with each leaf, and each leaf except the first adds an entry:
            // this terminates the loop on any bytes.
            let is_in_place = bound.is_none_or(|bound| position < bound && last_hash < bound);
            if !is_in_place || (leaf.is_empty() && position > from_hash) {
                let reason = "its names are not those that belong there";
                return Err(self.damaged(number, reason).into());
            }
            batch.entries.append(&mut leaf);
            match bound {
                None => return Ok(batch),
                Some(bound) => position = bound,
            }
            if batch.entries.len() >= at_least.max(1) {
                batch.next_hash = Some(position);
                return Ok(batch);
            }
        }
    }
}
