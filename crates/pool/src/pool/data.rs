//! The data of a pool: reading and storing its bytes, and making them durable.

use aquifer_vm::Bytes;

use super::Pool;
use crate::error::{PoolError, Result};
use crate::media::ByteRange;
use crate::mutant::{self, Mutant};

/// How much is stored between two looks at whether the locks are kept: this takes 0.1 ms.
pub(super) const STORED_AT_ONCE_BYTES: usize = 1 << 20;

impl Pool {
    /// Copies bytes of the data out, without a system call where the media are mapped. Concurrent
    /// changes may make the copy torn.
    ///
    /// # Errors
    /// [`PoolError::Media`]; [`PoolError::Forked`].
    pub fn load(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        // A child has other memory where its parent has the mapping.
        self.core().handle.members.check_reading()?;
        Ok(self.media().load(offset_bytes, bytes)?)
    }

    /// Copies bytes to the data, without a system call where the media are memory: visible to all
    /// processes at once, durable after [`Pool::make_durable`].
    ///
    /// # Errors
    /// [`PoolError::Media`]; [`PoolError::Forked`]; [`PoolError::ReadOnly`]; [`PoolError::LocksLost`],
    /// and then a part of the bytes may be stored.
    ///
    /// # Safety
    /// As for [`Media::write_at`](crate::media::Media::write_at): the caller must ensure that no
    /// reference to the bytes forbids the change, such as a lease of an immutable file or a typed
    /// value of an attached object. A layer may store to the pages of inodes that it manages, by
    /// its own rules, and to pages that it has reserved.
    pub unsafe fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let members = &self.core().handle.members;
        // A child has other memory where its parent has the mapping.
        members.check_process()?;
        self.core().handle.check_not_passive()?;
        for (part, bytes) in (0..).zip(bytes.chunks(STORED_AT_ONCE_BYTES)) {
            // Without the locks, others may have taken the reservation or the lock of the file, and
            // given the pages to other files.
            members.check_kept()?;
            // SAFETY: the caller upholds the same contract.
            unsafe {
                self.media().store(offset_bytes + part * STORED_AT_ONCE_BYTES as u64, bytes)?
            };
        }
        Ok(())
    }

    /// Passes bytes of the data to a closure: in place where the media are mapped, else as a copy
    /// in memory that the call allocates. They may change during the call. If the closure reads a
    /// byte that cannot be read, its result is dropped.
    ///
    /// # Errors
    /// [`PoolError::Media`]; [`PoolError::Forked`].
    pub fn look_at<T>(&self, range: ByteRange, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        self.core().handle.members.check_reading()?;
        Ok(self.media().look_at(range, look)?)
    }

    /// Prefetches the beginning of a range of the data into the CPU cache.
    #[inline]
    pub fn prefetch(&self, range: ByteRange) {
        if let Some(mapping) = self.media().mapping() {
            mapping.prefetch(range.offset_bytes, range.len_bytes as usize);
        }
    }

    /// The error for bytes in these ranges that could not be read by another way than
    /// [`Pool::look_at`].
    pub fn unreadable(&self, ranges: impl IntoIterator<Item = ByteRange>) -> PoolError {
        self.media().unreadable(ranges).into()
    }

    /// Bytes of the data in place, which the caller must have pinned; `None` where the media are
    /// not mapped. Reading a byte that can no longer be read raises `SIGBUS`, as with mmap.
    #[inline]
    pub fn bytes(&self, range: ByteRange) -> Option<Bytes<'_>> {
        self.media().bytes(range)
    }

    /// The address at which bytes of the data can be stored to; `None` where they can only be
    /// written. With write windows by protection keys, a thread can store there only while it has
    /// one ([`Media::write_window`](crate::media::Media::write_window)), and a load there needs one
    /// as well.
    pub fn place_to_store(&self, range: ByteRange) -> Option<*mut u8> {
        self.media().place_to_store(range)
    }

    /// Makes ranges durable that were written through [`Pool::media`].
    ///
    /// # Errors
    /// [`PoolError::Media`]; the pool is read-only from then on.
    pub fn make_durable(&self, ranges: &[ByteRange]) -> Result<()> {
        let log = &self.core().log;
        if mutant::is(log.handle.mutant, Mutant::CommitBeforeData) {
            return Ok(());
        }
        log.make_durable(ranges)
    }

    /// A hint that [`Pool::make_durable`] or [`Pool::sync_with`] of this range will come soon: the media
    /// begin with it, and nothing waits.
    pub fn begin_write_back(&self, range: ByteRange) {
        self.media().begin_write_back(range);
    }

    /// Makes all earlier changes durable, of any process.
    ///
    /// # Errors
    /// [`PoolError::Failed`], [`PoolError::Media`], [`PoolError::Stalled`].
    pub fn sync(&self) -> Result<()> {
        let core = self.core();
        core.handle.check_writable()?;
        let head_lsn = core.log.close_log()?;
        core.log.wait_durable(head_lsn)
    }

    /// Makes ranges durable that were written through [`Pool::media`], and all earlier changes, of any
    /// process: [`Pool::make_durable`] and [`Pool::sync`] with fewer flushes.
    ///
    /// The ranges are handed to the media first, and what makes the log durable makes them durable as
    /// well. So a power cut before the return can leave the log durable and the ranges not, or the
    /// other way round. No state needs either order: bytes that a change exposes are durable before the
    /// change counts, whoever asks for them, and those that are overwritten in place may be old or new.
    ///
    /// # Errors
    /// As for both.
    pub fn sync_with(&self, ranges: &[ByteRange]) -> Result<()> {
        let log = &self.core().log;
        let has_nothing =
            ranges.is_empty() || mutant::is(log.handle.mutant, Mutant::CommitBeforeData);
        if !has_nothing {
            log.write_back(ranges)?;
        }
        log.handle.check_writable()?;
        let head_lsn = log.close_log()?;
        // Only by this thread: another one may have begun before the ranges were handed over.
        let has_flushed = log.wait_durable_and_flush(head_lsn)?;
        match (has_nothing, has_flushed) {
            (true, _) => Ok(()),
            // A flush would also have found what the system has told to another program.
            (false, true) => log.check_nothing_lost(),
            (false, false) => log.flush(),
        }
    }

    /// Makes all data written earlier durable, of any process: not the metadata ([`Pool::sync`]).
    ///
    /// # Errors
    /// [`PoolError::Media`]; the pool is read-only from then on.
    pub fn sync_data(&self) -> Result<()> {
        self.core().log.make_durable(&[self.layout().data()])
    }
}
