//! Mapping ahead of a reader, by helper threads that use only idle CPU time.
//!
//! The mapper does not see the faults that the kernel serves. So it maps ahead the ranges that were
//! advised ([`super::advice`]), and those that the page tables show to be read in order. A helper
//! populates the range piece by piece from its start, without regard to the reader's position: a
//! helper that follows the reader was never faster, and one that spins for it cost two readers on
//! two CPUs a third of their speed. Pages that the reader reaches first are faulted in as usual.
//!
//! ```text
//!             reader ──▶                 helper ──▶
//!  ├─────────────┴───────────────────────────┴·····┆·············┆·············┤
//!  └── start                               populated   marker        marker    end
//!                      └─ at most in_flight_bytes ─┘
//! ```
//!
//! # How far ahead
//! Ranges longer than half of the limit have *markers*: 64 KiB in every quarter of the limit that
//! are left unmapped. Once a marker is mapped, the reader has passed it. This keeps a file larger
//! than memory from being read in before it is used. Ranges in progress share the limit equally. A
//! helper that waits for a marker sleeps, longer each time, and works on other ranges.
//!
//! # Without advice
//! Files in memory have the costliest faults, so a fresh view of 32 MiB or more of such a file is
//! *watched*: a helper checks its first pages after 1, 2, 4, … ms, some ten times in all, and then
//! stops. If all of the first MiB has been touched and nearly none of the rest, the reader is taken
//! to be sequential, and at most three times what it has read is mapped ahead of it; markers at
//! doubling distances show how much that is. With no CPU idle the helper gives up. A reader that
//! starts in the middle of the view, or later than that, is not detected.
//!
//! # Priority
//! Helpers run under `SCHED_IDLE`: on an idle CPU that is as good as a normal thread; without one,
//! a normal thread takes time from the readers, and an idle one does not. But populating holds the
//! lock of the address space for reading, and a helper that is preempted during a call keeps it:
//! with all CPUs busy, an `mmap` of another thread waited up to 320 ms for a helper that populated
//! 2 MiB a call. So calls are short (`CALL_BYTES`). Between them the helper holds no lock; it
//! yields its CPU, and sleeps if it was preempted (`ASIDE`). It starts no piece while more
//! threads are runnable than there are CPUs: two readers on two CPUs lost a tenth of their speed to
//! a helper that did.
//!
//! # Life of a range
//! A request holds its mapping, so no page is populated after the unmap. Dropping the [`Ticket`]
//! ends the request: a queued one is removed at once, a piece in progress is finished first.
//! Helpers start with the first request and end with the [`MapAhead`]. A forked child has none and
//! maps nothing ahead.
//!
//! # Lock order
//! `state` is the only lock. It is not held while pages are populated or a mapping is dropped.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_sys::cpu::{self, Contention};
use aquifer_sys::memory::REGION_BYTES;
use aquifer_sys::pagemap::Pagemap;

use self::job::Job;
use self::markers::{MARKER_BYTES, Markers};
use super::populate::{Form, Span, whole_pages};
use aquifer_vm::ProcessMark;
use aquifer_vm::worker::Worker;

mod job;
mod markers;

/// Size of a piece where the file is in memory.
pub(crate) const PIECE_BYTES: usize = REGION_BYTES;
/// Size of a piece that has to be read: the kernel's largest read-ahead.
const COLD_PIECE_BYTES: usize = 8 << 20;
/// How long a helper waits for a reader: first wait, and longest.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(256);
/// Least length of an unadvised range that is watched: shorter ones are read before watching pays.
pub(crate) const WATCHED_BYTES: usize = 32 << 20;
/// Behaviour that tests override.
#[derive(Debug, Clone, Copy)]
struct Tuning {
    /// How pages are populated; the best available form by default.
    form: Option<Form>,
    /// How long an unadvised range is watched without progress of its reader.
    watched_for: Duration,
    /// Whether helpers yield to other threads.
    step_aside: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { form: None, watched_for: Duration::from_secs(1), step_aside: true }
    }
}

/// Limits of mapping ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapAheadLimits {
    /// Largest number of helper threads; 0 disables mapping ahead.
    pub workers: usize,
    /// Most bytes that may be populated ahead of their readers.
    pub in_flight_bytes: u64,
}

