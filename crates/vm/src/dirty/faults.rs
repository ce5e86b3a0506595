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
//!   at that time. Faults in between can only make it smaller, and the next check fail. A thread
//!   that is between the account of a fault and its record would make it larger. It does not sleep
//!   there, so between the two steps every other thread with a log must be found asleep, or ended;
//!   otherwise the start is put off to the next take.
//! * So if the check holds, `M` now is at most `M` at the start, and equal: no fault was without a
//!   record since then. The scan of all pages that belongs to the start comes after it, and finds
//!   what was stored before.
//! * The kernel accounts and records a fault before the thread continues with its store. A store
//!   that happened before a take is counted and recorded when the take begins. One that happens
//!   during the take is left for the next take as before, and its record too, or it was taken out
//!   of the log by this take, whose scan then comes after the page was made writable, and finds it.
//!
//! Apart from starts, it does not matter which threads have logs, whether they ended, or why a record is missing. All
//! that costs is a scan of all pages.
//!
//! # When faults are recorded
//! A record makes a fault 0.35 µs slower, which pays if takes find few pages. So logs are opened on
//! trial, for all threads there are then, and closed again if a number of takes in a row scanned all
//! pages nevertheless. The pauses until the next trial grow.
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

/// To record the fault of a page and scan the page alone takes about as long as a scan of this many
/// pages.
const PAGES_OF_A_SCAN: usize = 256;
/// The most pages to scan one by one, half of what a log has room for.
const MOST_PAGES: usize = 1024;
/// The most threads with logs.
const MOST_THREADS: usize = 32;
/// Takes before the first trial.
const FIRST_PAUSE: u32 = 3;
/// Takes between the first trials, if they fail; each further pause is four times as long.
const SHORTEST_PAUSE: u32 = 64;
const LONGEST_PAUSE: u32 = 1 << 14;
/// A trial ends after this many takes in a row that scanned all pages.
const MOST_MISSES: u32 = 16;
/// After this many such takes there may be new threads.
const MISSES_OF_NEW_THREADS: u32 = 4;
/// After this many takes a tracker scans everything.
pub(super) const TAKES_BETWEEN_SCANS: u32 = 256;

struct State {
    watched: Vec<Watched>,
    /// Faults taken out of logs.
    recorded: u64,
    /// Faults without a record at the last start, or fewer; `None` if it was put off.
    unrecorded: Option<u64>,
    /// Raised by each start: trackers that have not scanned everything since must do so.
    starts: u64,
    /// Takes in a row that scanned all pages, in this trial.
    misses: u32,
    /// Takes until the next trial, and then until the one after it.
    pause: u32,
    next_pause: u32,
    is_refused: bool,
    /// By the first address of the tracked range.
    trackers: BTreeMap<usize, Found>,
}

impl Default for State {
    fn default() -> State {
        State {
            watched: Vec::new(),
            recorded: 0,
            unrecorded: None,
            starts: 0,
            misses: 0,
            pause: FIRST_PAUSE,
            next_pause: SHORTEST_PAUSE,
            is_refused: false,
            trackers: BTreeMap::new(),
        }
    }
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
    /// First addresses of pages; more than `most_pages` if there were more.
    pages: Vec<usize>,
    /// With more pages than this a scan of everything is cheaper.
    most_pages: usize,
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
                    && found.pages.len() <= found.most_pages
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
        self.take_logs();
        let Some(unrecorded) = self.unrecorded else { return false };
        // Read behind the logs: see the module's documentation.
        page_faults::faults_of_process() == self.recorded + unrecorded
    }

    fn start(&mut self) {
        // Read before the logs: see the module's documentation.
        let faults = page_faults::faults_of_process();
        let caller = page_faults::this_thread();
        let mut others = self.watched.iter().filter(|one| one.thread != caller);
        let is_put_off = others.any(|one| page_faults::may_be_recording(one.thread));
        self.take_logs();
        self.unrecorded = (!is_put_off).then(|| faults.saturating_sub(self.recorded));
        self.starts += 1;
    }

    /// Opens and closes logs. `is_useful` tells whether this take need not scan all pages.
    fn reconsider(&mut self, is_useful: bool) {
        if self.is_refused {
            return;
        }
        if self.watched.is_empty() {
            match self.pause.checked_sub(1) {
                Some(rest) => self.pause = rest,
                None => self.watch(),
            }
        } else if is_useful {
            self.misses = 0;
            self.next_pause = SHORTEST_PAUSE;
        } else {
            self.misses += 1;
            match self.misses {
                MISSES_OF_NEW_THREADS => self.watch(),
                MOST_MISSES => {
                    self.watched.clear();
                    self.unrecorded = None;
                    self.misses = 0;
                    self.pause = self.next_pause;
                    self.next_pause = (4 * self.next_pause).min(LONGEST_PAUSE);
                }
                _ => {}
            }
        }
    }

    /// Opens a log for each thread that has none. A start must follow: a new log may get the record
    /// of a fault that was accounted before.
    fn watch(&mut self) {
        self.unrecorded = None;
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
                Err(_) => break,
            }
        }
        self.is_refused = self.watched.is_empty();
    }
}

/// The faults in the range of one tracker.
#[derive(Debug)]
pub(super) struct FaultedPages {
    start: usize,
}

impl FaultedPages {
    /// Registers a range of addresses, which no other tracker has. `None` if scanning all of it is
    /// cheap.
    pub fn new(addresses: Range<usize>) -> Option<FaultedPages> {
        let most_pages = addresses.len() / SMALL_PAGE_BYTES / PAGES_OF_A_SCAN;
        if most_pages < 2 {
            return None;
        }
        let found = Found {
            end: addresses.end,
            pages: Vec::new(),
            most_pages: most_pages.min(MOST_PAGES),
            starts: 0,
            takes: 0,
        };
        state().trackers.insert(addresses.start, found);
        Some(FaultedPages { start: addresses.start })
    }

    /// Returns the pages (first addresses, ascending) to scan for the stores since the last take;
    /// `None` if the caller must scan all pages, now. All takes of the range must ask.
    pub fn take(&self) -> Option<Vec<usize>> {
        let mut state = state();
        let is_complete = state.is_complete();
        let found = state.trackers.get_mut(&self.start)?;
        let mut pages = std::mem::take(&mut found.pages);
        let is_useful = is_complete && pages.len() <= found.most_pages;
        state.reconsider(is_useful);
        let has_logs = !state.watched.is_empty();
        if !is_complete && has_logs {
            state.start();
        }
        let starts = state.starts;
        let found = state.trackers.get_mut(&self.start)?;
        if is_useful && found.starts == starts && found.takes < TAKES_BETWEEN_SCANS {
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
