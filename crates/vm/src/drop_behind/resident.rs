//! How many pages of the files are in the page cache: an estimate, and the measurement behind it.
//!
//! The measurement is `cachestat` of the files, at 20 to 100 ns a page. It is renewed for at most a
//! fiftieth of the time, or a two-hundredth while it confirms the estimate. In between, what the
//! process has read since is added to it, and what was dropped is subtracted. Both numbers that say
//! what was read are inexact:
//!
//! * The process's count of bytes read from storage is exact while it reads these files only. It
//!   includes all other reads, and lacks those of file systems without a block device of their own
//!   (FUSE).
//! * The count of pages mapped in includes other mappings, pages that were mapped in before, and
//!   lacks what was read ahead.
//!
//! So the first is used alone while the last measurement confirmed the estimate. Otherwise the
//! larger one is used, and nothing is dropped before the files have been measured.
//!
//! Where `cachestat` is missing (before Linux 6.5, or for files of other users), the measurement
//! counts the file's pages in this process's page tables, and misses pages read ahead.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_sys::clock::thread_cpu_time;
use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::residency::{MappedFilePages, StorageReads};

use super::{Droppable, PageTables, SHORTEST_NAP};

/// Bytes that one call measures at first: a thread that wakes up on this CPU waits for the end of
/// the call, so a measurement of everything at once would stall it for milliseconds.
const STEP_BYTES: u64 = 2 * REGION_BYTES as u64;
const LONGEST_STEP_BYTES: u64 = 1 << 30;
/// The time between measurements, in multiples of the CPU time that one takes.
const COST_SHARE: u32 = 50;
const EXACT_COST_SHARE: u32 = 200;
/// So many pages that were read, and were found in the page cache, confirm the estimate.
const CONFIRMING_PAGES: u64 = 256;

/// Counters that change when pages are brought in, in pages.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Activity {
    read: u64,
    mapped: u64,
    asked: u64,
}

impl Activity {
    /// The activity half-way to a later one.
    fn midway(self, later: Activity) -> Activity {
        Activity {
            read: self.read.midpoint(later.read),
            mapped: self.mapped.midpoint(later.mapped),
            // What was asked for meanwhile may not be there yet.
            asked: self.asked,
        }
    }
}

/// The estimate of resident pages. See the module documentation.
pub(super) struct Residency {
    reads: Option<StorageReads>,
    maps: Option<MappedFilePages>,
    /// The last measurement, less what was dropped since (part of which was brought in since).
    base: Option<i64>,
    /// The activity at the last measurement.
    based_on: Activity,
    /// Pages that were read, and were gone when the files were measured: others dropped them.
    lost: u64,
    /// Pages that were unmapped since: the count of mapped pages fell by them.
    unmapped: u64,
    /// Pages that were dropped since.
    dropped: u64,
    /// The last measurement confirmed what was read as the number of pages brought in.
    is_exact: bool,
    /// The activity at the last check.
    seen: Activity,
    unchanged: bool,
    measure_next: Instant,
    /// CPU time of the last measurement.
    cost: Duration,
}

impl Residency {
    pub fn new() -> Residency {
        Residency {
            reads: StorageReads::open().ok(),
            maps: MappedFilePages::open().ok(),
            base: None,
            based_on: Activity::default(),
            is_exact: false,
            lost: 0,
            unmapped: 0,
            dropped: 0,
            seen: Activity::default(),
            unchanged: false,
            measure_next: Instant::now(),
            cost: Duration::ZERO,
        }
    }

    /// File pages mapped in the process.
    pub fn mapped(&self) -> u64 {
        self.maps.as_ref().and_then(|maps| maps.read().ok()).unwrap_or(0)
    }

    /// Notes that files were added or removed: the estimate counts others.
    pub fn doubt(&mut self) {
        self.is_exact = false;
    }

    /// Pages dropped since the last measurement.
    pub fn dropped_unmeasured(&self) -> u64 {
        self.dropped
    }

    /// Discards the measurement when no file is left.
    pub fn forget(&mut self) {
        self.base = None;
    }

    /// Whether nothing was brought in between the last two checks.
    pub fn is_idle(&self) -> bool {
        self.unchanged
    }

    /// CPU time of the last measurement.
    pub fn cost(&self) -> Duration {
        self.cost
    }

    /// Whether the estimate may be trusted without a measurement.
    pub fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// Pages of the files that others dropped, the kernel for example, approximately.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// `pages` were dropped from the page cache.
    pub fn dropped(&mut self, pages: u64) {
        self.dropped += pages;
        self.base = self.base.map(|base| base - pages as i64);
    }

