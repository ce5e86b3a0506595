//! Heartbeats of a process that waits for its media.
//!
//! A flush takes as long as the device does, and the thread that requested it is blocked. Processes
//! that wait for what the thread holds would take it for stopped, and fail with
//! [`PoolError::Stalled`](crate::PoolError::Stalled). So a dedicated thread reports progress for
//! it: while such a call runs, that thread raises the progress counter that the waiters watch,
//! every [`PERIOD`]. When the process is stopped, that thread is too, and the waiters time out.
//!
//! It is started by the first call that waits for the media, also if no other process has the pool
//! open: one may open it meanwhile, but not while the last one closes it. It sleeps while no call
//! waits. A call locks a mutex of the handle twice, briefly, and wakes the thread at most once in a
//! period.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use aquifer_sys::waits;

use crate::background::Worker;
use crate::shared::segment::Control;

/// Much shorter than any usual timeout,
/// [`PoolOptions::stall_timeout`](crate::PoolOptions::stall_timeout).
pub(crate) const PERIOD: Duration = Duration::from_millis(200);

/// What this handle holds, besides file mutexes, while it waits for its media or for other
/// processes that do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// The log's first append, if it is this handle's.
    Log,
    /// The maintenance mutex.
    Maintenance,
    /// Nothing else.
    Files,
}

/// What this handle holds while it waits for its media, and the heartbeat thread; without one there
/// are no heartbeats.
#[derive(Debug, Default)]
pub(crate) struct Heartbeat {
    pub worker: OnceLock<Worker>,
    state: Mutex<State>,
    /// Whether no other process can wait for this one any more.
    is_alone: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Held>,
    is_beating: bool,
}

impl Heartbeat {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    fn begin(&self, held: Held) {
        let Some(worker) = self.worker.get() else { return };
        // Relaxed: set by the call that closes the pool, and there are no others then.
        if self.is_alone.load(Relaxed) {
            return;
        }
        let mut state = self.state();
        state.waiting.push(held);
        if !std::mem::replace(&mut state.is_beating, true) {
            drop(state);
            if !worker.call() {
                // The next wait tries again.
                self.state().is_beating = false;
            }
        }
    }

    /// From now on no other process can wait for this one: it is closing the pool, as the last.
    pub fn be_alone(&self) {
        self.is_alone.store(true, Relaxed);
    }

    fn end(&self, held: Held) {
        if self.worker.get().is_some() {
            let mut state = self.state();
            if let Some(index) = state.waiting.iter().position(|one| *one == held) {
                state.waiting.swap_remove(index);
            }
        }
    }
}

/// Ends the wait that [`Heartbeat::while_media_work`] began, also if the work panics.
struct Waiting<'a>(&'a Heartbeat, Held);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl Heartbeat {
    /// Runs work that takes as long as the media do, and sends heartbeats to the processes that
    /// wait for what is held.
    pub fn while_media_work<T>(&self, held: Held, work: impl FnOnce() -> T) -> T {
        waits::about_to_wait();
        self.begin(held);
        let _waiting = Waiting(self, held);
        work()
    }

    /// Sends one heartbeat of the handle that owns this process slot. Returns false if no call
    /// waits: then the thread sleeps until the bell rings.
    pub fn beat(&self, control: &Control, owner: usize) -> bool {
        let mut state = self.state();
        if !state.waiting.is_empty() {
            // All mutexes of this handle: there is no record of which thread holds which one, and
            // waits.
            control.file_mutexes.iter().for_each(|mutex| mutex.note_progress_of(owner as u16));
        }
        for held in &state.waiting {
            match held {
                Held::Files => {}
                Held::Log => {
                    let first = control.appends.first();
                    if first.owner.load(Relaxed) == owner as u64 {
                        // Relaxed: a hint for waiters. If a new append has just become the first,
                        // an extra count is harmless.
                        first.progress.fetch_add(1, Relaxed);
                    }
                }
                Held::Maintenance => control.maintenance_mutex.note_progress_of_holder(),
            }
        }
        state.is_beating = !state.waiting.is_empty();
        state.is_beating
    }
}
