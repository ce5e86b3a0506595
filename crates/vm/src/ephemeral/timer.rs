//! The thread that lets go of what was retired when nobody else does in time.
//!
//! It sleeps until the first mapping is retired, waits for the delay, and unmaps everything that is not in use: so a
//! mapping is gone after the delay and the time that takes, and a program that maps nothing is not woken.
//!
//! ```text
//!           arm: first retired                      stop
//!  Idle ───────────────────────▶ Armed ─────────────────────▶ Stopped
//!    ▲                             │
//!    └──────── disarm ─────────────┘   then everything is unmapped
//! ```
//! A process at its limit of mappings can have no further thread. Then whoever retires something lets go of it, and the next
//! one tries again ([`aquifer_sys::thread`]: a thread that cannot work is an error, not the end of the process).
//!
//! It is disarmed before it looks. Who retires something that it does not see any more takes the lock of the pool after
//! it, and so finds the bell disarmed.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use aquifer_sys::thread::{self, Thread};

use crate::ProcessMark;
use crate::sync::{AtomicU32, Ordering, wait, wake};

const IDLE: u32 = 0;
const ARMED: u32 = 1;
const STOPPED: u32 = 2;

/// Whether there is something to do.
#[derive(Debug)]
pub(super) struct Bell {
    state: AtomicU32,
}

impl Bell {
    pub fn new() -> Bell {
        Bell { state: AtomicU32::new(IDLE) }
    }

    /// Something was retired.
    pub fn arm(&self) {
        // Relaxed: ordered by the lock of what it was retired to, see above.
        if self.state.load(Ordering::Relaxed) == IDLE && self.change(IDLE, ARMED) {
            wake(&self.state, u32::MAX);
        }
    }

    /// Waits until something was retired; not if the bell was stopped.
    pub fn wait_armed(&self) -> bool {
        loop {
            match self.state.load(Ordering::Acquire) {
                IDLE => wait(&self.state, IDLE, None),
                ARMED => return true,
                _ => return false,
            }
        }
    }

    /// Lets the time pass; not if the bell was stopped.
    fn wait_delay(&self, delay: Duration) -> bool {
        // None: longer than clocks count.
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

    /// From now on, what is retired arms it again.
    pub fn disarm(&self) {
        self.change(ARMED, IDLE);
    }

    /// Nobody waits any more.
    pub fn stop(&self) {
        // AcqRel: what was done before is seen by the thread, which ends.
        self.state.swap(STOPPED, Ordering::AcqRel);
        wake(&self.state, u32::MAX);
    }

    fn change(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Whether it will be looked at what was retired.
    #[cfg(all(test, loom))]
    pub fn is_armed(&self) -> bool {
        self.state.load(Ordering::Acquire) == ARMED
    }
}

/// What the thread works on.
pub(super) trait Swept: Send + Sync + 'static {
    /// Armed when there is something to do.
    fn bell(&self) -> &Bell;
    /// Does it.
    fn sweep(&self);
}

/// The thread, made when it is first needed.
#[derive(Debug)]
pub(super) struct Timer {
    thread: OnceLock<Thread>,
    starting: Mutex<()>,
    mark: ProcessMark,
}

impl Timer {
    pub fn new() -> Timer {
        Timer { thread: OnceLock::new(), starting: Mutex::new(()), mark: ProcessMark::new() }
    }

    /// Starts the thread at the first call at which there can be one more. It sweeps whenever the delay after the bell was
    /// armed is over. Says whether there is a thread.
    pub fn start(&self, delay: Duration, swept: &Arc<impl Swept>) -> bool {
        if self.thread.get().is_some() {
            return true;
        }
        let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.thread.get().is_some() {
            return true;
        }
        let swept = swept.clone();
        let started = thread::start(c"aquifer-unmap", move || run(delay, &*swept));
        started.is_ok_and(|thread| self.thread.set(thread).is_ok())
    }

    /// Waits for the thread's end, after the bell was stopped.
    pub fn join(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.mark.is_current() {
            thread.join();
        } else {
            // It is a thread of the parent's.
            std::mem::forget(thread);
        }
    }
}

fn run(delay: Duration, swept: &impl Swept) {
    let bell = swept.bell();
    while bell.wait_armed() && bell.wait_delay(delay) {
        bell.disarm();
        swept.sweep();
    }
}
