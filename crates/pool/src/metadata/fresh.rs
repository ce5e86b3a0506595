//! Fresh pages: those that were never written to, and so are zero by their position.
//!
//! ```text
//!   data ─────────┬───────────────────────────┬──────────────────────┬───────────────────┐
//!    named, free, │ free and known to be zero │ the same             │ fresh             │
//!    freed, …     │                           │ (handed out by none) │                   │
//!   ──────────────┴───────────────────────────┴──────────────────────┴───────────────────┘
//!                                     used_to_page           fresh_from_page      page_count
//! ```
//!
//! No page is handed out before the pool's head records, durably, that it is no longer fresh
//! (`fresh_from_page`). That is a record in the log, which becomes durable with everything before
//! it: with all bytes that earlier records expose. So it must not be needed often. The head is
//! raised by a gigabyte at a time, by the first checkpoint after the pool was opened, and by later ones
//! once half of that is used. A thread that writes waits only if it comes before the first
//! checkpoint, when there is little to write back, or if it is faster than the media for half a
//! gigabyte.
//!
//! # Closing
//! Pages between what was handed out and the head are zero, and only the segment knows it. The last
//! process that closes the pool lowers the head to `used_to_page`, the end of all pages that were
//! handed out since the pool was recovered. Every crash state is right:
//!
//! | a crash | finds the head | because |
//! |---|---|---|
//! | before the lowering is durable | raised | pages below it count as written, whatever they hold |
//! | after it | at `used_to_page` | no page from there on was written in this time but with zeros, as it was not handed out; none is afterwards, since only the closing process has the pool; and at recovery the head was not above it |
//!
//! So a crash costs the knowledge that at most two gigabytes of free pages are zero, and no more.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::error::{PoolError, Result};
use crate::metadata::alloc::{PageMaps, Wanted};
use crate::metadata::core::Core;
use crate::metadata::transaction::Durability;
use crate::mutant::{self, Mutant};

impl Core {
    /// Records that pages before `end_page` are about to be written to. From then on their position
    /// does not mark them as zero, even if the writer dies before an inode names them. Durable on
    /// return.
    pub fn use_fresh_pages(&self, end_page: u64) -> Result<()> {
        let control = self.handle.control();
        // Relaxed: the process that closes the pool loads it after all others have left, and for all
        // others it is a hint.
        let mut used_to_page = control.used_to_page.load(Relaxed);
        if used_to_page < end_page {
            used_to_page = control.used_to_page.fetch_max(end_page, Relaxed);
        }
        // Acquire: pairs with the Release of the `fetch_max` below.
        let durable_page = control.durable_fresh_from_page.load(Acquire);
        if end_page <= durable_page || mutant::is(self.handle.mutant, Mutant::FreshUnsaid) {
            let raise_at_page = durable_page.saturating_sub(self.handle.fresh_step_pages / 2);
            let is_due = used_to_page <= raise_at_page && raise_at_page < end_page;
            if is_due && durable_page < self.handle.layout.page_count {
                self.checkpoint_soon();
            }
            return Ok(());
        }
        let fresh_from_page = self.image.head()?.fresh_from_page;
        if end_page <= fresh_from_page {
            // Another transaction has recorded it, which is visible and not durable yet. Without
            // its record a crash would make these pages fresh again, with what was written to them.
            // Acquire: pairs with the Release in `apply_noted`, which comes before the change of
            // the image that was seen here.
            self.log.wait_durable(control.fresh_lsn.load(Acquire))?;
            control.durable_fresh_from_page.fetch_max(fresh_from_page, Release);
            return Ok(());
        }
        let raised_page = self.raised(end_page);
        self.transact(Durability::Now, Vec::new(), |transaction| {
            transaction.use_pages_before(raised_page);
            Ok::<_, PoolError>(())
        })?;
        control.durable_fresh_from_page.fetch_max(raised_page, Release);
        Ok(())
    }

    /// Makes a checkpoint that no thread waits for because it lacks room: it raises the head as
    /// well, if less than half of a step is left, so that no thread waits for that. If it cannot be
    /// raised, the checkpoint is made all the same, before the error is returned.
    pub fn checkpoint_ahead(&self) -> Result<()> {
        let raised = self.raise_fresh_ahead();
        self.checkpoint().and(raised)
    }

    fn raised(&self, page: u64) -> u64 {
        page.saturating_add(self.handle.fresh_step_pages).min(self.handle.layout.page_count)
    }

    /// Durable after the next checkpoint.
    fn raise_fresh_ahead(&self) -> Result<()> {
        let fresh_from_page = self.image.head()?.fresh_from_page;
        let used_to_page = self.handle.control().used_to_page.load(Relaxed);
        if fresh_from_page == self.handle.layout.page_count
            || used_to_page.saturating_add(self.handle.fresh_step_pages / 2) <= fresh_from_page
        {
            return Ok(());
        }
        let raised_page = self.raised(fresh_from_page);
        self.transact(Durability::Later, Vec::new(), |transaction| {
            transaction.use_pages_before(raised_page);
            Ok::<_, PoolError>(())
        })
    }

    /// Lowers the head to the end of the pages that were handed out; durable after the next
    /// checkpoint. For the process that closes the pool and has locked all others out.
    pub fn lower_fresh(&self) -> Result<()> {
        let control = self.handle.control();
        let mut used_to_page = control.used_to_page.load(Relaxed);
        if mutant::is(self.handle.mutant, Mutant::FreshAgain) {
            let last = PageMaps::of(&self.handle).all(Wanted::Any).last();
            used_to_page = last.map_or(used_to_page, |run| run.start_page);
        }
        if self.image.head()?.fresh_from_page <= used_to_page {
            return Ok(());
        }
        // Should this handle hand out pages after all, it raises the head again.
        control.durable_fresh_from_page.store(used_to_page, Release);
        self.transact(Durability::Later, Vec::new(), |transaction| {
            transaction.lower_fresh(used_to_page);
            Ok::<_, PoolError>(())
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::format::inode::HEAD_SLOT;
    use crate::pool::Pool;

    /// The head of the pool is damaged, so it can neither be raised nor lowered.
    #[test]
    fn checkpoints_are_made_even_if_the_head_cannot_be_changed() {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = directory.path().join("pool");
        let options = Pool::options().log_bytes(64 << 10).background(false);
        let pool = options.create(&path, 4 << 20).unwrap();
        drop(pool.reserve(1, 1).unwrap());
        let (core, control) = (pool.core(), pool.core().handle.control());
        let damaged = core.handle.segment.slot(HEAD_SLOT).unwrap();
        damaged.iter().for_each(|word| word.store(u64::MAX, Relaxed));
        let before_lsn = control.tail_lsn.load(Relaxed);
        let error = pool.checkpoint().unwrap_err();
        assert!(matches!(error, PoolError::Damaged { .. }), "{error}");
        assert!(control.tail_lsn.load(Relaxed) > before_lsn);
        // When it is closed, the superblock records that no process has it open.
        let names_a_segment = || std::fs::read(&path).unwrap()[96..112] != [0; 16];
        assert!(names_a_segment());
        drop(pool);
        assert!(!names_a_segment());
    }
}
