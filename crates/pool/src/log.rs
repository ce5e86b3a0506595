//! The redo log: appending in parallel, acknowledging in order.
//!
//! ```text
//!        tail            applied          durable                        head
//!  ──────┬────────────────┬─────────────────┬──────────────────────────────┬────── ring
//!  reused│ at its place,  │ to be copied to │ pending: reserved, written,  │ free
//!        │ not flushed    │ its place       │ durable behind another       │
//! ```
//!
//! An append reserves its space under the metadata mutex ([`Locked::reserve`]), writes it without any
//! lock, in parallel with others, and reports its completion ([`Log::complete`]). It is
//! *acknowledged* when everything before it is durable as well ([`Log::wait_durable`]): recovery
//! reads records up to the first incomplete one, so no acknowledged record can lie behind a hole.
//!
//! # Holes
//! A process that dies or gives up between reserving and completing leaves a hole. A process that
//! waits behind it detects that the owner's lock was released, and completes the append: with the
//! same bytes if the record is whole, else with a record that only fills the space. So the outcome
//! of an append whose owner died is old or new, never both.
//!
//! A process may have several commits in flight, each of which contains the changes since the
//! previous one. If one of them becomes a hole, the later ones must not count either: they are made
//! void *first*, while the hole still keeps readers from advancing to them. They were not
//! acknowledged, because the hole was not.
//!
//! # Packed records
//! Most changes need not be durable at once. Their records are consecutive, in one append that
//! grows ([`append::PACKED`]): a change is written to the log under the metadata mutex, and counts
//! for all processes when one store moves the append's end behind it. A process that needs
//! everything before some position to be durable ([`Log::wait_durable`]) adopts the append, and
//! completes it like any other ([`Log::harden`]):
//!
//! 1. *close* it: a record that fills the log up to a page boundary, so that durable bytes are not
//!    written again;
//! 2. write back and flush all bytes that its records expose, which is rule 3 for all of them at
//!    once;
//! 3. *mark* the closing record, and write the whole append durably.
//!
//! The kernel may write pages of the log back at any time, so after a power cut there can be whole
//! records whose exposed bytes are missing. Recovery accepts them only if a marked record follows,
//! or if the [`life`](crate::life) is the same and no process has seen an error about lost bytes:
//! then only processes have died, and everything is still in memory.
//!
//! # Without the lock
//! Room is reserved, and the durable prefix advanced, under the metadata mutex.
//! [`appends`](crate::appends) and [`signal`](crate::signal) document what is stored and loaded
//! without it, and why its order suffices; they have models.
//!
//! # A failed write (rule 5)
//! A failed write is repeated once at the same place. If that fails too, the pool becomes read-only
//! for all processes, and no record behind the failed one is ever acknowledged.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_sys::patience::WaitedFor;

use crate::appends::{Appends, NewAppend, append};
use crate::commit::CommitBuffer;
use crate::error::{PoolError, Result};
use crate::failure::FailureKind;
use crate::format::FormatError;
use crate::format::record::{Record, skip_page};
use crate::handle::Handle;
use crate::heartbeat::Held;
use crate::image;
use crate::locked::Locked;
use crate::media::MediaError;
use crate::mutant::{self, Mutant};
use crate::point;
use crate::segment::Control;

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

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error(transparent)]
    Media(#[from] MediaError),
    #[error(transparent)]
    Format(#[from] FormatError),
}

/// The log, as this handle appends to it. Its end and its pending appends lie in the segment, for
/// all processes ([`Appends`]).
pub(crate) struct Log {
    pub handle: Arc<Handle>,
    /// Memory for records, kept for reuse.
    pub(crate) buffers: Mutex<Vec<CommitBuffer>>,
    /// The position of this handle's last commit. Changed with the metadata mutex.
    last_commit_lsn: AtomicU64,
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
    pub fn new(handle: Arc<Handle>) -> Log {
        let last_commit_lsn = AtomicU64::new(append::NOTHING);
        Log { handle, buffers: Mutex::default(), last_commit_lsn }
    }

    pub fn control(&self) -> &Control {
        self.handle.control()
    }

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
    /// the pool for all processes.
    pub(crate) fn write_log(&self, lsn: u64, bytes: &[u8]) -> Result<()> {
        let Handle { media, heartbeat, mutant, .. } = &*self.handle;
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
            self.control().fail(FailureKind::Log, &error.source);
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
            self.control().fail(FailureKind::Data, &error.source);
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
            self.control().fail(FailureKind::Log, &error.source);
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
        if self.control().appends.durable_lsn() >= lsn {
            Ok(())
        } else {
            self.handle.heartbeat.while_media_work(Held::Files, || self.wait_until_durable(lsn))
        }
    }

    fn wait_until_durable(&self, lsn: u64) -> Result<()> {
        let control = self.control();
        let mut waited = WaitedFor::new(self.progress());
        loop {
            let signal = control.signal.now();
            if control.appends.durable_lsn() >= lsn {
                return Ok(());
            }
            control.check_not_failed()?;
            if self.is_waiting() {
                self.help()?;
                continue;
            }
            if !control.signal.wait(signal, LOOK_AFTER)
                && !self.help()?
                && waited.look(self.progress()) > self.handle.members.stall_timeout
            {
                return Err(self.stalled_append());
            }
        }
    }

    /// A value that changes when the log becomes durable further, or when a part of its first
    /// append does.
    pub(crate) fn progress(&self) -> (u64, u64) {
        let appends = &self.control().appends;
        (appends.durable_lsn(), appends.first().progress.load(Relaxed))
    }

    /// Whether the first append is one that any waiter may complete.
    fn is_waiting(&self) -> bool {
        let appends = &self.control().appends;
        let state = || appends.first().state.load(Relaxed);
        !appends.are_none() && matches!(state(), append::PACKED | append::ABANDONED)
    }

    pub(crate) fn stalled_append(&self) -> PoolError {
        let owner = self.control().appends.first().owner.load(Relaxed) as usize;
        let pid = self.handle.members.locks.pid_of(self.control(), owner);
        PoolError::Stalled { pid, what: "a commit" }
    }

    /// Reads a record that counts; fails the pool if it cannot be read.
    pub fn read_counted(&self, lsn: u64) -> Result<Record> {
        self.handle.log_reader().read(lsn).map_err(|error| self.fail_unreadable(lsn, error))
    }

    /// Fails the pool because a record that counts cannot be read; returns the error.
    pub fn fail_unreadable(&self, lsn: u64, error: ReadError) -> PoolError {
        match error {
            ReadError::Media(error) => {
                self.control().fail(FailureKind::Log, &error.source);
                error.into()
            }
            ReadError::Format(error) => {
                self.control().fail(FailureKind::Log, &io::Error::from_raw_os_error(libc::EIO));
                self.handle.damaged(format!("the log at {lsn}"), error)
            }
        }
    }

    /// Completes the first pending append if its owner will not. Returns whether it did.
    fn help(&self) -> Result<bool> {
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
            return Ok(true);
        }
        match self.handle.log_reader().read(adopted.lsn) {
            Ok(record) if record.header.end_lsn() == adopted.end_lsn => {
                if is_metadata {
                    let locked = self.lock()?;
                    if control.appends.metadata_lsn.load(Relaxed) < adopted.end_lsn {
                        image::apply(&locked, &record);
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
