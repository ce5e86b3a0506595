//! Finds the pages of a private mapping that were stored to, without a signal for each store.
//!
//! Persistent objects live in private mappings: a store copies its page, and the copy is the
//! object's shadow. A commit needs the pages stored to since the last commit
//! ([`DirtyTracker::take`]); after it, copies without new stores can be dropped
//! ([`DirtyTracker::drop_clean`]).
//!
//! # Two forms
//! * [`Scan`](TrackerForm::Scan) queries the kernel (Linux 6.7, userfaultfd not filtered). The
//!   first set is free: a page that was copied is no longer the file's. Later sets need write
//!   protection that the kernel removes at the first store to a page (WP_ASYNC). A mapping tracked
//!   this way brings in one page per fault where an ordinary one brings in many, so only pieces of
//!   2 MiB in which stores happen are tracked, from the first take after the first store on: see
//!   `pieces` for when, `scan` for how. Where the system lets the process record its own page faults
//!   (`perf_event_open`), a take during which no store is in progress scans only the pages at which
//!   there were any: see `faults`.
//! * [`Compare`](TrackerForm::Compare) works everywhere: the caller compares pages that have a
//!   private copy with the content of the last commit. It costs one comparison per private page and
//!   take.
//!
//! A tracker that scans switches to comparing permanently when the kernel refuses a call (a system
//! call filter was installed in the meantime, no mappings are left): the comparison finds the
//! stores that the failed scan lost. [`form`](DirtyTracker::form) returns the current form.
//!
//! # Guarantees
//! * A store that happened before a take began is reported by it or by an earlier one.
//! * A store that races with a take is reported by this one or by the next. The caller says so
//!   ([`Stores::InProgress`]).
//! * `Scan` reports pages that were stored to, `Compare` pages whose content differs. Neither
//!   reports a page that was only loaded.
//! * Stores by system calls count like any other, once the call has returned. During an
//!   asynchronous read into the object with O_DIRECT, the device stores without using the page
//!   tables: a later take may not report that page.
//! * Stores by other processes, such as a debugger's, are reported by one of the next 256 takes with
//!   [`Stores::Excluded`], or by the next with [`Stores::InProgress`].
//!
//! # Restrictions
//! The tracker owns the mapping's page tables: no other code drops pages of it, registers it with a
//! userfaultfd, or replaces parts. Threads may store during a take; capturing a consistent state
//! after it is the caller's task. A tracker is inert in a forked child and must not be used there.
//!
//! ```
//! use aquifer_vm::dirty::{DirtyTracker, PageRun, Stores, TrackedKind};
//! use aquifer_vm::fixed::{FixedRange, random_base};
//!
//! # fn main() -> Result<(), aquifer_vm::VmError> {
//! let len_bytes = 16 * 4096;
//! let range = FixedRange::map_anonymous(random_base(len_bytes, &[])?, len_bytes)?;
//! // SAFETY: a private mapping that no other code uses.
//! let mut tracker =
//!     unsafe { DirtyTracker::new(range.address(), len_bytes, None, TrackedKind::Anonymous)? };
//! for page in [2, 3, 7] {
//!     // SAFETY: inside the mapping.
//!     unsafe { range.address().add(page * 4096).write(1) };
//! }
//! let mut stored = Vec::new();
//! // Nothing was committed before, so every page that holds data has changed.
//! let mut is_changed = |page| [2, 3, 7].map(aquifer_vm::PageIndex).contains(&page);
//! tracker.take(Stores::Excluded, &mut is_changed, &mut stored)?;
//! assert_eq!(stored, [PageRun::new(2..4), PageRun::new(7..8)]);
//! # Ok(())
//! # }
//! ```

use std::io;
use std::sync::{Arc, OnceLock};

use aquifer_sys::features;
use aquifer_sys::memory::{self, Advice, Range, SMALL_PAGE_BYTES};
use aquifer_sys::pagemap::{Pagemap, Protect};
use once_cell::race::OnceBool;

use crate::VmError;
use crate::fork::{PerProcess, ProcessMark};

mod faults;
#[cfg(test)]
mod model_tests;
mod pieces;
pub mod runs;
mod scan;
#[cfg(test)]
mod test_support;
#[cfg(test)]
mod tests;

pub use runs::{PageBits, PageIndex, PageRun};

use faults::FaultedPages;
use pieces::TrackedRange;
use scan::Scan;

