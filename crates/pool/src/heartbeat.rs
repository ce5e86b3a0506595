//! Signs of life of a process that waits for its media.
//!
//! A flush takes as long as the device does, and meanwhile the thread that asked for it can say nothing. Others that wait for what it
//! holds would take it for stopped, and fail with [`PoolError::Stalled`](crate::PoolError::Stalled). So a thread of its own says for it
//! that it goes on: while such a call runs, the progress that the others watch is raised every [`PERIOD`]. When the process is
//! stopped, so is that thread, and the others are told.
//!
//! It sleeps while nothing is waited for. A call costs two short looks at a mutex of the handle, and wakes the thread at most once in a period.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use crate::background::Bell;
use crate::core::Core;

/// Much shorter than anybody's patience, [`OpenOptions::stall_timeout`](crate::OpenOptions::stall_timeout).
pub(crate) const PERIOD: Duration = Duration::from_millis(200);

/// What others wait for while this handle waits for its media, or for others that do, besides the mutexes of files that it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// The log's first append, if it is this handle's.
    Log,
    /// The maintenance mutex.
    Maintenance,
    /// Nothing else.
    Files,
}

/// What this handle holds while it waits for its media, and what rings the thread that says so; without it nothing is said.
#[derive(Debug, Default)]
pub(crate) struct Heartbeat {
    pub bell: OnceLock<Arc<Bell>>,
    state: Mutex<State>,
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
        let Some(bell) = self.bell.get() else { return };
        let mut state = self.state();
        state.waiting.push(held);
        if !std::mem::replace(&mut state.is_beating, true) {
            drop(state);
            bell.ring();
        }
    }

    fn end(&self, held: Held) {
        if self.bell.get().is_some() {
            let mut state = self.state();
            if let Some(index) = state.waiting.iter().position(|one| *one == held) {
                state.waiting.swap_remove(index);
            }
        }
    }
}

/// Ends what [`Core::while_media_work`] began, also when that panics.
struct Waiting<'a>(&'a Heartbeat, Held);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl Core {
    /// Does what takes as long as the media take, and lets those that wait for what is held know that this process goes on.
    pub fn while_media_work<T>(&self, held: Held, work: impl FnOnce() -> T) -> T {
        self.heartbeat.begin(held);
        let _waiting = Waiting(&self.heartbeat, held);
        work()
    }

    /// Says once that this process goes on with what it holds. False if it waits for nothing: there is nothing to say until the bell rings.
    pub fn beat(&self) -> bool {
        let mut state = self.heartbeat.state();
        if !state.waiting.is_empty() {
            // All of them: which thread holds which one, and for which of them it waits, is not noted anywhere.
            let owner = self.membership.index() as u16;
            self.control().file_mutexes.iter().for_each(|mutex| mutex.note_progress_of(owner));
        }
        for held in &state.waiting {
            match held {
                Held::Files => {}
                Held::Log => {
                    let first = self.control().appends.first();
                    if first.owner.load(Relaxed) == self.membership.index() as u64 {
                        // Relaxed: a hint for those who wait. If the append has just become another one, it had as much time.
                        first.progress.fetch_add(1, Relaxed);
                    }
                }
                Held::Maintenance => {
                    self.control().maintenance_mutex.note_progress_of_holder();
                }
            }
        }
        state.is_beating = !state.waiting.is_empty();
        state.is_beating
    }
}
