//! The redo log: appending in parallel, acknowledging in order.
//!
//! ```text
//!        tail            applied          durable                        head
//!  ──────┬────────────────┬─────────────────┬──────────────────────────────┬────── ring
//!  reused│ at its place,  │ to be copied to │ pending: reserved, written,  │ free
//!        │ not flushed    │ its place       │ durable behind another       │
//! ```
//!
//! An append reserves its space under the metadata mutex ([`Core::reserve`]), writes it without any
//! lock, in parallel with others, and reports its completion ([`Core::complete`]). It is
//! *acknowledged* when everything before it is durable as well ([`Core::wait_durable`]): recovery
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
//! everything before some position to be durable ([`Core::wait_durable`]) adopts the append, and
//! completes it like any other ([`Core::harden`]):
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
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_sys::patience::WaitedFor;

use crate::appends::{Appends, NewAppend, Pending, append};
use crate::core::{Core, Locked};
use crate::error::{PoolError, Result};
use crate::format::record::{Header, MIN_CLOSE_BYTES, RECORD_UNIT_BYTES, Record, skip_page};
use crate::format::{FormatError, PAGE_BYTES};
use crate::heartbeat::Held;
use crate::media::{Media, MediaError};
use crate::mutant::{self, Mutant};
use crate::point;

/// How long a waiter sleeps before it checks whether the first pending append still has an owner.
const LOOK_AFTER: Duration = Duration::from_millis(20);

/// The kind of failure that made the pool read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum FailureKind {
    Log = 1,
    Data = 2,
    Superblock = 3,
}

impl FailureKind {
    pub fn from_code(code: u64) -> FailureKind {
        match code {
            1 => FailureKind::Log,
            3 => FailureKind::Superblock,
            _ => FailureKind::Data,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            FailureKind::Log => "writing the log",
            FailureKind::Data => "writing data back",
            FailureKind::Superblock => "writing a superblock",
        }
    }
}

/// Reserved space of the log that this process writes.
pub(crate) struct Append {
    core: Arc<Core>,
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
        if self.is_complete || !self.core.process.is_current() {
            return;
        }
        let pending = self.core.pending(self.index);
        let is_unapplied_metadata = pending.is_metadata.load(Relaxed) != 0
            && self.core.control().appends.metadata_lsn.load(Relaxed) < self.end_lsn;
        if is_unapplied_metadata {
            // The record may be in the log, but it is not in the image: a later record could
            // contradict it. Failing the pool prevents later records.
            self.core.fail(FailureKind::Log, &io::Error::from_raw_os_error(libc::EIO));
        }
        // Without the lock: the entry belongs to this append until it is durable. A process that
        // waits behind it completes it, and sees the failure noted before.
        self.core.control().appends.give_up(self.index);
        self.core.signal();
    }
}

