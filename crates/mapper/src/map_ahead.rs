//! Mapping ahead of a reader, by helper threads that only use what CPU time nobody else wants.
//!
//! A fault of a mapping that the kernel serves is not seen here, so what is mapped ahead is what was advised
//! ([`super::advice`]), and what the page tables show to be read in order. A helper goes through the range from its start and populates it piece by piece, without regard to
//! where the reader is: a helper that follows the reader's position was never faster, and one that spins for it cost two
//! readers on two CPUs a third of their speed. What a reader meets first it faults in as usual.
//!
//! ```text
//!             reader ──▶                 helper ──▶
//!  ├─────────────┴───────────────────────────┴·····┆·············┆·············┤
//!  └── start                               populated   marker        marker    end
//!                      └─ at most in_flight_bytes ─┘
//! ```
//!
//! # How far ahead
//! Ranges that are longer than half of the limit have *markers*: 64 KiB every quarter of it that are left unmapped. The page
//! tables show when the reader has come by, and that it has read all before. So a file larger than memory is not
//! read in before anybody can use it. Ranges in progress share the limit equally. A helper that waits for a marker sleeps, longer each time, and works on other
//! ranges meanwhile.
//!
//! # Without advice
//! Where a fault costs most, on files in memory, a fresh view of 32 MiB or more is *watched*: a helper looks at its first
//! pages after 1, 2, 4, … ms, some ten times in all if nothing happens, and never again. If by then all of the first MiB was
//! touched and nearly nothing of the rest, its reader is taken for one that reads in order, and at most three times what it
//! has read is mapped ahead of it; markers at doubling distances show how much that is. With no CPU idle the helper gives up.
//! A reader that begins in the middle, or later, is not noticed.
//!
//! # Priority
//! Helpers run under `SCHED_IDLE`: with a CPU free that is as good as a normal thread; without one, a normal thread takes
//! time from the readers, and this one does not. Populating holds the lock of the address space for reading, though, and a
//! helper that loses its CPU in the middle of a call keeps it: with all CPUs busy, an `mmap` of another thread waited
//! up to 320 ms for one that populated 2 MiB a call. So calls are short ([`CALL_BYTES`]), a helper offers its CPU to others
//! between them, when it holds nothing, and if somebody took it, steps aside ([`ASIDE`]). It begins no piece while more threads are runnable
//! than there are CPUs: two readers on two CPUs lost a tenth of their speed to a helper that did.
//!
//! # Life of a range
//! A request holds its mapping, so nothing is populated after it was unmapped. Dropping the [`Ticket`] ends the request: what
//! is queued is let go at once, a piece in progress is finished first. Helpers start with the first request and end with the
//! [`MapAhead`]. In a forked child there are none, and nothing is done.
//!
//! # Lock order
//! `state` is the only lock, and is not held while pages are populated or a mapping is dropped.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_sys::cpu::{self, Contention};
use aquifer_sys::memory::REGION_BYTES;
use aquifer_sys::pagemap::Pagemap;
use aquifer_sys::thread::{self, Thread};

use self::job::Job;
use self::markers::{MARKER_BYTES, Markers};
use super::populate::{Form, Span, whole_pages};
use aquifer_vm::ProcessMark;

mod job;
mod markers;

/// What is populated at a time where the file is in memory.
pub(crate) const PIECE_BYTES: usize = REGION_BYTES;
/// What is populated at a time where it has to be read: as much as the kernel reads ahead at most.
const COLD_PIECE_BYTES: usize = 8 << 20;
/// How long a helper waits for a reader, at first and at most.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(256);
/// Ranges that nobody advised about are watched from this length on: shorter ones are read before it pays.
pub(crate) const WATCHED_BYTES: usize = 32 << 20;
/// What tests set otherwise.
#[derive(Debug, Clone, Copy)]
struct Manners {
    /// How pages are brought in; the better form by default.
    form: Option<Form>,
    /// How long a range that nobody advised about is watched without its reader coming any further.
    watched_for: Duration,
    /// Whether helpers step aside for others.
    step_aside: bool,
}

impl Default for Manners {
    fn default() -> Self {
        Manners { form: None, watched_for: Duration::from_secs(1), step_aside: true }
    }
}

/// Bounds of what is mapped ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapAheadLimits {
    /// Helper threads at most; 0 for no mapping ahead.
    pub workers: usize,
    /// Bytes that are brought in before their readers have come near them, at most.
    pub in_flight_bytes: u64,
}