/// How stores are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TrackerForm {
    /// By the kernel: PAGEMAP_SCAN and WP_ASYNC.
    Scan,
    /// By comparing pages that have a private copy.
    Compare,
}

impl TrackerForm {
    /// Returns an error if this process cannot use it.
    pub fn available(self) -> Result<(), VmError> {
        match self {
            TrackerForm::Scan => features::pagemap_scan()
                .map_err(|source| tracking("PAGEMAP_SCAN (Linux 6.7)", source))
                .and_then(|()| {
                    features::tracked_stores().map_err(|source| {
                        tracking("userfaultfd with WP_ASYNC (Linux 6.7, not filtered)", source)
                    })
                }),
            TrackerForm::Compare => shared_pagemap().map(drop),
        }
    }

    /// Returns the better available form, determined once per process.
    pub fn best() -> TrackerForm {
        static SCANS: OnceBool = OnceBool::new();
        if SCANS.get_or_init(|| TrackerForm::Scan.available().is_ok()) {
            TrackerForm::Scan
        } else {
            TrackerForm::Compare
        }
    }

    /// The name of the form, for reports.
    pub fn name(self) -> &'static str {
        match self {
            TrackerForm::Scan => "scan",
            TrackerForm::Compare => "compare",
        }
    }
}

/// The kind of a tracked mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TrackedKind {
    /// A private mapping of a file. Pages without a copy show the file.
    PrivateFile,
    /// Anonymous memory, filled by the caller: for files that cannot be mapped privately.
    Anonymous,
}

/// Whether threads may be storing to the mapping during a take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stores {
    /// The caller guarantees that no thread is in a store to the mapping, nor in a system call that
    /// stores to it or makes its pages writable (`mlock`, `MADV_POPULATE_WRITE`). A take may then
    /// scan only pages with recorded faults. If the guarantee is broken, a store that happened before
    /// the take may be reported late, by one of the next 256.
    Excluded,
    /// Threads may be storing. A take scans all pages.
    InProgress,
}

fn tracking(doing: &'static str, source: io::Error) -> VmError {
    VmError::Tracking { doing, source }
}

/// Returns one descriptor for all trackers of a process. A child opens its own, because the parent's
/// shows the parent.
fn shared_pagemap() -> Result<Arc<Pagemap>, VmError> {
    static SHARED: PerProcess<OnceLock<Arc<Pagemap>>> = PerProcess::new();
    let shared = SHARED.get();
    if let Some(map) = shared.get() {
        return Ok(map.clone());
    }
    let map = Pagemap::open().map(Arc::new).map_err(|source| {
        tracking("opening /proc/self/pagemap (mount /proc; keep the process dumpable)", source)
    })?;
    Ok(shared.get_or_init(|| map).clone())
}

/// Tracks the stores to one mapping.
#[derive(Debug)]
pub struct DirtyTracker {
    range: TrackedRange,
    kind: TrackedKind,
    map: Arc<Pagemap>,
    mark: ProcessMark,
    /// State of the form `Scan`; `None` when comparing.
    scan: Option<Scan>,
    /// Scans of all pages.
    complete_scans: u64,
    /// Where scans need not look; `None` when comparing, for short ranges, and before the first take
    /// with stores excluded.
    faulted: Option<FaultedPages>,
    /// Whether PAGEMAP_SCAN may be used to find private pages when comparing.
    scans_private: bool,
    /// Pages known to have a private copy, as of the last take or drop.
    known: PageBits,
    /// Stored to but not yet handed out, or given back.
    pending: Vec<PageRun>,
    /// Where the next drop starts.
    drop_from: PageIndex,
}

/// Most ranges in one vectored call (the kernel's `UIO_MAXIOV` is 1024).
const RANGES_AT_A_TIME: usize = 512;

