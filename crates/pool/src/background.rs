//! Background threads of each open pool: one makes checkpoints, one zeroes pages, one sends
//! heartbeats.
//!
//! Each is started when it is first called, sleeps until it is called again, and only does work that
//! would be done without it: a full log triggers a checkpoint, and an allocation that needs zeros
//! makes them. A pool works without the threads. So a process that reads, or that changes a little and
//! leaves making it durable to others or to its end, starts none; one that waits for the media starts
//! that of the heartbeats.

use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

use aquifer_vm::worker::{self, Bell, Ticket};

use crate::core::Core;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::heartbeat::PERIOD;
use crate::options::PoolOptions;
use crate::zero::CHUNK_PAGES;

/// A background thread, which is started by the first call and runs until it is stopped.
pub(crate) struct Worker {
    name: &'static CStr,
    bell: Arc<Bell>,
    /// What the thread does after each call; false ends it.
    work: Arc<dyn Fn(&Bell) -> bool + Send + Sync>,
    thread: worker::Worker,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Worker").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Prepares the threads of an open pool.
pub(crate) fn prepare(core: &Arc<Core>, options: &PoolOptions) {
    if !core.handle.members.is_writable || !options.background {
        return;
    }
    // Called here only, so none is there yet.
    let _ = core.checkpointer.set(Worker::checkpointer(core));
    if options.zero_bytes_per_second > 0 {
        let _ = core.space.zeroer.set(Zeroer::new(core, options));
    }
    let _ = core.handle.heartbeat.worker.set(Worker::heartbeat(core));
}

impl Worker {
    /// `work` must not keep alive what owns this worker.
    pub fn new(
        name: &'static CStr,
        work: impl Fn(&Bell) -> bool + Send + Sync + 'static,
    ) -> Worker {
        let (bell, work, thread) = (Arc::default(), Arc::new(work), worker::Worker::new());
        Worker { name, bell, work, thread }
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

    /// Has the thread do its work, soon. Returns false if there is no thread and none can be started:
    /// then the work is left to the calls that need it, and the next call tries again.
    pub fn call(&self) -> bool {
        if !self.thread.has_started() && !self.bell.is_stopped() {
            let (bell, work) = (self.bell.clone(), self.work.clone());
            let body = move || {
                let mut heard = Ticket::default();
                while bell.wait(&mut heard, None) && work(&bell) {}
            };
            let _ = self.thread.start_once(self.name, body);
        }
        self.bell.ring();
        self.has_started()
    }

    /// Whether there is a thread, or was one.
    pub fn has_started(&self) -> bool {
        self.thread.has_started()
    }

    /// The bell that calls it.
    #[cfg(test)]
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Stops the thread, if there is one, and waits until it has ended.
    pub fn stop(&self) {
        self.bell.stop();
        self.thread.join();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The thread that zeroes free pages, at a limited rate, until there are enough.
#[derive(Debug)]
pub(crate) struct Zeroer {
    pub worker: Worker,
    pub stock_bytes: u64,
}

impl Zeroer {
    fn new(core: &Arc<Core>, options: &PoolOptions) -> Zeroer {
        let (stock_bytes, rate) = (options.zeroed_bytes, options.zero_bytes_per_second);
        let core = Arc::downgrade(core);
        let worker = Worker::new(c"aquifer-zero", move |bell| {
            let Some(core) = core.upgrade() else { return false };
            while core.space.lacks_zeros(stock_bytes) {
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
        Zeroer { worker, stock_bytes }
    }
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
