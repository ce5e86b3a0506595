//! What the death of a process leaves in the segment, and putting it right.
//!
//! A process that dies with the metadata mutex may have left a change half done: the next holder
//! completes or undoes it ([`Slots::repair`](Metadata::repair)). What a process had reserved or begun to append when
//! it died is given back by the process that inherits its slot, or by a checkpoint.

use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::bitmap;
use crate::error::{PoolError, Result};
use crate::format::inode::{HEAD_SLOT, PoolHead};
use crate::format::layout::SLOTS_PER_PAGE;
use crate::format::record::Record;
use crate::format::run::Run;
use crate::format::slot::named_runs;
use crate::log::locks::{Locked, Metadata};
use crate::log::reader::ReadError;
use crate::metadata::alloc::{from_word, note_slot};
use crate::metadata::apply;
use crate::metadata::freed;
use crate::metadata::image_slots::load_slot;
use crate::metadata::object_names;
use crate::shared::segment::{ProcessSlot, RESERVATIONS};

/// The metadata of the image, as the [log](crate::log) needs it.
pub(crate) struct Slots;

impl Metadata for Slots {
    /// Completes or undoes what a process was doing when it died with the metadata mutex:
    ///
    /// 1. a record that is in the log and not completely in the image is applied (again), and a
    ///    packed one that is not published is erased;
    /// 2. its claim on an inode is released;
    /// 3. the map of used pages is rebuilt.
    ///
    /// Before all of that it is noted whether the record was published ([`note`](crate::shared::note)), and a
    /// page of the image that it was making present is completed.
    ///
    /// Pending appends need no repair: an entry counts from the last store of
    /// [`Appends::push`](crate::shared::appends::Appends::push) on, and is removed after the store of
    /// `durable_lsn`.
    fn repair(&self, locked: &Locked<'_>) -> Result<()> {
        let control = locked.control();
        // Before anything is published.
        control.noting.repair(control.appends.head_lsn());
        locked.handle().segment.settle();
        for index in control.appends.indexes() {
            let pending = control.appends.entry(index);
            let lsn = pending.lsn.load(Relaxed);
            if pending.is_packed.load(Relaxed) != 0 {
                locked.repair_packed(index)?;
                continue;
            }
            if pending.is_metadata.load(Relaxed) == 0
                || lsn < control.appends.metadata_lsn.load(Relaxed)
            {
                continue;
            }
            // Only the holder of the metadata mutex makes metadata records, so this one is the dead
            // process's. It counts if it is completely in the log.
            match locked.handle().log_reader().read(lsn) {
                Ok(record) => apply::apply(locked, &record),
                Err(ReadError::Format(_)) => pending.is_metadata.store(0, Relaxed),
                // It may count or not: no record may be appended that could contradict it.
                Err(unreadable) => drop(locked.log().fail_unreadable(lsn, unreadable)),
            }
        }
        // Its transaction has either happened or not. Release: as in the drop of `Transaction`,
        // pairs with `wait_while_claimed`.
        control.claimed_inode.store(0, Release);
        object_names::repair(control);
        control.image.end_any_change();
        rebuild(locked)
    }

    fn apply(&self, locked: &Locked<'_>, record: &Record) {
        apply::apply(locked, record);
    }

    fn freed_between(&self, locked: &Locked<'_>, lsn: u64, end_lsn: u64) -> Vec<Run> {
        freed::freed_between(locked, lsn, end_lsn)
    }
}

/// Rebuilds the map of used pages from what the base names, the inodes in the image, the
/// reservations and the freed runs that wait; and the slot sets from the slots. Reads no media.
///
/// # Errors
/// [`PoolError::SharedMemory`]. Then pages in use may be marked as free: the next holder of the mutex
/// repairs it, and until one succeeds none changes anything.
pub(crate) fn rebuild(locked: &Locked<'_>) -> Result<()> {
    let rebuilt = rebuild_maps(locked);
    if rebuilt.is_err() {
        // Relaxed: guarded by the mutex.
        locked.control().needs_repair.store(1, Relaxed);
    }
    rebuilt
}

fn rebuild_maps(locked: &Locked<'_>) -> Result<()> {
    let handle = locked.handle();
    let (segment, control) = (&handle.segment, handle.control());
    freed::settle(control);
    // What slots name that are not in the image.
    for (word, base) in segment.used_pages().iter().zip(segment.base_used_pages()) {
        word.store(base.load(Relaxed), Relaxed);
    }
    // Allocates memory only where the pool is recovered.
    let mark = |run: Run| {
        segment.allocate_maps(run.end_page())?;
        bitmap::set(segment.used_pages(), run, true);
        Ok::<(), PoolError>(())
    };
    mark(Run { start_page: 0, pages: handle.layout.data_start_page })?;
    mark(handle.saved)?;
    let mut runs = Vec::new();
    let present = handle.segment.present_pages();
    let present = present.flat_map(|page| page * SLOTS_PER_PAGE..(page + 1) * SLOTS_PER_PAGE);
    for slot in present {
        let bytes = load_slot(&handle.segment, slot);
        note_slot(&handle.segment, slot);
        if slot != HEAD_SLOT {
            named_runs(&bytes, &mut runs);
            runs.drain(..).try_for_each(mark)?;
        }
    }
    let (waiting, held) = freed::waiting(control);
    waiting.chain(held).try_for_each(mark)?;
    freed::count_behind_tail(control);
    for (index, process) in handle.segment.processes() {
        if !has_reservations(process) {
            continue;
        }
        if handle.members.locks.is_alive(index) {
            reservations(process).try_for_each(mark)?;
        } else {
            forget_reservations(process);
        }
    }
    let map = segment.used_pages();
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
    let is_left = |(index, process): (usize, &ProcessSlot)| {
        has_reservations(process) && !handle.members.locks.is_alive(index)
    };
    if handle.segment.processes().any(is_left) { rebuild(locked) } else { Ok(()) }
}

/// Abandons what the last owner of this process's slot had in progress when it died. With a new
/// owner the slot counts as alive, so waiters would wait for its appends and its reserved pages
/// would never be freed. An inode may name these pages already, so the map is rebuilt.
pub(crate) fn inherit_slot(locked: &Locked<'_>) -> Result<()> {
    locked.abandon_appends_of(locked.handle().members.locks.index());
    let handle = locked.handle();
    let process = handle.segment.process(handle.members.locks.index());
    if !has_reservations(process) {
        return Ok(());
    }
    forget_reservations(process);
    rebuild(locked)
}

/// Whether the last owner of a slot has reserved pages. Reading them is cheap; asking whether the
/// owner lives is a system call.
pub(crate) fn has_reservations(process: &ProcessSlot) -> bool {
    process.zeroing_pages.load(Relaxed) != 0 || reservations(process).next().is_some()
}

fn forget_reservations(process: &ProcessSlot) {
    let used = (process.used_reservations.load(Relaxed) as usize).min(RESERVATIONS);
    process.reservations[..used].iter().for_each(|word| word.store(0, Relaxed));
    process.used_reservations.store(0, Relaxed);
    process.zeroing_pages.store(0, Relaxed);
}

fn reservations(process: &ProcessSlot) -> impl Iterator<Item = Run> + '_ {
    let used = (process.used_reservations.load(Relaxed) as usize).min(RESERVATIONS);
    let words = &process.reservations[..used];
    words.iter().map(|word| from_word(word.load(Relaxed))).filter(|run| !run.is_empty())
}
