//! A thread that keeps the page cache of mapped files within a bound.
//!
//! Without it, the page cache grows until the kernel reclaims, on the fault path and page by page.
//! This thread acts earlier: when more than 90 % of the bound is resident, it sweeps through the
//! files in address order and returns whole regions, until 86 % are left. A region is unmapped with
//! one call (one TLB shootdown) and its pages are dropped from the page cache with another, which
//! only drops unmapped pages. First in, first out in address order measured as good as any policy
//! that checks the pages first, because checking costs more than a page is worth. So streamed data
//! drops behind.
//!
//! # How much is resident
//! The number of file pages in this process's page tables costs a microsecond to read, so each
//! check uses it. It also counts other mappings of the process, and misses pages that were read
//! ahead but not mapped yet. So a correction is added to it, renewed from `cachestat` of the files
//! for at most a fiftieth of the time. The result is an estimate, which other mappings of the
//! process can raise by any amount: before anything is dropped the files are measured. Where
//! `cachestat` is missing (before Linux 6.5, or for files of other users), the measurement counts
//! the file's pages in this process's page tables, and misses pages read ahead.
//!
//! # Sleeping
//! The thread checks every 2 ms near the bound, and less often the farther it is from it, because
//! no device fills memory faster than one page per half microsecond. While nothing changes, it
//! checks every 20 ms, or every 100 ms far from the limit. Without files the thread sleeps until
//! one is added.
//!
//! Lock order: the list of files is a leaf; it is copied, so that files are used without it.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{FileIdentity, MappedFilePages, Pagemap};

use crate::worker::Bell;

/// Pages of a region, the unit that one call unmaps. Not smaller, because page-cache folios of 2
/// MiB exist and are dropped whole or not at all.
pub const REGION_PAGES: u64 = (REGION_BYTES / SMALL_PAGE_BYTES) as u64;
/// Regions skipped at once if none of their pages is cached.
const SPAN_REGIONS: u64 = 32;
const START_PERCENT: u64 = 90;
const STOP_PERCENT: u64 = 86;

const SHORTEST_NAP: Duration = Duration::from_millis(2);
const IDLE_NAP: Duration = Duration::from_millis(20);
const LONGEST_NAP: Duration = Duration::from_millis(100);
/// Longest nap after sweeps that dropped nothing: all pages are pinned, or mapped by other
/// processes.
const STUCK_NAP: Duration = Duration::from_secs(1);
const FASTEST_FILL: Duration = Duration::from_nanos(500);

/// A mapped file whose pages can be dropped because they are copies of stored data.
pub trait Droppable: Send + Sync {
    /// The identity of the file. A file that is added twice is counted once.
    fn identity(&self) -> FileIdentity;
    /// Length of the mapping, from the start of the file.
    fn len_bytes(&self) -> u64;
    /// Where the sweep continues, in bytes.
    fn cursor(&self) -> &AtomicU64;
    /// Number of pages in the page cache (length 0: to the end of the file); `None` if unknown.
    fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64>;
    /// Returns the pages of a range: unmaps them, and drops them from the page cache.
    fn discard(&self, pages: Range<u64>);
    /// A number that changes when pages may have been brought in without being mapped.
    fn asked(&self) -> u64 {
        0
    }
    /// Number of pages that this process has mapped in; `None` if unknown. Used where
    /// [`Droppable::cached`] returns `None`.
    fn mapped(&self, _tables: &mut PageTables) -> Option<u64> {
        None
    }
    /// Called before a region with `_cached` cached pages is discarded.
    fn observe(&self, _region: &Range<u64>, _cached: u64, _tables: &mut PageTables) {}
    /// Whether the file is to be removed: it is not checked again.
    fn is_gone(&self) -> bool {
        false
    }
}

/// The files, and the commands to the thread. See the module documentation.
pub struct DropBehind<F> {
    files: Mutex<Vec<Arc<F>>>,
    bell: Bell,
}

impl<F> Default for DropBehind<F> {
    fn default() -> Self {
        DropBehind { files: Mutex::new(vec![]), bell: Bell::new() }
    }
}

impl<F: Droppable> DropBehind<F> {
    /// Creates it without files.
    pub fn new() -> DropBehind<F> {
        DropBehind::default()
    }