impl Default for MapAheadLimits {
    /// One helper per four CPUs (1 to 4), and an eighth of the machine's memory.
    fn default() -> Self {
        MapAheadLimits {
            workers: (cpu::count() / 4).clamp(1, 4),
            in_flight_bytes: cpu::memory_bytes() / 8,
        }
    }
}

impl MapAheadLimits {
    /// The markers of `range`. An advised range has them only if it is longer than half of the
    /// limit.
    fn markers(&self, range: &Range<usize>, is_watched: bool) -> Markers {
        let limit = usize::try_from(self.in_flight_bytes).unwrap_or(usize::MAX);
        let quarter = (limit / 4).max(PIECE_BYTES);
        if is_watched {
            return Markers::Doubling { start: range.start, most: 1 << quarter.ilog2() };
        }
        if range.len() > limit / 2 {
            Markers::Every(quarter.next_multiple_of(PIECE_BYTES))
        } else {
            Markers::None
        }
    }
}

/// Counters of mapping ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapAheadStats {
    /// Ranges that were requested.
    pub requests: u64,
    /// Unadvised ranges whose reader was found to be sequential.
    pub detected: u64,
    /// Bytes that helpers have processed.
    pub populated_bytes: u64,
    /// Ranges waiting or in progress.
    pub in_progress: u64,
}

/// A range to be mapped ahead.
struct Request {
    span: Arc<dyn Span>,
    range: Range<usize>,
    markers: Markers,
    /// Whether it was not advised: then the reader's progress decides what is mapped.
    is_watched: bool,
    ended: AtomicBool,
}

/// A piece that a helper is populating.
struct Running {
    number: u64,
    /// The request of the piece. Only compared: the helper holds the reference.
    request: *const Request,
}

// SAFETY: the pointer is compared and never dereferenced.
unsafe impl Send for Running {}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    running: Vec<Running>,
    /// Pieces started so far.
    pieces: u64,
    helpers: usize,
    idle: usize,
    stopping: bool,
}

struct Shared {
    state: Mutex<State>,
    /// Notified when work arrives, at shutdown, and when a piece is done.
    changed: Condvar,
    limits: MapAheadLimits,
    tuning: Tuning,
    requests: AtomicU64,
    detected: AtomicU64,
    populated_bytes: AtomicU64,
}

/// The helpers of one mapper.
pub(crate) struct MapAhead {
    shared: ManuallyDrop<Arc<Shared>>,
    worker: Worker,
}

/// A request, which ends when this is dropped.
pub(crate) struct Ticket {
    shared: ManuallyDrop<Arc<Shared>>,
    request: ManuallyDrop<Arc<Request>>,
    mark: ProcessMark,
}

impl MapAhead {
    /// Starts no threads yet.
    pub fn new(limits: MapAheadLimits) -> MapAhead {
        MapAhead::with_tuning(limits, Tuning::default())
    }

