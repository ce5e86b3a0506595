//! Writing the log: taking room, writing, and waiting until everything before is durable. The top
//! of `log.rs` describes it.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_sys::patience::WaitedFor;

use crate::appends::{Appends, NewAppend, append};
use crate::apply;
use crate::error::{PoolError, Result};
use crate::failure::FailureKind;
use crate::format::FormatError;
use crate::format::record::skip_page;
use crate::handle::Handle;
use crate::heartbeat::Held;
use crate::log::{Locked, Log};
use crate::mutant::{self, Mutant};
use crate::point;

/// How long a waiter sleeps before it checks whether the first pending append still has an owner.
const LOOK_AFTER: Duration = Duration::from_millis(20);

/// Reserved space of the log that this process writes.
pub(crate) struct Append {
    handle: Arc<Handle>,
    index: u64,
    pub lsn: u64,
    pub end_lsn: u64,
    pub acknowledged_lsn: u64,
    is_complete: bool,
}

impl Append {
    /// The index of its entry.
    pub fn index(&self) -> u64 {
        self.index
    }
}

impl Drop for Append {
    fn drop(&mut self) {
        // In a forked child it belongs to the parent, which continues with it.
        if self.is_complete || !self.handle.members.process.is_current() {
            return;
        }
        let control = self.handle.control();
        let pending = control.appends.entry(self.index);
        let is_unapplied_metadata = pending.is_metadata.load(Relaxed) != 0
            && control.appends.metadata_lsn.load(Relaxed) < self.end_lsn;
        if is_unapplied_metadata {
            // The record may be in the log, but it is not in the image: a later record could
            // contradict it. Failing the pool prevents later records.
            control.fail(FailureKind::Log, &io::Error::from_raw_os_error(libc::EIO));
        }
        // Without the lock: the entry belongs to this append until it is durable. A process that
        // waits behind it completes it, and sees the failure noted before.
        control.appends.give_up(self.index);
        control.signal.ring();
    }
}

impl Locked<'_> {
    /// Whether the log has room for a record of `len_bytes`, between the head and the tail.
    pub fn has_room(&self, len_bytes: u64) -> bool {
        let log_bytes = self.handle().layout.log().len_bytes;
        let head_lsn = self.control().appends.head_lsn();
        let used = head_lsn - self.control().tail_lsn.load(Relaxed);
        let to_end = log_bytes - head_lsn % log_bytes;
        let skipped = if len_bytes > to_end { to_end } else { 0 };
        used + skipped + len_bytes <= log_bytes
    }

    pub fn push_pending(
        &self,
        lsn: u64,
        end_lsn: u64,
        state: u64,
        is_metadata: bool,
        depends_lsn: u64,
    ) -> u64 {
        let owner = self.handle().members.locks.index() as u64;
        let new = NewAppend { lsn, end_lsn, state, owner, is_metadata, depends_lsn };
        self.control().appends.push(new)
    }

    /// Reserves space for a record of `len_bytes`; `None` if there is not enough now. A record
    /// never crosses the end of the ring: a separate append fills the rest before it.
    pub fn reserve(
        &self,
        len_bytes: u64,
        is_metadata: bool,
    ) -> Result<Option<(Append, Option<Append>)>> {
        self.close_packed()?;
        let control = self.control();
        if !self.has_room(len_bytes) || !control.appends.has_entries(2) {
            return Ok(None);
        }
        let log_bytes = self.handle().layout.log().len_bytes;
        let acknowledged_lsn = control.appends.durable_lsn.load(Relaxed);
        let take = |lsn: u64, len_bytes: u64, is_metadata, depends_lsn| Append {
            handle: self.log().handle.clone(),
            index: self.push_pending(
                lsn,
                lsn + len_bytes,
                append::RESERVED,
                is_metadata,
                depends_lsn,
            ),
            lsn,
            end_lsn: lsn + len_bytes,
            acknowledged_lsn,
            is_complete: false,
        };
        let mut lsn = control.appends.head_lsn();
        let to_end = log_bytes - lsn % log_bytes;
        let filler = (len_bytes > to_end).then(|| {
            let filler = take(lsn, to_end, false, append::NOTHING);
            lsn += to_end;
            point::pass("reserve-filler");
            filler
        });
        let mut depends_lsn = append::NOTHING;
        if !is_metadata {
            let before_lsn = self.log().last_commit_lsn.swap(lsn, Relaxed);
            if before_lsn != append::NOTHING && before_lsn >= acknowledged_lsn {
                depends_lsn = before_lsn;
            }
            control.content_end_lsn.store(lsn + len_bytes, Relaxed);
        }
        let append = take(lsn, len_bytes, is_metadata, depends_lsn);
        point::pass("reserve-pending");
        Ok(Some((append, filler)))
    }

    /// Advances the durable prefix over the durable appends.
    fn advance(&self) -> bool {
        let believes_all = mutant::is(self.handle().mutant, Mutant::AcknowledgeOutOfOrder);
        self.control().appends.advance(believes_all, || point::pass("advance-between"))
    }

    /// Abandons the appends of a process slot whose owner is dead; the processes that wait for them
    /// complete them.
    pub fn abandon_appends_of(&self, slot: usize) {
        let appends = &self.control().appends;
        for index in appends.indexes() {
            let pending = appends.entry(index);
            let state = pending.state.load(Relaxed);
            let is_its = pending.owner.load(Relaxed) == slot as u64;
            // Packed records are whole, and belong to all processes.
            if is_its && !matches!(state, append::DURABLE | append::PACKED) {
                appends.give_up(index);
            }
        }
    }
}

