//! Members: this handle among the processes that have the pool open.
//!
//! | lock | kept by | held while |
//! |---|---|---|
//! | bytes of the pool file ([`membership`](crate::shared::membership)) | the kernel | a handle is open, recovers, zeroes, has the turn, has an inode locked |
//! | file mutexes ([`Members::lock_file`]) | the segment | a file is written to or changed |
//! | `held` | this handle | an inode is locked or unlocked |

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_sys::robust::{LockError, RobustGuard, RobustMutex};
use aquifer_vm::LifeMark;

use crate::error::{PoolError, Result};
use crate::shared::membership::Membership;
use crate::shared::segment::{Control, FILE_MUTEXES};

/// This handle among the processes that have the pool open.
pub(crate) struct Members {
    pub locks: Arc<Membership>,
    /// The process that opened the pool; ended when it was found to have lost its locks. Then the
    /// handle is as inert as in a forked child.
    pub process: LifeMark,
    /// Whether this handle may change the segment and the media.
    pub is_writable: bool,
    pub stall_timeout: Duration,
    /// Inodes locked through this handle.
    pub held: Mutex<BTreeSet<u64>>,
}

/// The index of the mutex of a file.
pub(crate) fn file_mutex(inode: u64) -> usize {
    inode as usize % FILE_MUTEXES
}

impl Members {
    /// Returns an error in a fork of the process that opened the pool, and after the loss of the
    /// locks.
    #[inline]
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_current() { Ok(()) } else { Err(self.inert()) }
    }

    /// [`Members::check_process`] before bytes are read. A handle that only reads takes no mutex, so
    /// it asks here for its locks: without them others may have given the pages to other files, and
    /// share another segment.
    #[inline]
    pub fn check_reading(&self) -> Result<()> {
        self.check_process()?;
        if self.is_writable { Ok(()) } else { self.check_kept() }
    }

    #[cold]
    fn inert(&self) -> PoolError {
        if self.process.has_ended() { PoolError::LocksLost } else { PoolError::Forked }
    }

    /// Returns an error if the program has closed the descriptor with this handle's locks: at the
    /// latest one tick of the clock afterwards.
    #[inline]
    pub fn check_kept(&self) -> Result<()> {
        if self.locks.were_kept() { Ok(()) } else { self.lose() }
    }

    /// From now on this handle is dead for itself as for all others.
    #[cold]
    pub fn end(&self) {
        let is_current = self.process.is_current();
        self.process.end();
        // In a forked child the locks are the parent's.
        if is_current {
            self.locks.end();
        }
    }

    #[cold]
    fn lose(&self) -> Result<()> {
        self.end();
        Err(PoolError::LocksLost)
    }

    /// As [`Members::check_kept`], as of now.
    pub fn check_kept_now(&self) -> Result<()> {
        if self.locks.are_kept() { Ok(()) } else { self.lose() }
    }

    /// Takes a mutex of the segment. If its previous holder died, the caller repairs what the mutex
    /// protects.
    pub fn take<'a>(&self, mutex: &'a RobustMutex, what: &'static str) -> Result<RobustGuard<'a>> {
        self.check_process()?;
        mutex.lock(Some(self.stall_timeout)).map_err(|error| match error {
            LockError::Timeout { holder_pid: pid, .. } => PoolError::Stalled { pid, what },
            LockError::System(source) => PoolError::Mutex(source),
            _ => PoolError::Mutex(std::io::Error::from_raw_os_error(libc::ENOTRECOVERABLE)),
        })
    }

    /// Takes the mutex of a file, for its writers. A dead holder may have left a change that was
    /// published, and that the image lacks: then the caller repairs that before it reads the file.
    pub fn lock_file<'a>(&self, control: &'a Control, inode: u64) -> Result<RobustGuard<'a>> {
        let mutex = &control.file_mutexes[file_mutex(inode)];
        let mut guard = self.take(mutex, "a file's lock")?;
        guard.set_owner(self.locks.index() as u16);
        if guard.previous_owner_died() {
            // Before the mutex counts as repaired, or a death here would hide the other one.
            control.dead_file_holders.note();
            // It may have died between a store and its note: see `Pool::foreign_writes`. Release:
            // pairs with the Acquire there. The mutex orders the bytes before this.
            control.writes[file_mutex(inode)].fetch_add(1, Release);
            guard.repaired();
        }
        // After the wait.
        self.check_kept()?;
        Ok(guard)
    }
}
