//! The shared state of an open pool, and the metadata mutex.
//!
//! # Lock order
//! file mutexes, ascending, then the maintenance mutex, then the metadata mutex; no other lock is
//! taken while the last is held. While it is held, a thread neither waits for the media nor copies
//! data, except for the one durable write of [`Core::repair`]. The next holder detects a dead
//! holder, and repairs what may have been left half done ([`Core::repair`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use aquifer_sys::robust::{LockError, RobustGuard, RobustMutex};
use aquifer_vm::file_mapping::FileMapping;
use aquifer_vm::{Bytes, ProcessMark};
use uuid::Uuid;

use crate::background::Bell;
use crate::commit::CommitBuffer;
use crate::error::{PoolError, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::{Layout, SLOTS_PER_PAGE};
use crate::format::record::LogIdentity;
use crate::heartbeat::Heartbeat;
use crate::image;
use crate::image_words::before_bytes_are_stored;
use crate::log::{FailureKind, ReadError};
use crate::media::{ByteRange, Media, MediaError, MediaOperation};
use crate::membership::Membership;
use crate::mutant::Mutant;
use crate::object_names;
use crate::owners::Inconsistency;
use crate::pins::Pins;
use crate::segment::{Control, FILE_MUTEXES, Segment};
use crate::segment_place::Places;

/// An open pool. All of it is safe to use from any thread.
pub(crate) struct Core {
    /// A reference to itself: appends outlive the call that began them.
    pub me: Weak<Core>,
    /// Before the media, whose descriptor it refers to: dropped first.
    pub membership: Arc<Membership>,
    pub media: Arc<dyn Media>,
    pub layout: Layout,
    pub uuid: Uuid,
    pub created_ns: u64,
    /// The life in which this generation of the log began: see [`life`](crate::life).
    pub life: u64,
    /// The id that names the segment in the superblock; nil for a private one.
    pub segment_id: Uuid,
    /// The directories in which the segment may lie.
    pub places: Places,
    pub segment: Segment,
    pub pins: Pins,
    /// Whether this handle may change the segment and the media.
    pub is_writable: bool,
    pub stall_timeout: Duration,
    pub mutant: Option<Mutant>,
    pub process: ProcessMark,
    /// Memory for records, kept for reuse.
    pub buffers: Mutex<Vec<CommitBuffer>>,
    /// The position of this handle's last commit in the log. Changed with the metadata mutex.
    pub last_commit_lsn: AtomicU64,
    /// Inodes locked through this handle.
    pub held: Mutex<BTreeSet<u64>>,
    /// Held while this process has pages reserved only to zero them.
    pub zeroing: Mutex<()>,
    /// Held by the call of this process that has the [turn](crate::turn), or waits for it behind
    /// other processes.
    pub reserving: Mutex<()>,
    /// Sends heartbeats while this process waits for its media.
    pub heartbeat: Heartbeat,
    /// Rung when there may be pages to zero.
    pub zeroer_bell: OnceLock<Arc<Bell>>,
    /// Inodes that a reader of a damaged pool ignores, with the inconsistency.
    pub distrusted: OnceLock<BTreeMap<u64, Inconsistency>>,
}

/// The held metadata mutex.
pub(crate) struct Locked<'a> {
    core: &'a Core,
    guard: RobustGuard<'a>,
}

impl Locked<'_> {
    pub fn core(&self) -> &Core {
        self.core
    }

    pub fn control(&self) -> &Control {
        self.core.control()
    }
}

/// The held maintenance mutex, which guards applying records, checkpoints and superblocks.
pub(crate) struct Maintaining<'a> {
    guard: RobustGuard<'a>,
}

impl Maintaining<'_> {
    /// Reports progress of the holder to the waiters.
    pub fn note_progress(&self) {
        self.guard.note_progress();
    }
}

/// The index of the mutex of a file.
pub(crate) fn file_mutex(inode: u64) -> usize {
    inode as usize % FILE_MUTEXES
}

impl Core {
    pub fn control(&self) -> &Control {
        self.segment.control()
    }

    /// Requests zeroing of free pages in the background, if this handle has a background thread for
    /// it.
    pub fn zero_soon(&self) {
        if let Some(bell) = self.zeroer_bell.get() {
            bell.ring();
        }
    }

    /// A reference that keeps the pool open.
    pub fn share(&self) -> Arc<Core> {
        self.me.upgrade().expect("a method is running on it")
    }

