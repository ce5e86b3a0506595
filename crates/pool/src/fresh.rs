//! Fresh pages: those that were never written to, and so are zero by their position.
//!
//! No page is handed out before the pool's head records, durably, that it is no longer fresh. That
//! is a transaction, so the head is raised in large steps.

use std::sync::atomic::Ordering::{Acquire, Release};

use crate::core::Core;
use crate::error::{PoolError, Result};
use crate::mutant::{self, Mutant};
use crate::transaction::Durability;

/// The step by which the head is raised, at most a thirty-second of the pool.
const FRESH_STEP_PAGES: u64 = 16_384;

impl Core {
    /// Records that pages before `end_page` are about to be written to. From then on their position
    /// does not mark them as zero, even if the writer dies before an inode names them. Durable on
    /// return.
    pub fn use_fresh_pages(&self, end_page: u64) -> Result<()> {
        let control = self.handle.control();
        // Acquire: pairs with the Release of the `fetch_max` below.
        if end_page <= control.durable_fresh_from_page.load(Acquire)
            || mutant::is(self.handle.mutant, Mutant::FreshUnsaid)
        {
            return Ok(());
        }
        let page_count = self.handle.layout.page_count;
        let step = (page_count / 32).clamp(1, FRESH_STEP_PAGES);
        let raised = end_page.saturating_add(step - 1).min(page_count);
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
        self.transact(Durability::Now, Vec::new(), |transaction| {
            transaction.use_pages_before(raised);
            Ok::<_, PoolError>(())
        })?;
        control.durable_fresh_from_page.fetch_max(raised, Release);
        Ok(())
    }
}
