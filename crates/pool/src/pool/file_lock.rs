//! Locks of files that are written to or changed.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_sys::robust::RobustGuard;

use super::Pool;
use super::data::STORED_AT_ONCE_BYTES;
use crate::bitmap;
use crate::error::Result;
use crate::log::locks::Log;
use crate::media::PersistenceDomain;
use crate::metadata::core::Core;
use crate::mutant::{self, Mutant};
use crate::point;
use crate::shared::handle::Handle;
use crate::shared::heartbeat::Held;
use crate::shared::members::file_mutex;
use crate::shared::segment::SlotSet;

/// One or two files, locked for writing. Unlocked when dropped, or when the process dies.
///
/// # Pages that change owners
/// Bytes stored to a page may reach the media before the record that gave the page to its file.
/// That is harmless if a power cut loses a new page together with its record. But if the record of
/// an *exchange* is lost, the page belongs to another file again, or to another part of the same
/// one. So a caller that exchanges pages declares it ([`FileLock::exchange`]), and no thread may
/// store to pages of a file before the last exchange is durable ([`FileLock::settle`]): of any
/// number of exchanges only the last one before a store causes a wait.
///
/// # Dead holders
/// What a caller reads of the file under the lock must include the last change by the holder before
/// it. If that holder died right after its change was published, the change counts and the image
/// lacks it: an overwrite would go to pages that the file no longer has, and an append would begin at
/// the old end. So the caller that gets the lock then has the metadata repaired first; if that fails,
/// the next one does.
///
/// # Forgotten locks
/// A lock that is never dropped (`mem::forget`) keeps the file locked until its thread ends. The
/// thread's list of held mutexes then lies in the shared memory, which therefore stays mapped when
/// the pool is closed, with everything else that belongs to the handle's open file description.
pub struct FileLock<'a> {
    log: &'a Log,
    mutexes: [usize; 2],
    first: RobustGuard<'a>,
    second: Option<RobustGuard<'a>>,
    /// How much was stored since this handle's locks were found to be kept: when this was taken, or
    /// later.
    stored_bytes: Cell<usize>,
    /// Keeps the mutexes mapped even if this is never dropped.
    _keeps_mapped: Arc<Handle>,
}