    fn with_tuning(limits: MapAheadLimits, tuning: Tuning) -> MapAhead {
        let shared = Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            limits,
            tuning,
            requests: AtomicU64::new(0),
            detected: AtomicU64::new(0),
            populated_bytes: AtomicU64::new(0),
        };
        MapAhead { shared: ManuallyDrop::new(Arc::new(shared)), worker: Worker::new() }
    }

    /// Maps `range` of a span ahead, until it is done or the ticket is dropped. `None` if there is
    /// nothing to do, or no helper can run.
    pub fn request(&self, span: &Arc<dyn Span>, range: Range<usize>) -> Option<Ticket> {
        self.enter(span, range, false)
    }

    /// Watches `range` of a span for a while, and maps it ahead if it is read in order from its
    /// start. `None` as for [`MapAhead::request`], and if the range is too short to be worth it.
    pub fn watch(&self, span: &Arc<dyn Span>, range: Range<usize>) -> Option<Ticket> {
        if range.len() < WATCHED_BYTES { None } else { self.enter(span, range, true) }
    }

    fn enter(&self, span: &Arc<dyn Span>, range: Range<usize>, is_watched: bool) -> Option<Ticket> {
        let range = whole_pages(&**span, range);
        if range.is_empty() || self.shared.limits.workers == 0 || !self.worker.is_current() {
            return None;
        }
        let markers = self.shared.limits.markers(&range, is_watched);
        let ended = AtomicBool::new(false);
        let request = Arc::new(Request { span: span.clone(), range, markers, is_watched, ended });
        let ticket = Ticket {
            shared: self.shared.clone(),
            request: ManuallyDrop::new(request.clone()),
            mark: ProcessMark::new(),
        };
        let start = request.range.start;
        let mut state = self.shared.lock();
        if state.idle == 0
            && state.helpers < self.shared.limits.workers
            && !self.start_helper(&mut state)
        {
            // Without helper threads, readers fault as usual.
            drop(state);
            return None;
        }
        let moved = Instant::now();
        state.queue.push_back(Job { request, at: start, passed: start, step: PIECE_BYTES, moved });
        drop(state);
        if !is_watched {
            // Relaxed: a statistic.
            self.shared.requests.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.changed.notify_all();
        Some(ticket)
    }

    /// Starts a helper if possible. Returns whether at least one exists.
    fn start_helper(&self, state: &mut State) -> bool {
        let shared = Arc::clone(&self.shared);
        if self.worker.start(c"aquifer-ahead", move || shared.help()).is_ok() {
            state.helpers += 1;
        }
        state.helpers > 0
    }

    /// Waits for the pieces in progress. On return, no helper holds a mapping whose tickets were
    /// dropped before the call.
    pub fn settle(&self) {
        if !self.worker.is_current() {
            return;
        }
        let mut state = self.shared.lock();
        let before = state.pieces;
        while state.running.iter().any(|running| running.number < before) {
            state = self.shared.wait(state);
        }
    }

    /// Returns the counters.
    pub fn stats(&self) -> MapAheadStats {
        if !self.worker.is_current() {
            return MapAheadStats::default();
        }
        let state = self.shared.lock();
        MapAheadStats {
            // Relaxed: statistics.
            requests: self.shared.requests.load(Ordering::Relaxed),
            detected: self.shared.detected.load(Ordering::Relaxed),
            populated_bytes: self.shared.populated_bytes.load(Ordering::Relaxed),
            in_progress: (state.queue.len() + state.running.len()) as u64,
        }
    }
}

impl Drop for MapAhead {
    fn drop(&mut self) {
        // In a child, a thread of the parent may hold the lock.
        if !self.worker.is_current() {
            return;
        }
        let left = {
            let mut state = self.shared.lock();
            state.stopping = true;
            std::mem::take(&mut state.queue)
        };
        self.shared.changed.notify_all();
        drop(left);
        self.worker.join();
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.shared) };
    }
}

impl Ticket {
    /// The range within the span.
    pub fn range(&self) -> Range<usize> {
        self.request.range.clone()
    }

    /// Whether the helpers have finished with it.
    pub fn is_done(&self) -> bool {
        if !self.mark.is_current() {
            return true;
        }
        let state = self.shared.lock();
        !state.queue.iter().any(|job| Arc::ptr_eq(&job.request, &self.request))
            && !state.is_running(&self.request)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // In a child, the mapping is the parent's, and the lock may never be released.
        if !self.mark.is_current() {
            return;
        }
        self.shared.end(&self.request);
        // SAFETY: dropped once, here, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.request) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.shared) };
    }
}

impl State {
    fn is_running(&self, request: &Arc<Request>) -> bool {
        self.running.iter().any(|running| running.request == Arc::as_ptr(request))
    }

