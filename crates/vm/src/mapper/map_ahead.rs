//! Mapping ahead of a reader, by helper threads that only use what CPU time nobody else wants.
//!
//! A fault of a mapping that the kernel serves is not seen here, so what is mapped ahead is what was advised
//! ([`super::advice`]). A helper goes through the range from its start and populates it piece by piece, without regard to
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
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_sys::cpu::{self, Contention};
use aquifer_sys::memory::{self, REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::pagemap::Pagemap;
use aquifer_sys::signal;

use super::populate::{Form, Missing, Span, whole_pages};
use crate::ProcessMark;

/// What is populated at a time where the file is in memory.
pub(crate) const PIECE_BYTES: usize = REGION_BYTES;
/// What is populated at a time where it has to be read: as much as the kernel reads ahead at most.
const COLD_PIECE_BYTES: usize = 8 << 20;
/// What is populated in one call where the file is in memory: some 20 µs.
const CALL_BYTES: usize = 128 << 10;
/// Left unmapped for the reader: what the kernel maps at one fault.
const MARKER_BYTES: usize = 64 << 10;
/// How long a helper waits when others want its CPU, and how often at most in a row.
const ASIDE: Duration = Duration::from_millis(1);
const MOST_ASIDES: usize = 100;
/// How long a helper waits for a reader, at first and at most.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(256);
/// Pages looked at to tell whether a piece has to be read.
const SAMPLES: usize = 8;

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

/// What was mapped ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapAheadStats {
    /// Ranges that were asked for.
    pub requests: u64,
    /// Bytes that helpers went through.
    pub populated_bytes: u64,
    /// Ranges waiting or in progress.
    pub in_progress: u64,
}

/// A range that a helper goes through.
struct Request {
    span: Arc<dyn Span>,
    range: Range<usize>,
    ended: AtomicBool,
}

/// A request in the queue.
struct Job {
    request: Arc<Request>,
    /// How far a helper has come.
    at: usize,
    /// How far the reader has come, as far as is known.
    passed: usize,
    /// Bytes of a piece.
    step: usize,
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
    form: Option<Form>,
    requests: AtomicU64,
    populated_bytes: AtomicU64,
}

