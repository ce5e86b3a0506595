//! Locks of inodes, and advisory locks of files.

use super::Pool;
use crate::advisory::{AdvisoryLocks, lockable_bytes};
use crate::error::Result;
use crate::inode_lock::{Holder, InodeLock, LockMode};
use crate::membership::Byte;

impl Pool {
    /// Locks an inode until the result is dropped; does not block.
    ///
    /// # Errors
    /// [`PoolError::Locked`](crate::PoolError::Locked) if another handle holds a conflicting lock;
    /// [`PoolError::AlreadyLocked`](crate::PoolError::AlreadyLocked) if this handle has a lock on
    /// it.
    pub fn lock_inode(&self, number: u64, mode: LockMode) -> Result<InodeLock> {
        InodeLock::take(&self.core().handle, number, mode)
    }

    /// The known holders of locks on an inode. Readers that opened the pool for reading are not
    /// listed, and locks of a process that holds very many may be missing.
    /// [`Pool::is_locked_elsewhere`] covers all.
    pub fn holders(&self, number: u64) -> Vec<Holder> {
        let handle = &self.core().handle;
        handle.members.holders(handle.control(), number)
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

    /// The limit of lockable ranges: no byte of a file from here on can be locked.
    pub fn lockable_bytes(&self) -> u64 {
        lockable_bytes(&self.core().handle.layout)
    }
}