    fn finish(&mut self, request: *const Request) {
        if let Some(place) = self.running.iter().position(|running| running.request == request) {
            self.running.swap_remove(place);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, request: &Arc<Request>) {
        // Relaxed: at worst one more piece is populated, of a mapping that is still held.
        request.ended.store(true, Ordering::Relaxed);
        let mut state = self.lock();
        let place = state.queue.iter().position(|job| Arc::ptr_eq(&job.request, request));
        let job = place.and_then(|place| state.queue.remove(place));
        drop(state);
        drop(job);
    }

    /// The main loop of a helper.
    fn help(&self) {
        cpu::run_when_idle();
        let pagemap = Pagemap::open().ok();
        let contention = Contention::open().ok().filter(|_| self.tuning.step_aside);
        let mut patience = FIRST_WAIT;
        let mut state = self.lock();
        while !state.stopping {
            if let Some((job, piece)) = self.next_piece(&mut state, pagemap.as_ref()) {
                patience = FIRST_WAIT;
                drop(state);
                self.populate(job, piece, contention.as_ref());
                state = self.lock();
            } else if state.queue.is_empty() {
                state.idle += 1;
                state = self.wait(state);
                state.idle -= 1;
            } else {
                state.idle += 1;
                let waited = self.changed.wait_timeout(state, patience);
                let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                state = woken;
                state.idle -= 1;
                // A range with a fast reader may have caused the wake-up: start with short waits
                // again.
                patience =
                    if timeout.timed_out() { (patience * 2).min(LONGEST_WAIT) } else { FIRST_WAIT };
            }
        }
    }

    /// The next piece that may be populated: of the range at the head of the queue that is not yet
    /// far enough ahead of its reader. Ranges in progress share `in_flight_bytes` equally, so that
    /// none waits for the reader of another.
    fn next_piece(
        &self,
        state: &mut State,
        pagemap: Option<&Pagemap>,
    ) -> Option<(Job, Range<usize>)> {
        let begun = state.queue.iter().filter(|job| !job.is_unseen()).count() + state.running.len();
        let share = usize::try_from(self.limits.in_flight_bytes / begun.max(1) as u64)
            .unwrap_or(usize::MAX);
        for _ in 0..state.queue.len() {
            let mut job = state.queue.pop_front()?;
            if let Some(pagemap) = pagemap {
                self.look_for_reader(&mut job, pagemap);
            }
            let is_known = pagemap.is_some() && job.moved.elapsed() < self.tuning.watched_for;
            if job.request.is_watched && !is_known {
                // Stop watching: most mappings are not read in order. The job may be dropped under
                // the lock, because the ticket still holds the mapping, and dropping the ticket
                // takes this lock first.
                continue;
            }
            if let Some(piece) = job.piece(share) {
                let number = state.pieces;
                state.pieces += 1;
                state.running.push(Running { number, request: Arc::as_ptr(&job.request) });
                return Some((job, piece));
            }
            state.queue.push_back(job);
        }
        None
    }

    /// Updates the reader's position, or checks whether a watched range is read in order.
    fn look_for_reader(&self, job: &mut Job, pagemap: &Pagemap) {
        if job.is_unseen() && job.looks_sequential(pagemap) {
            job.begin();
            // Relaxed: a statistic.
            self.detected.fetch_add(1, Ordering::Relaxed);
        }
        if !job.is_unseen() {
            job.look_for_reader(pagemap);
        }
    }

    /// Populates a piece and requeues the range if there is more of it.
    fn populate(&self, mut job: Job, piece: Range<usize>, contention: Option<&Contention>) {
        let is_free = job.let_others_run(contention);
        let form = self.tuning.form.unwrap_or_else(Form::best);
        let range = job.request.range.clone();
        let is_marked = piece.start > range.start && job.request.markers.is_at(piece.start);
        let after_marker = if is_marked { piece.start + MARKER_BYTES } else { piece.start };
        // Unadvised mapping ahead must not cost other threads CPU time.
        let is_wanted = is_free || !job.request.is_watched;
        let has_more = is_wanted
            && job.populate(form, after_marker..piece.end, contention).is_ok()
            && piece.end < range.end;
        if is_wanted {
            // Relaxed: a statistic.
            self.populated_bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
        job.at = piece.end;
        if has_more {
            job.step = if job.is_cold() { COLD_PIECE_BYTES } else { PIECE_BYTES };
        }
        let request = Arc::as_ptr(&job.request);
        let mut state = self.lock();
        // Relaxed: ending a request sets this before it takes the lock and searches the queue.
        if has_more && !state.stopping && !job.request.ended.load(Ordering::Relaxed) {
            state.queue.push_back(job);
        } else {
            // Dropping the job may unmap the mapping: do it outside the lock, and before the
            // waiters learn that it is done.
            drop(state);
            drop(job);
            state = self.lock();
        }
        state.finish(request);
        drop(state);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
