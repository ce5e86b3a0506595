//! The metadata mutex and the maintenance mutex, which belong to the log.
//!
//! A record enters the log, and changes the image and the maps of pages, only with the metadata
//! mutex; records are copied to their place, and the tail moves, only with the maintenance mutex.
//! Each has a guard type; what needs a mutex is a method of its guard, or takes the guard.
//!
//! While a thread holds the metadata mutex, it neither waits for the media nor copies data, except
//! for the one durable write of [`Locked::repair`]. The next holder detects a dead holder, and
//! repairs what may have been left half done. [`core`](crate::core) has the order of all locks.

use std::sync::atomic::Ordering::{Relaxed, Release};

use aquifer_sys::robust::RobustGuard;

use crate::alloc;
use crate::error::{PoolError, Result};
use crate::format::layout::SLOTS_PER_PAGE;
use crate::handle::Handle;
use crate::image;
use crate::log::{Log, ReadError};
use crate::object_names;
use crate::segment::Control;

/// The held metadata mutex.
pub(crate) struct Locked<'a> {
    log: &'a Log,
    guard: RobustGuard<'a>,
}

impl<'a> Locked<'a> {
    pub fn log(&self) -> &'a Log {
        self.log
    }

    pub fn handle(&self) -> &'a Handle {
        &self.log.handle
    }

    pub fn control(&self) -> &'a Control {
        self.handle().control()
    }
}

/// The held maintenance mutex, which guards applying records, checkpoints and superblocks.
pub(crate) struct Maintaining<'a> {
    log: &'a Log,
    guard: RobustGuard<'a>,
}

impl<'a> Maintaining<'a> {
    pub fn log(&self) -> &'a Log {
        self.log
    }

    /// Reports progress of the holder to the waiters.
    pub fn note_progress(&self) {
        self.guard.note_progress();
    }

    fn take_over(&mut self) {
        if self.guard.previous_owner_died() {
            // The dead holder may have cleared the marks of changed pages without writing the
            // pages.
            let segment = &self.log.handle.segment;
            image::mark_changed(self, 0..segment.allocated_slots() / SLOTS_PER_PAGE);
            self.guard.repaired();
        }
    }
}

impl Log {
    /// Takes the metadata mutex; first repairs the state if the previous holder died.
    pub fn lock(&self) -> Result<Locked<'_>> {
        let mutex = &self.control().metadata_mutex;
        let guard = self.handle.members.take(mutex, "the metadata lock")?;
        let mut locked = Locked { log: self, guard };
        if locked.guard.previous_owner_died() {
            locked.repair()?;
            locked.guard.repaired();
        }
        Ok(locked)
    }

    /// Takes the maintenance mutex. What it protects is idempotent: after a dead holder it is
    /// repeated.
    pub fn maintain(&self) -> Result<Maintaining<'_>> {
        let mutex = &self.control().maintenance_mutex;
        // The holder may itself wait for commits up to here. While they make progress, retry; if
        // one is stalled, report its owner rather than the holder of the mutex.
        let head_lsn = self.control().appends.head_lsn();
        let guard = loop {
            let progress = self.progress();
            let (durable_lsn, _) = progress;
            match self.handle.members.take(mutex, "the maintenance lock") {
                Err(PoolError::Stalled { .. }) if durable_lsn < head_lsn => {
                    if self.progress() == progress {
                        return Err(self.stalled_append());
                    }
                }
                taken => break taken?,
            }
        };
        let mut maintaining = Maintaining { log: self, guard };
        maintaining.take_over();
        Ok(maintaining)
    }

    /// Takes the maintenance mutex if it is free.
    pub fn try_maintain(&self) -> Option<Maintaining<'_>> {
        let guard = self.control().maintenance_mutex.try_lock().ok()??;
        let mut maintaining = Maintaining { log: self, guard };
        maintaining.take_over();
        Some(maintaining)
    }
}

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
    fn repair(&self) -> Result<()> {
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
                Ok(record) => image::apply(self, &record),
                Err(ReadError::Format(_)) => pending.is_metadata.store(0, Relaxed),
                // It may count or not: no record may be appended that could contradict it.
                Err(unreadable) => drop(self.log.fail_unreadable(lsn, unreadable)),
            }
        }
        // Its transaction has either happened or not. Release: as in the drop of `Transaction`,
        // pairs with `wait_while_claimed`.
        control.claimed_inode.store(0, Release);
        if control.image.is_odd() {
            object_names::distrust(control);
        }
        control.image.end_any_change();
        alloc::rebuild(self)
    }
}