/// The helpers of one mapper.
pub(crate) struct MapAhead {
    shared: ManuallyDrop<Arc<Shared>>,
    helpers: Mutex<Vec<JoinHandle<()>>>,
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
        MapAhead::with_form(limits, None)
    }

    fn with_form(limits: MapAheadLimits, form: Option<Form>) -> MapAhead {
        let shared = Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            limits,
            form,
            requests: AtomicU64::new(0),
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
        let range = whole_pages(&**span, range);
        if range.is_empty() || self.shared.limits.workers == 0 || !self.mark.is_current() {
            return None;
        }
        let request =
            Arc::new(Request { span: span.clone(), range, ended: AtomicBool::new(false) });
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
        state.queue.push_back(Job { request, at: start, passed: start, step: PIECE_BYTES });
        drop(state);
        // Relaxed: a statistic.
        self.shared.requests.fetch_add(1, Ordering::Relaxed);
        self.shared.changed.notify_all();
        Some(ticket)
    }

    /// Whether there is at least one helper afterwards.
    fn start_helper(&self, state: &mut State) -> bool {
        let shared = Arc::clone(&self.shared);
        let started = std::thread::Builder::new()
            .name("aquifer-ahead".to_owned())
            .spawn(move || shared.help());
        if let Ok(thread) = started {
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
        let this = std::thread::current().id();
        for thread in std::mem::take(self.helpers.get_mut().unwrap_or_else(PoisonError::into_inner))
        {
            // A helper that drops the last reference to a mapping may drop its mapper with it.
            if thread.thread().id() != this {
                let _ = thread.join();
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
        signal::block_asynchronous();
        cpu::run_when_idle();
        let pagemap = Pagemap::open().ok();
        let contention = Contention::open().ok();
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
                patience =
                    if timeout.timed_out() { (patience * 2).min(LONGEST_WAIT) } else { patience };
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
        let ranges = (state.queue.len() + state.running.len()) as u64;
        let share =
            usize::try_from(self.limits.in_flight_bytes / ranges.max(1)).unwrap_or(usize::MAX);
        for _ in 0..state.queue.len() {
            let mut job = state.queue.pop_front()?;
            let stretch = self.stretch_bytes(&job.request.range);
            if let (Some(pagemap), Some(stretch)) = (pagemap, stretch) {
                job.look_for_reader(stretch, pagemap);
            }
            let piece = job.piece(stretch);
            if piece.end - job.passed <= share || job.at == job.passed || stretch.is_none() {
                let number = state.pieces;
                state.pieces += 1;
                state.running.push(Running { number, request: Arc::as_ptr(&job.request) });
                return Some((job, piece));
            }
            state.queue.push_back(job);
        }
        None
    }

    /// From one marker to the next, counted from the start of the span; a short range has none.
    fn stretch_bytes(&self, range: &Range<usize>) -> Option<usize> {
        let limit = usize::try_from(self.limits.in_flight_bytes).unwrap_or(usize::MAX);
        (range.len() > limit / 2)
            .then(|| (limit / 4).next_multiple_of(PIECE_BYTES).max(PIECE_BYTES))
    }

    /// Populates a piece and puts the range back into the queue if there is more of it.
    fn populate(&self, mut job: Job, piece: Range<usize>, contention: Option<&Contention>) {
        job.let_others_run(contention);
        let form = self.form.unwrap_or_else(Form::best);
        let range = job.request.range.clone();
        let is_marked = self.stretch_bytes(&range).is_some_and(|stretch| {
            piece.start.is_multiple_of(stretch) && piece.start > range.start
        });
        let after_marker = if is_marked { piece.start + MARKER_BYTES } else { piece.start };
        let populated = job.populate(form, after_marker..piece.end, contention);
        // Relaxed: a statistic.
        self.populated_bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
        let has_more = populated.is_ok() && piece.end < range.end;
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

impl Job {
    /// What is populated next: up to a border of pieces, or to a marker.
    fn piece(&self, stretch: Option<usize>) -> Range<usize> {
        let address = self.request.span.address() as usize + self.at;
        let to_border = (address / self.step + 1) * self.step - address;
        let to_marker = stretch.map_or(usize::MAX, |stretch| stretch - self.at % stretch);
        self.at..(self.at + to_border.min(to_marker)).min(self.request.range.end)
    }

    /// Populates a part of the range, in short calls unless it has to be read, which is waited for without the lock.
    fn populate(
        &self,
        form: Form,
        part: Range<usize>,
        contention: Option<&Contention>,
    ) -> Result<(), Missing> {
        let call_bytes = if self.step == COLD_PIECE_BYTES { COLD_PIECE_BYTES } else { CALL_BYTES };
        let mut at = part.start;
        // Relaxed: what is populated for nothing is a call more at worst.
        while at < part.end && !self.request.ended.load(Ordering::Relaxed) {
            let end = (at + call_bytes).min(part.end);
            let lost_before = cpu::involuntary_switches();
            form.populate(&*self.request.span, at..end)?;
            std::thread::yield_now();
            if cpu::involuntary_switches() != lost_before {
                std::thread::sleep(ASIDE);
                self.let_others_run(contention);
            }
            at = end;
        }
        Ok(())
    }

    /// Waits while there are more threads to run than CPUs: not for ever, since a machine that is always busy is no reason to
    /// never come to an end.
    fn let_others_run(&self, contention: Option<&Contention>) {
        for _ in 0..MOST_ASIDES {
            // Relaxed: a wait too many at worst.
            let has_ended = self.request.ended.load(Ordering::Relaxed);
            if has_ended || !contention.is_some_and(Contention::is_any_waiting) {
                return;
            }
            std::thread::sleep(ASIDE);
        }
    }

    /// Moves on to the last marker that the reader has reached.
    fn look_for_reader(&mut self, stretch: usize, pagemap: &Pagemap) {
        loop {
            let marker = (self.passed / stretch + 1) * stretch;
            if marker >= self.request.range.end {
                return;
            }
            let address = self.request.span.address().wrapping_add(marker);
            if !matches!(pagemap.present(address, &mut [0]), Ok(1)) {
                return;
            }
            self.passed = marker;
            self.at = self.at.max(marker);
        }
    }

    /// Whether most of what lies next has to be read first, by a few samples. Where the system does not tell (files of
    /// others), it has not.
    fn is_cold(&self) -> bool {
        let end = self.request.range.end.min(self.at + PIECE_BYTES);
        let mut resident = [0];
        let cold = (0..SAMPLES).filter(|sample| {
            let offset = self.at + (end - self.at) / SAMPLES * sample;
            let page = offset / SMALL_PAGE_BYTES * SMALL_PAGE_BYTES;
            let address = self.request.span.address().wrapping_add(page);
            memory::residency(address, SMALL_PAGE_BYTES, &mut resident).is_ok()
                && resident[0] & 1 == 0
        });
        cold.count() * 2 > SAMPLES
    }
}

#[cfg(test)]
mod tests;
