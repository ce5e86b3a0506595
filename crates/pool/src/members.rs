//! Members: this handle among the processes that have the pool open.
//!
//! | lock | kept by | held while |
//! |---|---|---|
//! | bytes of the pool file ([`membership`](crate::membership)) | the kernel | a handle is open, recovers, zeroes, has the turn, has an inode locked |
//! | file mutexes ([`Members::lock_file`]) | the segment | a file is written to or changed |
//! | `held` | this handle | an inode is locked or unlocked |

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_sys::robust::{LockError, RobustGuard, RobustMutex};
use aquifer_vm::ProcessMark;

use crate::error::{PoolError, Result};
use crate::membership::Membership;
use crate::segment::{Control, FILE_MUTEXES};

/// This handle among the processes that have the pool open.
pub(crate) struct Members {
    pub locks: Arc<Membership>,
    pub process: ProcessMark,
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
    /// Returns an error in a fork of the process that opened the pool.
    #[inline]
    pub fn check_process(&self) -> Result<()> {
        if self.process.is_current() { Ok(()) } else { Err(PoolError::Forked) }
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

    /// Takes the mutex of a file, for its writers. It protects nothing that a dead holder could
    /// leave half done.
    pub fn lock_file<'a>(&self, control: &'a Control, inode: u64) -> Result<RobustGuard<'a>> {
        let mutex = &control.file_mutexes[file_mutex(inode)];
        let mut guard = self.take(mutex, "a file's lock")?;
        guard.set_owner(self.locks.index() as u16);
        if guard.previous_owner_died() {
            guard.repaired();
        }
        Ok(guard)
    }
}
