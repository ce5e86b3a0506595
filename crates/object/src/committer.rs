//! Commits that become durable in the background, one thread for each [`Objects`](crate::Objects) that begins any.
//!
//! They are finished in the order in which they were captured. Their place in the log is theirs since then, so
//! commits of other threads that come later are acknowledged later. Dropping a [`PendingPsync`] cancels nothing;
//! dropping the last handle of the objects finishes what is under way first.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

use aquifer_vm::ProcessMark;

use crate::error::{ObjectError, Result, text};
use crate::flight::{Flight, Flights};

/// A psync whose pages are captured and on their way. The object may be stored to again.
///
/// Wait with [`PendingPsync::wait`], or await it as a future. Dropping it cancels nothing: if the psync then
/// fails, its pages are taken along by the next one, and detaching without one is an error.
///
/// A future is woken by the thread that commits: nothing long may run in its waker.
#[must_use = "the psync may fail; wait for it, or drop it explicitly"]
#[derive(Debug)]
pub struct PendingPsync {
    completion: Arc<Completion>,
}

#[derive(Debug)]
struct Completion {
    state: Mutex<CompletionState>,
    done: Condvar,
    process: ProcessMark,
}

#[derive(Debug)]
struct CompletionState {
    is_done: bool,
    outcome: Option<Result<()>>,
    waker: Option<Waker>,
}

impl Completion {
    fn new() -> Arc<Completion> {
        Arc::new(Completion {
            state: Mutex::new(CompletionState { is_done: false, outcome: None, waker: None }),
            done: Condvar::new(),
            process: ProcessMark::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, CompletionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complete(&self, outcome: Result<()>) {
        let mut state = self.state();
        state.is_done = true;
        state.outcome = Some(outcome);
        let waker = state.waker.take();
        drop(state);
        self.done.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl PendingPsync {
    /// Whether it has ended, well or not: [`PendingPsync::wait`] returns at once.
    pub fn is_done(&self) -> bool {
        self.completion.process.is_current() && self.completion.state().is_done
    }

    /// Waits until everything stored before is durable.
    ///
    /// # Errors
    /// As for [`Attachment::psync`](crate::Attachment::psync).
    pub fn wait(self) -> Result<()> {
        if !self.completion.process.is_current() {
            return Err(ObjectError::Forked);
        }
        let mut state = self.completion.state();
        while !state.is_done {
            state = self.completion.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.outcome.take().unwrap_or(Ok(()))
    }
}

impl Future for PendingPsync {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        if !self.completion.process.is_current() {
            return Poll::Ready(Err(ObjectError::Forked));
        }
        let mut state = self.completion.state();
        if state.is_done {
            return Poll::Ready(state.outcome.take().unwrap_or(Ok(())));
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

/// What an object must have behind it for a psync that captured nothing.
pub(crate) struct Earlier {
    pub flights: Arc<Flights>,
    pub number: u64,
    pub name: Vec<u8>,
}

impl Earlier {
    /// Waits for it.
    pub fn wait(&self) -> Result<()> {
        self.flights.wait_landed(self.number);
        match self.flights.has_returned() {
            true => Err(ObjectError::Unsynced { name: text(&self.name) }),
            false => Ok(()),
        }
    }
}

struct Job {
    flight: Option<Flight>,
    earlier: Vec<Earlier>,
    completion: Arc<Completion>,
}

impl Job {
    fn run(self) {
        let finished = self.flight.map_or(Ok(()), Flight::finish);
        let outcome = finished.and_then(|()| self.earlier.iter().try_for_each(Earlier::wait));
        self.completion.complete(outcome);
    }
}

/// The thread and its queue.
pub(crate) struct Committer {
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
        Committer { queue: Arc::default(), thread: Mutex::new(None), process: ProcessMark::new() }
    }

    /// Has a flight finished in the background, and waits there for earlier ones.
    pub fn submit(&self, flight: Option<Flight>, earlier: Vec<Earlier>) -> PendingPsync {
        let completion = Completion::new();
        let pending = PendingPsync { completion: completion.clone() };
        let job = Job { flight, earlier, completion };
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let queue = self.queue.clone();
            let builder = std::thread::Builder::new().name("aquifer-psync".to_owned());
            *thread = builder.spawn(move || queue.run()).ok();
        }
        if thread.is_none() {
            // Without a thread, the caller waits.
            job.run();
            return pending;
        }
        self.queue.state().jobs.push_back(job);
        self.queue.bell.notify_one();
        pending
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        // The thread is the parent's.
        if !self.process.is_current() {
            return;
        }
        self.queue.state().must_stop = true;
        self.queue.bell.notify_one();
        if let Some(thread) = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}