impl DirtyTracker {
    /// Tracks `len_bytes` from `start`, both multiples of the small page. Earlier stores count as
    /// stores. `form` forces a form; by default it is the better one that supports the mapping.
    ///
    /// # Safety
    /// The range is one private mapping of the given kind, and remains so as long as the tracker is
    /// used; no other code drops its pages or registers it with a userfaultfd. The tracker may be
    /// dropped before or after the mapping.
    pub unsafe fn new(
        start: *mut u8,
        len_bytes: u64,
        form: Option<TrackerForm>,
        kind: TrackedKind,
    ) -> Result<DirtyTracker, VmError> {
        let page = SMALL_PAGE_BYTES as u64;
        if len_bytes == 0
            || !len_bytes.is_multiple_of(page)
            || !start.addr().is_multiple_of(SMALL_PAGE_BYTES)
        {
            return Err(tracking(
                "the range must be whole pages",
                io::Error::from(io::ErrorKind::InvalidInput),
            ));
        }
        let map = shared_pagemap()?;
        let range = TrackedRange { start: start.addr(), pages: len_bytes / page };
        if kind == TrackedKind::Anonymous {
            // A store would dirty all of a huge page. Kernels without huge pages refuse the advice,
            // which is harmless.
            // SAFETY: the caller's mapping; the advice keeps its contents.
            let _ = unsafe { memory::advise(start, len_bytes as usize, Advice::NoHugePage) };
        }
        let form = match form {
            Some(form) => form,
            None if TrackerForm::best() == TrackerForm::Scan && tells_copies(&map, range, kind) => {
                TrackerForm::Scan
            }
            None => TrackerForm::Compare,
        };
        Ok(DirtyTracker {
            range,
            kind,
            scans_private: map.can_scan().is_ok(),
            map,
            mark: ProcessMark::new(),
            scan: (form == TrackerForm::Scan).then(|| Scan::new(range)),
            faulted: None,
            complete_scans: 0,
            known: PageBits::new(range.pages),
            pending: Vec::new(),
            drop_from: PageIndex(0),
        })
    }

    /// The form in use.
    pub fn form(&self) -> TrackerForm {
        if self.scan.is_some() { TrackerForm::Scan } else { TrackerForm::Compare }
    }

    /// Pages tracked.
    pub fn pages(&self) -> u64 {
        self.range.pages
    }

    /// How many takes scanned all pages. The others knew from page faults where stores may have
    /// happened.
    pub fn complete_scans(&self) -> u64 {
        self.complete_scans
    }

    fn check_process(&self) -> Result<(), VmError> {
        if self.mark.is_current() { Ok(()) } else { Err(VmError::Forked) }
    }

    /// Replaces `out` with the pages stored to since the last take: sorted runs with gaps between
    /// them. From then on they are tracked anew. After an error nothing is lost: the next take
    /// reports all of them.
    ///
    /// `stores` says whether threads may be storing meanwhile. `is_changed` returns whether a page
    /// differs from the last commit. It is called for pages with a private copy when comparing, and
    /// rarely when scanning. If it cannot tell, it returns true.
    pub fn take(
        &mut self,
        stores: Stores,
        is_changed: &mut dyn FnMut(PageIndex) -> bool,
        out: &mut Vec<PageRun>,
    ) -> Result<(), VmError> {
        self.check_process()?;
        self.collect(stores, is_changed)?;
        out.clear();
        runs::normalise(&mut self.pending);
        out.append(&mut self.pending);
        Ok(())
    }

    /// Adds the pages stored to since the last call to `pending`.
    fn collect(
        &mut self,
        stores: Stores,
        is_changed: &mut dyn FnMut(PageIndex) -> bool,
    ) -> Result<(), VmError> {
        if let Some(scan) = &mut self.scan {
            let faulted = match stores {
                Stores::Excluded => {
                    if self.faulted.is_none() {
                        self.faulted = FaultedPages::new(self.range.addresses());
                    }
                    self.faulted.as_ref().and_then(FaultedPages::take)
                }
                Stores::InProgress => None,
            };
            let (map, known, found) = (&*self.map, &mut self.known, &mut self.pending);
            let result = match faulted {
                Some(pages) => {
                    let mut runs = Vec::with_capacity(pages.len());
                    for start in pages {
                        let end = start + SMALL_PAGE_BYTES;
                        runs::push(&mut runs, self.range.run(start as u64, end as u64));
                    }
                    scan.take_within(&runs, map, known, is_changed, found)
                }
                None => {
                    self.complete_scans += 1;
                    scan.take(map, known, is_changed, found)
                }
            };
            if result.is_ok() {
                return Ok(());
            }
            // Pages that the failed scan has protected would not be reported again: compare from
            // now on.
            self.scan = None;
            self.faulted = None;
        }
        let candidates = self.find_private()?;
        for page in candidates.iter().flat_map(|run| run.pages()) {
            if is_changed(page) {
                runs::push(&mut self.pending, PageRun { first: page, count: 1 });
            }
        }
        Ok(())
    }

