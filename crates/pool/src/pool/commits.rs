//! Commits of a pool's log, and bringing the media up to date with it.

use std::sync::atomic::Ordering::Relaxed;

use super::Pool;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::log::commit::{Commit, CommitContent};
use crate::log::replay::Committed;
use crate::media::ByteRange;
use crate::open::workers::report_checkpoint;
use crate::shared::appends::at_place;

/// The use of the log at which a checkpoint begins in the background.
const CHECKPOINT_AT_PERCENT: u64 = 50;

impl Pool {
    /// The most bytes of pages that one commit may carry.
    pub fn max_commit_bytes(&self) -> u64 {
        self.core().log.max_commit_bytes()
    }

    /// Captures a commit: `fill` copies the whole pages, in order, into the memory it is given. All
    /// content becomes durable together when [`Commit::finish`] returns. The pool stays open until
    /// then.
    ///
    /// The commit takes its place in the log now, and everything behind it, of all processes,
    /// becomes durable after it: until it is finished or dropped, other commits, transactions and
    /// checkpoints wait. If that takes longer than their
    /// [`PoolOptions::stall_timeout`](crate::PoolOptions::stall_timeout), they fail with
    /// [`PoolError::Stalled`](crate::PoolError::Stalled), which names this process. When the
    /// process dies, they continue at once.
    ///
    /// # Errors
    /// [`PoolError::TooLargeForLog`](crate::PoolError::TooLargeForLog);
    /// [`PoolError::Failed`](crate::PoolError::Failed) and
    /// [`PoolError::Media`](crate::PoolError::Media) from a checkpoint that makes room.
    ///
    /// # Safety
    /// The commit replaces the bytes of its ranges, in this process and others. The caller must
    /// hold the write lock of each inode ([`Pool::lock_inode`]) until the commit is finished, or
    /// ensure otherwise that no reference covers the ranges: see
    /// [`Media::write_at`](crate::media::Media::write_at).
    pub unsafe fn capture(
        &self,
        content: &CommitContent<'_>,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Commit> {
        let make_room = |len_bytes| self.core().make_room(len_bytes);
        let mut commit = self.core().log.capture(content, fill, make_room)?;
        commit.keeps_open = Some(self.shared.clone());
        self.checkpoint_in_time();
        Ok(commit)
    }

    /// The end of the durable log.
    pub fn durable_lsn(&self) -> u64 {
        self.core().handle.control().appends.durable_lsn.load(Relaxed)
    }

    /// The tail of the log: everything before it is durable at its place, and may be overwritten.
    pub fn tail_lsn(&self) -> u64 {
        self.core().handle.control().tail_lsn.load(Relaxed)
    }

    /// Commits before this position are copied to their place.
    pub fn applied_lsn(&self) -> u64 {
        at_place(&self.core().handle.control().applied_lsn)
    }

    /// Copies everything committed before `lsn`, or as much of it as is durable, to its place.
    ///
    /// # Errors
    /// [`PoolError::Media`](crate::PoolError::Media); the pool is read-only from then on.
    pub fn apply_through(&self, lsn: u64) -> Result<()> {
        self.core().handle.check_writable()?;
        self.core().log.apply_through(lsn.min(self.durable_lsn()))
    }

    /// Brings the media, at their place, up to date with the log. Returns the pages of `range`,
    /// with their offsets, that a reader must see instead of those on media, because this handle
    /// cannot copy them there.
    ///
    /// The caller must hold the lock of the inode, so that there are no commits to `range` during
    /// the call. The call decides a commit that a dead process had begun: from now on it is there
    /// or it is not, and a reader that cannot decide keeps seeing the old content.
    ///
    /// # Errors
    /// [`PoolError::Media`](crate::PoolError::Media),
    /// [`PoolError::Damaged`](crate::PoolError::Damaged),
    /// [`PoolError::Stalled`](crate::PoolError::Stalled).
    pub fn bring_up_to_date(&self, range: ByteRange) -> Result<Vec<(u64, Vec<u8>)>> {
        let log = &self.core().log;
        if self.is_writable() && log.control().check_not_failed().is_ok() {
            let head_lsn = log.close_log()?;
            log.wait_durable(head_lsn)?;
            log.apply_through(head_lsn)?;
            return Ok(Vec::new());
        }
        log.committed_for_reader(range, self.overlay(), |seen| {
            (seen.within(range))
                .map(|(offset, content)| {
                    let mut page = vec![0; PAGE_BYTES as usize];
                    content.read(&**self.media(), offset, &mut page)?;
                    Ok((offset, page))
                })
                .collect()
        })
    }

    /// Ranges of the media for which the log currently has newer content.
    ///
    /// # Errors
    /// [`PoolError::Media`](crate::PoolError::Media),
    /// [`PoolError::Damaged`](crate::PoolError::Damaged).
    pub fn unapplied(&self) -> Result<Vec<ByteRange>> {
        let log = &self.core().log;
        let nothing = ByteRange { offset_bytes: 0, len_bytes: 0 };
        log.committed_for_reader(nothing, self.overlay(), |seen| Ok(seen.committed.ranges()))
    }

    /// What a reader without shared memory found in the log when it opened the pool.
    fn overlay(&self) -> Option<&Committed> {
        let is_snapshot = !self.is_writable() && self.core().handle.segment_id.is_nil();
        is_snapshot.then_some(&self.shared.overlay)
    }

    /// Brings the media up to date with the log, so that log space and freed pages can be reused, and
    /// prepares pages that were never used.
    ///
    /// # Errors
    /// [`PoolError::Media`](crate::PoolError::Media); the pool is read-only from then on.
    /// [`PoolError::Damaged`](crate::PoolError::Damaged) and
    /// [`PoolError::Stalled`](crate::PoolError::Stalled) if no pages could be prepared; what the log
    /// held is applied all the same.
    pub fn checkpoint(&self) -> Result<()> {
        let outcome = self.core().checkpoint_ahead();
        report_checkpoint(self.core(), &outcome);
        outcome
    }

    /// Requests a checkpoint in the background, if this handle has a background thread.
    pub fn checkpoint_soon(&self) {
        self.core().checkpoint_soon();
    }

    /// Requests a checkpoint in the background if the log is half full.
    pub(super) fn checkpoint_in_time(&self) {
        if self.core().log.use_percent() >= CHECKPOINT_AT_PERCENT {
            self.checkpoint_soon();
        }
    }
}
