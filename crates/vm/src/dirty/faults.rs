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
//!   take:                         2. getrusage: F    │       1. take all logs: R, and the pages
//!                                 3. F = R + unrecorded?  yes: scan these pages   no: scan all
//! ```
//!
//! # Why no store is missed
//! The kernel serves a fault in three steps: it makes the page writable, accounts the fault, and
//! records it; then the thread continues with its store. Once the page is writable, *another* thread
//! can store to it without a fault of its own. So a take asks only if no store is in progress
//! ([`Stores::Excluded`](super::Stores)): each store so far has ended, and the fault that made its
//! page writable too, because that was the fault of a store. Faults elsewhere may be in progress.
//!
//! `F` is the number of faults that the kernel has accounted to the process, and `R` the number of
//! records taken out of the logs. A fault raises `F` first, and then `R`, or never: it is *silent*
//! if it has no record ([`aquifer_sys::page_faults`] lists the reasons). So at any time
//! `F − R = silent faults + faults between account and record + records still in logs`.
//!
//! * *The start* reads `F`, checks that every other thread with a log is asleep or has ended, and
//!   takes the logs after that. A thread does not sleep between account and record, so every fault
//!   that was accounted and is not silent is now taken: `unrecorded = F − R` is at most the number of
//!   silent faults when `F` was read. Faults in between can only make it smaller, and the next check
//!   fail. If a thread may be running, the start is put off to the next take. The scan of all pages
//!   that belongs to a start comes after it.
//! * *The check* takes the logs first and reads `F` after that. It holds if `F = R + unrecorded`.
//!   Then, by the equation, there are at most as many silent faults as when the start read `F`, so
//!   there was none since, and no fault is between account and record.
//! * So if the check holds, the fault of every store since the start has its record, which this take
//!   or an earlier one has taken. Pages made writable before the start were found by its scan.
//! * A take for which stores may be in progress scans all pages, and leaves the records to the next
//!   take that asks.
//!
//! Apart from starts, it does not matter which threads have logs, whether they ended, or why a record
//! is missing. All that costs is a scan of all pages. The tests run the rules against a model of the
//! kernel, with the steps of faults and takes in all orders.
//!
//! # When faults are recorded
//! A record makes a fault 0.35 µs slower, which pays if takes find few pages. So logs are opened on
//! trial, for all threads there are then, and closed again if a number of takes in a row scanned all
//! pages nevertheless. The pauses until the next trial grow. A log takes two descriptors: when the
//! process has none left, all logs are closed. `AQUIFER_NO_PERF_EVENTS` forbids them, for a sandbox
//! that ends a process for asking.
//!
//! # What is not seen
//! Faults that another process or a thread of the kernel takes for this memory
//! (`process_vm_writev`, a debugger, a child of `vfork`) are accounted to it, not to this process. The
//! tracker scans everything every [`TAKES_BETWEEN_SCANS`] takes, which finds those pages too.
//!
//! A system call that makes pages writable without a store (`mlock`, `MADV_POPULATE_WRITE`) counts as
//! a store in progress.
//!
//! # Threads and forks
//! One lock guards everything, taken by takes only, never by a fault. A child gets a new, empty
//! state: its trackers are inert, and it does not keep its parent's events alive.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_sys::features::is_forbidden;
use aquifer_sys::memory::SMALL_PAGE_BYTES;
use aquifer_sys::page_faults::{self, FaultLog};

use crate::fork::{NotInherited, PerProcess};

#[cfg(test)]
mod model_tests;

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
/// Of so many takes in a row a tracker scans everything in one at least.
pub(super) const TAKES_BETWEEN_SCANS: u32 = 256;

/// What the rules need of the kernel.
trait Kernel {
    /// The record of a thread's faults.
    type Log;
    /// Whether the user does not want faults to be recorded.
    fn is_forbidden(&self) -> bool {
        false
    }
    /// The threads of this process.
    fn threads(&mut self) -> io::Result<Vec<libc::pid_t>>;
    fn open(&mut self, thread: libc::pid_t) -> io::Result<Self::Log>;
    fn thread_of(log: &Self::Log) -> libc::pid_t;
    fn has_ended(&mut self, log: &Self::Log) -> bool;
    /// [`FaultLog::may_be_recording`].
    fn may_be_recording(&mut self, log: &Self::Log) -> bool;
    /// [`FaultLog::take`].
    fn take(&mut self, log: &mut Self::Log, each: &mut dyn FnMut(usize)) -> u64;
    /// [`page_faults::faults_of_process`].
    fn faults(&mut self) -> io::Result<u64>;
}

/// The kernel that this process runs on.
#[derive(Default)]
struct System;

struct Watched {
    /// Dropped before the log, which closes the descriptors.
    _not_inherited: [NotInherited; 2],
    log: FaultLog,
}

impl Kernel for System {
    type Log = Watched;

    fn is_forbidden(&self) -> bool {
        is_forbidden("AQUIFER_NO_PERF_EVENTS")
    }

    fn threads(&mut self) -> io::Result<Vec<libc::pid_t>> {
        page_faults::threads()
    }

    fn open(&mut self, thread: libc::pid_t) -> io::Result<Watched> {
        let log = FaultLog::open(thread)?;
        Ok(Watched { _not_inherited: log.descriptors().map(NotInherited::new), log })
    }