impl Log {
    /// Reports an append as durable, and advances the durable prefix.
    pub(crate) fn complete(&self, append: &mut Append) -> Result<()> {
        let locked = self.lock()?;
        locked.control().appends.note_durable(append.index);
        append.is_complete = true;
        point::pass("complete-durable");
        let has_moved = locked.advance();
        drop(locked);
        if has_moved {
            self.control().signal.ring();
        }
        Ok(())
    }

    /// Writes `bytes` durably at `lsn`, twice if the first attempt fails; the second failure fails
    /// the pool for all processes. Writes nothing without the locks.
    pub(crate) fn write_log(&self, lsn: u64, bytes: &[u8]) -> Result<()> {
        let Handle { media, heartbeat, mutant, .. } = &*self.handle;
        // Another thread may have found the locks lost: then other processes fill this place.
        self.handle.members.check_kept()?;
        let position = self.handle.log_position(lsn);
        let write = || {
            if mutant::is(*mutant, Mutant::NoFlush) {
                // SAFETY: only the log writes to its own pages, and no reference to them is ever
                // made.
                unsafe { media.write_at(position, bytes) }
            } else {
                heartbeat.while_media_work(Held::Log, || {
                    // SAFETY: as above.
                    unsafe { media.write_durable(position, bytes) }
                })
            }
        };
        if write().is_ok() {
            return Ok(());
        }
        write().map_err(|error| {
            self.handle.fail_at_media(FailureKind::Log, &error.source);
            self.note_loss();
            PoolError::Failed {
                what: FailureKind::Log.name(),
                source: io::Error::from_raw_os_error(
                    error.source.raw_os_error().unwrap_or(libc::EIO),
                ),
            }
        })?;
        // The record is durable. But the kernel's error may have been about another page whose
        // writeback failed, and the kernel reports it only once: a checkpoint of another process
        // would take that page for written. The media remember it.
        if let Err(error) = heartbeat.while_media_work(Held::Log, || media.flush()) {
            self.handle.fail_at_media(FailureKind::Data, &error.source);
            self.note_loss();
        }
        Ok(())
    }

    /// Makes an append durable with `bytes`, the whole record.
    pub fn write_append(&self, append: &mut Append, bytes: &[u8]) -> Result<()> {
        self.write_log(append.lsn, bytes)?;
        point::pass("append-written");
        self.complete(append)
    }

    /// Makes the bytes of an append visible to all processes, not durable.
    pub fn publish_append(&self, append: &Append, bytes: &[u8]) -> Result<()> {
        let position = self.handle.log_position(append.lsn);
        // SAFETY: only the log writes to its own pages, and no reference to them is ever made.
        let write = || unsafe { self.handle.media.write_at(position, bytes) };
        write().or_else(|_| write()).inspect_err(|error| {
            self.handle.fail_at_media(FailureKind::Log, &error.source);
        })?;
        self.control().appends.note_written(append.index);
        Ok(())
    }

    /// Fills the space of an append without content.
    pub fn write_filler(&self, append: &mut Append) -> Result<()> {
        let len_bytes = append.end_lsn - append.lsn;
        let page =
            skip_page(append.lsn, len_bytes, append.acknowledged_lsn, self.handle.identity());
        self.write_append(append, &page)
    }

    /// Waits until everything before `lsn` is durable, and completes abandoned appends.
    pub fn wait_durable(&self, lsn: u64) -> Result<()> {
        self.wait_durable_and_flush(lsn).map(drop)
    }

    /// As [`Log::wait_durable`]. Returns whether this thread has made durable what was handed to the
    /// media before the call.
    pub fn wait_durable_and_flush(&self, lsn: u64) -> Result<bool> {
        let has_flushed = Cell::new(false);
        if self.control().appends.durable_lsn() < lsn {
            let wait = || self.wait_until_durable(lsn, &has_flushed);
            self.handle.heartbeat.while_media_work(Held::Files, wait)?;
        }
        Ok(has_flushed.get())
    }