impl FileLock<'_> {
    /// Has the image brought up to date if a holder before this one has died.
    fn repair_after_the_dead(&self) -> Result<()> {
        self.log.control().dead_file_holders.settle(|| self.log.lock().map(drop))
    }

    /// Reports progress of a long operation to the waiters: their
    /// [`PoolOptions::stall_timeout`](crate::PoolOptions::stall_timeout) restarts.
    pub fn note_progress(&self) {
        self.first.note_progress();
        self.second.iter().for_each(RobustGuard::note_progress);
    }

    /// As [`Pool::store`], to pages of these files and to pages that the caller has reserved. Once in
    /// a MiB, looks whether this handle's locks are kept, and reports progress to the waiters.
    ///
    /// # Errors
    /// As for [`Pool::store`].
    ///
    /// # Safety
    /// As for [`Pool::store`].
    pub unsafe fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let Handle { members, media, .. } = &*self.log.handle;
        // A child has other memory where its parent has the mapping.
        members.check_process()?;
        for (part, bytes) in (0..).zip(bytes.chunks(STORED_AT_ONCE_BYTES)) {
            self.stored_bytes.set(self.stored_bytes.get() + bytes.len());
            if self.stored_bytes.get() > STORED_AT_ONCE_BYTES {
                members.check_kept()?;
                self.note_progress();
                self.stored_bytes.set(bytes.len());
            }
            // SAFETY: the caller upholds the same contract.
            let stored =
                unsafe { media.store(offset_bytes + part * STORED_AT_ONCE_BYTES as u64, bytes) };
            point::pass("file-stored");
            // Also what was stored before an error.
            self.note_write();
            stored?;
        }
        Ok(())
    }

    fn note_write(&self) {
        let [first, second] = self.mutexes;
        self.log.handle.note_write(first);
        if second != first {
            self.log.handle.note_write(second);
        }
    }

    /// Notes whether the application has requested room beyond the end of a file; such room is not
    /// released as surplus. Visible to all processes, until the file is deleted or no process has
    /// the pool open.
    pub fn note_room(&self, inode: u64, was_asked_for: bool) {
        let segment = &self.log.handle.segment;
        if inode < segment.slots() {
            let change = if was_asked_for { bitmap::set_shared } else { bitmap::clear_shared };
            change(segment.slot_set(SlotSet::WithRoom), inode);
        }
    }

    /// Whether room beyond the end of a file was requested.
    pub fn has_room(&self, inode: u64) -> bool {
        let segment = &self.log.handle.segment;
        inode < segment.slots() && bitmap::is_set(segment.slot_set(SlotSet::WithRoom), inode)
    }

    /// Runs a change that moves pages between these files, or within one of them.
    pub fn exchange<T>(&self, change: impl FnOnce() -> T) -> T {
        // If this process dies in between, the next holder does not know whether the change was
        // made.
        self.note_exchanged(u64::MAX);
        let changed = change();
        self.note_exchanged(self.log.handle.control().appends.metadata_lsn.load(Relaxed));
        changed
    }

    fn note_exchanged(&self, lsn: u64) {
        // Relaxed: the file mutexes order it.
        for mutex in self.mutexes {
            self.log.handle.control().exchanged_lsn[mutex].store(lsn, Relaxed);
        }
    }

    /// Makes the last exchange of pages of these files durable; must be called before bytes are
    /// stored to them. Costs nothing unless pages were exchanged since the last sync.
    ///
    /// # Errors
    /// [`PoolError::Failed`](crate::PoolError::Failed),
    /// [`PoolError::Media`](crate::PoolError::Media),
    /// [`PoolError::Stalled`](crate::PoolError::Stalled).
    #[inline]
    pub fn settle(&self) -> Result<()> {
        let control = self.log.handle.control();
        let durable_lsn = control.appends.durable_lsn.load(Relaxed);
        let exchanged = self.mutexes.map(|mutex| control.exchanged_lsn[mutex].load(Relaxed));
        if exchanged[0].max(exchanged[1]) <= durable_lsn {
            Ok(())
        } else {
            self.make_exchange_durable(exchanged[0].max(exchanged[1]))
        }
    }

    /// Makes all changes so far durable. Must be called before bytes beyond the end of a file are
    /// overwritten in place by a change that never shows the new bytes in that file: a truncation
    /// that is not durable yet may have cut them off, and after a crash without it they are part of
    /// the file again.
    ///
    /// # Errors
    /// As for [`FileLock::settle`].
    pub fn settle_all(&self) -> Result<()> {
        self.make_exchange_durable(u64::MAX)
    }

    #[cold]
    fn make_exchange_durable(&self, exchanged_lsn: u64) -> Result<()> {
        let log = self.log;
        if log.handle.media.domain() != PersistenceDomain::Volatile
            && !mutant::is(log.handle.mutant, Mutant::StoreUnsettled)
        {
            let lsn = exchanged_lsn.min(log.close_log()?);
            log.wait_durable(lsn)?;
            self.note_exchanged(lsn);
        }
        Ok(())
    }
}

impl Handle {
    fn note_write(&self, mutex: usize) {
        // First its own. A thread that loads both in between finds the difference one too low, which a
        // store of another handle may make up for; the next thread that loads them finds that one. The
        // other way round, that store could be missed for good. Relaxed: of the same handle.
        self.own_writes[mutex].fetch_add(1, Relaxed);
        // Release: pairs with the Acquire in `foreign_writes`. The bytes are stored.
        self.control().writes[mutex].fetch_add(1, Release);
    }
}