impl Default for MapAheadLimits {
    /// A helper for four CPUs, and an eighth of the machine's memory.
    fn default() -> Self {
        MapAheadLimits {
            workers: (cpu::count() / 4).clamp(1, 4),
            in_flight_bytes: cpu::memory_bytes() / 8,
        }
    }
}

impl MapAheadLimits {
    /// Where `range` has markers: advised, only if it is longer than half of what may be brought in unread.
    fn markers(&self, range: &Range<usize>, is_watched: bool) -> Markers {
        let limit = usize::try_from(self.in_flight_bytes).unwrap_or(usize::MAX);
        let quarter = (limit / 4).max(PIECE_BYTES);
        if is_watched {
            return Markers::Doubling { start: range.start, most: 1 << quarter.ilog2() };
        }
        match range.len() > limit / 2 {
            true => Markers::Every(quarter.next_multiple_of(PIECE_BYTES)),
            false => Markers::None,
        }
    }
}

/// What was mapped ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapAheadStats {
    /// Ranges that were asked for.
    pub requests: u64,
    /// Ranges that nobody asked for, and whose reader was seen to read in order.
    pub detected: u64,
    /// Bytes that helpers went through.
    pub populated_bytes: u64,
    /// Ranges waiting or in progress.
    pub in_progress: u64,
}

/// A range that a helper goes through.
struct Request {
    span: Arc<dyn Span>,
    range: Range<usize>,
    markers: Markers,
    /// Whether nobody advised it: then what its reader does decides.
    is_watched: bool,
    ended: AtomicBool,
}

/// A piece that a helper is populating.
struct Running {
    number: u64,
    /// Of which request. Only compared: the helper holds it.
    request: *const Request,
}

// SAFETY: the pointer is never followed.
unsafe impl Send for Running {}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    running: Vec<Running>,
    /// Pieces begun.
    pieces: u64,
    helpers: usize,
    idle: usize,
    stopping: bool,
}

struct Shared {
    state: Mutex<State>,
    /// There is work, or none any more, or a piece is done.
    changed: Condvar,
    limits: MapAheadLimits,
    manners: Manners,
    requests: AtomicU64,
    detected: AtomicU64,
    populated_bytes: AtomicU64,
}

/// The helpers of one mapper.
pub(crate) struct MapAhead {
    shared: ManuallyDrop<Arc<Shared>>,
    helpers: Mutex<Vec<Thread>>,
    mark: ProcessMark,
}

/// A request. Dropped, it ends.
pub(crate) struct Ticket {
    shared: ManuallyDrop<Arc<Shared>>,
    request: ManuallyDrop<Arc<Request>>,
    mark: ProcessMark,
}

impl MapAhead {
    /// Starts nothing yet.
    pub fn new(limits: MapAheadLimits) -> MapAhead {
        MapAhead::with_manners(limits, Manners::default())
    }

