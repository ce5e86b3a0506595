//! The thread that unmaps retired mappings when no other thread does in time.
//!
//! It sleeps until the first mapping is retired, waits for the delay, and unmaps everything that is
//! not in use. So a mapping is unmapped after the delay plus the time for that, and a program that
//! maps nothing is not woken.
//!
//! ```text
//!           arm: first retired                      stop
//!  Idle ───────────────────────▶ Armed ─────────────────────▶ Stopped
//!    ▲                             │
//!    └──────── disarm ─────────────┘   then everything is unmapped
//! ```
//! A process at its limit of mappings cannot start a thread. Then the thread that retires a mapping
//! also unmaps it, and the next one tries again ([`aquifer_sys::thread`]: failing to start a thread
//! is an error, and does not terminate the process).
//!
//! The bell differs from [`worker::Bell`](crate::worker::Bell), so that retiring a mapping costs one
//! load while the bell is armed: a ring would be a store that all threads share.
//!
//! The bell is disarmed before the sweep. If a thread retires a mapping too late for the sweep, it
//! takes the lock of the pool after the sweep, and so finds the bell disarmed and arms it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{AtomicU32, Ordering, wait, wake};
use crate::worker::Worker;

const IDLE: u32 = 0;
const ARMED: u32 = 1;
const STOPPED: u32 = 2;

/// Wakes the timer when there is something to unmap.
#[derive(Debug)]
pub(super) struct Bell {
    state: AtomicU32,
}

impl Bell {
    pub fn new() -> Bell {
        Bell { state: AtomicU32::new(IDLE) }
    }

    /// Arms the bell after a mapping was retired.
    pub fn arm(&self) {
        // Relaxed: ordered by the lock of the pool, see above.
        if self.state.load(Ordering::Relaxed) == IDLE && self.change(IDLE, ARMED) {
            wake(&self.state, u32::MAX);
        }
    }

    /// Waits until the bell is armed. Returns false if it was stopped.
    pub fn wait_armed(&self) -> bool {
        loop {
            match self.state.load(Ordering::Acquire) {
                IDLE => wait(&self.state, IDLE, None),
                ARMED => return true,
                _ => return false,
            }
        }
    }

    /// Waits for the delay. Returns false if the bell was stopped.
    fn wait_delay(&self, delay: Duration) -> bool {
        // `None` if the delay exceeds the range of the clock.
        let end = Instant::now().checked_add(delay);
        while self.state.load(Ordering::Acquire) == ARMED {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return true;
            }
            wait(&self.state, ARMED, left);
        }
        false
    }

    /// Disarms the bell: a mapping retired from now on arms it again.
    pub fn disarm(&self) {
        self.change(ARMED, IDLE);
    }

    /// Stops the bell, which ends all waits.
    pub fn stop(&self) {
        // AcqRel: everything before this is visible to the thread, which ends.
        self.state.swap(STOPPED, Ordering::AcqRel);
        wake(&self.state, u32::MAX);
    }

    fn change(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Whether a sweep is due for what was retired.
    #[cfg(all(test, loom))]
    pub fn is_armed(&self) -> bool {
        self.state.load(Ordering::Acquire) == ARMED
    }
}

/// What the thread sweeps.
pub(super) trait Swept: Send + Sync + 'static {
    /// The bell, armed when there is something to sweep.
    fn bell(&self) -> &Bell;
    /// Unmaps everything that is not in use.
    fn sweep(&self);
}

/// Starts the thread if it is not running. It sweeps whenever the delay after the bell was armed is
/// over. Returns whether the thread is running.
pub(super) fn start(worker: &Worker, delay: Duration, swept: &Arc<impl Swept>) -> bool {
    if worker.has_started() {
        return true;
    }
    let swept = swept.clone();
    worker.start_once(c"aquifer-unmap", move || run(delay, &*swept)).is_ok()
}

fn run(delay: Duration, swept: &impl Swept) {
    let bell = swept.bell();
    while bell.wait_armed() && bell.wait_delay(delay) {
        bell.disarm();
        swept.sweep();
    }
}
