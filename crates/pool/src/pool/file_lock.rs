//! Locks of files that are written to or changed.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sys::robust::RobustGuard;

use super::Pool;
use crate::bitmap;
use crate::core::Core;
use crate::error::Result;
use crate::handle::Handle;
use crate::heartbeat::Held;
use crate::log::Log;
use crate::media::PersistenceDomain;
use crate::members::file_mutex;
use crate::mutant::{self, Mutant};
use crate::segment::SlotSet;

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
/// # Forgotten locks
/// A lock that is never dropped (`mem::forget`) keeps the file locked until its thread ends. The
/// thread's list of held mutexes then lies in the shared memory, which therefore stays mapped when
/// the pool is closed, with everything else that belongs to the handle's open file description.
pub struct FileLock<'a> {
    log: &'a Log,
    mutexes: [usize; 2],
    first: RobustGuard<'a>,
    second: Option<RobustGuard<'a>>,
    /// Keeps the mutexes mapped even if this is never dropped.
    _keeps_mapped: Arc<Handle>,
}

impl FileLock<'_> {
    /// Reports progress of a long operation to the waiters: their
    /// [`PoolOptions::stall_timeout`](crate::PoolOptions::stall_timeout) restarts.
    pub fn note_progress(&self) {
        self.first.note_progress();
        self.second.iter().for_each(RobustGuard::note_progress);
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

impl Pool {
    /// Locks a file for writing, against all other writers; blocks.
    ///
    /// # Errors
    /// [`PoolError::Stalled`](crate::PoolError::Stalled) if the holder makes no progress for longer
    /// than [`PoolOptions::stall_timeout`](crate::PoolOptions::stall_timeout);
    /// [`PoolError::ReadOnly`](crate::PoolError::ReadOnly),
    /// [`PoolError::Failed`](crate::PoolError::Failed).
    pub fn lock_file(&self, inode: u64) -> Result<FileLock<'_>> {
        let Core { handle, log, .. } = &**self.core();
        handle.check_writable()?;
        Ok(FileLock {
            log,
            mutexes: [file_mutex(inode); 2],
            first: handle.members.lock_file(handle.control(), inode)?,
            second: None,
            _keeps_mapped: handle.clone(),
        })
    }

    /// [`Pool::lock_file`] of two files.
    ///
    /// # Errors
    /// As for [`Pool::lock_file`].
    pub fn lock_two_files(&self, one: u64, other: u64) -> Result<FileLock<'_>> {
        let Core { handle, log, .. } = &**self.core();
        handle.check_writable()?;
        // In the order of the mutexes, which is the global lock order.
        let (first, second) =
            if file_mutex(one) <= file_mutex(other) { (one, other) } else { (other, one) };
        let is_same = file_mutex(one) == file_mutex(other);
        let lock = |inode| handle.members.lock_file(handle.control(), inode);
        Ok(FileLock {
            log,
            mutexes: [one, other].map(file_mutex),
            first: lock(first)?,
            // While this waits for the second mutex, the heartbeat reports progress to the waiters
            // for the first.
            second: (!is_same)
                .then(|| handle.heartbeat.while_media_work(Held::Files, || lock(second)))
                .transpose()?,
            _keeps_mapped: handle.clone(),
        })
    }
}
