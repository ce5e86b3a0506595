//! Background threads, the bell that wakes them, and the end of their work.
//!
//! | | |
//! |---|---|
//! | [`Worker`] | the threads of one owner: started when first needed, joined when it is dropped |
//! | [`Bell`] | wakes a thread that waits for work, for a time, or for its end |
//! | [`JobThread`] | one thread that runs jobs in order |
//! | [`Completion`] | what another thread computes, to be awaited or waited for |
//!
//! A loop of a background thread is:
//! ```
//! use std::sync::Arc;
//! use aquifer_vm::worker::{Bell, Ticket, Worker};
//!
//! let bell = Arc::new(Bell::new());
//! let worker = Worker::new();
//! let own = bell.clone();
//! worker.start_once(c"example", move || {
//!     let mut heard = Ticket::default();
//!     while own.wait(&mut heard, None) {
//!         // work
//!     }
//! })?;
//! bell.ring(); // there is work
//! bell.stop(); // the thread ends when it has finished what it is doing
//! drop(worker); // joins it
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # After a fork
//! A child has copies of the objects and none of the threads, and a lock that a thread held is
//! never released there. In a child a [`Worker`] starts and joins nothing, a [`JobThread`] forgets
//! its jobs, and a [`Completion`] fails with [`VmError::Forked`](crate::VmError::Forked). An owner
//! that locks what it shares with its threads checks [`Worker::is_current`] first.

mod bell;
mod completion;
mod jobs;

use std::ffi::CStr;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use aquifer_sys::thread::{self, Thread};

pub use bell::{Bell, Ticket};
pub use completion::{Completer, Completion, completion};
pub use jobs::JobThread;

use crate::{ProcessMark, window};

/// The background threads of one owner. Dropping it joins them: the owner tells them to end before.
///
/// The threads block all asynchronous signals ([`aquifer_sys::thread`]).
#[derive(Debug)]
pub struct Worker {
    /// Whether there is a thread. Changes once.
    has_started: AtomicBool,
    threads: Mutex<Vec<Thread>>,
    mark: ProcessMark,
}

impl Worker {
    /// Starts no thread yet.
    pub fn new() -> Worker {
        Worker {
            has_started: AtomicBool::new(false),
            threads: Mutex::default(),
            mark: ProcessMark::new(),
        }
    }

    /// Returns whether the calling process made it. A forked child has none of the threads.
    pub fn is_current(&self) -> bool {
        self.mark.is_current()
    }

    /// Returns whether a thread was started.
    pub fn has_started(&self) -> bool {
        // Relaxed: the thread is reached through what it shares with the owner.
        self.has_started.load(Ordering::Relaxed)
    }

    /// Starts a thread unless there is one. The kernel truncates names to 15 bytes.
    ///
    /// # Errors
    /// The system refuses another thread, or the process is a forked child. The next call tries
    /// again.
    pub fn start_once(
        &self,
        name: &'static CStr,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        if self.has_started() {
            return Ok(());
        }
        self.start_if(|threads| threads.is_empty(), name, body)
    }

    /// Starts another thread.
    ///
    /// # Errors
    /// As for [`Worker::start_once`].
    pub fn start(
        &self,
        name: &'static CStr,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        self.start_if(|_| true, name, body)
    }

    fn start_if(
        &self,
        is_wanted: impl FnOnce(&[Thread]) -> bool,
        name: &'static CStr,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        if !self.mark.is_current() {
            return Err(io::Error::other("this process is a fork of the one with the threads"));
        }
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if is_wanted(&threads) {
            let body = || {
                window::give_up_inherited();
                body();
            };
            threads.push(thread::start(name, body)?);
            self.has_started.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Waits until the threads have ended, which the owner has told them to do. If the calling
    /// thread is one of them, it is detached instead: it has dropped the last reference to the
    /// owner.
    pub fn join(&self) {
        if !self.mark.is_current() {
            return;
        }
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        threads.into_iter().filter(|thread| !thread.is_current()).for_each(Thread::join);
    }
}

impl Default for Worker {
    fn default() -> Worker {
        Worker::new()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.join();
        if !self.mark.is_current() {
            // Detaching them could detach threads of the child that have the same stacks.
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(threads));
        }
    }
}

/// Runs work of a caller on a thread that also works for others: a panic is printed and ends here.
/// Nothing may see what a panic leaves of the work.
fn contain_panic(work: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
        // The destructor of its value could panic as well.
        std::mem::forget(panic);
    }
}

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;