    /// `pages` were unmapped.
    pub fn unmapped(&mut self, pages: u64) {
        self.unmapped += pages;
    }

    /// Behaves as after a measurement that took long.
    #[cfg(test)]
    pub fn measured_long_ago(&mut self) {
        self.measure_next += Duration::from_secs(3600);
    }

    /// Behaves as if the process had read so much of other files after an exact measurement.
    #[cfg(test)]
    pub fn others_were_read(&mut self, pages: u64) {
        self.measured_long_ago();
        self.is_exact = true;
        self.base = self.base.map(|base| base + pages as i64);
    }

    fn activity<F: Droppable>(&self, files: &[Arc<F>]) -> Activity {
        let read_bytes = self.reads.as_ref().and_then(|reads| reads.read().ok()).unwrap_or(0);
        let read_pages = read_bytes / SMALL_PAGE_BYTES as u64;
        Activity {
            read: read_pages.saturating_sub(F::read_past_of(files)),
            mapped: self.mapped(),
            asked: F::asked_of(files),
        }
    }

    /// The pages brought in since the last measurement.
    fn grown(&self, now: Activity) -> i64 {
        let read = now.read.saturating_sub(self.based_on.read) as i64;
        let mapped = (now.mapped + self.unmapped) as i64 - self.based_on.mapped as i64;
        if self.is_exact { read } else { read.max(mapped) }
    }

    pub fn estimate<F: Droppable>(&mut self, files: &[Arc<F>], tables: &mut PageTables) -> u64 {
        let now = self.activity(files);
        self.unchanged = now == self.seen;
        self.seen = now;
        let due = now != self.based_on && Instant::now() >= self.measure_next;
        match self.base {
            Some(base) if !due => (base + self.grown(now)).max(0) as u64,
            _ => self.measure(files, tables),
        }
    }

    /// Counts the files' pages.
    pub fn measure<F: Droppable>(&mut self, files: &[Arc<F>], tables: &mut PageTables) -> u64 {
        let started = thread_cpu_time();
        let before = self.activity(files);
        let mut counted = HashSet::new();
        let mut total = Some(0);
        let mut has_cachestat = true;
        for file in files {
            // A file that is mapped twice is in the page cache once.
            if counted.contains(&file.identity()) {
                continue;
            }
            let pages = match cached(&**file) {
                Some(cached) => {
                    counted.insert(file.identity());
                    Some(cached)
                }
                None => {
                    has_cachestat = false;
                    file.mapped(tables)
                }
            };
            total = total.zip(pages).map(|(total, pages): (u64, u64)| total + pages);
        }
        // Not the time that passed: on busy CPUs it is a multiple, and the next measurement late.
        self.cost = thread_cpu_time() - started;
        // Of what was brought in during the measurement, about half was counted.
        let now = before.midway(self.activity(files));
        let read = now.read.saturating_sub(self.based_on.read) as i64;
        let by_reads = self.base.map(|base| (base + read).max(0) as u64);
        let total = match total {
            Some(total) => total,
            // At the first check, everything mapped so far is attributed to foreign mappings.
            None => self.base.map_or(0, |base| (base + self.grown(now)).max(0) as u64),
        };
        let agrees =
            has_cachestat && by_reads.is_some_and(|pages| pages.abs_diff(total) <= total / 64);
        // Where nothing was read there was nothing to confirm: the file system may not count.
        self.is_exact =
            agrees && (self.is_exact || read as u64 > (total / 64).min(CONFIRMING_PAGES));
        let share = if self.is_exact { EXACT_COST_SHARE } else { COST_SHARE };
        self.measure_next = Instant::now() + (self.cost * share).max(SHORTEST_NAP);
        if !agrees {
            self.lost += by_reads.map_or(0, |pages| pages.saturating_sub(total));
        }
        self.base = Some(total as i64);
        self.based_on = now;
        (self.unmapped, self.dropped) = (0, 0);
        total
    }
}

/// The file's pages in the page cache.
fn cached<F: Droppable>(file: &F) -> Option<u64> {
    let (mut total, mut at, mut step) = (0, 0, STEP_BYTES);
    while at < file.len_bytes() {
        let found = file.cached(at, step)?;
        total += found;
        at += step;
        step = if found == 0 { (step * 2).min(LONGEST_STEP_BYTES) } else { STEP_BYTES };
    }
    if total == 0 {
        // It may be gone: the file is asked as a whole.
        total = file.cached(0, 0)?;
    }
    file.hands().cached.store(total, Ordering::Relaxed);
    Some(total)
}