impl Pool {
    /// A number that changes when another handle has stored bytes to the file, or to one that shares
    /// its lock: for a process that tells others that their copies are old. A store through a mapping
    /// counts when it is [noted](Pool::note_stored); what is appended or moved changes the layout
    /// version of the file instead, or as well.
    ///
    /// A store counts when it has returned, a long one after each MiB. While a thread of this handle
    /// stores, the number may change without another's store, or not show one yet: a call after that
    /// shows it. What a process has stored right before it died (at most a MiB) counts from the next
    /// time on that the file is locked for writing.
    pub fn foreign_writes(&self, inode: u64) -> u64 {
        let handle = &self.core().handle;
        let mutex = file_mutex(inode);
        // Acquire: pairs with the Release in `note_write`.
        let all = handle.control().writes[mutex].load(Acquire);
        all.wrapping_sub(handle.own_writes[mutex].load(Relaxed))
    }

    /// Notes that bytes of a file were stored through a mapping: see [`Pool::foreign_writes`].
    ///
    /// # Errors
    /// [`PoolError::ReadOnly`](crate::PoolError::ReadOnly),
    /// [`PoolError::Failed`](crate::PoolError::Failed).
    pub fn note_stored(&self, inode: u64) -> Result<()> {
        let handle = &self.core().handle;
        handle.check_may_change()?;
        handle.note_write(file_mutex(inode));
        Ok(())
    }

    /// Locks a file for writing, against all other writers; blocks.
    ///
    /// # Errors
    /// [`PoolError::Stalled`](crate::PoolError::Stalled) if the holder makes no progress for longer
    /// than [`PoolOptions::stall_timeout`](crate::PoolOptions::stall_timeout);
    /// [`PoolError::ReadOnly`](crate::PoolError::ReadOnly),
    /// [`PoolError::Failed`](crate::PoolError::Failed).
    pub fn lock_file(&self, inode: u64) -> Result<FileLock<'_>> {
        let Core { handle, log, .. } = &**self.core();
        handle.check_may_change()?;
        let lock = FileLock {
            log,
            mutexes: [file_mutex(inode); 2],
            first: handle.members.lock_file(handle.control(), inode)?,
            second: None,
            stored_bytes: Cell::new(0),
            _keeps_mapped: handle.clone(),
        };
        lock.repair_after_the_dead()?;
        Ok(lock)
    }

    /// [`Pool::lock_file`] of two files.
    ///
    /// # Errors
    /// As for [`Pool::lock_file`].
    pub fn lock_two_files(&self, one: u64, other: u64) -> Result<FileLock<'_>> {
        let Core { handle, log, .. } = &**self.core();
        handle.check_may_change()?;
        // In the order of the mutexes, which is the global lock order.
        let (first, second) =
            if file_mutex(one) <= file_mutex(other) { (one, other) } else { (other, one) };
        let is_same = file_mutex(one) == file_mutex(other);
        let take = |inode| handle.members.lock_file(handle.control(), inode);
        let lock = FileLock {
            log,
            mutexes: [one, other].map(file_mutex),
            first: take(first)?,
            // While this waits for the second mutex, the heartbeat reports progress to the waiters
            // for the first.
            second: (!is_same)
                .then(|| handle.heartbeat.while_media_work(Held::Files, || take(second)))
                .transpose()?,
            stored_bytes: Cell::new(0),
            _keeps_mapped: handle.clone(),
        };
        lock.repair_after_the_dead()?;
        Ok(lock)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_fails_in_the_middle_is_noticed() {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = directory.path().join("pool");
        let options = Pool::options().background(false);
        let pool = options.create(&path, 8 << 20).unwrap();
        let other = options.open(&path).unwrap();
        let before = pool.foreign_writes(9);
        let lock = other.lock_file(9).unwrap();
        let last_bytes = (8 << 20) - STORED_AT_ONCE_BYTES as u64;
        let bytes = vec![1; STORED_AT_ONCE_BYTES + 1];
        // SAFETY: these pages belong to no file and no object.
        unsafe { lock.store(last_bytes, &bytes) }.unwrap_err();
        assert_ne!(pool.foreign_writes(9), before);
        assert_eq!(pool.foreign_writes(10), 0);
    }
}
