//! Where stores may have happened, from the page faults of the process's threads.
//!
//! A page that a take has left clean is write-protected, is not a private copy, or is absent: the
//! first store to it is a page fault. If all faults since a tracker's last complete scan are known,
//! the pages at their addresses are the only ones to scan. A scan of them takes 1 to 2 µs, that of
//! an object of 64 MiB 30 to 100.
//!
//! ```text
//!   thread ── store ── fault ──► kernel: one more fault of the thread, its address into its log
//!                                                    │                        │
//!   take:                         3. getrusage: F    │       1. take all logs: R, and the pages
//!                                 4. F = R + unrecorded?  yes: scan these pages   no: scan all
//! ```
//!
//! # Why no store is missed
//! `F(t)` is the number of faults that the kernel has accounted to the process, `R(t)` the number it
//! has recorded in the logs, and `M(t) = F(t) − R(t)` that of those without a record. The kernel
//! raises `F` for each fault, and `R` at most once for the same fault
//! ([`aquifer_sys::page_faults`]), so `M` never decreases, and it is constant exactly as long as
//! every fault is recorded: of whatever thread, in user mode, with room in its log.
//!
//! * *The check* takes the logs first and reads `F` after that. It holds if `F = R + unrecorded`.
//!   Faults in between can only make `F` larger, and the check fail.
//! * *The start* reads `F` first and takes the logs after that: `unrecorded = F − R` is at most `M`
//!   at that time. Faults in between can only make it smaller, and the next check fail.
//! * So if the check holds, `M` now is at most `M` at the start, and equal: no fault was without a
//!   record since then. The scan of all pages that belongs to the start comes after it, and finds
//!   what was stored before.
//! * The kernel accounts and records a fault before the thread continues with its store. A store
//!   that happened before a take is counted and recorded when the take begins. One that happens
//!   during the take is left for the next take as before, and its record too, or it was taken out
//!   of the log by this take, whose scan then comes after the page was made writable, and finds it.
//!
//! It does not matter which threads have logs, whether they ended, or why a record is missing. All
//! that costs is a scan of all pages. Logs are opened once several takes in a row were incomplete,
//! for all threads there are then, and closed if that does not help.
//!
//! # What is not seen
//! Faults that another process or a thread of the kernel takes for this memory
//! (`process_vm_writev`, a debugger) are accounted to it, not to this process. The tracker scans
//! everything every [`TAKES_BETWEEN_SCANS`] takes, which finds those pages too.
//!
//! # Threads and forks
//! One lock guards everything, taken by takes only, never by a fault. A child gets a new, empty
//! state: its trackers are inert, and it does not keep its parent's events alive.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_sys::memory::SMALL_PAGE_BYTES;
use aquifer_sys::page_faults::{self, FaultLog};

use crate::fork::{NotInherited, PerProcess};

/// The most pages to scan one by one: a scan of everything is cheaper above that.
const MOST_PAGES: usize = 64;
/// The most threads with logs.
const MOST_THREADS: usize = 32;
/// After this many takes a tracker scans everything.
pub(super) const TAKES_BETWEEN_SCANS: u32 = 256;

#[derive(Default)]
struct State {
    watched: Vec<Watched>,
    /// Faults taken out of logs.
    recorded: u64,
    /// Faults without a record at the last start, or fewer.
    unrecorded: u64,
    /// Raised by each start: trackers that have not scanned everything since must do so.
    starts: u64,
    /// Takes in a row for which faults were missing.
    misses: u32,
    is_refused: bool,
    /// By the first address of the tracked range.
    trackers: BTreeMap<usize, Found>,
}

struct Watched {
    thread: libc::pid_t,
    /// Dropped before the log, which closes the descriptors.
    _not_inherited: [NotInherited; 2],
    log: FaultLog,
}

/// The faults in one tracked range.
struct Found {
    end: usize,
    /// First addresses of pages; more than [`MOST_PAGES`] if there were more.
    pages: Vec<usize>,
    starts: u64,
    takes: u32,
}

static STATE: PerProcess<Mutex<State>> = PerProcess::new();

