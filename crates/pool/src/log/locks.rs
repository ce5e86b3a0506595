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
//!    once; but not those that one of its records frees again;
//! 3. *mark* the closing record, and write the whole append durably.
//!
//! The kernel may write pages of the log back at any time, so after a power cut there can be whole
//! records whose exposed bytes are missing. Recovery accepts them only if a marked record follows,
//! or if the [`life`](crate::shared::life) is the same and no process has seen an error about lost bytes:
//! then only processes have died, and everything is still in memory.
//!
//! # The two mutexes
//! A record enters the log, and changes the image and the maps of pages, only with the *metadata*
//! mutex ([`Locked`]). Records are copied to their place, and the tail moves, only with the
//! *maintenance* mutex ([`Maintaining`]). What needs one of them is a method of its guard, or takes
//! the guard. While a thread holds the metadata mutex, it neither waits for the media nor copies
//! data, except for the one durable write of the [repair](crate::metadata::repair). The next holder detects a
//! dead holder, and repairs what may have been left half done. [`core`](crate::metadata::core) has the order
//! of all locks.
//!
//! # Without the lock
//! Room is reserved, and the durable prefix advanced, under the metadata mutex.
//! [`appends`](crate::shared::appends) and [`signal`](crate::shared::signal) document what is stored and loaded
//! without it, and why its order suffices; they have models.
//!
//! # A failed write (rule 5)
//! A failed write is repeated once at the same place. If that fails too, the pool becomes read-only
//! for all processes, and no record behind the failed one is ever acknowledged.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::robust::RobustGuard;

use crate::bitmap;
use crate::error::{PoolError, Result};
use crate::format::record::Record;
use crate::format::run::Run;
use crate::log::buffers::Buffers;
use crate::log::reader::ReadError;
use crate::log::superblocks::write_superblocks;
use crate::media::MediaError;
use crate::shared::appends::append;
use crate::shared::failure::FailureKind;
use crate::shared::handle::Handle;
use crate::shared::segment::Control;

/// What the log asks of the metadata, which its records change.
pub(crate) trait Metadata: Send + Sync {
    /// Completes or undoes what a process was doing when it died with the metadata mutex.
    ///
    /// # Errors
    /// Of the media, or without memory.
    fn repair(&self, locked: &Locked<'_>) -> Result<()>;

    /// Applies a record of the log that counts, if need be for the second time.
    fn apply(&self, locked: &Locked<'_>, record: &Record);

    /// The runs that records behind `lsn` have freed, up to the one that ends at `end_lsn`.
    fn freed_between(&self, locked: &Locked<'_>, lsn: u64, end_lsn: u64) -> Vec<Run>;
}

/// The log, as this handle appends to it. Its end and its pending appends lie in the segment, for
/// all processes ([`Appends`](crate::shared::appends::Appends)).
pub(crate) struct Log {
    pub handle: Arc<Handle>,
    pub buffers: Buffers,
    /// The position of this handle's last commit. Changed with the metadata mutex.
    pub last_commit_lsn: AtomicU64,
    /// The layer above.
    pub metadata: &'static dyn Metadata,
}

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

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // Found while it was held: a change may be half done, and this handle may not complete it.
        // Relaxed: guarded by the mutex, which is released after this.
        if self.handle().members.process.has_ended() {
            self.control().needs_repair.store(1, Relaxed);
        }
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

    /// Marks these pages of the image as changed. The marks are cleared only with this mutex. The
    /// metadata mutex is not needed, and its holder may be stopped: a lost mark would be a lost
    /// page.
    pub fn mark_changed(&self, pages: impl Iterator<Item = u64>) {
        let dirty = self.log.handle.segment.dirty_image_pages();
        pages.for_each(|page| bitmap::set_shared(dirty, page));
    }

    /// Records the failure of the pool in the superblocks.
    pub fn write_loss(&self) -> std::result::Result<(), MediaError> {
        let (handle, control) = (&self.log().handle, self.log().control());
        let superblock = handle.superblock(control.tail_lsn.load(Relaxed));
        // Stored before the write: a failed write may have written one copy.
        control.sequence.store(superblock.sequence, Relaxed);
        write_superblocks(&*handle.media, &superblock, 0, handle.mutant)
    }

    fn take_over(&mut self) {
        if self.guard.previous_owner_died() {
            // The dead holder may have cleared the marks of changed pages without writing the
            // pages.
            self.mark_changed(self.log.handle.segment.present_pages());
            self.guard.repaired();
        }
    }
}

impl Log {
    pub fn new(handle: Arc<Handle>, metadata: &'static dyn Metadata) -> Log {
        let last_commit_lsn = AtomicU64::new(append::NOTHING);
        Log { handle, buffers: Buffers::default(), last_commit_lsn, metadata }
    }

    pub fn control(&self) -> &Control {
        self.handle.control()
    }

    /// Takes the metadata mutex; first repairs the state if the previous holder died.
    pub fn lock(&self) -> Result<Locked<'_>> {
        let mutex = &self.control().metadata_mutex;
        self.begin(self.handle.members.take(mutex, "the metadata lock")?)
    }

    /// Takes the metadata mutex as [`Log::lock`] does, if it is free.
    pub fn try_lock(&self) -> Result<Option<Locked<'_>>> {
        self.handle.members.check_process()?;
        match self.control().metadata_mutex.try_lock() {
            Ok(Some(guard)) => self.begin(guard).map(Some),
            _ => Ok(None),
        }
    }

