//! The threads that answer requests.
//!
//! *Invariant: at most `Shared::turns` threads read the device or run a handler that does not wait.*
//! More of them than CPUs only wake each other: with four readers on two CPUs a request takes three
//! times as long. A thread *has a turn*, reads a request, answers it, and reads the next, without a
//! lock. A handler that waits, for the media or for another process, does so without the turn: another
//! thread takes it and goes on reading. It is woken only when no thread reads any more, so that a request
//! that waits wakes none as long as no other one comes. Handlers of requests that mostly wait give the
//! turn away themselves ([`Worker::blocking`]); all others when a call of the pool is about to wait
//! ([`aquifer_sys::waits`]), as when the log is full.
//!
//! ```text
//!          ┌──────────────────── read, answer ◄────┐
//!          ▼                                       │
//!  parked ─► has a turn ── request ── handler ─────┤
//!          ▲      └─ waits: gives the turn away    │ without a turn
//!          └───────────────────────────────────────┘
//! ```
//!
//! Each thread has a description of the device of its own, and buffers that are resident: see
//! [`Resident`](aquifer_sys::resident::Resident).

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aquifer_sys::resident::Resident;
use aquifer_sys::{cpu, thread, waits};

use crate::answer::Answer;
use crate::device::{Device, Received};
use crate::init::MAX_DATA_BYTES;
use crate::wire::{self, Request};

/// Beside the data: the header, the fixed part and the names of a request.
const MORE_IN_BYTES: usize = 8192;
/// The most threads that have a turn.
const MOST_TURNS: usize = 4;
/// The most threads.
pub(crate) const MOST_WORKERS: usize = u16::BITS as usize;
/// How often a handler may give back what was not used.
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// Requests are counted by their operation, those above together.
const OPERATIONS: usize = 64;

/// The length of the buffer that a request is read into.
pub(crate) const IN_BYTES: usize = MAX_DATA_BYTES + MORE_IN_BYTES;

/// A file system, as the kernel asks for it. Called by several threads at a time.
pub trait Handler: Send + Sync {
    /// Answers a request, or [none](Answer::none) that has no answer. `out` is memory for long
    /// answers, of at least the negotiated length and whatever is in it.
    ///
    /// What may wait for the media, or for anything but another thread's short lock, runs in
    /// [`Worker::blocking`].
    fn handle(
        &self,
        request: &Request<'_>,
        out: &mut [u8],
        answer: Answer<'_>,
        worker: &Worker<'_>,
    );

    /// Called once a second, from a thread of its own: to give back what was not used lately.
    fn tidy(&self) {}
}

/// How many requests there were.
#[derive(Debug)]
pub struct Counts {
    by_operation: [AtomicU64; OPERATIONS],
    malformed: AtomicU64,
    panics: AtomicU64,
}

impl Counts {
    fn new() -> Counts {
        Counts {
            by_operation: [const { AtomicU64::new(0) }; OPERATIONS],
            malformed: AtomicU64::new(0),
            panics: AtomicU64::new(0),
        }
    }

    /// Requests of one operation, by the kernel's number of it.
    pub fn of(&self, opcode: u32) -> u64 {
        // Relaxed, here and below: these are statistics.
        self.by_operation[(opcode as usize).min(OPERATIONS - 1)].load(Relaxed)
    }

    /// All requests.
    pub fn all(&self) -> u64 {
        self.by_operation.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// Requests that were no requests.
    pub fn malformed(&self) -> u64 {
        self.malformed.load(Relaxed)
    }

    /// Requests whose handler panicked.
    pub fn panics(&self) -> u64 {
        self.panics.load(Relaxed)
    }
}

/// The threads that answer the requests of one connection. See the [module](self).
pub struct Team {
    shared: Arc<Shared>,
}

struct Shared {
    handler: Arc<dyn Handler>,
    /// Of one, the threads get descriptions of their own; several are those that they share.
    devices: Vec<Device>,
    opens_more: bool,
    turns: usize,
    /// How many threads read the device.
    reading: AtomicUsize,
    /// `State::free_turns`, for threads without the lock.
    free_turns: AtomicUsize,
    state: Mutex<State>,
    /// A turn is free, or all has ended.
    turn: Condvar,
    /// All has ended.
    end: Condvar,
    counts: Counts,
}

#[derive(Default)]
struct State {
    free_turns: usize,
    parked: usize,
    workers: Vec<thread::Thread>,
    /// Of the indexes of threads, those that one has: a bit each.
    taken: u16,
    ended: bool,
    is_unmounted: bool,
    /// Why the device could not be read.
    failed: Option<io::Error>,
}

/// The thread that answers a request.
pub struct Worker<'t> {
    shared: Option<&'t Arc<Shared>>,
    index: usize,
    has_turn: Rc<Cell<bool>>,
}

