//! Batches on a pool of blocking threads: for systems without io_uring.
//!
//! One pool serves the process. Threads are started when batches need depth, up to
//! [`LARGEST_POOL`], and stay. They block all signals: they only make system calls on memory passed
//! to them and never access a mapping, so they need none.
//!
//! ```text
//! caller: batch.next() ─▶ Job ─▶ [pool's queue] ─▶ worker: whole transfer, blocking
//!         batch.complete ◀─────── [caller's inbox] ◀──────┘
//! ```
//!
//! A forked child has the pool's memory but not its threads, and a lock in it may be held by a
//! thread that does not exist in the child: it leaks that pool and creates its own. A child that a
//! batch forks leaks the batch's inbox as well.
//!
//! Lock order: a pool's queue and a batch's inbox are never held together, nor across a system call
//! or a call to the batch.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::super::state::FileState;
use super::super::transfer::{Begun, Transfer, finish_blocking};
use super::TransferResult;
use crate::{Batch, fork};

/// Maximum number of threads of the pool, and so of transfers in flight through it.
pub(super) const LARGEST_POOL: usize = 32;

static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());

struct Pool {
    generation: u64,
    queue: Mutex<Queue>,
    has_jobs: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
}

struct Job {
    file: Arc<FileState>,
    transfer: Transfer,
    tag: u64,
    inbox: Arc<Inbox>,
}

/// The results of one batch.
#[derive(Default)]
struct Inbox {
    results: Mutex<Vec<(u64, TransferResult)>>,
    has_results: Condvar,
}

/// Runs a batch on the pool; on the calling thread if no thread can be started. Returns at once in a
/// child that the batch forked: its transfers are not completed.
pub(super) fn run(file: &Arc<FileState>, batch: &mut dyn Batch, depth: usize) {
    let pool = pool();
    let depth = depth.min(pool.ensure_threads(depth));
    let mut flight = Flight {
        inbox: ManuallyDrop::default(),
        in_flight: 0,
        arrived: Vec::new(),
        generation: pool.generation,
    };
    loop {
        while flight.in_flight < depth.max(1) {
            let Some(request) = batch.next() else { break };
            if flight.is_inherited() {
                return;
            }
            match Transfer::begin(file, &request) {
                Begun::Ended(result) => batch.complete(request.tag, result),
                Begun::Going(transfer) if depth == 0 => {
                    batch.complete(request.tag, finish_blocking(file, transfer));
                }
                Begun::Going(transfer) => {
                    flight.in_flight += 1;
                    pool.submit(Job {
                        file: Arc::clone(file),
                        transfer,
                        tag: request.tag,
                        inbox: Arc::clone(&flight.inbox),
                    });
                }
            }
        }
        if flight.in_flight == 0 || flight.is_inherited() {
            return;
        }
        flight.wait();
        while let Some((tag, result)) = flight.arrived.pop() {
            batch.complete(tag, result);
            if flight.is_inherited() {
                return;
            }
        }
    }
}

/// The transfers of one batch that are in the pool.
struct Flight {
    /// In a child a worker that does not exist there may hold its lock: it is leaked.
    inbox: ManuallyDrop<Arc<Inbox>>,
    in_flight: usize,
    /// Taken out of the inbox, not yet reported to the batch.
    arrived: Vec<(u64, TransferResult)>,
    /// The process that started it.
    generation: u64,
}

impl Flight {
    /// Whether this process is a child that the batch forked.
    fn is_inherited(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Waits for at least one result and takes all available.
    fn wait(&mut self) {
        let mut results = lock(&self.inbox.results);
        while results.is_empty() {
            results = self.inbox.has_results.wait(results).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::swap(&mut *results, &mut self.arrived);
        drop(results);
        self.in_flight -= self.arrived.len();
    }
}

impl Drop for Flight {
    /// Waits for everything in flight. There is something only if the batch panicked, or in a child,
    /// whose parent waits.
    fn drop(&mut self) {
        if self.is_inherited() {
            return;
        }
        while self.in_flight > 0 {
            self.arrived.clear();
            self.wait();
        }
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.inbox) };
    }
}

impl Pool {
    /// Starts threads until there are `wanted`; returns how many there are.
    fn ensure_threads(&'static self, wanted: usize) -> usize {
        let wanted = wanted.min(LARGEST_POOL);
        let mut queue = lock(&self.queue);
        while queue.threads < wanted && self.start_thread() {
            queue.threads += 1;
        }
        queue.threads
    }

    fn start_thread(&'static self) -> bool {
        // A thread inherits its creator's signal mask: blocking signals here leaves no moment at
        // which a signal of the application could be delivered to it.
        let mask = BlockedSignals::new();
        let started = std::thread::Builder::new()
            .name("aquifer-io".into())
            .stack_size(128 << 10)
            .spawn(|| self.work());
        drop(mask);
        started.is_ok()
    }

    fn work(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let job = loop {
                match queue.jobs.pop_front() {
                    Some(job) => break job,
                    None => {
                        queue = self.has_jobs.wait(queue).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(queue);
            let Job { file, transfer, tag, inbox } = job;
            let result = finish_blocking(&file, transfer);
            // Before the result becomes visible: its batch may then end and the device be closed.
            drop(file);
            lock(&inbox.results).push((tag, result));
            inbox.has_results.notify_one();
        }
    }

    fn submit(&self, job: Job) {
        lock(&self.queue).jobs.push_back(job);
        self.has_jobs.notify_one();
    }
}

/// Returns this process's pool.
fn pool() -> &'static Pool {
    let generation = fork::generation();
    // Acquire: pairs with the release of the thread that created the pool.
    let mut current = POOL.load(Ordering::Acquire);
    loop {
        // SAFETY: null, or a pool that was leaked and so lives forever; of a parent's pool only the
        // generation is read, which never changes.
        if let Some(pool) = unsafe { current.as_ref() }
            && pool.generation == generation
        {
            return pool;
        }
        let fresh = Box::into_raw(Box::new(Pool {
            generation,
            queue: Mutex::default(),
            has_jobs: Condvar::new(),
        }));
        match POOL.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => current = fresh,
            Err(other) => {
                // SAFETY: made above, and never published.
                drop(unsafe { Box::from_raw(fresh) });
                current = other;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded data is valid at every step, so poisoning can be ignored.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Blocks all signals in this thread until dropped.
struct BlockedSignals {
    previous: libc::sigset_t,
}

impl BlockedSignals {
    fn new() -> Self {
        // SAFETY: all-zero is a valid `sigset_t`, filled in below.
        let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut previous: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `all` is valid for the call to fill in.
        unsafe { libc::sigfillset(&raw mut all) };
        // SAFETY: both sets outlive the call.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut previous) };
        BlockedSignals { previous }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: restores the set that `new` saved.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.previous, std::ptr::null_mut())
        };
    }
}
