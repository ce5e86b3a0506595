//! Storing a table that was edited.

use aquifer_pool::ChangeSlots;
use aquifer_pool::format::file::FileInode;
use aquifer_pool::format::run_list::RunList;

use super::FileTable;
use super::chain::damaged;
use crate::error::Result;

impl FileTable {
    /// Stores the edits: puts the lists that have changed, gives back slots that have nothing in them any more, and sets the runs, the
    /// part, the pages and the layout version of the inode, which is not put. Without an edit it does nothing.
    ///
    /// From then on the table is what is stored. If it fails, or the transaction does or is repeated, the table is neither the old
    /// one nor the new one: throw it away and begin with a clone of the one before.
    ///
    /// # Errors
    /// [`PoolError::NoFreeInode`](aquifer_pool::PoolError::NoFreeInode), and others of `slots`.
    ///
    /// # Panics
    /// If the table is not of this inode, or not of this state of it: it would undo what others have done.
    pub fn store(&mut self, inode: &mut FileInode, slots: &mut impl ChangeSlots) -> Result<()> {
        assert!(self.is_current(inode), "a table of another state of inode {}", inode.number);
        if !self.is_edited {
            return Ok(());
        }
        let mut next = 0;
        // From the last one on, because each names the one behind it.
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
