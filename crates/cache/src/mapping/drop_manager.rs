//! The thread that keeps kernel-backed mappings within the budget.
//!
//! Left alone, the page cache grows until the kernel reclaims, on the fault path and page by page. The
//! drop manager is ahead of it: when more than 90 % of the share is resident it sweeps through the files
//! in address order and gives whole regions back, until 86 % are left. A region is unmapped with one call
//! (one TLB shootdown) and its pages dropped from the page cache with another, which only drops pages
//! that nobody maps. First in, first out in address order measured as good as anything that looks at the
//! pages first, since looking costs more than a page is worth.
//!
//! # How much is resident
//! The number of file pages in this process's page tables costs a microsecond to read, so it is what each
//! look uses. It also counts other mappings of the process, and misses pages that were read ahead but not
//! mapped yet; so a correction is added to it, renewed from `cachestat` of the files at most a fiftieth of
//! the time. Where `cachestat` is missing (before Linux 6.5, or for files of others), the correction is
//! what was mapped when the first file came, and pages read ahead go uncounted.
//!
//! # Naps
//! A look every 2 ms while the share fills up near its limit; the farther from it the longer, as no
//! device fills memory faster than a page in half a microsecond; and 20 ms, or 100 far from the limit,
//! while nothing changes. Without a file the thread sleeps until one is added.
//!
//! Lock order: the list of files is a leaf; it is copied, so files are used without it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use aquifer_sys::futex::{self, Mutex};
use aquifer_sys::memory::{self, REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{Backing, MappedFilePages, Pagemap};

use crate::engine::Engine;
use crate::mapping::kernel::KernelFile;

/// Pages of a region: what one call unmaps. Not smaller, because page-cache folios of 2 MiB exist and
/// are dropped whole or not at all.
pub(crate) const REGION_PAGES: u64 = (REGION_BYTES / SMALL_PAGE_BYTES) as u64;
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

/// The drop manager of a cache. See the module documentation.
pub(crate) struct DropManager {
    engine: Arc<Engine>,
    files: Mutex<Vec<Arc<KernelFile>>>,
    wake: AtomicU32,
    stopping: AtomicBool,
}

impl DropManager {
    pub fn new(engine: Arc<Engine>) -> DropManager {
        DropManager {
            engine,
            files: Mutex::new(vec![]),
            wake: AtomicU32::new(0),
            stopping: AtomicBool::new(false),
        }
    }

    pub fn add(&self, file: Arc<KernelFile>) {
        // The pages of a file in memory are no copies: there is nothing to drop.
        if file.backing == Backing::Storage {
            self.files.lock().push(file);
            self.wake();
        }
    }

    pub fn remove(&self, file: &Arc<KernelFile>) {
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

    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.wake();
    }

    /// The thread.
    pub fn run(&self) {
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
                self.publish(0);
                None
            } else {
                Some(self.look(&mut look, &files))
            };
            // Before the nap: a file that its mapping has left is unmapped here.
            drop(files);
            futex::wait(&self.wake, wakes, nap);
        }
    }

    fn publish(&self, pages: u64) {
        let bytes = pages * SMALL_PAGE_BYTES as u64;
        let pages = bytes / self.engine.options.page_bytes as u64;
        self.engine.kernel_resident_pages.store(pages, Ordering::Relaxed);
    }

    /// Looks once, drops what is too much, and says when to look again.
    fn look(&self, look: &mut Look, files: &[Arc<KernelFile>]) -> Duration {
        let share = self.engine.kernel_share_bytes() / SMALL_PAGE_BYTES as u64;
        let (start, stop) = (share * START_PERCENT / 100, share * STOP_PERCENT / 100);
        let mut resident = look.resident.estimate(files);
        let mut freed = 0;
        if resident > start {
            freed = self.sweep(look, files, resident - stop);
            look.resident.correct(files);
            resident = look.resident.estimate(files);
        }
        self.publish(resident);
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
    fn sweep(&self, look: &mut Look, files: &[Arc<KernelFile>], wanted: u64) -> u64 {
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
    fn sweep_file(&self, look: &mut Look, file: &KernelFile, wanted: u64) -> u64 {
        const REGION: u64 = REGION_BYTES as u64;
        const SPAN: u64 = SPAN_REGIONS * REGION;
        let end = file.geometry.len_bytes;
        let detects = file.detects();
        let mut freed = 0;
        let mut at = file.cursor.load(Ordering::Relaxed) / REGION * REGION;
        if at >= end {
            at = 0;
        }
        while at < end && freed < wanted && !self.stopping.load(Ordering::Relaxed) {
            let span_end = (at / SPAN + 1) * SPAN;
            if at.is_multiple_of(SPAN) && cached(file, at, SPAN) == Some(0) {
                at = span_end;
                continue;
            }
            let region = at..(at + REGION).min(end).next_multiple_of(SMALL_PAGE_BYTES as u64);
            at += REGION;
            let before = cached(file, region.start, REGION);
            if before == Some(0) {
                continue;
            }
            if detects && let Some(before) = before {
                look.observe(file, &region, before);
            }
            let mapped = look.resident.mapped();
            file.discard(region.clone());
            freed += match (before, cached(file, region.start, REGION)) {
                (Some(before), Some(after)) => before.saturating_sub(after),
                _ => mapped.saturating_sub(look.resident.mapped()),
            };
        }
        file.cursor.store(if at >= end { 0 } else { at }, Ordering::Relaxed);
        freed
    }
}

fn cached(file: &KernelFile, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
    memory::cachestat(file.file(), offset_bytes, len_bytes).ok().map(|stat| stat.cached)
}

/// What the thread remembers between looks.
struct Look {
    resident: Residency,
    pagemap: Option<Pagemap>,
    entries: Box<[u64]>,
    /// Index of the file being swept.
    turn: usize,
    /// Sweeps in a row that freed nothing.
    stuck: u32,
}

impl Look {
    fn new() -> Look {
        Look {
            resident: Residency::new(),
            pagemap: Pagemap::open().ok(),
            entries: vec![0; REGION_PAGES as usize].into_boxed_slice(),
            turn: 0,
            stuck: 0,
        }
    }

    fn observe(&mut self, file: &KernelFile, region: &std::ops::Range<u64>, cached: u64) {
        let Some(pagemap) = &self.pagemap else { return };
        let pages = ((region.end - region.start) / SMALL_PAGE_BYTES as u64) as usize;
        let entries = &mut self.entries[..pages];
        // What cannot be counted is no evidence, like a region where nothing is mapped.
        file.observe(cached, || pagemap.present(file.address(region.start), entries).unwrap_or(0));
    }
}

/// What changes when pages come or go.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Activity {
    mapped: u64,
    batches_asked: u64,
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

    fn activity(&self, files: &[Arc<KernelFile>]) -> Activity {
        let asked = |file: &Arc<KernelFile>| file.batches_asked.load(Ordering::Relaxed);
        Activity { mapped: self.mapped(), batches_asked: files.iter().map(asked).sum() }
    }

    fn estimate(&mut self, files: &[Arc<KernelFile>]) -> u64 {
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
    fn correct(&mut self, files: &[Arc<KernelFile>]) {
        let started = Instant::now();
        self.corrected = self.activity(files);
        let mapped = self.corrected.mapped as i64;
        let mut total = Some(0);
        for (index, file) in files.iter().enumerate() {
            // A file mapped twice is in the page cache once.
            if files[..index].iter().all(|other| other.identity != file.identity) {
                total = total.zip(cached(file, 0, 0)).map(|(total, pages)| total + pages);
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
