//! Locks of inodes, and advisory locks of files.

use std::os::fd::OwnedFd;

use super::Pool;
use crate::error::Result;
use crate::metadata::core::Core;
use crate::shared::advisory::{AdvisoryLocks, lockable_bytes};
use crate::shared::inode_lock::{Holder, InodeLock, LockMode};
use crate::shared::membership::Byte;

impl Pool {
    /// Locks an inode until the result is dropped; does not block, except that a handle that is open
    /// for writing takes the metadata lock for a moment: what it then reads of the inode includes the
    /// last change by a holder that has died.
    ///
    /// # Errors
    /// [`PoolError::Locked`](crate::PoolError::Locked) if another handle holds a conflicting lock;
    /// [`PoolError::AlreadyLocked`](crate::PoolError::AlreadyLocked) if this handle has a lock on
    /// it; [`PoolError::ReadOnly`](crate::PoolError::ReadOnly) for an exclusive lock in a pool that is
    /// open [passively](crate::PoolOptions::passive); [`PoolError::Stalled`](crate::PoolError::Stalled).
    pub fn lock_inode(&self, number: u64, mode: LockMode) -> Result<InodeLock> {
        let Core { handle, log, .. } = &**self.core();
        if mode == LockMode::Exclusive {
            handle.check_not_passive()?;
        }
        let lock = InodeLock::take(handle, number, mode)?;
        // The kernel does not tell that the last holder has died. If that was right after its change
        // was published, the change counts and the image lacks it: the runs that the caller would find
        // there are free. Whatever a holder has published before its death is repaired here at the
        // latest, as this lock is only granted after that. A failed pool can be read as it is.
        if handle.members.is_writable && handle.control().check_not_failed().is_ok() {
            drop(log.lock()?);
        }
        Ok(lock)
    }

    /// The known holders of locks on an inode. Readers that opened the pool for reading are not
    /// listed, and locks of a process that holds very many may be missing.
    /// [`Pool::is_locked_elsewhere`] covers all.
    pub fn holders(&self, number: u64) -> Vec<Holder> {
        let handle = &self.core().handle;
        handle.members.holders(&handle.segment, number)
    }

    /// Whether a lock of another handle or process conflicts with a lock of the inode in this mode.
    pub fn is_locked_elsewhere(&self, number: u64, mode: LockMode) -> bool {
        self.core().handle.members.locks.is_locked_by_other(Byte::Inode(number), mode.kind())
    }

    /// Returns a lock holder for a file, without any locks. The caller must keep the inode number
    /// from being reused while the holder exists ([`Pool::pin_inode`]).
    ///
    /// # Errors
    /// [`PoolError::CannotLock`](crate::PoolError::CannotLock) if the pool file cannot be reopened;
    /// [`PoolError::Forked`](crate::PoolError::Forked).
    pub fn advisory_locks(&self, inode: u64) -> Result<AdvisoryLocks> {
        AdvisoryLocks::new(&self.core().handle, inode)
    }

    /// Returns the lock holder for a file whose descriptor this is: a duplicate of that of
    /// [`Pool::advisory_locks`] for the same inode, in another process. Both are then one holder, whose
    /// locks survive the death of either process, and dropping this one
    /// ([`AdvisoryLocks::shared`]). The caller keeps the inode number from being reused.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// use std::os::fd::AsFd;
    ///
    /// use aquifer_pool::{LockArea, LockMode};
    ///
    /// let locks = pool.advisory_locks(5)?.shared();
    /// let descriptor = locks.as_fd().try_clone_to_owned()?; // or sent to another process
    /// assert!(locks.try_lock(&LockArea::File, LockMode::Exclusive)?);
    /// let same = pool.adopt_advisory_locks(5, descriptor)?;
    /// assert!(same.try_lock(&LockArea::File, LockMode::Exclusive)?);
    /// drop(locks);
    /// assert!(!pool.advisory_locks(5)?.try_lock(&LockArea::File, LockMode::Shared)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PoolError::CannotLock`](crate::PoolError::CannotLock) if the descriptor cannot be used;
    /// [`PoolError::Forked`](crate::PoolError::Forked).
    pub fn adopt_advisory_locks(&self, inode: u64, descriptor: OwnedFd) -> Result<AdvisoryLocks> {
        AdvisoryLocks::adopt(&self.core().handle, inode, descriptor)
    }

    /// The limit of lockable ranges: no byte of a file from here on can be locked.
    pub fn lockable_bytes(&self) -> u64 {
        lockable_bytes(&self.core().handle.layout)
    }
}