    /// Copies bytes out of the media, without a system call where they are mapped.
    pub fn load(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        if let Some(mapping) = self.media.mapping()
            && mapping.read(offset_bytes, bytes).is_ok()
        {
            return Ok(());
        }
        // The range is not mapped; or this returns the error.
        Ok(self.media.read_at(offset_bytes, bytes)?)
    }

    /// Returns an error in a fork of the process that opened the pool.
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_current() { Ok(()) } else { Err(PoolError::Forked) }
    }

    /// Passes bytes of the media to a closure.
    pub fn look_at<T>(&self, range: ByteRange, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.check_process()?;
        let len = usize::try_from(range.len_bytes).unwrap_or(usize::MAX);
        if self.bytes(range).is_some()
            && let Some(mapping) = self.media.mapping()
        {
            let looked = mapping.guarded(self.media.file(), range.offset_bytes, len, look);
            return looked.map_err(|_| self.unreadable([range]));
        }
        if range.end_bytes() > self.media.len_bytes() {
            // Let the media report a range outside of them before memory is taken for all of it.
            self.media.read_at(range.end_bytes() - 1, &mut [0])?;
        }
        // The caller chose the length: running out of memory is an error, and must not abort the
        // process.
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| self.read_error(range, libc::ENOMEM))?;
        bytes.resize(len, 0);
        self.media.read_at(range.offset_bytes, &mut bytes)?;
        Ok(look(Bytes::from(&bytes[..])))
    }

    /// The error for bytes of the media in these ranges that could not be read.
    #[cold]
    pub fn unreadable(&self, ranges: impl IntoIterator<Item = ByteRange>) -> PoolError {
        let mut first = None;
        for range in ranges {
            first.get_or_insert(range);
            for at in (range.offset_bytes..range.end_bytes()).step_by(PAGE_BYTES as usize) {
                if let Err(error) = self.media.read_at(at, &mut [0]) {
                    return error.into();
                }
            }
        }
        // They can be read again, but what was read before cannot be trusted.
        let range = first.unwrap_or(ByteRange { offset_bytes: 0, len_bytes: 0 });
        self.read_error(range, libc::EIO)
    }

    fn read_error(&self, range: ByteRange, errno: i32) -> PoolError {
        PoolError::Media(MediaError {
            operation: MediaOperation::Read,
            path: self.media.path().to_path_buf(),
            offset_bytes: range.offset_bytes,
            len_bytes: range.len_bytes,
            source: std::io::Error::from_raw_os_error(errno),
        })
    }

    /// Bytes of the media in place; `None` if they are not mapped.
    #[inline]
    pub fn bytes(&self, range: ByteRange) -> Option<Bytes<'_>> {
        self.bytes_of(self.media.mapping()?, range)
    }

    /// The address at which to store bytes of the media; `None` if they are not mapped for stores.
    pub fn place_to_store(&self, range: ByteRange) -> Option<*mut u8> {
        let bytes = self.bytes_of(self.media.mapping_to_store()?, range)?;
        Some(bytes.as_ptr().cast_mut())
    }

    #[inline]
    fn bytes_of<'a>(&self, mapping: &'a FileMapping, range: ByteRange) -> Option<Bytes<'a>> {
        let len = usize::try_from(range.len_bytes).ok()?;
        mapping.bytes(range.offset_bytes, len).ok().or_else(|| {
            // The media may have grown.
            self.media.extend_mapping();
            mapping.bytes(range.offset_bytes, len).ok()
        })
    }

    /// Copies bytes to the media, visible to all processes at once, without a system call where
    /// they are memory.
    ///
    /// Where they are page cache, this is a write: a store to an uncached page would first read it,
    /// and a store to a page of a large folio would have the whole folio written back.
    ///
    /// # Safety
    /// As for [`Media::write_at`].
    pub unsafe fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        before_bytes_are_stored();
        // SAFETY: the caller upholds the same contract.
        unsafe { self.media.store_at(offset_bytes, bytes)? };
        Ok(())
    }

    /// The identity that new records of this pool carry.
    pub fn identity(&self) -> LogIdentity {
        LogIdentity {
            pool: self.uuid.as_u64_pair().0,
            generation: self.control().generation.load(Relaxed),
        }
    }

    /// Returns an error if nothing may be changed: in a fork, opened for reading, or after a
    /// failure.
    pub fn check_writable(&self) -> Result<()> {
        self.check_process()?;
        if !self.is_writable {
            return Err(PoolError::ReadOnly {
                path: self.media.path().to_path_buf(),
                reason: "it was opened for reading",
            });
        }
        self.check_not_failed()
    }

    /// Returns an error if a write failed earlier, here or in another process.
    pub fn check_not_failed(&self) -> Result<()> {
        // Acquire: pairs with the Release in `fail`. The kind is visible when the failure is.
        match self.control().failure.load(Acquire) {
            0 => Ok(()),
            errno => Err(PoolError::Failed {
                what: FailureKind::from_code(self.control().failure_kind.load(Relaxed)).name(),
                source: std::io::Error::from_raw_os_error((errno - 1) as i32),
            }),
        }
    }

    /// Makes the pool read-only for all processes, and wakes all waiters.
    pub fn fail(&self, kind: FailureKind, error: &std::io::Error) {
        let control = self.control();
        control.failure_kind.store(kind as u64, Relaxed);
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // Release: pairs with `check_not_failed`.
        control.failure.store(errno as u64 + 1, Release);
        self.signal();
    }

    /// Takes the mutex of a file, for its writers. It protects nothing that a dead holder could
    /// leave half done.
    pub fn lock_file(&self, inode: u64) -> Result<RobustGuard<'_>> {
        let mutex = &self.control().file_mutexes[file_mutex(inode)];
        let mut guard = self.take(mutex, "a file's lock")?;
        guard.set_owner(self.membership.index() as u16);
        if guard.previous_owner_died() {
            guard.repaired();
        }
        Ok(guard)
    }

    fn take<'a>(&self, mutex: &'a RobustMutex, what: &'static str) -> Result<RobustGuard<'a>> {
        if !self.process.is_current() {
            return Err(PoolError::Forked);
        }
        mutex.lock(Some(self.stall_timeout)).map_err(|error| match error {
            LockError::Timeout { holder_pid: pid, .. } => PoolError::Stalled { pid, what },
            LockError::System(source) => PoolError::Mutex(source),
            _ => PoolError::Mutex(std::io::Error::from_raw_os_error(libc::ENOTRECOVERABLE)),
        })
    }

    /// Takes the metadata mutex; first repairs the state if the previous holder died.
    pub fn lock(&self) -> Result<Locked<'_>> {
        let guard = self.take(&self.control().metadata_mutex, "the metadata lock")?;
        let mut locked = Locked { core: self, guard };
        if locked.guard.previous_owner_died() {
            self.repair(&locked)?;
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
        let head_lsn = self.head_lsn();
        let mut guard = loop {
            let progress = self.log_progress();
            let (durable_lsn, _) = progress;
            match self.take(mutex, "the maintenance lock") {
                Err(PoolError::Stalled { .. }) if durable_lsn < head_lsn => {
                    if self.log_progress() == progress {
                        return Err(self.stalled_append());
                    }
                }
                taken => break taken?,
            }
        };
        self.take_over(&mut guard);
        Ok(Maintaining { guard })
    }

    /// Takes the maintenance mutex if it is free.
    pub fn try_maintain(&self) -> Option<Maintaining<'_>> {
        let mut guard = self.control().maintenance_mutex.try_lock().ok()??;
        self.take_over(&mut guard);
        Some(Maintaining { guard })
    }

    fn take_over(&self, guard: &mut RobustGuard<'_>) {
        if guard.previous_owner_died() {
            // The dead holder may have cleared the marks of changed pages without writing the
            // pages.
            image::mark_changed(self, 0..self.segment.allocated_slots() / SLOTS_PER_PAGE);
            guard.repaired();
        }
    }

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
    fn repair(&self, locked: &Locked<'_>) -> Result<()> {
        let control = self.control();
        for index in control.appends.indexes() {
            let pending = self.pending(index);
            let lsn = pending.lsn.load(Relaxed);
            if pending.is_packed.load(Relaxed) != 0 {
                self.repair_packed(locked, index)?;
                continue;
            }
            if pending.is_metadata.load(Relaxed) == 0
                || lsn < control.appends.metadata_lsn.load(Relaxed)
            {
                continue;
            }
            // Only the holder of the metadata mutex makes metadata records, so this one is the dead
            // process's. It counts if it is completely in the log.
            match self.read_record(lsn) {
                Ok(record) => image::apply(locked, &record),
                Err(ReadError::Format(_)) => pending.is_metadata.store(0, Relaxed),
                // It may count or not: no record may be appended that could contradict it.
                Err(unreadable) => drop(self.fail_unreadable(lsn, unreadable)),
            }
        }
        // Its transaction has either happened or not. Release: as in the drop of `Transaction`,
        // pairs with `wait_while_claimed`.
        control.claimed_inode.store(0, Release);
        if control.image.is_odd() {
            object_names::distrust(control);
        }
        control.image.end_any_change();
        crate::alloc::rebuild(locked)
    }
}