    /// Adds a file, whose pages count and are dropped from now on.
    pub fn add(&self, file: Arc<F>) {
        let is_first = {
            let mut files = self.files.lock();
            files.push(file);
            files.len() == 1
        };
        // Later files need no wake-up: the thread checks again before much can be brought in.
        if is_first {
            self.wake();
        }
    }

    /// Removes a file. Only a sweep in progress may still drop its pages.
    pub fn remove(&self, file: &Arc<F>) {
        let removed = {
            let mut files = self.files.lock();
            let at = files.iter().position(|other| Arc::ptr_eq(other, file));
            at.map(|at| files.swap_remove(at))
        };
        drop(removed);
        self.wake();
    }

    /// Makes the thread check again now.
    pub fn wake(&self) {
        self.bell.ring();
    }

    /// Ends [`DropBehind::run`].
    pub fn stop(&self) {
        self.bell.stop();
    }

    /// The main function of the thread. At every check it reads `bound_bytes` and passes the
    /// resident pages to `publish`.
    pub fn run(&self, bound_bytes: impl Fn() -> u64, publish: impl Fn(u64)) {
        let mut state = State::new();
        loop {
            let ticket = self.bell.ticket();
            if ticket.is_stopped() {
                return;
            }
            let files = self.files.lock().clone();
            let nap = if files.is_empty() {
                state.resident.forget();
                publish(0);
                None
            } else {
                Some(self.check(&mut state, &files, bound_bytes(), &publish))
            };
            self.forget_gone(&mut state, &files);
            // Before the nap: this may drop the last reference to a file, which unmaps it.
            drop(files);
            self.bell.sleep(ticket, nap);
        }
    }

    fn forget_gone(&self, state: &mut State, files: &[Arc<F>]) {
        let gone: HashSet<*const F> =
            files.iter().filter(|file| file.is_gone()).map(Arc::as_ptr).collect();
        if gone.is_empty() {
            return;
        }
        let is_gone = |file: &Arc<F>| gone.contains(&Arc::as_ptr(file));
        state.turn -=
            files[..state.turn.min(files.len())].iter().filter(|file| is_gone(file)).count();
        self.files.lock().retain(|file| !is_gone(file));
    }

    /// Checks once, drops the excess, and returns when to check again.
    fn check(
        &self,
        state: &mut State,
        files: &[Arc<F>],
        bound_bytes: u64,
        publish: &impl Fn(u64),
    ) -> Duration {
        let share = bound_bytes / SMALL_PAGE_BYTES as u64;
        let (start, stop) = (share * START_PERCENT / 100, share * STOP_PERCENT / 100);
        let mut resident = state.resident.estimate(files, &mut state.tables);
        let mut freed = 0;
        if resident > start {
            // Foreign mappings may have raised the estimate.
            resident = state.resident.measure(files, &mut state.tables);
        }
        if resident > start {
            freed = self.sweep(state, files, resident - stop);
            resident = state.resident.estimate(files, &mut state.tables);
        }
        publish(resident);
        let idle = state.resident.idle();
        if resident > start {
            // More was brought in during the sweep: check again at once, unless nothing can be
            // dropped.
            state.stuck = if freed == 0 { state.stuck + 1 } else { 0 };
            return match state.stuck {
                0 => Duration::ZERO,
                times => (LONGEST_NAP * times).min(STUCK_NAP),
            };
        }
        state.stuck = 0;
        let room = u32::try_from(start - resident).unwrap_or(u32::MAX);
        let away = FASTEST_FILL.saturating_mul(room).clamp(SHORTEST_NAP, LONGEST_NAP);
        // Spend at most half of the time on measuring what foreign mappings add to the estimate.
        let away = away.max(state.resident.cost);
        if idle { away.max(IDLE_NAP) } else { away }
    }

    /// Continues through the files where the last sweep ended, for at most one round. Returns how
    /// many pages left the page cache.
    fn sweep(&self, state: &mut State, files: &[Arc<F>], wanted: u64) -> u64 {
        let mut freed = 0;
        state.turn %= files.len();
        for _ in 0..=files.len() {
            let file = &files[state.turn];
            freed += self.sweep_file(state, file, wanted - freed);
            if freed >= wanted || self.bell.is_stopped() {
                return freed;
            }
            state.turn = (state.turn + 1) % files.len();
        }
        freed
    }

