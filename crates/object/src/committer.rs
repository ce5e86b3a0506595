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

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use aquifer_vm::worker::{Completer, Completion, JobThread, completion};

use crate::error::{ObjectError, Result};
use crate::flight::Flight;
use crate::psync::Captured;

/// A psync whose pages are captured and being written. The object may be stored to again.
///
/// Wait with [`PendingPsync::wait`], or await it as a future. Dropping it cancels nothing. If the
/// psync fails, the next psync commits its pages too; detaching without another psync returns an
/// error.
///
/// The committing thread wakes the future: the waker must not run anything long.
#[must_use = "the psync may fail; wait for it, or drop it explicitly"]
#[derive(Debug)]
pub struct PendingPsync {
    completion: Completion<Result<()>>,
}

/// The end of a psync, in parts: its own commit, and earlier commits of its objects.
pub(crate) struct Countdown {
    state: Mutex<CountdownState>,
    done: Completer<Result<()>>,
}

struct CountdownState {
    /// Parts that have not ended.
    open: usize,
    /// The first error, or the result of all parts.
    outcome: Result<()>,
}

impl Countdown {
    /// Ends one part.
    pub fn end_one(&self, outcome: Result<()>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.outcome.is_ok() {
            state.outcome = outcome;
        }
        state.open -= 1;
        if state.open == 0 {
            let outcome = std::mem::replace(&mut state.outcome, Ok(()));
            drop(state);
            self.done.complete(outcome);
        }
    }
}

impl PendingPsync {
    /// Returns it with the parts that have to end.
    fn new(parts: usize) -> (PendingPsync, Arc<Countdown>) {
        let (done, completion) = completion();
        if parts == 0 {
            done.complete(Ok(()));
        }
        let state = Mutex::new(CountdownState { open: parts, outcome: Ok(()) });
        (PendingPsync { completion }, Arc::new(Countdown { state, done }))
    }

    /// Whether the psync has ended, successfully or not, so that [`PendingPsync::wait`] returns at
    /// once.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// Waits until everything stored before the psync began is durable.
    ///
    /// # Errors
    /// As for [`Attachment::psync`](crate::Attachment::psync).
    pub fn wait(mut self) -> Result<()> {
        self.completion.wait().map_err(|_| ObjectError::Forked)?
    }
}

impl Future for PendingPsync {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let outcome = ready!(Pin::new(&mut self.completion).poll(context));
        Poll::Ready(outcome.map_err(|_| ObjectError::Forked)?)
    }
}

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
