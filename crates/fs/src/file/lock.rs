//! Advisory locks: of whole files, named as in `std::fs`, and of byte ranges, as with `fcntl`.
//!
//! The kernel keeps them (see [`AdvisoryLocks`]). So they end when their handle is closed or its
//! process dies, and work across PID namespaces. Advisory: they do not block I/O.

use std::fs::TryLockError;
use std::ops::{Range, RangeBounds};
use std::time::Duration;

use aquifer_pool::format::file::FileKind;
use aquifer_pool::{AdvisoryLocks, LockArea, LockMode, PoolError};
use aquifer_vm::bytes::bounds_of;

use super::File;
use crate::error::{FsError, Result};

/// A lock on a range that another handle holds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldRange {
    /// The locked bytes; the end is `u64::MAX` if the lock has no end.
    pub range: Range<u64>,
    /// Whether it is shared or exclusive.
    pub mode: LockMode,
}

/// Converts a range to an area; an empty range is an error.
fn area_of(range: impl RangeBounds<u64>) -> Result<LockArea> {
    let Range { start, end } = bounds_of(&range, u64::MAX);
    if start < end { Ok(LockArea::Bytes(start..end)) } else { Err(FsError::EmptyRange) }
}

fn locked(is_locked: bool) -> Result<()> {
    if is_locked { Ok(()) } else { Err(FsError::Locked) }
}

impl File {
    fn locks(&self) -> Result<&AdvisoryLocks> {
        if self.inode().kind != FileKind::File {
            return Err(FsError::IsADirectory { path: self.as_path() });
        }
        let locks = &self.opened.locks;
        if let Some(made) = locks.get() {
            return Ok(made);
        }
        // Another thread may be first; then its locks are used.
        let made = self.files().pool().advisory_locks(self.inode().number)?;
        Ok(locks.get_or_init(|| made))
    }

    /// Runs a lock operation on an area, after checking that the area can be locked.
    fn with_area<T>(
        &self,
        area: &LockArea,
        act: impl FnOnce(&AdvisoryLocks, &LockArea) -> aquifer_pool::Result<T>,
    ) -> Result<T> {
        let limit_bytes = self.files().pool().lockable_bytes();
        if let LockArea::Bytes(Range { start, end }) = area
            && (*start >= limit_bytes || (*end > limit_bytes && *end != u64::MAX))
        {
            return Err(FsError::LockTooFar { limit_bytes });
        }
        act(self.locks()?, area).map_err(|error| match error {
            PoolError::CannotLock { source, .. }
                if source.kind() == std::io::ErrorKind::Interrupted =>
            {
                FsError::Interrupted
            }
            error => error.into(),
        })
    }

    /// Locks the file exclusively for this handle; blocks until it can. As [`std::fs::File::lock`].
    ///
    /// The lock belongs to this handle and its clones: it conflicts with other handles of the same
    /// file, in this process or another one. It ends with [`File::unlock`], when the last clone is
    /// dropped, and when the process dies. If the handle already holds a lock of the file, the lock
    /// is converted; while that blocks, the handle holds no lock.
    ///
    /// If the *pool* was opened read-only, only shared locks are possible.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::fs::TryLockError;
    ///
    /// let file = files.create_file("/f")?;
    /// file.lock()?;
    /// let other = files.open_file("/f")?;
    /// assert!(matches!(other.try_lock_shared(), Err(TryLockError::WouldBlock)));
    /// drop(file);
    /// other.lock_shared()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Interrupted`] if a signal interrupts the wait, and then the handle has no lock;
    /// [`FsError::Pool`] if the pool was opened read-only, the process is a fork, or the system
    /// does not support locks; [`FsError::IsADirectory`].
    pub fn lock(&self) -> Result<()> {
        self.with_area(&LockArea::File, |locks, area| locks.lock(area, LockMode::Exclusive))
    }