    /// Sweeps a file from its cursor to its end, where the cursor wraps around.
    fn sweep_file(&self, state: &mut State, file: &F, wanted: u64) -> u64 {
        const REGION: u64 = REGION_BYTES as u64;
        const SPAN: u64 = SPAN_REGIONS * REGION;
        let end = file.len_bytes();
        let mut freed = 0;
        let mut at = file.cursor().load(Ordering::Relaxed) / REGION * REGION;
        if at >= end {
            at = 0;
        }
        while at < end && freed < wanted && !self.bell.is_stopped() {
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
                file.observe(&region, before, &mut state.tables);
            }
            let mapped = state.resident.mapped();
            file.discard(region.clone());
            freed += match (before, file.cached(region.start, REGION)) {
                (Some(before), Some(after)) => before.saturating_sub(after),
                _ => mapped.saturating_sub(state.resident.mapped()),
            };
        }
        file.cursor().store(if at >= end { 0 } else { at }, Ordering::Relaxed);
        freed
    }
}

/// The process's page tables, and a buffer to read them.
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

    /// Number of pages mapped in, of one region at most; `None` if that cannot be read.
    pub fn present(&mut self, address: *const u8, len_bytes: u64) -> Option<u64> {
        let pages = (len_bytes / SMALL_PAGE_BYTES as u64) as usize;
        self.pagemap.as_ref()?.present(address, self.entries.get_mut(..pages)?).ok()
    }

    /// As [`PageTables::present`], for any length in whole pages.
    pub fn present_in(&mut self, address: *const u8, len_bytes: u64) -> Option<u64> {
        let mut found = 0;
        for at in (0..len_bytes).step_by(REGION_BYTES) {
            let len = (len_bytes - at).min(REGION_BYTES as u64);
            found += self.present(address.wrapping_add(at as usize), len)?;
        }
        Some(found)
    }
}

/// The state of the thread between checks.
struct State {
    resident: Residency,
    tables: PageTables,
    /// Index of the file being swept.
    turn: usize,
    /// Sweeps in a row that freed nothing.
    stuck: u32,
}

impl State {
    fn new() -> State {
        State { resident: Residency::new(), tables: PageTables::new(), turn: 0, stuck: 0 }
    }
}

