//! Work for the I/O workers: prefetches asked for by the fault path, and tasks of asynchronous calls.
//!
//! Prefetches are plain numbers in a bounded lock-free queue, because the fault path must not allocate;
//! when the queue is full a prefetch is forgotten, which costs speed and nothing else.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::ArrayQueue;

use crate::doorbell::Doorbell;
use crate::engine::Engine;
use crate::ids::StoreId;

struct Prefetch {
    store: StoreId,
    first: u64,
    pages: u64,
}

thread_local! {
    /// The queues that the thread works for, if it is a worker.
    static SERVED: Cell<*const Jobs> = const { Cell::new(ptr::null()) };
}

/// A task of an asynchronous call.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// The queues.
pub(crate) struct Jobs {
    prefetches: ArrayQueue<Prefetch>,
    tasks: Mutex<VecDeque<Task>>,
    posted: Doorbell,
    stopping: AtomicBool,
}

impl Jobs {
    pub fn new() -> Jobs {
        Jobs {
            prefetches: ArrayQueue::new(256),
            tasks: Mutex::default(),
            posted: Doorbell::new(),
            stopping: AtomicBool::new(false),
        }
    }

    /// Asks for a prefetch. Async-signal-safe.
    pub fn push_prefetch(&self, store: StoreId, first: u64, pages: u64) {
        let _ = self.prefetches.push(Prefetch { store, first, pages });
        self.posted.ring(1);
    }

    /// Hands a task to a worker.
    pub fn push_task(&self, task: Task) {
        self.tasks.lock().expect("a task does not panic inside the lock").push_back(task);
        self.posted.ring(1);
    }

    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.posted.ring(u32::MAX);
    }

    fn next_task(&self) -> Option<Task> {
        self.tasks.lock().expect("a task does not panic inside the lock").pop_front()
    }

    /// Whether the calling thread is one of the workers.
    pub fn is_served_here(&self) -> bool {
        ptr::eq(SERVED.get(), self)
    }

    /// On one of the workers: runs a task, if there is one. For those that wait on a worker for what tasks
    /// hold, which would otherwise wait for themselves. False where nothing was done.
    pub fn help(&self) -> bool {
        if !self.is_served_here() {
            return false;
        }
        self.next_task().map(|task| task()).is_some()
    }

    /// A worker thread. Tasks left when the cache stops are still run: somebody awaits them.
    pub fn run_worker(&self, engine: &Engine) {
        aquifer_sys::signal::block_asynchronous();
        SERVED.set(self);
        loop {
            let ticket = self.posted.ticket();
            if let Some(task) = self.next_task() {
                task();
                continue;
            }
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            if let Some(prefetch) = self.prefetches.pop() {
                engine.run_prefetch(prefetch.store, prefetch.first, prefetch.pages);
                continue;
            }
            self.posted.sleep(ticket, None);
        }
    }
}
