//! Advisory locks of files: on whole files and on ranges of their bytes, between processes and between handles.
//!
//! They are open-file-description locks of the pool file, on bytes far behind its end: the kernel keeps them, wakes who waits,
//! and drops them when their holder closes its file or dies. Nothing of them is on media or in shared memory. What they guard is for their
//! users to agree upon: nobody is kept from reading or writing.
//!
//! ```text
//!  0        pool        2⁶¹  members, inodes      2⁶² + number × 2ᵏ                       2⁶³
//!  ├──────────────┤ ┄┄┄┄ ├────────┤ ┄┄┄┄┄┄┄┄┄┄┄┄┄┄├──────────┬──────────┬──────────┬─ ┄┄ ─┤
//!                        + 2³³ + number: a whole   │ bytes of │ bytes of │ bytes of │
//!                          file                    │ file 0   │ file 1   │ file 2   │
//! ```
//!
//! Each file has 2ᵏ bytes for the ranges of its own, where 2ᵏ is 2⁶² by the number of slots of the pool, rounded down: 4 TiB in a
//! pool with a million of them. Bytes behind that cannot be locked.
//!
//! # Holders
//! A lock belongs to an open file description, so each handle that takes locks has one of its own, made when it takes the first. A handle
//! never stands in its own way: what it locks again changes its kind. A lock of a whole file and one of a range do not see each
//! other, as `flock` and `fcntl` do not.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_sys::lock::{self, LockRange};
use aquifer_vm::NotInherited;

use crate::core::Core;
use crate::error::{PoolError, Result};
use crate::membership::{FILE_BYTES, WHOLE_FILES};
use crate::pool::{LockMode, Pool};

/// How long to sleep between two attempts, where the waiting has a limit: the kernel's own has none.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// What of a file is locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LockArea {
    /// All of it, as `flock` does.
    File,
    /// These of its bytes, as `fcntl` does: whether they are there or not. An end of `u64::MAX` stands for all behind the start.
    Bytes(Range<u64>),
}

/// Somebody else's lock that stands against one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldLock {
    /// What is locked.
    pub area: LockArea,
    /// Whether others are let in.
    pub mode: LockMode,
}

/// The advisory locks of one handle of a file. Given up when this is dropped, or when the process dies.
#[derive(Debug)]
pub struct AdvisoryLocks {
    /// Speaks of the descriptor below: dropped before it.
    _not_inherited: NotInherited,
    file: OwnedFd,
    core: Arc<Core>,
    inode: u64,
}

impl Pool {
    /// A holder of locks of a file, which has none yet. While it lives, the caller keeps the number of the inode from being
    /// another file's ([`Pool::pin_inode`]).
    ///
    /// # Errors
    /// [`PoolError::CannotLock`] if the pool file cannot be opened once more; [`PoolError::Forked`].
    pub fn advisory_locks(&self, inode: u64) -> Result<AdvisoryLocks> {
        let core = self.core();
        if !core.process.is_current() {
            return Err(PoolError::Forked);
        }
        // Who reads has nothing that it could write with.
        let flags = if core.is_writable { libc::O_RDWR } else { libc::O_RDONLY };
        let file = aquifer_sys::io::reopen(core.media.file(), flags)
            .map_err(|source| PoolError::CannotLock { inode, source })?;
        let _not_inherited = NotInherited::new(file.as_fd());
        Ok(AdvisoryLocks { _not_inherited, file, core: core.share(), inode })
    }

    /// Behind which byte of a file no range can be locked.
    pub fn lockable_bytes(&self) -> u64 {
        self.core().lockable_bytes()
    }
}

impl Core {
    fn lockable_bytes(&self) -> u64 {
        let slots = self.layout.slots().next_power_of_two();
        FILE_BYTES / slots
    }
}

impl AdvisoryLocks {
    fn start(&self) -> u64 {
        FILE_BYTES + self.inode * self.core.lockable_bytes()
    }

    fn range(&self, area: &LockArea) -> Result<LockRange> {
        if !self.core.process.is_current() {
            return Err(PoolError::Forked);
        }
        let LockArea::Bytes(bytes) = area else {
            return Ok(LockRange::byte(WHOLE_FILES + self.inode));
        };
        let limit_bytes = self.core.lockable_bytes();
        let end = if bytes.end == u64::MAX { limit_bytes } else { bytes.end };
        if bytes.start >= end || end > limit_bytes {
            return Err(PoolError::Parameter {
                what: "a range to be locked",
                value: format!("{bytes:?}"),
                reason: "it has at least one byte, and ends before `Pool::lockable_bytes`",
            });
        }
        Ok(LockRange { offset_bytes: self.start() + bytes.start, len_bytes: end - bytes.start })
    }