    fn with_manners(limits: MapAheadLimits, manners: Manners) -> MapAhead {
        let shared = Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            limits,
            manners,
            requests: AtomicU64::new(0),
            detected: AtomicU64::new(0),
            populated_bytes: AtomicU64::new(0),
        };
        MapAhead {
            shared: ManuallyDrop::new(Arc::new(shared)),
            helpers: Mutex::default(),
            mark: ProcessMark::new(),
        }
    }

    /// Has `range` of a span mapped ahead, until that is done or the ticket is dropped. `None` if there is nothing to do, or
    /// nobody who could.
    pub fn request(&self, span: &Arc<dyn Span>, range: Range<usize>) -> Option<Ticket> {
        self.enter(span, range, false)
    }

    /// Has `range` of a span watched for a while, and mapped ahead if it is read from its start on. `None` as for
    /// [`MapAhead::request`], and if the range is too short for that to be worth it.
    pub fn watch(&self, span: &Arc<dyn Span>, range: Range<usize>) -> Option<Ticket> {
        if range.len() < WATCHED_BYTES { None } else { self.enter(span, range, true) }
    }

    fn enter(&self, span: &Arc<dyn Span>, range: Range<usize>, is_watched: bool) -> Option<Ticket> {
        let range = whole_pages(&**span, range);
        if range.is_empty() || self.shared.limits.workers == 0 || !self.mark.is_current() {
            return None;
        }
        let markers = self.shared.limits.markers(&range, is_watched);
        let ended = AtomicBool::new(false);
        let request = Arc::new(Request { span: span.clone(), range, markers, is_watched, ended });
        let ticket = Ticket {
            shared: self.shared.clone(),
            request: ManuallyDrop::new(request.clone()),
            mark: self.mark,
        };
        let start = request.range.start;
        let mut state = self.shared.lock();
        if state.idle == 0
            && state.helpers < self.shared.limits.workers
            && !self.start_helper(&mut state)
        {
            // Without threads, readers fault as they always did.
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

    /// Whether there is at least one helper afterwards.
    fn start_helper(&self, state: &mut State) -> bool {
        let shared = Arc::clone(&self.shared);
        if let Ok(thread) = thread::start(c"aquifer-ahead", move || shared.help()) {
            state.helpers += 1;
            self.helpers.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        state.helpers > 0
    }

    /// Waits for the pieces in progress. Afterwards no helper holds a mapping whose tickets were dropped before.
    pub fn settle(&self) {
        if !self.mark.is_current() {
            return;
        }
        let mut state = self.shared.lock();
        let before = state.pieces;
        while state.running.iter().any(|running| running.number < before) {
            state = self.shared.wait(state);
        }
    }

    /// What was done so far.
    pub fn stats(&self) -> MapAheadStats {
        if !self.mark.is_current() {
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
        // In a child, the threads and whoever held the lock are the parent's.
        if !self.mark.is_current() {
            for thread in
                std::mem::take(self.helpers.get_mut().unwrap_or_else(PoisonError::into_inner))
            {
                std::mem::forget(thread);
            }
            return;
        }
        let left = {
            let mut state = self.shared.lock();
            state.stopping = true;
            std::mem::take(&mut state.queue)
        };
        self.shared.changed.notify_all();
        drop(left);
        for thread in std::mem::take(self.helpers.get_mut().unwrap_or_else(PoisonError::into_inner))
        {
            // A helper that drops the last reference to a mapping may drop its mapper with it.
            if !thread.is_current() {
                thread.join();
            }
        }
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.shared) };
    }
}

impl Ticket {
    /// The part of the span.
    pub fn range(&self) -> Range<usize> {
        self.request.range.clone()
    }

    /// Whether a helper is through with it.
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
        // In a child, the mapping is the parent's, and its lock may be held for ever.
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
        // Relaxed: a piece more is populated at worst, of a mapping that is still held.
        request.ended.store(true, Ordering::Relaxed);
        let mut state = self.lock();
        let place = state.queue.iter().position(|job| Arc::ptr_eq(&job.request, request));
        let job = place.and_then(|place| state.queue.remove(place));
        drop(state);
        drop(job);
    }

    /// What a helper does all its life.
    fn help(&self) {
        cpu::run_when_idle();
        let pagemap = Pagemap::open().ok();
        let contention = Contention::open().ok().filter(|_| self.manners.step_aside);
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
                // What woke it may be a range whose reader is fast.
                patience =
                    if timeout.timed_out() { (patience * 2).min(LONGEST_WAIT) } else { FIRST_WAIT };
            }
        }
    }

    /// The next piece that may be populated: of the range that waited for longest, unless it is far enough ahead of its
    /// reader. What may be in flight is shared equally by the ranges in progress, so that none waits for the reader of
    /// another.
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
            let is_known = pagemap.is_some() && job.moved.elapsed() < self.manners.watched_for;
            if job.request.is_watched && !is_known {
                // Not for ever: most mappings are not read in order. The ticket still holds the mapping, and whoever drops
                // that takes the lock first.
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

    /// Finds how far the reader of a range has come, if it has begun.
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

    /// Populates a piece and puts the range back into the queue if there is more of it.
    fn populate(&self, mut job: Job, piece: Range<usize>, contention: Option<&Contention>) {
        let is_free = job.let_others_run(contention);
        let form = self.manners.form.unwrap_or_else(Form::best);
        let range = job.request.range.clone();
        let is_marked = piece.start > range.start && job.request.markers.is_at(piece.start);
        let after_marker = if is_marked { piece.start + MARKER_BYTES } else { piece.start };
        // What nobody asked for is not done at the cost of others.
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
        // Relaxed: who ends a request sets this before it takes the lock and looks into the queue.
        if has_more && !state.stopping && !job.request.ended.load(Ordering::Relaxed) {
            state.queue.push_back(job);
        } else {
            // Letting go of a mapping unmaps it: not under the lock, and before anybody is told that it is done.
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
