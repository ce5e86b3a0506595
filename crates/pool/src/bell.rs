//! The signal that a background thread sleeps on.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The signal that a worker sleeps on.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    state: Mutex<BellState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BellState {
    has_rung: bool,
    must_stop: bool,
}

impl Bell {
    fn state(&self) -> MutexGuard<'_, BellState> {
        self.state.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    pub fn ring(&self) {
        self.state().has_rung = true;
        self.changed.notify_all();
    }

    /// Waits until the bell has rung; returns false if the worker must stop.
    pub fn wait(&self) -> bool {
        let mut state = self.state();
        while !state.has_rung && !state.must_stop {
            state = self.changed.wait(state).unwrap_or_else(|broken| broken.into_inner());
        }
        state.has_rung = false;
        !state.must_stop
    }

    /// Sleeps for `duration`; returns false if the worker must stop.
    pub fn pause(&self, duration: Duration) -> bool {
        let until = Instant::now() + duration;
        let mut state = self.state();
        while !state.must_stop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            state = (self.changed.wait_timeout(state, left))
                .map_or_else(|broken| broken.into_inner().0, |(state, _)| state);
        }
        false
    }

    /// Tells the worker to stop.
    pub fn stop(&self) {
        self.state().must_stop = true;
        self.changed.notify_all();
    }
}
