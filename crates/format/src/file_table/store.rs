//! Storing a table that was edited.

use crate::file::FileInode;
use crate::run_list::RunList;
use crate::slots::ChangeSlots;

use super::FileTable;
use super::chain::damaged;

impl FileTable {
    /// Stores the edits: puts the lists that have changed, gives back unused slots, and sets the
    /// runs, the part, the pages and the layout version of the inode, which the caller puts. Does
    /// nothing if there are no edits.
    ///
    /// After that the table matches the stored one. If this call or the transaction fails, or the
    /// transaction is retried, the table matches neither the old nor the new state: drop it and
    /// start from a clone of the old table.
    ///
    /// # Errors
    /// Those of `slots`, above all that no slot is free.
    ///
    /// # Panics
    /// If the table is of another inode or another state of it: storing it would undo other
    /// callers' changes.
    pub fn store<S: ChangeSlots>(
        &mut self,
        inode: &mut FileInode,
        slots: &mut S,
    ) -> Result<(), S::Error> {
        assert!(self.is_current(inode), "a table of another state of inode {}", inode.number);
        if !self.is_edited {
            return Ok(());
        }
        let mut next = 0;
        // Back to front, because each list links to the next one.
        for list in self.lists[1..].iter_mut().rev() {
            if list.slot == 0 {
                list.slot = match self.unused_slots.pop() {
                    Some(slot) => slot,
                    None => slots.take_slot()?,
                };
            }
            if list.is_changed || list.stored_next != next {
                let stored = RunList {
                    number: list.slot,
                    owner: self.owner,
                    next,
                    runs: list.runs().to_vec(),
                };
                let bytes = stored.encode().map_err(|error| damaged(self.owner, error))?;
                slots.put(list.slot, bytes);
                (list.stored_next, list.is_changed) = (next, false);
            }
            next = list.slot;
        }
        for slot in self.unused_slots.drain(..) {
            slots.give_back(slot)?;
        }
        (self.lists[0].stored_next, self.lists[0].is_changed) = (next, false);
        self.layout_version = self.layout_version.wrapping_add(1);
        self.is_edited = false;
        inode.runs = self.lists[0].runs().to_vec();
        inode.part = next;
        inode.pages = self.mapped_pages;
        inode.layout_version = self.layout_version;
        Ok(())
    }
}
