//! Appends: the reserved space of a record, and writing it. The top of [`locks`](super::locks)
//! describes the log.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::{PoolError, Result};
use crate::format::record::skip_page;
use crate::log::locks::{Locked, Log};
use crate::mutant::{self, Mutant};
use crate::point;
use crate::shared::appends::{NewAppend, append};
use crate::shared::failure::FailureKind;
use crate::shared::handle::Handle;
use crate::shared::heartbeat::Held;

/// Reserved space of the log that this process writes.
pub(crate) struct Append {
    pub(super) handle: Arc<Handle>,
    pub(super) index: u64,
    pub lsn: u64,
    pub end_lsn: u64,
    pub acknowledged_lsn: u64,
    pub(super) is_complete: bool,
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

    /// Advances the durable prefix over the durable appends.
    pub(super) fn advance(&self) -> bool {
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
}
