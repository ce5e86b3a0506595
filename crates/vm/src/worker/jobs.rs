//! A thread that runs jobs in order.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Bell, Worker, contain_panic};

/// Runs jobs one after another on one thread, which starts with the first. Dropping it completes
/// all jobs and ends the thread.
///
/// A panic in a job is printed, and ends that job: those behind it belong to other callers.
pub struct JobThread<J> {
    queue: ManuallyDrop<Arc<Queue<J>>>,
    name: &'static CStr,
    worker: Worker,
}

struct Queue<J> {
    jobs: Mutex<VecDeque<J>>,
    bell: Bell,
    run: fn(J),
}

impl<J: Send + 'static> JobThread<J> {
    /// `run` performs a job.
    pub fn new(name: &'static CStr, run: fn(J)) -> JobThread<J> {
        let queue = Queue { jobs: Mutex::default(), bell: Bell::new(), run };
        JobThread { queue: ManuallyDrop::new(Arc::new(queue)), name, worker: Worker::new() }
    }

    /// Queues a job; performs it at once if no thread can be started. In a forked child it is
    /// forgotten.
    pub fn run(&self, job: J) {
        if !self.worker.is_current() {
            std::mem::forget(job);
            return;
        }
        let queue = Arc::clone(&self.queue);
        match self.worker.start_once(self.name, move || queue.work()) {
            Ok(()) => {
                self.queue.jobs().push_back(job);
                self.queue.bell.ring();
            }
            Err(_) => (self.queue.run)(job),
        }
    }
}

impl<J> Queue<J> {
    fn jobs(&self) -> MutexGuard<'_, VecDeque<J>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let ticket = self.bell.ticket();
            let job = self.jobs().pop_front();
            match job {
                // What a panic leaves of a job nothing sees.
                Some(job) => contain_panic(|| (self.run)(job)),
                None if ticket.is_stopped() => return,
                None => self.bell.sleep(ticket, None),
            }
        }
    }
}

impl<J> Drop for JobThread<J> {
    fn drop(&mut self) {
        // The jobs are the parent's, and a thread of the parent may hold their lock.
        if !self.worker.is_current() {
            return;
        }
        self.queue.bell.stop();
        self.worker.join();
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.queue) };
    }
}
