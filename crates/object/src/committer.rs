//! Makes commits durable in the background, on one thread per [`Objects`](crate::Objects).
//!
//! Commits finish in log order. A commit is acknowledged only when all earlier ones are durable, so
//! the thread must never wait for a commit that is behind it in its own queue. Therefore capturing
//! and queueing are one step under the lock `order`, and the thread waits only for the log.
//!
//! Dropping a [`PendingPsync`] cancels nothing. Dropping the last handle of the objects finishes
//! all pending commits first.
//!
//! Lock order: `order`, the attachments' locks, the queue's lock.

use std::sync::{Arc, Mutex, PoisonError};

use aquifer_vm::worker::JobThread;

use crate::completion::{Countdown, PendingPsync};
use crate::error::Result;
use crate::flight::{Captured, Flight};

struct Job {
    flight: Flight,
    countdown: Arc<Countdown>,
}

/// The thread and its queue.
pub(crate) struct Committer {
    order: Mutex<()>,
    thread: JobThread<Job>,
}

impl Committer {
    pub fn new() -> Committer {
        let finish = |job: Job| job.countdown.end_one(job.flight.finish());
        Committer { order: Mutex::new(()), thread: JobThread::new(c"aquifer-psync", finish) }
    }

    /// Captures, and queues the commit to be finished in the background.
    pub fn begin(&self, capture: impl FnOnce() -> Result<Captured>) -> Result<PendingPsync> {
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let Captured { flight, earlier } = capture()?;
        let (pending, countdown) = PendingPsync::new(earlier.len() + usize::from(flight.is_some()));
        if let Some(flight) = flight {
            // If no thread can be started, the caller finishes the commit itself.
            self.thread.run(Job { flight, countdown: countdown.clone() });
        }
        drop(order);
        earlier.iter().for_each(|earlier| earlier.watch(&countdown));
        Ok(pending)
    }
}