    fn failed(&self) -> impl Fn(io::Error) -> PoolError {
        let inode = self.inode;
        move |source| PoolError::CannotLock { inode, source }
    }

    fn check(&self, mode: LockMode) -> Result<()> {
        match mode == LockMode::Exclusive && !self.core.is_writable {
            true => Err(PoolError::ReadOnly {
                path: self.core.media.path().to_path_buf(),
                reason: "it was opened for reading, which allows shared locks only",
            }),
            false => Ok(()),
        }
    }

    /// Locks, or changes the kind of what is locked already; false if somebody else's lock stands against it. Then what was
    /// locked still is, as it was.
    ///
    /// # Errors
    /// [`PoolError::CannotLock`], [`PoolError::ReadOnly`] for an exclusive lock in a pool that was opened for reading,
    /// [`PoolError::Parameter`] for an empty range and for bytes that cannot be locked, [`PoolError::Forked`].
    pub fn try_lock(&self, area: &LockArea, mode: LockMode) -> Result<bool> {
        let range = self.range(area)?;
        self.check(mode)?;
        lock::try_lock(self.file.as_fd(), range, mode.kind()).map_err(self.failed())
    }

    /// As [`AdvisoryLocks::try_lock`], and waits for as long as it takes.
    ///
    /// A lock of a whole file that is held in the other mode is given up before waiting, as `flock` does, so two that want to
    /// change theirs do not wait for each other. One of a range is kept, as with `fcntl`.
    ///
    /// # Errors
    /// As for [`AdvisoryLocks::try_lock`]; [`PoolError::CannotLock`] with `EINTR` if a signal came in between.
    pub fn lock(&self, area: &LockArea, mode: LockMode) -> Result<()> {
        if self.try_lock(area, mode)? {
            return Ok(());
        }
        let range = self.range(area)?;
        if *area == LockArea::File {
            self.unlock(area)?;
        }
        lock::lock(self.file.as_fd(), range, mode.kind()).map_err(self.failed())
    }

    /// As [`AdvisoryLocks::try_lock`], and tries again for so long.
    ///
    /// # Errors
    /// As for [`AdvisoryLocks::try_lock`].
    pub fn lock_timeout(&self, area: &LockArea, mode: LockMode, timeout: Duration) -> Result<bool> {
        let started = Instant::now();
        while !self.try_lock(area, mode)? {
            let Some(left) = timeout.checked_sub(started.elapsed()) else { return Ok(false) };
            std::thread::sleep(left.min(RETRY_AFTER));
        }
        Ok(true)
    }

    /// Gives up what is locked there. Not an error where nothing is.
    ///
    /// # Errors
    /// [`PoolError::CannotLock`] if a lock cannot be divided; [`PoolError::Parameter`], [`PoolError::Forked`].
    pub fn unlock(&self, area: &LockArea) -> Result<()> {
        let range = self.range(area)?;
        lock::unlock(self.file.as_fd(), range).map_err(self.failed())
    }

    /// The first lock of somebody else's that stands against one in this mode. The system does not say whose it is.
    ///
    /// # Errors
    /// As for [`AdvisoryLocks::unlock`].
    pub fn conflict(&self, area: &LockArea, mode: LockMode) -> Result<Option<HeldLock>> {
        let range = self.range(area)?;
        let found = lock::conflict(self.file.as_fd(), range, mode.kind()).map_err(self.failed())?;
        Ok(found.map(|found| HeldLock {
            area: match area {
                LockArea::File => LockArea::File,
                LockArea::Bytes(_) => LockArea::Bytes(self.bytes_of(found.range)),
            },
            mode: LockMode::of(found.kind),
        }))
    }

    fn bytes_of(&self, range: LockRange) -> Range<u64> {
        let limit_bytes = self.core.lockable_bytes();
        let start = range.offset_bytes.saturating_sub(self.start());
        let end = start.saturating_add(range.len_bytes);
        // No length stands for all there can be behind the start, here as well.
        let is_rest = range.len_bytes == 0 || end >= limit_bytes;
        start..if is_rest { u64::MAX } else { end }
    }
}

impl Drop for AdvisoryLocks {
    fn drop(&mut self) {
        // Before it is closed: a child may have a copy of the descriptor. In a child they are the parent's.
        if self.core.process.is_current() {
            let _ = lock::unlock(self.file.as_fd(), LockRange::WHOLE);
        }
    }
}