impl Team {
    /// Starts answering. Threads get descriptions of their own of the one device.
    ///
    /// # Errors
    /// Those of the system: too many threads, too little memory.
    pub fn start(device: Device, handler: Arc<dyn Handler>) -> io::Result<Team> {
        Team::start_sharing(vec![device], true, handler)
    }

    /// As well; unless `opens_more`, the threads use these descriptions only.
    ///
    /// # Errors
    /// As for [`Team::start`].
    pub fn start_sharing(
        devices: Vec<Device>,
        opens_more: bool,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Team> {
        let turns = cpu::count().clamp(2, MOST_TURNS);
        let state = Mutex::new(State { free_turns: turns, ..State::default() });
        let (turn, end, counts) = (Condvar::new(), Condvar::new(), Counts::new());
        let (reading, free_turns) = (AtomicUsize::new(0), AtomicUsize::new(turns));
        let shared = Shared {
            handler,
            devices,
            opens_more,
            turns,
            reading,
            free_turns,
            state,
            turn,
            end,
            counts,
        };
        let shared = Arc::new(shared);
        let team = Team { shared };
        let started = team.shared.start_all();
        if started.is_err() {
            // None has read a request yet that could be lost: they are parked, or wait in a read.
            team.shared.end(Ok(false));
        }
        started.map(|()| team)
    }

    /// How many requests there were.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Whether the file system was unmounted, so that its device number may be another one's.
    pub fn is_unmounted(&self) -> bool {
        self.shared.lock().is_unmounted
    }

    /// Waits until the file system is unmounted or the connection ends, and all threads with it. Returns
    /// which.
    ///
    /// # Errors
    /// Those of reading the device: the connection may live, but this team has ended.
    pub fn wait(&self) -> io::Result<bool> {
        let mut state = self.shared.lock();
        while !state.ended {
            state = self.shared.end.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        // A thread that ends may have started another one before.
        while let Some(worker) = state.workers.pop() {
            drop(state);
            worker.join();
            state = self.shared.lock();
        }
        state.failed.take().map_or(Ok(state.is_unmounted), Err)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic leaves it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_all(self: &Arc<Self>) -> io::Result<()> {
        let shared = self.clone();
        let tidying = thread::start(c"aquifer-fuse-t", move || shared.tidy())?;
        self.lock().workers.push(tidying);
        self.lock().taken = (1 << self.turns) - 1;
        (0..self.turns).try_for_each(|index| self.start_worker(index))
    }

    /// Runs [`Handler::tidy`] until the end.
    fn tidy(&self) {
        let mut state = self.lock();
        while !state.ended {
            let waited = self.end.wait_timeout(state, TIDY_EVERY);
            let (now, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            drop(now);
            if waited.timed_out() {
                self.handler.tidy();
            }
            state = self.lock();
        }
    }

    /// Starts the thread of an index that was taken. Without the lock: its buffers take a while.
    fn start_worker(self: &Arc<Self>, index: usize) -> io::Result<()> {
        let device = &self.devices[index % self.devices.len()];
        let device = if self.opens_more { device.another()? } else { device.duplicate()? };
        let (input, output) = (Resident::new(IN_BYTES)?, Resident::new(MAX_DATA_BYTES)?);
        let shared = self.clone();
        let work = move || shared.work(index, device, input, output);
        let worker = thread::start(c"aquifer-fuse", work)?;
        self.lock().workers.push(worker);
        Ok(())
    }

    /// Waits for a turn. Returns false when there is nothing more to read.
    fn take_turn(&self) -> bool {
        let mut state = self.lock();
        while state.free_turns == 0 && !state.ended {
            state.parked += 1;
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.parked -= 1;
        }
        if state.ended {
            return false;
        }
        state.free_turns -= 1;
        self.free_turns.store(state.free_turns, SeqCst);
        true
    }

    /// Takes a turn if there is one.
    fn take_turn_back(&self) -> bool {
        let mut state = self.lock();
        let is_free = state.free_turns > 0 && !state.ended;
        if is_free {
            state.free_turns -= 1;
            self.free_turns.store(state.free_turns, SeqCst);
        }
        is_free
    }

    /// Lets another thread read, before the calling one waits.
    fn give_turn(self: &Arc<Self>) {
        let mut state = self.lock();
        state.free_turns += 1;
        // SeqCst, with the change of `reading` in `receive`: either this thread sees that no other one
        // reads, or the last reader sees the free turn.
        self.free_turns.store(state.free_turns, SeqCst);
        drop(state);
        if self.reading.load(SeqCst) == 0 {
            self.have_turn_taken();
        }
    }

    /// Waits for the next request. The last thread that reads lets another one read from then on, if
    /// there is a turn.
    fn receive(self: &Arc<Self>, device: &Device, input: &mut [u8]) -> io::Result<Received> {
        self.reading.fetch_add(1, SeqCst);
        let received = device.receive(input);
        let is_last = self.reading.fetch_sub(1, SeqCst) == 1;
        if is_last && self.free_turns.load(SeqCst) > 0 {
            self.have_turn_taken();
        }
        received
    }

    /// Wakes or starts a thread for a free turn.
    fn have_turn_taken(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.free_turns == 0 {
            return;
        }
        if state.parked > 0 {
            self.turn.notify_one();
        } else if state.taken != u16::MAX && !state.ended {
            let index = state.taken.trailing_ones();
            state.taken |= 1 << index;
            drop(state);
            // Without another thread, the requests wait for this one.
            if self.start_worker(index as usize).is_err() {
                self.lock().taken &= !(1 << index);
            }
        }
    }

    fn end(&self, is_unmounted: io::Result<bool>) {
        let mut state = self.lock();
        state.ended = true;
        match is_unmounted {
            Ok(is_unmounted) => state.is_unmounted |= is_unmounted,
            Err(error) => state.failed = Some(error),
        }
        self.turn.notify_all();
        self.end.notify_all();
    }

    fn work(
        self: &Arc<Self>,
        index: usize,
        device: Device,
        mut input: Resident,
        mut output: Resident,
    ) {
        cpu::run_promptly();
        let has_turn = Rc::new(Cell::new(false));
        let worker = Worker { shared: Some(self), index, has_turn: has_turn.clone() };
        let shared = self.clone();
        let before = move || {
            if has_turn.replace(false) {
                shared.give_turn();
            }
        };
        waits::before_waits(before, || {
            self.work_in_turns(&worker, &device, &mut input, &mut output)
        });
    }

    fn work_in_turns(
        self: &Arc<Self>,
        worker: &Worker<'_>,
        device: &Device,
        input: &mut [u8],
        output: &mut [u8],
    ) {
        while self.take_turn() {
            worker.has_turn.set(true);
            while worker.has_turn.get() {
                match self.receive(device, input) {
                    Ok(Received::Request(len)) => {
                        self.answer(device, &input[..len], output, worker);
                    }
                    Ok(Received::Unmounted) => return self.end(Ok(true)),
                    Ok(Received::Aborted) => return self.end(Ok(false)),
                    Err(error) => return self.end(Err(error)),
                }
            }
        }
    }

    fn answer(&self, device: &Device, bytes: &[u8], output: &mut [u8], worker: &Worker<'_>) {
        let opcode = bytes.get(4..8).and_then(|opcode| opcode.try_into().ok());
        let opcode = opcode.map_or(0, u32::from_ne_bytes) as usize;
        self.counts.by_operation[opcode.min(OPERATIONS - 1)].fetch_add(1, Relaxed);
        match wire::parse(bytes) {
            Ok(request) => {
                let answer = Answer::new(device, request.unique);
                let handle = || self.handler.handle(&request, output, answer, worker);
                // The client gets EIO, from the answer that is dropped.
                if catch_unwind(AssertUnwindSafe(handle)).is_err() {
                    self.counts.panics.fetch_add(1, Relaxed);
                }
            }
            Err(malformed) => {
                self.counts.malformed.fetch_add(1, Relaxed);
                drop(malformed.unique.map(|unique| Answer::new(device, unique)));
            }
        }
    }
}

impl Worker<'_> {
    /// One that belongs to no team: for handlers that are called without a device.
    pub fn alone() -> Worker<'static> {
        Worker { shared: None, index: 0, has_turn: Rc::default() }
    }

    /// Which of the team's threads it is, from 0 to 15.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Runs something that may wait for the media or for another process, while another thread reads
    /// requests.
    pub fn blocking<T>(&self, work: impl FnOnce() -> T) -> T {
        let Some(shared) = self.shared.filter(|_| self.has_turn.replace(false)) else {
            return work();
        };
        shared.give_turn();
        let result = work();
        self.has_turn.set(shared.take_turn_back());
        result
    }
}
