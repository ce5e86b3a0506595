//! The stored form of a file table: reading, checking and freeing it list by list.
//!
//! The slots read here may hold anything with a valid checksum. A cycle in the chain is found after
//! at most three times as many steps as it has slots, without remembering all of them (Brent's
//! algorithm: remember a slot, and replace it after twice as many steps each time).

use super::list::mapped_pages;
use crate::file::FileInode;
use crate::run::{MAX_PAGES, Run};
use crate::run_list::RunList;
use crate::slots::{ChangeSlots, ReadSlots, StructureError};

pub(super) fn damaged(inode: u64, reason: impl ToString) -> StructureError {
    StructureError::damaged(format!("the file table of inode {inode}"), reason)
}

fn read_list<S: ReadSlots>(slots: &S, owner: u64, number: u64) -> Result<RunList, S::Error> {
    let list = RunList::decode(&slots.slot(number)?, number)
        .map_err(|error| damaged(owner, format!("slot {number}: {error}")))?;
    if list.owner == owner {
        Ok(list)
    } else {
        Err(damaged(owner, format!("slot {number} belongs to inode {}", list.owner)).into())
    }
}

/// The lists of a file after its inode's; ends at the first error.
pub(super) struct Chain<'a, S> {
    slots: &'a S,
    owner: u64,
    next: u64,
    /// A slot that was passed, or 0.
    remembered: u64,
    steps: u64,
    steps_until_next: u64,
}

impl<'a, S: ReadSlots> Chain<'a, S> {
    pub fn new(inode: &FileInode, slots: &'a S) -> Chain<'a, S> {
        Chain {
            slots,
            owner: inode.number,
            next: inode.part,
            remembered: 0,
            steps: 0,
            steps_until_next: 1,
        }
    }
}

impl<S: ReadSlots> Iterator for Chain<'_, S> {
    type Item = Result<RunList, S::Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let number = std::mem::take(&mut self.next);
        if number == 0 {
            return None;
        }
        if number == self.remembered {
            let reason = format!("slot {number} leads back to itself");
            return Some(Err(damaged(self.owner, reason).into()));
        }
        if self.steps == self.steps_until_next {
            (self.remembered, self.steps) = (number, 0);
            self.steps_until_next *= 2;
        }
        self.steps += 1;
        let list = read_list(self.slots, self.owner, number);
        if let Ok(list) = &list {
            self.next = list.next;
        }
        Some(list)
    }
}

/// The pages of a table, summed up while it is read.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub pages: u64,
    pub mapped_pages: u64,
}

impl Totals {
    /// Adds the runs of a slot of this file.
    pub fn add(&mut self, inode: u64, runs: &[Run]) -> Result<(), StructureError> {
        // No overflow: a slot has less than 64 runs, of less than 2^40 pages each.
        self.pages += runs.iter().map(|run| run.pages).sum::<u64>();
        self.mapped_pages += mapped_pages(runs);
        if self.pages <= MAX_PAGES {
            Ok(())
        } else {
            Err(damaged(inode, "it has more pages than a file can have"))
        }
    }

    /// Checks that these are all pages of the file.
    pub fn check(&self, inode: &FileInode) -> Result<(), StructureError> {
        // It also detects a slot of the chain whose last change never reached the media.
        if self.mapped_pages == inode.pages {
            Ok(())
        } else {
            Err(damaged(
                inode.number,
                format!(
                    "its runs have {} pages, its inode says {}",
                    self.mapped_pages, inode.pages
                ),
            ))
        }
    }
}

/// Reads the whole stored table of a file, whatever it holds, and calls `on_slot` for each slot of
/// it besides the inode, and `on_run` for each run, holes included. Then returns the first error.
///
/// If the chain has a cycle, slots are reported several times.
///
/// # Errors
/// [`StructureError::Damaged`]: the first inconsistency. Nothing after it was read.
pub fn check<S: ReadSlots>(
    inode: &FileInode,
    slots: &S,
    mut on_slot: impl FnMut(u64),
    mut on_run: impl FnMut(Run),
) -> Result<(), S::Error> {
    let mut totals = Totals::default();
    inode.runs.iter().for_each(|run| on_run(*run));
    totals.add(inode.number, &inode.runs)?;
    for list in Chain::new(inode, slots) {
        let list = list?;
        on_slot(list.number);
        list.runs.iter().for_each(|run| on_run(*run));
        totals.add(inode.number, &list.runs)?;
    }
    Ok(totals.check(inode)?)
}

/// Removes runs of a file that is being freed, as many as one transaction may free: whole slots'
/// worth of runs, from the front, at most `max_runs` in all and `max_slots` slots, but at least
/// those of one slot. The file is empty when `inode.part` is 0 and `inode.runs` is empty.
///
/// The caller then puts only the inode, not the next list. So a file with any number of runs is
/// freed in steps that need neither its whole table nor a large transaction. The remaining runs are
/// *not* the file's content any more, because they move to the front: no process may have the file
/// open.
///
/// Returns the runs that were removed, without holes.
///
/// # Errors
/// [`StructureError::Damaged`]; those of `slots`. After an error the transaction must not be
/// committed.
pub fn give_back<S: ChangeSlots>(
    inode: &mut FileInode,
    slots: &mut S,
    max_runs: usize,
    max_slots: usize,
) -> Result<Vec<Run>, S::Error> {
    let mut removed = std::mem::take(&mut inode.runs);
    for _ in 0..max_slots {
        if inode.part == 0 {
            break;
        }
        // A cycle leads back to a slot that is free by then.
        let list = read_list(slots, inode.number, inode.part)?;
        if !removed.is_empty() && removed.len() + list.runs.len() > max_runs {
            break;
        }
        slots.give_back(list.number)?;
        inode.part = list.next;
        removed.extend(list.runs);
    }
    removed.retain(|run| !run.is_hole());
    let left_pages = inode.pages.checked_sub(mapped_pages(&removed));
    inode.pages = left_pages
        .ok_or_else(|| damaged(inode.number, "its runs have more pages than its inode says"))?;
    inode.layout_version = inode.layout_version.wrapping_add(1);
    Ok(removed)
}
