//! A thread that keeps what mapped files have in memory below a bound.
//!
//! Left alone, the page cache grows until the kernel reclaims, on the fault path and page by page. This
//! thread is ahead of it: when more than 90 % of the bound is resident it sweeps through the files
//! in address order and gives whole regions back, until 86 % are left. A region is unmapped with one call
//! (one TLB shootdown) and its pages dropped from the page cache with another, which only drops pages
//! that nobody maps. First in, first out in address order measured as good as anything that looks at the
//! pages first, since looking costs more than a page is worth. What is streamed through drops behind.
//!
//! # How much is resident
//! The number of file pages in this process's page tables costs a microsecond to read, so it is what each
//! look uses. It also counts other mappings of the process, and misses pages that were read ahead but not
//! mapped yet; so a correction is added to it, renewed from `cachestat` of the files at most a fiftieth of
//! the time. Where `cachestat` is missing (before Linux 6.5, or for files of others), the correction is
//! what was mapped when the first file came, and pages read ahead go uncounted.
//!
//! # Naps
//! A look every 2 ms while the bound is near; the farther from it the longer, as no
//! device fills memory faster than a page in half a microsecond; and 20 ms, or 100 far from the limit,
//! while nothing changes. Without a file the thread sleeps until one is added.
//!
//! Lock order: the list of files is a leaf; it is copied, so files are used without it.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_sys::futex::{self, Mutex};
use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{FileIdentity, MappedFilePages, Pagemap};

/// Pages of a region: what one call unmaps. Not smaller, because page-cache folios of 2 MiB exist and
/// are dropped whole or not at all.
pub const REGION_PAGES: u64 = (REGION_BYTES / SMALL_PAGE_BYTES) as u64;
/// Regions skipped at once where none of their pages is cached.
const SPAN_REGIONS: u64 = 32;
const START_PERCENT: u64 = 90;
const STOP_PERCENT: u64 = 86;

const SHORTEST_NAP: Duration = Duration::from_millis(2);
const IDLE_NAP: Duration = Duration::from_millis(20);
const LONGEST_NAP: Duration = Duration::from_millis(100);
/// Longest nap after sweeps that dropped nothing: everything is pinned, or mapped by other processes.
const STUCK_NAP: Duration = Duration::from_secs(1);
const FASTEST_FILL: Duration = Duration::from_nanos(500);

/// A mapped file whose pages can be dropped, because they are copies of what is stored.
pub trait Droppable: Send + Sync {
    /// Which file it is. One that is there twice is counted once.
    fn identity(&self) -> FileIdentity;
    /// Bytes that are mapped, from the start of the file.
    fn len_bytes(&self) -> u64;
    /// Where the sweep goes on, in bytes.
    fn cursor(&self) -> &AtomicU64;
    /// Pages in the page cache, of a length of 0 to the end; `None` if that cannot be told.
    fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64>;
    /// Gives the pages of a range back: unmaps them, and drops them from the page cache.
    fn discard(&self, pages: Range<u64>);
    /// A number that changes when pages may have come in that are not mapped.
    fn asked(&self) -> u64 {
        0
    }
    /// Called before a region with so many cached pages is discarded.
    fn observe(&self, _region: &Range<u64>, _cached: u64, _tables: &mut PageTables) {}
    /// Whether nothing is left of it. Then it is not looked at again.
    fn is_gone(&self) -> bool {
        false
    }
}

/// The files, and what the thread is told. See the module documentation.
pub struct DropBehind<F> {
    files: Mutex<Vec<Arc<F>>>,
    wake: AtomicU32,
    stopping: AtomicBool,
}

impl<F> Default for DropBehind<F> {
    fn default() -> Self {
        let (wake, stopping) = (AtomicU32::new(0), AtomicBool::new(false));
        DropBehind { files: Mutex::new(vec![]), wake, stopping }
    }
}

impl<F: Droppable> DropBehind<F> {
    /// Without files.
    pub fn new() -> DropBehind<F> {
        DropBehind::default()
    }

    /// From now on its pages count, and are dropped.
    pub fn add(&self, file: Arc<F>) {
        let is_first = {
            let mut files = self.files.lock();
            files.push(file);
            files.len() == 1
        };
        // Otherwise the thread looks by itself before much can have come in.
        if is_first {
            self.wake();
        }
    }

    /// Its pages are left alone from now on, but for a sweep in progress.
    pub fn remove(&self, file: &Arc<F>) {
        let removed = {
            let mut files = self.files.lock();
            let at = files.iter().position(|other| Arc::ptr_eq(other, file));
            at.map(|at| files.swap_remove(at))
        };
        drop(removed);
        self.wake();
    }

