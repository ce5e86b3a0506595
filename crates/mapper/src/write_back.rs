//! Paced write-back, so that no flush has to write for seconds.
//!
//! Optional, because other processes see stores before they are flushed.
//!
//! A thread visits the private views in turn and writes their dirty pages, at a total rate. The
//! kernel starts to write them to the device at once. A flush then has little left to write and to
//! wait for.
//!
//! Pages written this way are not durable before a flush returns, and stay in `unsynced` of their
//! view until then: a flush that fails writes them again (see [`super::flush`]).
//!
//! # Pace
//! Ten times a second, each view gets its share of a tenth of the rate. Unused budget is not
//! carried over. If nothing is dirty in any view, the thread wakes only once a second.
//!
//! Lock order: the list of views is locked alone; it is released before the lock of a view is
//! taken.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::error::{MapError, Result};
use super::private::PrivateFile;
use aquifer_vm::VmError;
use aquifer_vm::worker::{Bell, Ticket, Worker};

const TICK: Duration = Duration::from_millis(100);
const IDLE_TICK: Duration = Duration::from_secs(1);

/// The thread, started with the first view. It ends when this is dropped.
pub(crate) struct WriteBack {
    shared: Arc<Shared>,
    worker: Worker,
}

struct Shared {
    bytes_per_second: u64,
    views: Mutex<Vec<Weak<PrivateFile>>>,
    /// Rung when a view is added.
    bell: Bell,
}

impl Shared {
    fn views(&self) -> MutexGuard<'_, Vec<Weak<PrivateFile>>> {
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WriteBack {
    /// At most `bytes_per_second`; 0 disables write-back.
    pub fn new(bytes_per_second: u64) -> WriteBack {
        let shared = Shared { bytes_per_second, views: Mutex::default(), bell: Bell::new() };
        WriteBack { shared: Arc::new(shared), worker: Worker::new() }
    }

    /// Adds a view, for as long as it lives.
    ///
    /// # Errors
    /// [`MapError::Memory`] if the thread cannot be started.
    pub fn add(&self, view: &Arc<PrivateFile>) -> Result<()> {
        if !self.worker.is_current() {
            return Err(MapError::Forked);
        }
        if self.shared.bytes_per_second == 0 {
            return Ok(());
        }
        self.shared.views().push(Arc::downgrade(view));
        let shared = self.shared.clone();
        let started = self.worker.start_once(c"aquifer-flush", move || run(&shared));
        started.map_err(|source| VmError::Thread { source })?;
        self.shared.bell.ring();
        Ok(())
    }
}

impl Drop for WriteBack {
    fn drop(&mut self) {
        self.shared.bell.stop();
    }
}

fn run(shared: &Shared) {
    let mut tick = TICK;
    let mut heard = Ticket::default();
    loop {
        let before = heard;
        if !shared.bell.wait(&mut heard, Some(tick)) {
            return;
        }
        let is_new = heard != before;
        let mut views = shared.views();
        views.retain(|view| view.strong_count() > 0);
        let all: Vec<_> = views.iter().filter_map(Weak::upgrade).collect();
        drop(views);
        let budget_bytes = shared.bytes_per_second / 10;
        let has_written = write_some(&all, budget_bytes) > 0;
        tick = if has_written || is_new { TICK } else { IDLE_TICK };
        // The last reference to a view may be dropped here: not under the lock.
    }
}

/// Writes up to `budget_bytes`: an equal share of each view, plus what earlier views left over.
/// Returns how much it wrote.
fn write_some(views: &[Arc<PrivateFile>], budget_bytes: u64) -> u64 {
    let mut left = budget_bytes;
    for (index, view) in views.iter().enumerate() {
        let share = left / (views.len() - index) as u64;
        // Pages that fail stay dirty, and the next flush reports the error.
        let written = view.write_back(share.max(1)).unwrap_or_else(|_error| {
            aquifer_sys::event!(warn, error = %_error, "write-back failed; the pages stay dirty");
            None
        });
        let written = written.unwrap_or(0);
        left = left.saturating_sub(written);
    }
    budget_bytes - left
}

#[cfg(test)]
mod tests;