/// Reads and checks the record at `lsn` of a log.
pub(crate) fn read_record(
    media: &dyn Media,
    layout: &crate::format::layout::Layout,
    lsn: u64,
    identity: crate::format::record::LogIdentity,
    mutant: Option<Mutant>,
) -> std::result::Result<Record, ReadError> {
    let log = layout.log();
    let offset = lsn % log.len_bytes;
    let position = log.offset_bytes + offset;
    // Up to the next page boundary: in most cases the whole record.
    let first_bytes = PAGE_BYTES - offset % PAGE_BYTES;
    let mut page = vec![0; first_bytes as usize];
    media.read_at(position, &mut page)?;
    let header = Header::decode(&page, lsn, log.len_bytes, identity)?;
    let wanted_bytes = match (header.is_close, header.is_skip) {
        (true, _) => MIN_CLOSE_BYTES,
        (false, true) => RECORD_UNIT_BYTES,
        (false, false) => header.len_bytes,
    };
    page.resize(wanted_bytes as usize, 0);
    if wanted_bytes > first_bytes {
        media.read_at(position + first_bytes, &mut page[first_bytes as usize..])?;
    }
    if mutant::is(mutant, Mutant::NoChecksum) {
        return Ok(Record::decode_unchecked(header, page)?);
    }
    Ok(Record::decode(header, page)?)
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error(transparent)]
    Media(#[from] MediaError),
    #[error(transparent)]
    Format(#[from] FormatError),
}

impl Core {
    /// Wakes all waiters for the log.
    pub fn signal(&self) {
        self.control().signal.ring();
    }

    pub fn pending(&self, index: u64) -> &Pending {
        self.control().appends.entry(index)
    }

    /// The position of the next record.
    pub fn head_lsn(&self) -> u64 {
        self.control().appends.head_lsn()
    }

    pub(crate) fn position(&self, lsn: u64) -> u64 {
        let log = self.layout.log();
        log.offset_bytes + lsn % log.len_bytes
    }

    pub fn read_record(&self, lsn: u64) -> std::result::Result<Record, ReadError> {
        read_record(&*self.media, &self.layout, lsn, self.identity(), self.mutant)
    }

    /// Whether the log has room for a record of `len_bytes`, between the head and the tail.
    pub(crate) fn has_room(&self, len_bytes: u64) -> bool {
        let log_bytes = self.layout.log().len_bytes;
        let used = self.head_lsn() - self.control().tail_lsn.load(Relaxed);
        let to_end = log_bytes - self.head_lsn() % log_bytes;
        let skipped = if len_bytes > to_end { to_end } else { 0 };
        used + skipped + len_bytes <= log_bytes
    }

    pub(crate) fn push_pending(
        &self,
        lsn: u64,
        end_lsn: u64,
        state: u64,
        is_metadata: bool,
        depends_lsn: u64,
    ) -> u64 {
        let owner = self.membership.index() as u64;
        let new = NewAppend { lsn, end_lsn, state, owner, is_metadata, depends_lsn };
        self.control().appends.push(new)
    }

    /// Reserves space for a record of `len_bytes`, with the metadata mutex held; `None` if there is
    /// not enough now. A record never crosses the end of the ring: a separate append fills the rest
    /// before it.
    pub fn reserve(
        &self,
        locked: &Locked<'_>,
        len_bytes: u64,
        is_metadata: bool,
    ) -> Result<Option<(Append, Option<Append>)>> {
        self.close_packed(locked)?;
        let control = self.control();
        if !self.has_room(len_bytes) || !control.appends.has_entries(2) {
            return Ok(None);
        }
        let log_bytes = self.layout.log().len_bytes;
        let acknowledged_lsn = control.appends.durable_lsn.load(Relaxed);
        let take = |lsn: u64, len_bytes: u64, is_metadata, depends_lsn| Append {
            core: self.share(),
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
        let mut lsn = self.head_lsn();
        let to_end = log_bytes - lsn % log_bytes;
        let filler = (len_bytes > to_end).then(|| {
            let filler = take(lsn, to_end, false, append::NOTHING);
            lsn += to_end;
            point::pass("reserve-filler");
            filler
        });
        let mut depends_lsn = append::NOTHING;
        if !is_metadata {
            let before_lsn = self.last_commit_lsn.swap(lsn, Relaxed);
            if before_lsn != append::NOTHING && before_lsn >= acknowledged_lsn {
                depends_lsn = before_lsn;
            }
        }
        if !is_metadata {
            control.content_end_lsn.store(lsn + len_bytes, Relaxed);
        }
        let append = take(lsn, len_bytes, is_metadata, depends_lsn);
        point::pass("reserve-pending");
        Ok(Some((append, filler)))
    }

    /// Reports an append as durable, and advances the durable prefix.
    pub(crate) fn complete(&self, append: &mut Append) -> Result<()> {
        let locked = self.lock()?;
        self.control().appends.note_durable(append.index);
        append.is_complete = true;
        point::pass("complete-durable");
        let has_moved = self.advance();
        drop(locked);
        if has_moved {
            self.signal();
        }
        Ok(())
    }

    /// Advances the durable prefix over the durable appends. Requires the metadata mutex.
    fn advance(&self) -> bool {
        let believes_all = mutant::is(self.mutant, Mutant::AcknowledgeOutOfOrder);
        self.control().appends.advance(believes_all, || point::pass("advance-between"))
    }

    /// Writes `bytes` durably at `lsn`, twice if the first attempt fails; the second failure fails
    /// the pool for all processes.
    pub(crate) fn write_log(&self, lsn: u64, bytes: &[u8]) -> Result<()> {
        let position = self.position(lsn);
        let write = || {
            if mutant::is(self.mutant, Mutant::NoFlush) {
                // SAFETY: only the log writes to its own pages, and no reference to them is ever
                // made.
                unsafe { self.media.write_at(position, bytes) }
            } else {
                self.while_media_work(Held::Log, || {
                    // SAFETY: as above.
                    unsafe { self.media.write_durable(position, bytes) }
                })
            }
        };
        if write().is_ok() {
            return Ok(());
        }
        write().map_err(|error| {
            self.fail(FailureKind::Log, &error.source);
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
        if let Err(error) = self.while_media_work(Held::Log, || self.media.flush()) {
            self.fail(FailureKind::Data, &error.source);
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
        // SAFETY: only the log writes to its own pages, and no reference to them is ever made.
        let write = || unsafe { self.media.write_at(self.position(append.lsn), bytes) };
        write().or_else(|_| write()).inspect_err(|error| {
            self.fail(FailureKind::Log, &error.source);
        })?;
        self.control().appends.note_written(append.index);
        Ok(())
    }

    /// Fills the space of an append without content.
    pub fn write_filler(&self, append: &mut Append) -> Result<()> {
        let len_bytes = append.end_lsn - append.lsn;
        let page = skip_page(append.lsn, len_bytes, append.acknowledged_lsn, self.identity());
        self.write_append(append, &page)
    }

    /// Waits until everything before `lsn` is durable, and completes abandoned appends.
    pub fn wait_durable(&self, lsn: u64) -> Result<()> {
        if self.control().appends.durable_lsn() >= lsn {
            Ok(())
        } else {
            self.while_media_work(Held::Files, || self.wait_until_durable(lsn))
        }
    }

    fn wait_until_durable(&self, lsn: u64) -> Result<()> {
        let control = self.control();
        let mut waited = WaitedFor::new(self.log_progress());
        loop {
            let signal = control.signal.now();
            if control.appends.durable_lsn() >= lsn {
                return Ok(());
            }
            self.check_not_failed()?;
            if self.is_waiting() {
                self.help()?;
                continue;
            }
            if !control.signal.wait(signal, LOOK_AFTER)
                && !self.help()?
                && waited.look(self.log_progress()) > self.stall_timeout
            {
                return Err(self.stalled_append());
            }
        }
    }

    /// A value that changes when the log becomes durable further, or when a part of its first
    /// append does.
    pub(crate) fn log_progress(&self) -> (u64, u64) {
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
        PoolError::Stalled { pid: self.membership.pid_of(self.control(), owner), what: "a commit" }
    }

    /// Fails the pool because a record that counts cannot be read; returns the error.
    pub fn fail_unreadable(&self, lsn: u64, error: ReadError) -> PoolError {
        match error {
            ReadError::Media(error) => {
                self.fail(FailureKind::Log, &error.source);
                error.into()
            }
            ReadError::Format(error) => {
                self.fail(FailureKind::Log, &io::Error::from_raw_os_error(libc::EIO));
                self.damaged(format!("the log at {lsn}"), error)
            }
        }
    }

    /// Abandons the appends of a process slot whose owner is dead; the processes that wait for them
    /// complete them.
    pub fn abandon_appends_of(&self, locked: &Locked<'_>, slot: usize) {
        let appends = &locked.control().appends;
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

    /// Completes the first pending append if its owner will not. Returns whether it did.
    fn help(&self) -> Result<bool> {
        let locked = self.lock()?;
        let control = self.control();
        let appends = &control.appends;
        let Some(first) = appends.indexes().next() else { return Ok(false) };
        let pending = appends.entry(first);
        if pending.state.load(Relaxed) == append::PACKED {
            // It is the last append as well.
            self.close_packed(&locked)?;
            if appends.are_none() {
                return Ok(true);
            }
        }
        let owner = pending.owner.load(Relaxed) as usize;
        let is_abandoned = appends.is_given_up(first);
        // An append that was given up because it cannot be written is not tried a third time, or a
        // record behind it might be acknowledged.
        self.check_not_failed()?;
        if !is_abandoned && self.membership.is_alive(owner) {
            // It may be complete, with an owner that has died before it advanced the prefix.
            let has_moved = self.advance();
            drop(locked);
            if has_moved {
                self.signal();
            }
            return Ok(has_moved);
        }
        if pending.state.load(Relaxed) == append::DURABLE {
            let has_moved = self.advance();
            drop(locked);
            self.signal();
            return Ok(has_moved);
        }
        appends.adopt(first, self.membership.index() as u64);
        let mut adopted = Append {
            core: self.share(),
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
        match self.read_record(adopted.lsn) {
            Ok(record) if record.header.end_lsn() == adopted.end_lsn => {
                if is_metadata {
                    let locked = self.lock()?;
                    if control.appends.metadata_lsn.load(Relaxed) < adopted.end_lsn {
                        crate::image::apply(&locked, &record);
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
                    self.pending(adopted.index).is_metadata.store(0, Relaxed);
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
        let dependents = if mutant::is(self.mutant, Mutant::KeepDependents) {
            Vec::new()
        } else {
            self.control().appends.dependents_of(hole.index)
        };
        drop(locked);
        Appends::close_hole(&dependents, (hole.lsn, hole.end_lsn), |lsn, end_lsn| {
            if lsn == hole.lsn {
                point::pass("help-void");
            }
            let page = skip_page(lsn, end_lsn - lsn, hole.acknowledged_lsn, self.identity());
            self.write_log(lsn, &page)
        })?;
        point::pass("append-written");
        self.complete(&mut hole)
    }
}