    /// Makes the thread look again now.
    pub fn wake(&self) {
        // Release pairs with the acquire in `run`.
        self.wake.fetch_add(1, Ordering::Release);
        futex::wake(&self.wake, 1);
    }

    /// Ends [`DropBehind::run`].
    pub fn stop(&self) {
        // Release pairs with the acquire in `run`.
        self.stopping.store(true, Ordering::Release);
        self.wake();
    }

    /// The thread. `bound_bytes` is asked for, and `publish` told the pages resident, at every look.
    pub fn run(&self, bound_bytes: impl Fn() -> u64, publish: impl Fn(u64)) {
        aquifer_sys::signal::block_asynchronous();
        let mut look = Look::new();
        loop {
            let wakes = self.wake.load(Ordering::Acquire);
            if self.stopping.load(Ordering::Acquire) {
                return;
            }
            let files = self.files.lock().clone();
            let nap = if files.is_empty() {
                look.resident.forget();
                publish(0);
                None
            } else {
                Some(self.look(&mut look, &files, bound_bytes(), &publish))
            };
            self.forget_gone(&mut look, &files);
            // Before the nap: a file that its mapping has left is unmapped here.
            drop(files);
            futex::wait(&self.wake, wakes, nap);
        }
    }

    fn forget_gone(&self, look: &mut Look, files: &[Arc<F>]) {
        let gone: HashSet<*const F> =
            files.iter().filter(|file| file.is_gone()).map(Arc::as_ptr).collect();
        if gone.is_empty() {
            return;
        }
        let is_gone = |file: &Arc<F>| gone.contains(&Arc::as_ptr(file));
        look.turn -=
            files[..look.turn.min(files.len())].iter().filter(|file| is_gone(file)).count();
        self.files.lock().retain(|file| !is_gone(file));
    }

    /// Looks once, drops what is too much, and says when to look again.
    fn look(
        &self,
        look: &mut Look,
        files: &[Arc<F>],
        bound_bytes: u64,
        publish: &impl Fn(u64),
    ) -> Duration {
        let share = bound_bytes / SMALL_PAGE_BYTES as u64;
        let (start, stop) = (share * START_PERCENT / 100, share * STOP_PERCENT / 100);
        let mut resident = look.resident.estimate(files);
        let mut freed = 0;
        if resident > start {
            freed = self.sweep(look, files, resident - stop);
            look.resident.correct(files);
            resident = look.resident.estimate(files);
        }
        publish(resident);
        let idle = look.resident.idle();
        if resident > start {
            // More came in meanwhile: at once, unless nothing can be done.
            look.stuck = if freed == 0 { look.stuck + 1 } else { 0 };
            return match look.stuck {
                0 => Duration::ZERO,
                times => (LONGEST_NAP * times).min(STUCK_NAP),
            };
        }
        look.stuck = 0;
        let room = u32::try_from(start - resident).unwrap_or(u32::MAX);
        let away = FASTEST_FILL.saturating_mul(room).clamp(SHORTEST_NAP, LONGEST_NAP);
        if idle { away.max(IDLE_NAP) } else { away }
    }

    /// Goes on through the files where the last sweep ended, for at most one turn. Returns how many pages
    /// left the page cache.
    fn sweep(&self, look: &mut Look, files: &[Arc<F>], wanted: u64) -> u64 {
        let mut freed = 0;
        look.turn %= files.len();
        for _ in 0..=files.len() {
            let file = &files[look.turn];
            freed += self.sweep_file(look, file, wanted - freed);
            if freed >= wanted || self.stopping.load(Ordering::Acquire) {
                return freed;
            }
            look.turn = (look.turn + 1) % files.len();
        }
        freed
    }