    /// Locks the file in shared mode; blocks until it can. As [`std::fs::File::lock_shared`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// let other = files.open_file("/f")?;
    /// file.lock_shared()?;
    /// other.lock_shared()?;
    /// assert!(other.try_lock().is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::lock`], but a pool that was opened read-only is no error.
    pub fn lock_shared(&self) -> Result<()> {
        self.with_area(&LockArea::File, |locks, area| locks.lock(area, LockMode::Shared))
    }

    /// Tries [`File::lock`] without blocking. As [`std::fs::File::try_lock`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.try_lock()?;
    /// file.try_lock()?; // no conflict with itself
    /// let error = files.open_file("/f")?.try_lock().unwrap_err();
    /// assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::WouldBlock);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TryLockError::WouldBlock`]; then the handle keeps the lock that it had.
    /// [`TryLockError::Error`] has the [`FsError`]s of [`File::lock`] inside.
    pub fn try_lock(&self) -> std::result::Result<(), TryLockError> {
        self.try_file(LockMode::Exclusive)
    }

    /// Tries [`File::lock_shared`] without blocking. As [`std::fs::File::try_lock_shared`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.lock()?;
    /// file.try_lock_shared()?; // from exclusive to shared
    /// files.open_file("/f")?.try_lock_shared()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::try_lock`].
    pub fn try_lock_shared(&self) -> std::result::Result<(), TryLockError> {
        self.try_file(LockMode::Shared)
    }

    fn try_file(&self, mode: LockMode) -> std::result::Result<(), TryLockError> {
        match self.with_area(&LockArea::File, |locks, area| locks.try_lock(area, mode)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(TryLockError::WouldBlock),
            Err(error) => Err(TryLockError::Error(error.into())),
        }
    }

    /// Locks the file; blocks for at most `timeout`.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::time::Duration;
    ///
    /// use aquifer_fs::{FsError, LockMode};
    ///
    /// let file = files.create_file("/f")?;
    /// file.lock()?;
    /// let other = files.open_file("/f")?;
    /// let refused = other.lock_timeout(LockMode::Shared, Duration::from_millis(5));
    /// assert!(matches!(refused, Err(FsError::Locked)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Locked`]; then the handle keeps the lock that it had. Others as for
    /// [`File::lock`].
    pub fn lock_timeout(&self, mode: LockMode, timeout: Duration) -> Result<()> {
        locked(
            self.with_area(&LockArea::File, |locks, area| locks.lock_timeout(area, mode, timeout))?,
        )
    }

    /// Releases the lock of the file, if the handle has one. As [`std::fs::File::unlock`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.lock()?;
    /// file.unlock()?;
    /// files.open_file("/f")?.try_lock()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`], [`FsError::IsADirectory`].
    pub fn unlock(&self) -> Result<()> {
        self.with_area(&LockArea::File, AdvisoryLocks::unlock)
    }

    /// Returns the mode of a lock of the file that conflicts with `mode` and that another handle
    /// holds. Locks of ranges are ignored.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::LockMode;
    ///
    /// let (file, other) = (files.create_file("/f")?, files.open_file("/f")?);
    /// file.lock_shared()?;
    /// assert_eq!(other.lock_conflict(LockMode::Exclusive)?, Some(LockMode::Shared));
    /// assert_eq!(other.lock_conflict(LockMode::Shared)?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::unlock`].
    pub fn lock_conflict(&self, mode: LockMode) -> Result<Option<LockMode>> {
        let found = self.with_area(&LockArea::File, |locks, area| locks.conflict(area, mode))?;
        Ok(found.map(|held| held.mode))
    }

