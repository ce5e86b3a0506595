//! The failure of a pool: an error after which no process may change it.
//!
//! It lies in the segment, so that every process sees it: see rule 5 in the top of `log/locks.rs`.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::error::{PoolError, Result};
use crate::shared::segment::Control;

/// The kind of failure that made the pool read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum FailureKind {
    Log = 1,
    Data = 2,
    Superblock = 3,
}

impl FailureKind {
    fn from_code(code: u64) -> FailureKind {
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

impl Control {
    /// Returns an error if a write failed earlier, here or in another process.
    pub fn check_not_failed(&self) -> Result<()> {
        // Acquire: pairs with the Release in `fail`. The kind is visible when the failure is.
        match self.failure.load(Acquire) {
            0 => Ok(()),
            errno => Err(PoolError::Failed {
                what: FailureKind::from_code(self.failure_kind.load(Relaxed)).name(),
                source: io::Error::from_raw_os_error((errno - 1) as i32),
            }),
        }
    }

    /// Makes the pool read-only for all processes, and wakes all waiters.
    pub fn fail(&self, kind: FailureKind, error: &io::Error) {
        self.failure_kind.store(kind as u64, Relaxed);
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // Release: pairs with `check_not_failed`.
        self.failure.store(errno as u64 + 1, Release);
        self.signal.ring();
    }
}