    /// From the file's cursor to its end, where the cursor starts over.
    fn sweep_file(&self, look: &mut Look, file: &F, wanted: u64) -> u64 {
        const REGION: u64 = REGION_BYTES as u64;
        const SPAN: u64 = SPAN_REGIONS * REGION;
        let end = file.len_bytes();
        let mut freed = 0;
        let mut at = file.cursor().load(Ordering::Relaxed) / REGION * REGION;
        if at >= end {
            at = 0;
        }
        while at < end && freed < wanted && !self.stopping.load(Ordering::Relaxed) {
            let span_end = (at / SPAN + 1) * SPAN;
            if at.is_multiple_of(SPAN) && file.cached(at, SPAN) == Some(0) {
                at = span_end;
                continue;
            }
            let region = at..(at + REGION).min(end).next_multiple_of(SMALL_PAGE_BYTES as u64);
            at += REGION;
            let before = file.cached(region.start, REGION);
            if before == Some(0) {
                continue;
            }
            if let Some(before) = before {
                file.observe(&region, before, &mut look.tables);
            }
            let mapped = look.resident.mapped();
            file.discard(region.clone());
            freed += match (before, file.cached(region.start, REGION)) {
                (Some(before), Some(after)) => before.saturating_sub(after),
                _ => mapped.saturating_sub(look.resident.mapped()),
            };
        }
        file.cursor().store(if at >= end { 0 } else { at }, Ordering::Relaxed);
        freed
    }
}

/// The process's page tables, and room to read them.
pub struct PageTables {
    pagemap: Option<Pagemap>,
    entries: Box<[u64]>,
}

impl PageTables {
    fn new() -> PageTables {
        PageTables {
            pagemap: Pagemap::open().ok(),
            entries: vec![0; REGION_PAGES as usize].into_boxed_slice(),
        }
    }

    /// How many pages are mapped in, of a region at most; `None` if that cannot be read.
    pub fn present(&mut self, address: *const u8, len_bytes: u64) -> Option<u64> {
        let pages = (len_bytes / SMALL_PAGE_BYTES as u64) as usize;
        self.pagemap.as_ref()?.present(address, self.entries.get_mut(..pages)?).ok()
    }
}

/// What the thread remembers between looks.
struct Look {
    resident: Residency,
    tables: PageTables,
    /// Index of the file being swept.
    turn: usize,
    /// Sweeps in a row that freed nothing.
    stuck: u32,
}

impl Look {
    fn new() -> Look {
        Look { resident: Residency::new(), tables: PageTables::new(), turn: 0, stuck: 0 }
    }
}

/// What changes when pages come or go.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Activity {
    mapped: u64,
    asked: u64,
}

/// The estimate of resident pages. See the module documentation.
struct Residency {
    counter: Option<MappedFilePages>,
    /// Added to the process's count.
    correction: Option<i64>,
    /// What was going on at the last look, and at the last correction.
    seen: Activity,
    corrected: Activity,
    unchanged: bool,
    correct_next: Instant,
}

impl Residency {
    fn new() -> Residency {
        Residency {
            counter: MappedFilePages::open().ok(),
            correction: None,
            seen: Activity::default(),
            corrected: Activity::default(),
            unchanged: false,
            correct_next: Instant::now(),
        }
    }

    /// File pages mapped in the process.
    fn mapped(&self) -> u64 {
        self.counter.as_ref().and_then(|counter| counter.read().ok()).unwrap_or(0)
    }

    /// All files are gone.
    fn forget(&mut self) {
        self.correction = None;
    }

    /// Whether nothing was mapped or unmapped between the last two looks.
    fn idle(&self) -> bool {
        self.unchanged
    }

    fn activity<F: Droppable>(&self, files: &[Arc<F>]) -> Activity {
        let asked = files.iter().map(|file| file.asked());
        Activity { mapped: self.mapped(), asked: asked.fold(0, u64::wrapping_add) }
    }

    fn estimate<F: Droppable>(&mut self, files: &[Arc<F>]) -> u64 {
        let now = self.activity(files);
        self.unchanged = now == self.seen;
        self.seen = now;
        let due = now != self.corrected && Instant::now() >= self.correct_next;
        if due || self.correction.is_none() {
            self.correct(files);
        }
        now.mapped.saturating_add_signed(self.correction.unwrap_or(0))
    }

    /// Renews the correction from what the page cache holds of the files.
    fn correct<F: Droppable>(&mut self, files: &[Arc<F>]) {
        let started = Instant::now();
        self.corrected = self.activity(files);
        let mapped = self.corrected.mapped as i64;
        let mut total = Some(0);
        let mut seen = HashSet::new();
        for file in files {
            // A file mapped twice is in the page cache once.
            if seen.insert(file.identity()) {
                total = total.zip(file.cached(0, 0)).map(|(total, pages)| total + pages);
            }
        }
        match total {
            Some(total) => self.correction = Some(total as i64 - mapped),
            // What is mapped now belongs to others, if this is the first look.
            None if self.correction.is_none() => self.correction = Some(-mapped),
            None => {}
        }
        let cost = started.elapsed();
        self.correct_next = Instant::now() + (cost * 50).max(SHORTEST_NAP);
    }
}
