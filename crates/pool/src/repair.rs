//! What the death of a process leaves in the segment, and putting it right.
//!
//! A process that dies with the metadata mutex may have left a change half done: the next holder
//! completes or undoes it ([`Locked::repair`]). What a process had reserved or begun to append when
//! it died is given back by the process that inherits its slot, or by a checkpoint.

use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::alloc::{from_word, note_slot};
use crate::apply;
use crate::bitmap;
use crate::error::Result;
use crate::format::inode::{HEAD_SLOT, PoolHead};
use crate::format::run::Run;
use crate::format::slot::named_runs;
use crate::freed;
use crate::image_slots::load_slot;
use crate::log::Locked;
use crate::log_reader::ReadError;
use crate::object_names;
use crate::segment::ProcessSlot;

impl Locked<'_> {
    /// Completes or undoes what a process was doing when it died with the metadata mutex:
    ///
    /// 1. a record that is in the log and not completely in the image is applied (again), and a
    ///    packed one that is not published is erased;
    /// 2. its claim on an inode is released;
    /// 3. the map of used pages is rebuilt.
    ///
    /// Pending appends need no repair: an entry counts from the last store of
    /// [`Appends::push`](crate::appends::Appends::push) on, and is removed after the store of
    /// `durable_lsn`.
    pub fn repair(&self) -> Result<()> {
        let control = self.control();
        for index in control.appends.indexes() {
            let pending = control.appends.entry(index);
            let lsn = pending.lsn.load(Relaxed);
            if pending.is_packed.load(Relaxed) != 0 {
                self.repair_packed(index)?;
                continue;
            }
            if pending.is_metadata.load(Relaxed) == 0
                || lsn < control.appends.metadata_lsn.load(Relaxed)
            {
                continue;
            }
            // Only the holder of the metadata mutex makes metadata records, so this one is the dead
            // process's. It counts if it is completely in the log.
            match self.handle().log_reader().read(lsn) {
                Ok(record) => apply::apply(self, &record),
                Err(ReadError::Format(_)) => pending.is_metadata.store(0, Relaxed),
                // It may count or not: no record may be appended that could contradict it.
                Err(unreadable) => drop(self.log().fail_unreadable(lsn, unreadable)),
            }
        }
        // Its transaction has either happened or not. Release: as in the drop of `Transaction`,
        // pairs with `wait_while_claimed`.
        control.claimed_inode.store(0, Release);
        if control.image.is_odd() {
            object_names::distrust(control);
        }
        control.image.end_any_change();
        rebuild(self)
    }
}

/// Rebuilds the map of used pages from the inodes, the reservations and the freed runs that wait;
/// the slot sets from the slots; and the index of names, if it is incomplete.
pub(crate) fn rebuild(locked: &Locked<'_>) -> Result<()> {
    let handle = locked.handle();
    let (map, control) = (handle.segment.used_pages(), handle.control());
    freed::settle(control);
    for word in map {
        word.store(0, Relaxed);
    }
    let mark = |run| {
        bitmap::set(map, run, true);
    };
    mark(Run { start_page: 0, pages: handle.layout.data_start_page });
    let mut runs = Vec::new();
    for slot in 0..handle.segment.allocated_slots() {
        let bytes = load_slot(&handle.segment, slot);
        note_slot(&handle.segment, slot);
        if slot != HEAD_SLOT {
            named_runs(&bytes, &mut runs);
            runs.drain(..).for_each(mark);
        }
    }
    object_names::build(&handle.segment);
    let (waiting, held) = freed::waiting(control);
    waiting.chain(held).for_each(mark);
    freed::count_behind_tail(control);
    for (index, process) in control.processes.iter().enumerate() {
        if handle.members.locks.is_alive(index) {
            reservations(process).for_each(mark)
        } else {
            forget_reservations(process)
        }
    }
    let used: u64 = map.iter().map(|word| u64::from(word.load(Relaxed).count_ones())).sum();
    control.free_count.store(handle.layout.page_count - used, Relaxed);
    // Used pages lose their bit. A page taken by a process that died has lost it when it was taken,
    // or was never written.
    let mut zeroed = 0;
    for (word, used) in handle.segment.zeroed_pages().iter().zip(map) {
        let bits = word.load(Relaxed) & !used.load(Relaxed);
        word.store(bits, Relaxed);
        zeroed += u64::from(bits.count_ones());
    }
    control.zeroed_count.store(zeroed, Relaxed);
    control.first_free_page.iter().for_each(|page| page.store(0, Relaxed));
    let head = PoolHead::decode(&load_slot(&handle.segment, HEAD_SLOT));
    let fresh_from_page = head.map_or(handle.layout.page_count, |head| head.fresh_from_page);
    control.fresh_from_page.store(fresh_from_page, Relaxed);
    Ok(())
}

/// Frees what dead processes had reserved. An allocation that finds no room makes a checkpoint,
/// which calls this.
pub(crate) fn take_from_the_dead(locked: &Locked<'_>) -> Result<()> {
    let handle = locked.handle();
    // Reading the reservations is cheap; checking whether their owner lives is a system call.
    let is_left = |(index, process): (usize, &ProcessSlot)| {
        reservations(process).next().is_some() && !handle.members.locks.is_alive(index)
    };
    if handle.control().processes.iter().enumerate().any(is_left) {
        rebuild(locked)
    } else {
        Ok(())
    }
}

/// Abandons what the last owner of this process's slot had in progress when it died. With a new
/// owner the slot counts as alive, so waiters would wait for its appends and its reserved pages
/// would never be freed. An inode may name these pages already, so the map is rebuilt.
pub(crate) fn inherit_slot(locked: &Locked<'_>) -> Result<()> {
    locked.abandon_appends_of(locked.handle().members.locks.index());
    let process = &locked.control().processes[locked.handle().members.locks.index()];
    if reservations(process).next().is_none() {
        return Ok(());
    }
    forget_reservations(process);
    rebuild(locked)
}

fn forget_reservations(process: &ProcessSlot) {
    process.reservations.iter().for_each(|word| word.store(0, Relaxed));
    process.zeroing_pages.store(0, Relaxed);
}

fn reservations(process: &ProcessSlot) -> impl Iterator<Item = Run> + '_ {
    process.reservations.iter().map(|word| from_word(word.load(Relaxed))).filter(|r| !r.is_empty())
}