    fn thread_of(one: &Watched) -> libc::pid_t {
        one.log.thread()
    }

    fn has_ended(&mut self, one: &Watched) -> bool {
        one.log.has_ended()
    }

    fn may_be_recording(&mut self, one: &Watched) -> bool {
        one.log.may_be_recording()
    }

    fn take(&mut self, one: &mut Watched, each: &mut dyn FnMut(usize)) -> u64 {
        one.log.take(each)
    }

    fn faults(&mut self) -> io::Result<u64> {
        page_faults::faults_of_process()
    }
}

struct State<K: Kernel> {
    kernel: K,
    logs: Vec<K::Log>,
    /// Faults taken out of logs.
    recorded: u64,
    /// Silent faults at the last start, or fewer; `None` if it was put off.
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

impl<K: Kernel + Default> Default for State<K> {
    fn default() -> State<K> {
        State::new(K::default())
    }
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

static STATE: PerProcess<Mutex<State<System>>> = PerProcess::new();

fn state() -> MutexGuard<'static, State<System>> {
    STATE.get().lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Kernel> State<K> {
    fn new(kernel: K) -> State<K> {
        State {
            logs: Vec::new(),
            recorded: 0,
            unrecorded: None,
            starts: 0,
            misses: 0,
            pause: FIRST_PAUSE,
            next_pause: SHORTEST_PAUSE,
            is_refused: kernel.is_forbidden(),
            kernel,
            trackers: BTreeMap::new(),
        }
    }

    /// Adds a tracked range. A range that overlaps it belongs to a mapping that is gone.
    fn add(&mut self, addresses: Range<usize>, most_pages: usize) {
        self.trackers.retain(|&start, old| old.end <= addresses.start || addresses.end <= start);
        let found =
            Found { end: addresses.end, pages: Vec::new(), most_pages, starts: 0, takes: 0 };
        self.trackers.insert(addresses.start, found);
    }

    /// Takes all logs, and gives each tracker its pages.
    fn take_logs(&mut self) {
        let State { kernel, logs, recorded, trackers, .. } = self;
        for log in logs {
            *recorded += kernel.take(log, &mut |address| {
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
        self.kernel.faults().is_ok_and(|faults| faults == self.recorded + unrecorded)
    }

    fn start(&mut self) {
        // Read before the logs: see the module's documentation.
        let faults = self.kernel.faults();
        let State { kernel, logs, .. } = self;
        let is_put_off = logs.iter().any(|log| kernel.may_be_recording(log));
        self.take_logs();
        let faults = faults.ok().filter(|_| !is_put_off);
        self.unrecorded = faults.map(|faults| faults.saturating_sub(self.recorded));
        self.starts += 1;
    }

    /// Opens and closes logs. `is_useful` tells whether this take need not scan all pages.
    fn reconsider(&mut self, is_useful: bool) {
        if self.is_refused {
            return;
        }
        if self.logs.is_empty() {
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
                    self.logs.clear();
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
        let State { kernel, logs, .. } = self;
        logs.retain(|log| !kernel.has_ended(log));
        for thread in kernel.threads().unwrap_or_default() {
            let is_new = logs.iter().all(|log| K::thread_of(log) != thread);
            if !is_new || logs.len() >= MOST_THREADS {
                continue;
            }
            match kernel.open(thread) {
                Ok(log) => logs.push(log),
                // It has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    // The program needs its last descriptors itself.
                    logs.clear();
                    self.pause = LONGEST_PAUSE;
                    return;
                }
                Err(_) => break,
            }
        }
        self.is_refused = self.logs.is_empty();
    }

    /// [`FaultedPages::take`] of the range that starts there.
    fn take(&mut self, start: usize) -> Option<Vec<usize>> {
        let is_complete = self.is_complete();
        let found = self.trackers.get_mut(&start)?;
        let mut pages = std::mem::take(&mut found.pages);
        let is_useful = is_complete && pages.len() <= found.most_pages;
        self.reconsider(is_useful);
        let has_logs = !self.logs.is_empty();
        if !is_complete && has_logs {
            self.start();
        }
        let starts = self.starts;
        let found = self.trackers.get_mut(&start)?;
        if is_useful && found.starts == starts && found.takes + 1 < TAKES_BETWEEN_SCANS {
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

/// The faults in the range of one tracker.
#[derive(Debug)]
pub(super) struct FaultedPages {
    start: usize,
}

impl FaultedPages {
    /// Registers the range of addresses of a mapping. `None` if scanning all of it is cheap.
    pub fn new(addresses: Range<usize>) -> Option<FaultedPages> {
        let most_pages = addresses.len() / SMALL_PAGE_BYTES / PAGES_OF_A_SCAN;
        if most_pages < 2 {
            return None;
        }
        state().add(addresses.clone(), most_pages.min(MOST_PAGES));
        Some(FaultedPages { start: addresses.start })
    }

    /// Returns the pages (first addresses, ascending) to scan for the stores since the last call;
    /// `None` if the caller must scan all pages, now. No store may be in progress. Takes that do not
    /// ask scan all pages.
    pub fn take(&self) -> Option<Vec<usize>> {
        state().take(self.start)
    }
}

impl Drop for FaultedPages {
    fn drop(&mut self) {
        state().trackers.remove(&self.start);
    }
}
