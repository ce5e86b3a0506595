//! Background threads of each open pool: one makes checkpoints, one zeroes pages, one sends
//! heartbeats.
//!
//! Each sleeps until its bell is rung, and only does work that would be done without it: a full log
//! triggers a checkpoint, and an allocation that needs zeros makes them. A pool works without the
//! threads.

use std::ffi::CStr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use aquifer_vm::worker::{self, Bell, Ticket};

use crate::core::Core;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::heartbeat::PERIOD;
use crate::options::PoolOptions;
use crate::zero::CHUNK_PAGES;

/// A background thread, which runs until it is stopped or the pool is closed.
pub(crate) struct Worker {
    bell: Arc<Bell>,
    thread: worker::Worker,
}

impl Worker {
    /// Starts the thread that makes checkpoints.
    pub fn checkpointer(core: &Arc<Core>) -> Option<Worker> {
        let bell = core.checkpoint_bell.get_or_init(Arc::default).clone();
        Self::start(core, c"aquifer-ckpt", bell, |core, _| {
            // A failure is recorded for all processes, and the next call of each returns it.
            report_checkpoint(core, &core.checkpoint_ahead());
        })
    }

    /// Starts the thread that zeroes free pages, at a limited rate, until there are enough.
    pub fn zeroer(core: &Arc<Core>, options: &PoolOptions) -> Option<Worker> {
        let (stock_bytes, rate) = (options.zeroed_bytes, options.zero_bytes_per_second);
        let bell = core.space.zeroer_bell.get_or_init(Arc::default).clone();
        Self::start(core, c"aquifer-zero", bell, move |core, bell| {
            while core.space.zeroed_bytes() < stock_bytes {
                let most_pages = CHUNK_PAGES.min(rate.div_ceil(PAGE_BYTES));
                // The allocation that needs the pages reports the failure.
                let zeroed = core.space.zero_some(most_pages).unwrap_or(0);
                let pause = Duration::from_secs_f64((zeroed * PAGE_BYTES) as f64 / rate as f64);
                if zeroed == 0 || !bell.pause(pause) {
                    break;
                }
            }
        })
    }

    /// Starts the thread that signals progress while this process waits for its media.
    pub fn heartbeat(core: &Arc<Core>) -> Option<Worker> {
        let bell = core.handle.heartbeat.bell.get_or_init(Arc::default).clone();
        Self::start(core, c"aquifer-beat", bell, |core, bell| {
            let handle = &core.handle;
            let owner = handle.members.locks.index();
            while bell.pause(PERIOD) && handle.heartbeat.beat(handle.control(), owner) {}
        })
    }

    fn start(
        core: &Arc<Core>,
        name: &'static CStr,
        bell: Arc<Bell>,
        work: impl Fn(&Core, &Bell) + Send + 'static,
    ) -> Option<Worker> {
        let (core, own_bell): (Weak<Core>, _) = (Arc::downgrade(core), bell.clone());
        let thread = worker::Worker::new();
        let body = move || {
            let mut heard = Ticket::default();
            while own_bell.wait(&mut heard, None) {
                let Some(core) = core.upgrade() else { return };
                work(&core, &own_bell);
            }
        };
        thread.start(name, body).ok()?;
        Some(Worker { bell, thread })
    }

    /// Stops the worker and waits until it has ended.
    pub fn stop(self) {}
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.bell.stop();
        self.thread.join();
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