    fn wait_until_durable(&self, lsn: u64, has_flushed: &Cell<bool>) -> Result<()> {
        let control = self.control();
        let mut waited = WaitedFor::new(self.progress());
        loop {
            let signal = control.signal.now();
            if control.appends.durable_lsn() >= lsn {
                return Ok(());
            }
            control.check_not_failed()?;
            if self.is_waiting() {
                self.help(has_flushed)?;
                continue;
            }
            if !control.signal.wait(signal, LOOK_AFTER)
                && !self.help(has_flushed)?
                && waited.look(self.progress()) > self.handle.members.stall_timeout
            {
                return Err(self.stalled_append());
            }
        }
    }

    /// Whether the first append is one that any waiter may complete.
    fn is_waiting(&self) -> bool {
        let appends = &self.control().appends;
        let state = || appends.first().state.load(Relaxed);
        !appends.are_none() && matches!(state(), append::PACKED | append::ABANDONED)
    }

    /// Completes the first pending append if its owner will not. Returns whether it did.
    fn help(&self, has_flushed: &Cell<bool>) -> Result<bool> {
        let locked = self.lock()?;
        let control = self.control();
        let appends = &control.appends;
        let Some(first) = appends.indexes().next() else { return Ok(false) };
        let pending = appends.entry(first);
        if pending.state.load(Relaxed) == append::PACKED {
            // It is the last append as well.
            locked.close_packed()?;
            if appends.are_none() {
                return Ok(true);
            }
        }
        let owner = pending.owner.load(Relaxed) as usize;
        let is_abandoned = appends.is_given_up(first);
        // An append that was given up because it cannot be written is not tried a third time, or a
        // record behind it might be acknowledged.
        control.check_not_failed()?;
        if !is_abandoned && self.handle.members.locks.is_alive(owner) {
            // It may be complete, with an owner that has died before it advanced the prefix.
            let has_moved = locked.advance();
            drop(locked);
            if has_moved {
                control.signal.ring();
            }
            return Ok(has_moved);
        }
        if pending.state.load(Relaxed) == append::DURABLE {
            let has_moved = locked.advance();
            drop(locked);
            control.signal.ring();
            return Ok(has_moved);
        }
        appends.adopt(first, self.handle.members.locks.index() as u64);
        let mut adopted = Append {
            handle: self.handle.clone(),
            index: first,
            lsn: pending.lsn.load(Relaxed),
            end_lsn: pending.end_lsn.load(Relaxed),
            acknowledged_lsn: control.appends.durable_lsn.load(Relaxed),
            is_complete: false,
        };
        let is_metadata = pending.is_metadata.load(Relaxed) != 0;
        let is_packed = pending.is_packed.load(Relaxed) != 0;
        drop(locked);
        point::pass("help-adopted");
        if is_packed {
            self.harden(adopted)?;
            has_flushed.set(self.hardening_flushes());
            return Ok(true);
        }
        match self.handle.log_reader().read(adopted.lsn) {
            Ok(record) if record.header.end_lsn() == adopted.end_lsn => {
                if is_metadata {
                    let locked = self.lock()?;
                    if control.appends.metadata_lsn.load(Relaxed) < adopted.end_lsn {
                        apply::apply(&locked, &record);
                    }
                }
                point::pass("help-decided");
                self.write_append(&mut adopted, record.bytes())?;
            }
            unread => {
                if is_metadata {
                    let _locked = self.lock()?;
                    if control.appends.metadata_lsn.load(Relaxed) >= adopted.end_lsn {
                        // Other processes have seen the change, and the record cannot be written
                        // again.
                        let error = unread.err().unwrap_or(FormatError::Short.into());
                        return Err(self.fail_unreadable(adopted.lsn, error));
                    }
                    // It never became visible; no image change is due for it.
                    appends.entry(adopted.index).is_metadata.store(0, Relaxed);
                }
                point::pass("help-decided");
                self.close_hole(adopted)?;
            }
        }
        Ok(true)
    }

    /// Fills the space of a missing append, after that of the commits that depend on it. Their
    /// process is dead.
    fn close_hole(&self, mut hole: Append) -> Result<()> {
        let locked = self.lock()?;
        let dependents = if mutant::is(self.handle.mutant, Mutant::KeepDependents) {
            Vec::new()
        } else {
            locked.control().appends.dependents_of(hole.index)
        };
        drop(locked);
        Appends::close_hole(&dependents, (hole.lsn, hole.end_lsn), |lsn, end_lsn| {
            if lsn == hole.lsn {
                point::pass("help-void");
            }
            let page = skip_page(lsn, end_lsn - lsn, hole.acknowledged_lsn, self.handle.identity());
            self.write_log(lsn, &page)
        })?;
        point::pass("append-written");
        self.complete(&mut hole)
    }
}
