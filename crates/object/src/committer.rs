//! Makes commits durable in the background, on one thread per [`Objects`](crate::Objects).
//!
//! Commits finish in log order. A commit is acknowledged only when all earlier ones are durable, so
//! the thread must never wait for a commit that is behind it in its own queue. Therefore capturing
//! and queueing are one step under the lock `order`, and the thread waits only for the log.
//!
//! Dropping the last handle of the objects finishes all pending commits first.
//!
//! Lock order: `order`, the attachments' locks, the queue's lock.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use aquifer_vm::ProcessMark;

use crate::completion::{Completion, PendingPsync};
use crate::error::Result;
use crate::flight::{Captured, Flight};

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
        Ok(PendingPsync::new(completion))
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
