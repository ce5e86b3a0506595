//! Background threads of each open pool: one makes checkpoints, one zeroes pages, one sends
//! heartbeats.
//!
//! Each is started when it is first called, sleeps until it is called again, and only does work that
//! would be done without it: a full log triggers a checkpoint, and an allocation that needs zeros
//! makes them. A pool works without the threads. So a process that reads, or that changes a little and
//! leaves making it durable to others or to its end, starts none; one that waits for the media starts
//! that of the heartbeats.

use std::sync::Arc;
use std::time::Duration;

use crate::background::Worker;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::metadata::core::Core;
use crate::metadata::space::Zeroer;
use crate::metadata::zero::CHUNK_PAGES;
use crate::options::PoolOptions;
use crate::shared::heartbeat::PERIOD;

/// How many bytes of free pages to keep zeroed. Pages that were never used count.
const STOCK_BYTES: u64 = 1 << 30;

/// Prepares the threads of an open pool.
pub(crate) fn prepare(core: &Arc<Core>, options: &PoolOptions) {
    if !core.handle.members.is_writable || !options.background {
        return;
    }
    // Called here only, so none is there yet.
    let _ = core.checkpointer.set(checkpointer(core));
    if options.zero_bytes_per_second > 0 {
        let _ = core.space.zeroer.set(zeroer(core, options));
    }
    let _ = core.handle.heartbeat.worker.set(heartbeat(core));
}

/// The thread that makes checkpoints.
fn checkpointer(core: &Arc<Core>) -> Worker {
    let core = Arc::downgrade(core);
    Worker::new(c"aquifer-ckpt", move |_| {
        let Some(core) = core.upgrade() else { return false };
        // A failure is recorded for all processes, and the next call of each returns it.
        report_checkpoint(&core, &core.checkpoint_ahead());
        true
    })
}

/// The thread that signals progress while this process waits for its media.
fn heartbeat(core: &Arc<Core>) -> Worker {
    let handle = Arc::downgrade(&core.handle);
    Worker::new(c"aquifer-beat", move |bell| {
        let Some(handle) = handle.upgrade() else { return false };
        let owner = handle.members.locks.index();
        while bell.pause(PERIOD) && handle.heartbeat.beat(handle.control(), owner) {}
        true
    })
}

fn zeroer(core: &Arc<Core>, options: &PoolOptions) -> Zeroer {
    let rate = options.zero_bytes_per_second;
    let core = Arc::downgrade(core);
    let worker = Worker::new(c"aquifer-zero", move |bell| {
        let Some(core) = core.upgrade() else { return false };
        while core.space.lacks_zeros(STOCK_BYTES) {
            let most_pages = CHUNK_PAGES.min(rate.div_ceil(PAGE_BYTES));
            // The allocation that needs the pages reports the failure.
            let zeroed = core.space.zero_some(most_pages).unwrap_or(0);
            let pause = Duration::from_secs_f64((zeroed * PAGE_BYTES) as f64 / rate as f64);
            if zeroed == 0 || !bell.pause(pause) {
                break;
            }
        }
        true
    });
    Zeroer { worker, stock_bytes: STOCK_BYTES }
}

/// Emits an event for a checkpoint. The caller holds no lock.
pub(crate) fn report_checkpoint(_core: &Core, outcome: &Result<()>) {
    match outcome {
        Ok(()) => aquifer_sys::event!(
            debug,
            pool = %_core.handle.media.path().display(),
            log_use_percent = _core.log.use_percent(),
            "checkpoint"
        ),
        Err(_error) => aquifer_sys::event!(
            error,
            pool = %_core.handle.media.path().display(),
            error = %_error,
            is_read_only = _core.handle.control().check_not_failed().is_err(),
            "checkpoint failed"
        ),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::pool::Pool;

    /// A pool that was opened and closed, with changes that were not synced, has had no thread: the
    /// last one that closes it is waited for by none.
    #[test]
    fn opening_and_closing_start_no_thread() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        drop(Pool::create(&path, 4 << 20).unwrap());
        let pool = Pool::open(&path).unwrap();
        let core = pool.core().clone();
        drop(pool);
        let workers = [core.checkpointer.get(), core.handle.heartbeat.worker.get()];
        assert!(workers.iter().all(|worker| worker.is_some_and(|worker| !worker.has_started())));
    }
}