/// Values that change when pages are brought in or dropped.
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
    /// The activity at the last check, and at the last correction.
    seen: Activity,
    corrected: Activity,
    unchanged: bool,
    correct_next: Instant,
    /// Duration of the last correction.
    cost: Duration,
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
            cost: Duration::ZERO,
        }
    }

    /// File pages mapped in the process.
    fn mapped(&self) -> u64 {
        self.counter.as_ref().and_then(|counter| counter.read().ok()).unwrap_or(0)
    }

    /// Discards the correction when no file is left.
    fn forget(&mut self) {
        self.correction = None;
    }

    /// Whether nothing was mapped or unmapped between the last two checks.
    fn idle(&self) -> bool {
        self.unchanged
    }

    fn activity<F: Droppable>(&self, files: &[Arc<F>]) -> Activity {
        let asked = files.iter().map(|file| file.asked());
        Activity { mapped: self.mapped(), asked: asked.fold(0, u64::wrapping_add) }
    }

    fn estimate<F: Droppable>(&mut self, files: &[Arc<F>], tables: &mut PageTables) -> u64 {
        let now = self.activity(files);
        self.unchanged = now == self.seen;
        self.seen = now;
        let due = now != self.corrected && Instant::now() >= self.correct_next;
        if due || self.correction.is_none() {
            self.measure(files, tables);
        }
        now.mapped.saturating_add_signed(self.correction.unwrap_or(0))
    }

    /// Counts the files' pages, and renews the correction.
    fn measure<F: Droppable>(&mut self, files: &[Arc<F>], tables: &mut PageTables) -> u64 {
        let started = Instant::now();
        self.corrected = self.activity(files);
        let mapped = self.corrected.mapped;
        let mut total = Some(0);
        let mut counted = HashSet::new();
        for file in files {
            // A file that is mapped twice is in the page cache once.
            if counted.contains(&file.identity()) {
                continue;
            }
            let pages = match file.cached(0, 0) {
                Some(cached) => {
                    counted.insert(file.identity());
                    Some(cached)
                }
                None => file.mapped(tables),
            };
            total = total.zip(pages).map(|(total, pages): (u64, u64)| total + pages);
        }
        match total {
            Some(total) => self.correction = Some(total as i64 - mapped as i64),
            // At the first check, attribute everything mapped so far to foreign mappings.
            None if self.correction.is_none() => self.correction = Some(-(mapped as i64)),
            None => {}
        }
        self.cost = started.elapsed();
        self.correct_next = Instant::now() + (self.cost * 50).max(SHORTEST_NAP);
        total.unwrap_or_else(|| mapped.saturating_add_signed(self.correction.unwrap_or(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_sys::memory::{self, Protection};
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    const MIB: u64 = 1 << 20;
    const BOUND: u64 = 32 * MIB;

    /// A file with the given number of pages in memory, by region.
    struct Fake {
        regions: Vec<AtomicU64>,
        cursor: AtomicU64,
        /// Whether `cached` or `mapped` returns its pages.
        has_cachestat: bool,
        discarded: AtomicU64,
    }

    impl Fake {
        fn with(bytes: u64, has_cachestat: bool) -> Arc<Fake> {
            Arc::new(Fake {
                regions: (0..bytes / REGION_BYTES as u64)
                    .map(|_| AtomicU64::new(REGION_PAGES))
                    .collect(),
                cursor: AtomicU64::new(0),
                has_cachestat,
                discarded: AtomicU64::new(0),
            })
        }

        fn pages(&self) -> u64 {
            self.regions.iter().map(|region| region.load(Ordering::Relaxed)).sum()
        }

        fn region(&self, offset_bytes: u64) -> &AtomicU64 {
            &self.regions[(offset_bytes / REGION_BYTES as u64) as usize]
        }
    }

    impl Droppable for Fake {
        fn identity(&self) -> FileIdentity {
            FileIdentity { device: 0, inode: 1 }
        }

        fn len_bytes(&self) -> u64 {
            (self.regions.len() * REGION_BYTES) as u64
        }

        fn cursor(&self) -> &AtomicU64 {
            &self.cursor
        }

        fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
            self.has_cachestat.then(|| match len_bytes {
                _ if len_bytes == 0 || len_bytes > REGION_BYTES as u64 => self.pages(),
                _ => self.region(offset_bytes).load(Ordering::Relaxed),
            })
        }

        fn mapped(&self, _tables: &mut PageTables) -> Option<u64> {
            Some(self.pages())
        }

        fn discard(&self, pages: Range<u64>) {
            let gone = self.region(pages.start).swap(0, Ordering::Relaxed);
            self.discarded.fetch_add(gone, Ordering::Relaxed);
        }
    }

    /// Maps a foreign file of this size, and faults it in.
    fn unrelated(bytes: u64) {
        // SAFETY: a NUL-terminated name.
        let memory =
            unsafe { libc::memfd_create(c"aquifer-unrelated".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: made above, and owned by nothing else.
        let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(memory) });
        file.set_len(bytes).unwrap();
        let len = bytes as usize;
        let address = memory::map_anonymous(len).unwrap();
        // SAFETY: replaces the mapping made above, which stays until the process ends.
        unsafe {
            memory::map_file_at(address, len, Protection::Read, file.as_fd(), 0).unwrap();
            memory::advise(address, len, memory::Advice::PopulateRead).unwrap();
        }
    }

    #[test]
    fn what_others_map_does_not_drop_our_pages() {
        for has_cachestat in [true, false] {
            let fake = Fake::with(16 * MIB, has_cachestat);
            let (behind, mut state) = (DropBehind::new(), State::new());
            let published = AtomicU64::new(0);
            let check_once = |state: &mut State| {
                let publish = |pages| published.store(pages, Ordering::Relaxed);
                behind.check(state, std::slice::from_ref(&fake), BOUND, &publish);
                published.load(Ordering::Relaxed)
            };
            check_once(&mut state);
            // As after a measurement that took long.
            state.resident.correct_next += Duration::from_secs(3600);
            unrelated(2 * BOUND);
            assert_eq!(check_once(&mut state), fake.pages(), "with cachestat: {has_cachestat}");
            assert_eq!(fake.discarded.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn what_is_ours_and_too_much_is_dropped() {
        let fake = Fake::with(40 * MIB, true);
        let (behind, mut state) = (DropBehind::new(), State::new());
        behind.check(&mut state, std::slice::from_ref(&fake), BOUND, &|_| ());
        let most = BOUND / SMALL_PAGE_BYTES as u64 * STOP_PERCENT / 100;
        assert!((most - REGION_PAGES..=most).contains(&fake.pages()), "{} pages", fake.pages());
    }
}