fn state() -> MutexGuard<'static, State> {
    STATE.get().lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Takes all logs, and gives each tracker its pages.
    fn take_logs(&mut self) {
        let State { watched, recorded, trackers, .. } = self;
        for one in watched {
            *recorded += one.log.take(|address| {
                let below = trackers.range_mut(..=address).next_back();
                if let Some((_, found)) = below.filter(|(_, found)| address < found.end)
                    && found.pages.len() <= MOST_PAGES
                {
                    let page = address / SMALL_PAGE_BYTES * SMALL_PAGE_BYTES;
                    if found.pages.last() != Some(&page) {
                        found.pages.push(page);
                    }
                }
            });
        }
    }

    /// Whether every fault since the last start was recorded.
    fn is_complete(&mut self) -> bool {
        if self.watched.is_empty() {
            return false;
        }
        self.take_logs();
        // Read behind the logs: see the module's documentation.
        page_faults::faults_of_process() == self.recorded + self.unrecorded
    }

    fn start(&mut self) {
        // Read before the logs: see the module's documentation.
        let faults = page_faults::faults_of_process();
        self.take_logs();
        self.unrecorded = faults.saturating_sub(self.recorded);
        self.starts += 1;
    }

    /// Opens and closes logs, at takes that are further and further apart.
    fn reconsider(&mut self) {
        self.misses = self.misses.saturating_add(1);
        if self.is_refused || !self.misses.is_power_of_two() {
            return;
        }
        match self.misses.trailing_zeros() {
            // The 4th in a row, the 64th, the 1024th.
            2 | 6 | 10 => self.watch(),
            // The 16th, the 256th, the 4096th: without use, they only make faults slower.
            4 | 8 | 12 => self.watched.clear(),
            _ => {}
        }
    }

    /// Opens a log for each thread that has none.
    fn watch(&mut self) {
        self.watched.retain(|one| !one.log.has_ended());
        for thread in page_faults::threads().unwrap_or_default() {
            let is_new = self.watched.iter().all(|one| one.thread != thread);
            if !is_new || self.watched.len() >= MOST_THREADS {
                continue;
            }
            match FaultLog::open(thread) {
                Ok(log) => {
                    let _not_inherited = log.descriptors().map(NotInherited::new);
                    self.watched.push(Watched { thread, _not_inherited, log });
                }
                // It has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(_) => {
                    self.is_refused = self.watched.is_empty();
                    return;
                }
            }
        }
    }
}

/// The faults in the range of one tracker.
#[derive(Debug)]
pub(super) struct FaultedPages {
    start: usize,
}

impl FaultedPages {
    /// Registers a range of addresses, which no other tracker has.
    pub fn new(addresses: Range<usize>) -> FaultedPages {
        let found = Found { end: addresses.end, pages: Vec::new(), starts: 0, takes: 0 };
        state().trackers.insert(addresses.start, found);
        FaultedPages { start: addresses.start }
    }

    /// Returns the pages (first addresses, ascending) to scan for the stores since the last take;
    /// `None` if the caller must scan all pages, now. All takes of the range must ask.
    pub fn take(&self) -> Option<Vec<usize>> {
        let mut state = state();
        let is_complete = state.is_complete();
        if is_complete {
            state.misses = 0;
        } else {
            if !state.is_refused {
                state.reconsider();
            }
            if !state.watched.is_empty() {
                state.start();
            }
        }
        let has_logs = !state.watched.is_empty();
        let starts = state.starts;
        let found = state.trackers.get_mut(&self.start)?;
        let mut pages = std::mem::take(&mut found.pages);
        let is_known = is_complete
            && found.starts == starts
            && found.takes < TAKES_BETWEEN_SCANS
            && pages.len() <= MOST_PAGES;
        if is_known {
            found.takes += 1;
            pages.sort_unstable();
            pages.dedup();
            return Some(pages);
        }
        if has_logs {
            // The caller scans all pages, after the start.
            found.starts = starts;
            found.takes = 0;
        }
        None
    }
}

impl Drop for FaultedPages {
    fn drop(&mut self) {
        state().trackers.remove(&self.start);
    }
}
