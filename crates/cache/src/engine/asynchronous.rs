//! Futures over the I/O workers. They need no run-time and work with any executor.

use aquifer_vm::worker::completion;

use crate::engine::jobs::Jobs;
use crate::error::{CacheError, Result};

/// Runs `work` on a worker; the future completes with its result. Without work, which is that of a
/// forked child, it fails with [`CacheError::Forked`].
///
/// The work runs even if the future is dropped.
pub(crate) fn run<T: Send + 'static, W: FnOnce() -> Result<T> + Send + 'static>(
    jobs: &Jobs,
    work: Option<W>,
) -> impl Future<Output = Result<T>> + Send + use<T, W> {
    let coming = work.map(|work| {
        let (done, coming) = completion();
        jobs.push_task(Box::new(move || done.complete(work())));
        coming
    });
    async move {
        match coming {
            Some(coming) => coming.await.map_err(|_| CacheError::Forked)?,
            None => Err(CacheError::Forked),
        }
    }
}