    fn begin<'a>(&'a self, guard: RobustGuard<'a>) -> Result<Locked<'a>> {
        let mut locked = Locked { log: self, guard };
        let (members, needs_repair) = (&self.handle.members, &self.control().needs_repair);
        // After the wait.
        if locked.guard.previous_owner_died() || needs_repair.load(Relaxed) != 0 {
            // A repair reads and writes the media.
            let repaired = members.check_kept_now().and_then(|()| self.metadata.repair(&locked));
            if members.process.has_ended() {
                // Another handle repairs it: see the drop of `Locked`. If this process dies before
                // that, it is a death of a holder again.
                locked.guard.repaired();
                return Err(PoolError::LocksLost);
            }
            repaired?;
            needs_repair.store(0, Relaxed);
            locked.guard.repaired();
        }
        members.check_kept()?;
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
        // As in `lock`.
        self.handle.members.check_kept()?;
        Ok(maintaining)
    }

    /// Takes the maintenance mutex if it is free.
    pub fn try_maintain(&self) -> Option<Maintaining<'_>> {
        self.handle.members.check_kept().ok()?;
        let guard = self.control().maintenance_mutex.try_lock().ok()??;
        let mut maintaining = Maintaining { log: self, guard };
        maintaining.take_over();
        Some(maintaining)
    }

    /// A value that changes when the log becomes durable further, or when a part of its first
    /// append does.
    pub fn progress(&self) -> (u64, u64) {
        let appends = &self.control().appends;
        (appends.durable_lsn(), appends.first().progress.load(Relaxed))
    }

    pub fn stalled_append(&self) -> PoolError {
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
                self.handle.fail_at_media(FailureKind::Log, &error.source);
                error.into()
            }
            ReadError::Format(error) => {
                self.control().fail(FailureKind::Log, &io::Error::from_raw_os_error(libc::EIO));
                self.handle.damaged(format!("the log at {lsn}"), error)
            }
        }
    }

    /// Records in the superblocks that the system has lost written bytes, if no thread holds the
    /// maintenance mutex. The next process that opens the pool then ignores commits that expose
    /// bytes which are not known to be durable: these may be among the lost ones, and the pages
    /// would show bytes of an earlier owner. Returns whether the loss is on media. If it is not,
    /// the segment records it as long as it exists.
    pub fn note_loss(&self) -> bool {
        // Does not block: the calling thread may hold the mutex itself. The holder checks for
        // failures before it releases it.
        self.try_maintain().is_some_and(|maintaining| maintaining.write_loss().is_ok())
    }

    /// Which part of the log is in use, in percent.
    pub fn use_percent(&self) -> u64 {
        let durable_lsn = self.control().appends.durable_lsn.load(Relaxed);
        // Other processes advance both between the two loads: the tail may be beyond the loaded
        // durable position.
        let used = durable_lsn.saturating_sub(self.control().tail_lsn.load(Relaxed));
        used * 100 / self.handle.layout.log().len_bytes
    }
}
