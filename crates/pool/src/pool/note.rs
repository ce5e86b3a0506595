//! Transactions that are counted in a [note](crate::shared::note).

use super::Pool;
use crate::error::Result;
use crate::shared::note::{self, TransactionNote, Unpublished};

impl Pool {
    /// Runs `work`, and counts in the note the transactions that this thread publishes in it by
    /// [`Pool::change`] and [`Pool::try_change`], each right before it counts for other processes.
    /// Those that are made durable at once ([`Pool::transact`]) are not counted.
    pub fn noting<T>(&self, note: TransactionNote, work: impl FnOnce() -> T) -> T {
        self.core().handle.control().noting.counting(note, work)
    }

    /// Runs `work` without counting its transactions: for what a request does besides, and may as
    /// well do twice.
    pub fn without_note<T>(&self, work: impl FnOnce() -> T) -> T {
        note::without(work)
    }

    /// Sets the result that the next transactions of this thread leave in its note; nothing outside
    /// [`Pool::noting`]. Inside a transaction it is that of the transaction.
    pub fn note_result(&self, result: [u64; 3]) {
        note::set_result(result);
    }

    /// The last 64 transactions that had a note, and that were not published because their process
    /// died before that. First repairs what processes have left that died before this call.
    ///
    /// The list ends when the last process closes the pool: it is complete for deaths since when some
    /// process has had the pool open for writing without a gap, this one or another, such as a
    /// [passive](crate::PoolOptions::passive) keeper.
    ///
    /// # Errors
    /// [`PoolError::Stalled`](crate::PoolError::Stalled) if a process that holds the metadata mutex
    /// makes no progress; [`PoolError::ReadOnly`](crate::PoolError::ReadOnly).
    pub fn unpublished(&self) -> Result<Vec<Unpublished>> {
        let core = self.core();
        core.handle.check_writable()?;
        Ok(core.log.lock()?.control().noting.unpublished())
    }
}