    /// Locks a range of bytes, which need not exist; blocks until it can. `F_OFD_SETLKW` of
    /// `fcntl`.
    ///
    /// Ownership and lifetime are as for [`File::lock`], with which range locks do not conflict.
    /// Any part of the range that the handle has already locked is converted, and stays locked
    /// while the call blocks: two handles that share bytes and both want them exclusively deadlock.
    /// [`File::lock_range_timeout`] does not block forever.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::LockMode;
    ///
    /// let (one, other) = (files.create_file("/f")?, files.open_file("/f")?);
    /// one.lock_range(0..100, LockMode::Exclusive)?;
    /// other.lock_range(100.., LockMode::Exclusive)?; // up to any length of the file
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::lock`], but the handle keeps the locks that it had; [`FsError::EmptyRange`];
    /// [`FsError::LockTooFar`] for bytes beyond the limit: 4 TiB in a pool with a million inodes,
    /// more with fewer inodes, less with more.
    pub fn lock_range(&self, range: impl RangeBounds<u64>, mode: LockMode) -> Result<()> {
        self.with_area(&area_of(range)?, |locks, area| locks.lock(area, mode))
    }

    /// Tries [`File::lock_range`] without blocking. `F_OFD_SETLK` of `fcntl`.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{FsError, LockMode};
    ///
    /// let (one, other) = (files.create_file("/f")?, files.open_file("/f")?);
    /// one.try_lock_range(0..100, LockMode::Shared)?;
    /// one.try_lock_range(50..60, LockMode::Exclusive)?; // a part of it
    /// other.try_lock_range(0..50, LockMode::Shared)?;
    /// let refused = other.try_lock_range(0..51, LockMode::Shared);
    /// assert!(matches!(refused, Err(FsError::Locked)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Locked`]; then nothing has changed. Others as for [`File::lock_range`].
    pub fn try_lock_range(&self, range: impl RangeBounds<u64>, mode: LockMode) -> Result<()> {
        locked(self.with_area(&area_of(range)?, |locks, area| locks.try_lock(area, mode))?)
    }

    /// Locks a range of bytes; blocks for at most `timeout`.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::time::Duration;
    ///
    /// use aquifer_fs::LockMode;
    ///
    /// let (one, other) = (files.create_file("/f")?, files.open_file("/f")?);
    /// one.lock_range(..10, LockMode::Exclusive)?;
    /// let waited = other.lock_range_timeout(..=9, LockMode::Shared, Duration::from_millis(5));
    /// assert_eq!(waited.unwrap_err().errno(), libc::EWOULDBLOCK);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::try_lock_range`].
    pub fn lock_range_timeout(
        &self,
        range: impl RangeBounds<u64>,
        mode: LockMode,
        timeout: Duration,
    ) -> Result<()> {
        locked(
            self.with_area(&area_of(range)?, |locks, area| {
                locks.lock_timeout(area, mode, timeout)
            })?,
        )
    }

    /// Releases whatever the handle has locked of a range.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::LockMode;
    ///
    /// let (one, other) = (files.create_file("/f")?, files.open_file("/f")?);
    /// one.lock_range(.., LockMode::Exclusive)?;
    /// one.unlock_range(10..20)?;
    /// other.try_lock_range(10..20, LockMode::Exclusive)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::unlock`]; [`FsError::EmptyRange`], [`FsError::LockTooFar`].
    pub fn unlock_range(&self, range: impl RangeBounds<u64>) -> Result<()> {
        self.with_area(&area_of(range)?, AdvisoryLocks::unlock)
    }

    /// Returns the first lock of another handle that conflicts with locking a range in this mode.
    /// `F_OFD_GETLK` of `fcntl`. The system does not report the owner.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::LockMode;
    ///
    /// let (one, other) = (files.create_file("/f")?, files.open_file("/f")?);
    /// one.lock_range(100..200, LockMode::Exclusive)?;
    /// let held = other.range_lock_conflict(.., LockMode::Shared)?.expect("the other one's");
    /// assert_eq!((held.range, held.mode), (100..200, LockMode::Exclusive));
    /// assert!(other.range_lock_conflict(..100, LockMode::Shared)?.is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::unlock_range`].
    pub fn range_lock_conflict(
        &self,
        range: impl RangeBounds<u64>,
        mode: LockMode,
    ) -> Result<Option<HeldRange>> {
        let found = self.with_area(&area_of(range)?, |locks, area| locks.conflict(area, mode))?;
        Ok(found.and_then(|held| match held.area {
            LockArea::Bytes(range) => Some(HeldRange { range, mode: held.mode }),
            LockArea::File => None,
        }))
    }
}