    /// Finds the pages with a private copy in the page tables, and records them. Where the kernel
    /// does not distinguish the zero page, anonymous pages that were only loaded are included.
    fn find_private(&mut self) -> Result<Vec<PageRun>, VmError> {
        let mut private = Vec::new();
        let range = self.range;
        let scanned = self.scans_private
            && self
                .map
                .scan(range.addresses(), scan::PRIVATE, Protect::No, &mut |region| {
                    runs::push(&mut private, range.run(region.start, region.end));
                })
                .is_ok();
        if !scanned {
            self.map
                .private_pages(range.addresses(), &mut |run| {
                    runs::push(&mut private, range.run(run.start as u64, run.end as u64));
                })
                .map_err(|source| tracking("reading /proc/self/pagemap", source))?;
        }
        runs::normalise(&mut private);
        self.known.clear();
        private.iter().for_each(|&run| self.known.insert_run(run));
        Ok(private)
    }

    /// Makes the next take report these pages again, together with new ones: for a commit that
    /// failed.
    pub fn give_back(&mut self, runs: &[PageRun]) {
        let pages = self.range.pages;
        assert!(runs.iter().all(|run| run.end().0 <= pages), "pages outside the tracked range");
        self.pending.extend_from_slice(runs);
        runs::normalise(&mut self.pending);
    }

    /// Forgets all stores so far: for copies that the caller has just filled. Stores that race with
    /// it may be forgotten too.
    pub fn reset_baseline(&mut self) -> Result<(), VmError> {
        self.check_process()?;
        if self.scan.is_some() {
            self.collect(Stores::InProgress, &mut |_| false)?;
        }
        self.pending.clear();
        Ok(())
    }

    /// Number of pages that have a private copy now. Scans the whole mapping: 8 ns per present
    /// page.
    pub fn private_pages(&mut self) -> Result<u64, VmError> {
        self.check_process()?;
        match &self.scan {
            Some(scan) => scan
                .private_not_in(&self.map, &self.known)
                .map(|others| self.known.count() + others)
                .map_err(|source| tracking("PAGEMAP_SCAN", source)),
            None => self.find_private().map(|_| self.known.count()),
        }
    }

    /// Number of pages that had a private copy at the last take, without those dropped since. Costs
    /// nothing.
    pub fn known_private_pages(&self) -> u64 {
        self.known.count()
    }

    /// Whether a page had a private copy at the last take, and it was not dropped since.
    pub fn has_private_copy(&self, page: PageIndex) -> bool {
        self.known.contains(page)
    }

    /// Drops up to `wanted` private copies that were neither stored to since the last take nor
    /// given back, so that these pages show the file again, and returns how many. `may_drop`
    /// decides about each clean page: the file must hold the content of the page. After an error
    /// some copies remain: [`has_private_copy`](DirtyTracker::has_private_copy) tells which.
    /// `is_changed` is as in [`take`](DirtyTracker::take), and called when comparing. Each call
    /// continues where the last one ended, wrapping around. Anonymous copies are never dropped.
    ///
    /// # Safety
    /// No thread stores to the mapping, or holds references into it, during the call. For every
    /// page for which `may_drop` returns true, the file holds the page's content.
    pub unsafe fn drop_clean(
        &mut self,
        wanted: u64,
        is_changed: &mut dyn FnMut(PageIndex) -> bool,
        may_drop: &mut dyn FnMut(PageIndex) -> bool,
    ) -> Result<u64, VmError> {
        self.check_process()?;
        if self.kind == TrackedKind::Anonymous || wanted == 0 {
            return Ok(0);
        }
        let Some(clean) = self.clean(|scan| scan.clean(&self.map, &self.known))? else {
            return Ok(0);
        };
        let mut victims = Vec::new();
        let mut count = 0;
        let mut drop_from = self.drop_from;
        // One round: from where the last call ended to the end, then from the start to there.
        for part in [drop_from.0..self.range.pages, 0..drop_from.0] {
            let mut from = PageIndex(part.start);
            while count < wanted
                && let Some(page) = self.known.next_from(from).filter(|page| page.0 < part.end)
            {
                if self.is_clean(page, &clean, is_changed) && may_drop(page) {
                    runs::push(&mut victims, PageRun { first: page, count: 1 });
                    count += 1;
                }
                from = PageIndex(page.0 + 1);
                drop_from = from;
            }
        }
        self.drop_from = drop_from;
        // SAFETY: the victims are clean private copies of pages of a file, and the caller guarantees
        // that no thread stores.
        unsafe { self.discard(&victims) }?;
        Ok(count)
    }

