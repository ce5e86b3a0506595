//! Advisory locks of files: on whole files and on byte ranges, between processes and between
//! handles.
//!
//! They are open-file-description locks of the pool file, on bytes far beyond its end: the kernel
//! keeps them, wakes the waiters, and drops them when the holder closes its file or dies. No state
//! is kept on media or in shared memory. Advisory: they do not block I/O.
//!
//! ```text
//!  0        pool        2⁶¹  members, inodes      2⁶² + number × 2ᵏ                       2⁶³
//!  ├──────────────┤ ┄┄┄┄ ├────────┤ ┄┄┄┄┄┄┄┄┄┄┄┄┄┄├──────────┬──────────┬──────────┬─ ┄┄ ─┤
//!                        + 2³³ + number: a whole   │ bytes of │ bytes of │ bytes of │
//!                          file                    │ file 0   │ file 1   │ file 2   │
//! ```
//!
//! Each file has 2ᵏ lock bytes for its ranges, where 2ᵏ is 2⁶² divided by the number of slots of
//! the pool, rounded down: 4 TiB in a pool with a million slots. Bytes beyond that cannot be
//! locked.
//!
//! # Holders
//! A lock belongs to an open file description, so each handle that takes locks has a private one,
//! opened before its first lock. A handle never conflicts with itself: locking again changes the
//! mode. Whole-file locks and range locks do not conflict with each other, just as `flock` and
//! `fcntl` locks do not.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_sys::lock::{self, LockRange};

use crate::error::{PoolError, Result};
use crate::format::layout::Layout;
use crate::media::lock_file::LockFile;
use crate::shared::handle::Handle;
use crate::shared::inode_lock::LockMode;
use crate::shared::membership::{FILE_BYTES, WHOLE_FILES};

/// The sleep between two attempts of a lock with a timeout: the kernel's blocking lock has none.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// The part of a file to lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LockArea {
    /// The whole file, as `flock` does.
    File,
    /// A byte range, as `fcntl` does; it may lie beyond the end of the file. An end of `u64::MAX`
    /// stands for everything from the start on.
    Bytes(Range<u64>),
}

/// A conflicting lock of another holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldLock {
    /// The locked part.
    pub area: LockArea,
    /// Whether it excludes all other locks or only exclusive ones.
    pub mode: LockMode,
}

/// The advisory locks of one handle of a file. Dropping this, or the death of the process, releases
/// them, unless another process has them as well ([`AdvisoryLocks::shared`]).
#[derive(Debug)]
pub struct AdvisoryLocks {
    file: LockFile,
    handle: Arc<Handle>,
    inode: u64,
    /// Whether dropping this leaves the locks as they are.
    is_shared: bool,
}

/// No byte of a file from here on can be locked.
pub(crate) fn lockable_bytes(layout: &Layout) -> u64 {
    FILE_BYTES / layout.slots().next_power_of_two()
}

impl AdvisoryLocks {
    pub(crate) fn new(handle: &Arc<Handle>, inode: u64) -> Result<AdvisoryLocks> {
        handle.members.check_process()?;
        // A pool opened for reading gets a descriptor that cannot write.
        let file = LockFile::open(handle.media.file(), handle.members.is_writable)
            .map_err(|source| PoolError::CannotLock { inode, source })?;
        Ok(AdvisoryLocks { file, handle: handle.clone(), inode, is_shared: false })
    }

    /// As of another holder of the inode's locks, in this process or in another one, whose descriptor
    /// this is: both are one holder then.
    pub(crate) fn adopt(handle: &Arc<Handle>, inode: u64, file: OwnedFd) -> Result<AdvisoryLocks> {
        handle.members.check_process()?;
        let file =
            LockFile::adopt(file).map_err(|source| PoolError::CannotLock { inode, source })?;
        Ok(AdvisoryLocks { file, handle: handle.clone(), inode, is_shared: true })
    }

    /// As this, and another process has a duplicate of the descriptor, for which locks outlive this
    /// process: dropping this releases none, whether the process ends in order or not. They end when
    /// either unlocks them, or when the last descriptor is closed.
    #[must_use]
    pub fn shared(mut self) -> AdvisoryLocks {
        self.is_shared = true;
        self
    }

    fn start(&self) -> u64 {
        FILE_BYTES + self.inode * lockable_bytes(&self.handle.layout)
    }

    fn range(&self, area: &LockArea) -> Result<LockRange> {
        self.handle.members.check_process()?;
        let LockArea::Bytes(bytes) = area else {
            return Ok(LockRange::byte(WHOLE_FILES + self.inode));
        };
        let limit_bytes = lockable_bytes(&self.handle.layout);
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
        if mode == LockMode::Exclusive && !self.handle.members.is_writable {
            Err(PoolError::ReadOnly {
                path: self.handle.media.path().to_path_buf(),
                reason: "it was opened for reading, which allows shared locks only",
            })
        } else {
            Ok(())
        }
    }

    /// Locks, or changes the mode of an existing lock. Returns false if another holder's lock
    /// conflicts; an existing lock of this holder is then unchanged.
    ///
    /// # Errors
    /// [`PoolError::CannotLock`], [`PoolError::ReadOnly`] for an exclusive lock in a pool opened
    /// for reading, [`PoolError::Parameter`] for an empty range and for bytes that cannot be
    /// locked, [`PoolError::Forked`].
    pub fn try_lock(&self, area: &LockArea, mode: LockMode) -> Result<bool> {
        let range = self.range(area)?;
        self.check(mode)?;
        lock::try_lock(self.file.as_fd(), range, mode.kind()).map_err(self.failed())
    }

    /// As [`AdvisoryLocks::try_lock`], but blocks until the lock is granted.
    ///
    /// A whole-file lock held in the other mode is released before blocking, as `flock` does, so
    /// two holders that change their modes do not deadlock. A range lock is kept, as with `fcntl`.
    ///
    /// # Errors
    /// As for [`AdvisoryLocks::try_lock`]; [`PoolError::CannotLock`] with `EINTR` if a signal
    /// interrupted the wait.
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

    /// As [`AdvisoryLocks::try_lock`], but retries until `timeout` has passed.
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

    /// Releases the locks in this area. Not an error where there are none.
    ///
    /// # Errors
    /// [`PoolError::CannotLock`] if a lock cannot be split; [`PoolError::Parameter`],
    /// [`PoolError::Forked`].
    pub fn unlock(&self, area: &LockArea) -> Result<()> {
        let range = self.range(area)?;
        lock::unlock(self.file.as_fd(), range).map_err(self.failed())
    }

    /// Returns the first lock of another holder that conflicts with this mode. The kernel does not
    /// report the holder.
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
        let limit_bytes = lockable_bytes(&self.handle.layout);
        let start = range.offset_bytes.saturating_sub(self.start());
        let end = start.saturating_add(range.len_bytes);
        // A length of 0 stands for everything from the start on, here too.
        let is_rest = range.len_bytes == 0 || end >= limit_bytes;
        start..if is_rest { u64::MAX } else { end }
    }
}

/// For another process: a duplicate of this descriptor keeps the locks, until either releases them.
impl AsFd for AdvisoryLocks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for AdvisoryLocks {
    fn drop(&mut self) {
        // Unlock before closing: a child process may have a copy of the descriptor. In a child the
        // locks belong to the parent.
        if !self.is_shared && self.handle.members.process.is_current() {
            let _ = lock::unlock(self.file.as_fd(), LockRange::WHOLE);
        }
    }
}
