//! Work for the I/O workers: prefetches requested by the fault path, and tasks of asynchronous
//! calls.
//!
//! Prefetches of the fault path are plain numbers in a bounded lock-free queue, because it must not
//! allocate. When the queue is full a prefetch is dropped, which only costs speed. What a call asks for is one job, however
//! many ranges it has.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use aquifer_vm::worker::Bell;
use crossbeam_queue::ArrayQueue;

use crate::ids::StoreId;

/// A hint of fewer runs is joined by the next one of its store.
const MOST_JOINED: usize = 1024;

/// Pages of a store that will be needed.
pub(crate) struct Prefetch {
    pub store: StoreId,
    pub first: u64,
    pub pages: u64,
}

/// Runs of pages of a store that will be needed.
pub(crate) struct Hint {
    pub store: StoreId,
    pub runs: Vec<Range<u64>>,
}

impl Hint {
    fn pages(&self) -> u64 {
        let lengths = self.runs.iter().map(|run| run.end.saturating_sub(run.start));
        lengths.fold(0, u64::saturating_add)
    }
}

/// Hints that wait, and the number of pages that they name.
#[derive(Default)]
struct Hints {
    waiting: VecDeque<Hint>,
    pages: u64,
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
    Hint(Hint),
}

/// The queues of a cache's workers.
pub(crate) struct Jobs {
    prefetches: ArrayQueue<Prefetch>,
    hints: Mutex<Hints>,
    tasks: Mutex<VecDeque<Task>>,
    posted: Bell,
}

impl Jobs {
    pub fn new() -> Jobs {
        Jobs {
            prefetches: ArrayQueue::new(256),
            hints: Mutex::default(),
            tasks: Mutex::default(),
            posted: Bell::new(),
        }
    }

    /// Requests a prefetch. Async-signal-safe.
    pub fn push_prefetch(&self, store: StoreId, first: u64, pages: u64) {
        let _ = self.prefetches.push(Prefetch { store, first, pages });
        self.posted.ring();
    }

    /// Requests a prefetch of many runs. Together with the request before it, if that still waits: together they fill the
    /// device's queue. Does nothing if those that wait name `most_pages` already, which is what the pool can hold.
    pub fn push_hint(&self, mut hint: Hint, most_pages: u64) {
        hint.runs.retain(|run| !run.is_empty());
        let pages = hint.pages();
        let mut hints = self.hints();
        if pages == 0 || hints.pages >= most_pages {
            return;
        }
        hints.pages = hints.pages.saturating_add(pages);
        match hints.waiting.back_mut() {
            Some(last) if last.store == hint.store && last.runs.len() < MOST_JOINED => {
                last.runs.extend(hint.runs);
            }
            _ => hints.waiting.push_back(hint),
        }
        drop(hints);
        self.posted.ring();
    }

    fn next_hint(&self) -> Option<Hint> {
        let mut hints = self.hints();
        let hint = hints.waiting.pop_front()?;
        hints.pages = hints.pages.saturating_sub(hint.pages());
        Some(hint)
    }

    /// Drops the hints about a store that is about to be detached.
    pub fn forget_hints(&self, store: StoreId) {
        let mut hints = self.hints();
        hints.waiting.retain(|hint| hint.store != store);
        hints.pages = hints.waiting.iter().map(Hint::pages).fold(0, u64::saturating_add);
    }

    fn hints(&self) -> MutexGuard<'_, Hints> {
        self.hints.lock().expect("nothing panics inside the lock")
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
            if let Some(hint) = self.next_hint() {
                return Some(Job::Hint(hint));
            }
            self.posted.sleep(ticket, None);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn hints_that_wait_name_little_more_than_the_pool_holds() {
        let jobs = Jobs::new();
        let push = |store, runs: &[Range<u64>]| {
            jobs.push_hint(Hint { store: StoreId(store), runs: runs.to_vec() }, 100);
        };
        for call in 0..1000 {
            push(call % 2, &[0..3, 5..5]);
        }
        jobs.forget_hints(StoreId(0));
        push(1, &[]);
        let waiting: Vec<_> = std::iter::from_fn(|| jobs.next_hint()).collect();
        assert_eq!(waiting.iter().map(Hint::pages).sum::<u64>(), 17 * 3);
        assert!(waiting.iter().all(|hint| hint.runs.iter().all(|run| *run == (0..3))));
        push(0, &[0..u64::MAX, 0..1]);
        push(0, std::slice::from_ref(&(7..8)));
        assert_eq!(jobs.next_hint().map(|hint| hint.runs.len()), Some(2));
        push(0, std::slice::from_ref(&(7..8)));
        assert_eq!(jobs.next_hint().map(|hint| hint.pages()), Some(1));
    }
}