    /// What a scan finds clean; nothing where pages are compared one by one. `None` if the state is
    /// unknown.
    fn clean(
        &self,
        find: impl FnOnce(&Scan) -> io::Result<Option<Vec<PageRun>>>,
    ) -> Result<Option<Vec<PageRun>>, VmError> {
        let Some(scan) = &self.scan else { return Ok(Some(Vec::new())) };
        find(scan).map_err(|source| tracking("PAGEMAP_SCAN", source))
    }

    /// Whether a known copy was not stored to since the last take. `clean` is of [`DirtyTracker::clean`].
    fn is_clean(
        &self,
        page: PageIndex,
        clean: &[PageRun],
        is_changed: &mut dyn FnMut(PageIndex) -> bool,
    ) -> bool {
        !runs::contains(&self.pending, page)
            && match &self.scan {
                Some(_) => runs::contains(clean, page),
                None => !is_changed(page),
            }
    }

    /// Drops private copies. Those of locked memory stay, with an error.
    ///
    /// # Safety
    /// They are clean copies of pages of a file, and no thread stores to them.
    unsafe fn discard(&mut self, victims: &[PageRun]) -> Result<(), VmError> {
        let mut gone = Vec::new();
        let mut failed = Ok(());
        for chunk in victims.chunks(RANGES_AT_A_TIME) {
            // SAFETY: forwarded to the caller.
            if unsafe { discard(self.range, chunk) }.is_ok() {
                gone.extend_from_slice(chunk);
                continue;
            }
            // Which of them it were is not said, and a page is dropped twice without harm.
            for page in chunk.iter().flat_map(|run| run.pages()) {
                let one = PageRun { first: page, count: 1 };
                // SAFETY: forwarded to the caller.
                match unsafe { discard(self.range, &[one]) } {
                    Ok(()) => runs::push(&mut gone, one),
                    Err(source) => {
                        failed = Err(tracking("dropping pages (is the memory locked?)", source));
                    }
                }
            }
        }
        gone.iter().for_each(|&run| self.known.remove_run(run));
        failed
    }
}

/// Whether the kernel distinguishes private copies in this mapping from pages of the file. It does
/// not for files on DAX before Linux 6.15, whose pages look like copies.
fn tells_copies(map: &Pagemap, range: TrackedRange, kind: TrackedKind) -> bool {
    if kind == TrackedKind::Anonymous {
        return true;
    }
    let first = range.start as *mut u8;
    // SAFETY: populates the first page, without a signal if that fails; the contents stay.
    let _ = unsafe { memory::advise(first, SMALL_PAGE_BYTES, Advice::PopulateRead) };
    let mut looks_private = false;
    let page = range.address_of(PageRun::new(0..1));
    let read = map.private_pages(page, &mut |_| looks_private = true);
    read.is_ok() && !looks_private
}

/// Drops the pages of at most [`RANGES_AT_A_TIME`] runs: all of them, or returns an error.
///
/// # Safety
/// The contents of the pages may be lost, and no thread stores to them.
unsafe fn discard(range: TrackedRange, victims: &[PageRun]) -> io::Result<()> {
    let ranges: Vec<_> = victims
        .iter()
        .map(|&run| {
            let addresses = range.address_of(run);
            Range { address: addresses.start as *mut u8, len_bytes: addresses.len() }
        })
        .collect();
    let len_bytes: usize = ranges.iter().map(|range| range.len_bytes).sum();
    if ranges.len() > 1 {
        // SAFETY: forwarded to the caller.
        match unsafe { memory::advise_many(&ranges, Advice::DontNeed) } {
            Ok(dropped) if dropped == len_bytes => return Ok(()),
            // Not supported before Linux 6.13, or incomplete: dropping a page twice is harmless.
            _ => {}
        }
    }
    for range in ranges {
        // SAFETY: forwarded to the caller.
        unsafe { memory::advise(range.address, range.len_bytes, Advice::DontNeed) }?;
    }
    Ok(())
}
