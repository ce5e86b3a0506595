//! Work for the I/O workers: prefetches requested by the fault path, and tasks of asynchronous
//! calls.
//!
//! Prefetches are plain numbers in a bounded lock-free queue, because the fault path must not
//! allocate. When the queue is full a prefetch is dropped, which only costs speed.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ptr;
use std::sync::Mutex;

use aquifer_vm::worker::Bell;
use crossbeam_queue::ArrayQueue;

use crate::ids::StoreId;

/// Pages of a store that will be needed.
pub(crate) struct Prefetch {
    pub store: StoreId,
    pub first: u64,
    pub pages: u64,
}

thread_local! {
    /// The queues that the thread serves, if it is a worker.
    static SERVED: Cell<*const Jobs> = const { Cell::new(ptr::null()) };
}

/// A task of an asynchronous call.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// What a worker does next.
pub(crate) enum Job {
    Task(Task),
    Prefetch(Prefetch),
}

/// The queues of a cache's workers.
pub(crate) struct Jobs {
    prefetches: ArrayQueue<Prefetch>,
    tasks: Mutex<VecDeque<Task>>,
    posted: Bell,
}

impl Jobs {
    pub fn new() -> Jobs {
        Jobs { prefetches: ArrayQueue::new(256), tasks: Mutex::default(), posted: Bell::new() }
    }

    /// Requests a prefetch. Async-signal-safe.
    pub fn push_prefetch(&self, store: StoreId, first: u64, pages: u64) {
        let _ = self.prefetches.push(Prefetch { store, first, pages });
        self.posted.ring();
    }

    /// Queues a task for a worker.
    pub fn push_task(&self, task: Task) {
        self.tasks.lock().expect("a task does not panic inside the lock").push_back(task);
        self.posted.ring();
    }

    pub fn stop(&self) {
        self.posted.stop();
    }

    fn next_task(&self) -> Option<Task> {
        self.tasks.lock().expect("a task does not panic inside the lock").pop_front()
    }

    /// A further prefetch, if one waits.
    pub fn next_prefetch(&self) -> Option<Prefetch> {
        self.prefetches.pop()
    }

    /// Whether the calling thread is one of the workers.
    pub fn is_served_here(&self) -> bool {
        ptr::eq(SERVED.get(), self)
    }

    /// Runs a queued task, if the calling thread is a worker and there is one; returns whether it
    /// did.
    ///
    /// A worker that waits for resources that queued tasks hold must call this, or it would wait
    /// for itself.
    pub fn help(&self) -> bool {
        if !self.is_served_here() {
            return false;
        }
        self.next_task().map(|task| task()).is_some()
    }

    /// Waits for the next job; the calling thread is a worker from now on. `None` when the cache
    /// stops, after the remaining tasks: callers await them.
    pub fn next(&self) -> Option<Job> {
        SERVED.set(self);
        loop {
            let ticket = self.posted.ticket();
            if let Some(task) = self.next_task() {
                return Some(Job::Task(task));
            }
            if ticket.is_stopped() {
                return None;
            }
            if let Some(prefetch) = self.next_prefetch() {
                return Some(Job::Prefetch(prefetch));
            }
            self.posted.sleep(ticket, None);
        }
    }
}
