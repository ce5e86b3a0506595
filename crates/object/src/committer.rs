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

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

use aquifer_vm::ProcessMark;

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
    completion: Arc<Completion>,
}

/// The end of a psync, in parts: its own commit, and earlier commits of its objects.
#[derive(Debug)]
pub(crate) struct Completion {
    state: Mutex<CompletionState>,
    done: Condvar,
    process: ProcessMark,
}

#[derive(Debug)]
struct CompletionState {
    /// Parts that have not ended.
    open: usize,
    /// The first error, or the result of all parts.
    outcome: Result<()>,
    waker: Option<Waker>,
}

impl Completion {
    fn new(parts: usize) -> Arc<Completion> {
        Arc::new(Completion {
            state: Mutex::new(CompletionState { open: parts, outcome: Ok(()), waker: None }),
            done: Condvar::new(),
            process: ProcessMark::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, CompletionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends one part.
    pub fn end_part(&self, outcome: Result<()>) {
        let mut state = self.state();
        if state.outcome.is_ok() {
            state.outcome = outcome;
        }
        state.open -= 1;
        if state.open > 0 {
            return;
        }
        let waker = state.waker.take();
        drop(state);
        self.done.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl CompletionState {
    fn take_outcome(&mut self) -> Result<()> {
        std::mem::replace(&mut self.outcome, Ok(()))
    }
}

impl PendingPsync {
    /// Whether the psync has ended, successfully or not, so that [`PendingPsync::wait`] returns at
    /// once.
    pub fn is_done(&self) -> bool {
        self.completion.process.is_current() && self.completion.state().open == 0
    }

    /// Waits until everything stored before the psync began is durable.
    ///
    /// # Errors
    /// As for [`Attachment::psync`](crate::Attachment::psync).
    pub fn wait(self) -> Result<()> {
        if !self.completion.process.is_current() {
            return Err(ObjectError::Forked);
        }
        let mut state = self.completion.state();
        while state.open > 0 {
            state = self.completion.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.take_outcome()
    }
}

impl Future for PendingPsync {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        if !self.completion.process.is_current() {
            return Poll::Ready(Err(ObjectError::Forked));
        }
        let mut state = self.completion.state();
        if state.open == 0 {
            return Poll::Ready(state.take_outcome());
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

struct Job {
    flight: Flight,
    completion: Arc<Completion>,
}

impl Job {
    fn run(self) {
        self.completion.end_part(self.flight.finish());
    }
}

/// The thread and its queue.
pub(crate) struct Committer {
    order: Mutex<()>,
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: ProcessMark,
}

#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    bell: Condvar,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<Job>,
    must_stop: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        aquifer_sys::signal::block_asynchronous();
        loop {
            let mut state = self.state();
            let job = loop {
                match state.jobs.pop_front() {
                    Some(job) => break job,
                    None if state.must_stop => return,
                    None => state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(state);
            job.run();
        }
    }
}

impl Committer {
    pub fn new() -> Committer {
        Committer {
            order: Mutex::new(()),
            queue: Arc::default(),
            thread: Mutex::new(None),
            process: ProcessMark::new(),
        }
    }

    /// Captures, and queues the commit to be finished in the background.
    pub fn begin(&self, capture: impl FnOnce() -> Result<Captured>) -> Result<PendingPsync> {
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let Captured { flight, earlier } = capture()?;
        let completion = Completion::new(earlier.len() + usize::from(flight.is_some()));
        if let Some(flight) = flight {
            self.submit(Job { flight, completion: completion.clone() });
        }
        drop(order);
        earlier.iter().for_each(|earlier| earlier.watch(&completion));
        Ok(PendingPsync { completion })
    }

    fn submit(&self, job: Job) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let queue = self.queue.clone();
            let builder = std::thread::Builder::new().name("aquifer-psync".to_owned());
            *thread = builder.spawn(move || queue.run()).ok();
        }
        if thread.is_none() {
            // No thread could be started: the caller finishes the commit itself.
            job.run();
            return;
        }
        self.queue.state().jobs.push_back(job);
        self.queue.bell.notify_one();
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if !self.process.is_current() {
            // The thread belongs to the parent. Detaching the handle here could detach one of the
            // child's own threads that has the same stack.
            std::mem::forget(thread);
            return;
        }
        self.queue.state().must_stop = true;
        self.queue.bell.notify_one();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}
