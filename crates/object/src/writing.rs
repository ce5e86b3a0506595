//! The state of an attachment for writing besides its memory: the pages stored to, their bases, and
//! the budget for private copies.
//!
//! Each page that was stored to has a private copy, the *shadow*. The copy stays after the commit,
//! because the program will probably store to the page again. When the copies exceed the budget,
//! clean ones are dropped, once their committed content is applied to the primary, which the
//! mapping then shows.

use aquifer_pool::format::PAGE_BYTES;
use aquifer_sys::memory::copy_racy;
use aquifer_vm::DirtyTracker;
use aquifer_vm::dirty::{PageIndex, PageRun, Stores};

use crate::base::{Bases, Changes};
use crate::error::{ObjectError, Result, text};
use crate::memory::Object;
use crate::ranges::NamedRanges;
use crate::shadow::Shadow;
use crate::twins::Page;

/// Above as many pages it pays to bring the primary up to date, and commit only those that changed.
const MANY_PAGES: u64 = 64;

/// The writing side of an attachment.
pub(crate) struct Writing {
    pub tracker: DirtyTracker,
    /// The pages taken by the current or the last capture.
    pub captured: Vec<PageRun>,
    /// The changes to commit of these pages.
    pub changes: Changes,
    /// The bases of these changes.
    pub bases: Bases,
    /// Whether a capture failed and none has succeeded since.
    pub is_behind: bool,
    /// The log position where the last captured commit ends.
    pub last_lsn: u64,
    /// Whether the captured pages are in the log but not yet noted in their bases.
    pub is_captured: bool,
    /// Pages committed by name since stores were looked for last; pages committed several times count
    /// as often.
    pub named_pages: u64,
    /// The run for large commits.
    pub shadow: Shadow,
    /// The number of private copies and twins above which they are dropped where possible.
    pub budget_pages: u64,
}

impl Writing {
    /// Takes the pages stored to since the last capture, and those of failed commits, into
    /// `captured`. An error loses no page.
    ///
    /// With [`Stores::InProgress`], other threads store only to memory that is unreachable in the
    /// object. Private copies are not dropped then: a store between comparing a page and dropping it
    /// would be lost.
    pub fn collect(&mut self, object: &Object, stores: Stores) -> Result<()> {
        // Not empty if the last capture panicked.
        self.give_back();
        self.trim(object, stores);
        let mut last = LastCommit::new(object, self.last_lsn);
        self.tracker
            .take(stores, &mut |page| last.differs(page), &mut self.captured)
            .map_err(|source| ObjectError::Memory { name: text(&object.name), source })
    }

    /// Takes the named ranges, instead of everything stored to.
    pub fn take_named(&mut self, object: &Object, ranges: &NamedRanges) {
        // Not empty if the last capture panicked.
        self.give_back();
        self.bases.take_named(object, ranges, &mut self.captured, &mut self.changes);
        self.named_pages += pages_of(&self.captured);
    }

    /// Whether a commit of named ranges would leave undone what a psync of everything must do: take
    /// pages back that were not committed, and look for private copies, which may be too many.
    pub fn is_everything_due(&self, object: &Object) -> bool {
        let copies =
            self.tracker.known_private_pages() + self.named_pages + self.bases.held_pages();
        self.is_behind
            || !self.captured.is_empty()
            || object.flights.has_returned()
            || (self.named_pages > 0 && copies > self.budget_pages)
    }

    /// Finds the changes in the captured pages.
    pub fn compare(&mut self, object: &Object) {
        let named_pages = std::mem::take(&mut self.named_pages);
        if named_pages.min(pages_of(&self.captured)) > MANY_PAGES {
            // Pages that were committed by name are captured again, most of them unchanged. Only in
            // pages that the primary shows as of their last commit this can be seen.
            object.flights.wait_landed(object.flights.last_begun());
            // If it fails, they are committed whole.
            let _ = object.shared.pool.apply_through(self.last_lsn);
        }
        self.bases.catch_up(object.shared.pool.applied_lsn(), self.last_lsn);
        let most_twins = self.budget_pages.saturating_sub(self.tracker.known_private_pages());
        self.bases.compare(object, &self.captured, most_twins, &mut self.changes);
    }

    /// Notes that the captured pages are in the log before `end_lsn`. [`Writing::committed`]
    /// follows, unless a panic intervenes.
    pub fn was_captured(&mut self, end_lsn: u64) {
        if !self.captured.is_empty() {
            self.last_lsn = end_lsn;
            self.is_captured = true;
        }
    }

    /// Updates the bases to what is in the log: the changes, and all the pages that were put
    /// `aside`, among them clean ones. `twins` are copies of whole pages as logged.
    pub fn committed(&mut self, aside: Option<&[PageRun]>, twins: &[Page]) {
        if self.captured.is_empty() {
            return;
        }
        self.bases.forget(aside.unwrap_or_default());
        self.bases.commit(&self.changes, twins);
        self.is_captured = false;
    }

    /// Returns the captured pages, so that the next capture takes them again.
    pub fn give_back(&mut self) {
        self.is_behind |= !self.captured.is_empty();
        if std::mem::take(&mut self.is_captured) {
            // The last capture panicked after taking its place in the log.
            self.bases.forget(&self.captured);
        }
        self.tracker.give_back(&self.captured);
        self.captured.clear();
    }

    /// When the budget is exceeded, drops all twins, and private copies of clean, applied pages.
    /// Private copies are dropped only if stores are excluded.
    ///
    /// Best effort: the next commit reports a failed pool, and locked memory stays.
    pub fn trim(&mut self, object: &Object, stores: Stores) {
        let returned = object.flights.take_returned();
        self.is_behind |= !returned.is_empty();
        self.bases.forget(&returned);
        self.tracker.give_back(&returned);
        let private_pages = self.tracker.known_private_pages();
        if private_pages + self.bases.held_pages() > self.budget_pages {
            self.bases.drop_twins();
        }
        if private_pages <= self.budget_pages || stores != Stores::Excluded {
            return;
        }
        let mut last = LastCommit::new(object, self.last_lsn);
        if !last.is_applied() {
            return;
        }
        let wanted = private_pages - self.budget_pages;
        // SAFETY: stores are excluded. A clean page was last committed with this content or never
        // stored to; all commits are applied and none is in flight, so the file holds the same
        // bytes as the page. A read through a reference sees no change.
        let _ = unsafe {
            self.tracker.drop_clean(wanted, &mut |page| last.differs(page), &mut |_| true)
        };
    }
}

pub(crate) fn pages_of(runs: &[PageRun]) -> u64 {
    runs.iter().map(|run| run.count).sum()
}

/// The content of the object as of its last commit: the primary, once that commit is applied.
struct LastCommit<'a> {
    object: &'a Object,
    lsn: u64,
    is_applied: Option<bool>,
    committed: Vec<u8>,
    present: Vec<u8>,
}

impl LastCommit<'_> {
    fn new(object: &Object, lsn: u64) -> LastCommit<'_> {
        LastCommit { object, lsn, is_applied: None, committed: Vec::new(), present: Vec::new() }
    }

    /// Brings the primary up to date on the first call. Returns whether it is.
    fn is_applied(&mut self) -> bool {
        *self.is_applied.get_or_insert_with(|| {
            let (flights, pool) = (&self.object.flights, &self.object.shared.pool);
            flights.wait_landed(flights.last_begun());
            pool.apply_through(self.lsn).is_ok() && pool.applied_lsn() >= self.lsn
        })
    }

    /// Whether a page differs from the last commit. Returns `true` if that cannot be determined.
    fn differs(&mut self, page: PageIndex) -> bool {
        if !self.is_applied() {
            return true;
        }
        self.committed.resize(PAGE_BYTES as usize, 0);
        self.present.resize(PAGE_BYTES as usize, 0);
        let offset = self.object.media.offset_bytes + page.0 * PAGE_BYTES;
        if self.object.shared.pool.media().read_at(offset, &mut self.committed).is_err() {
            return true;
        }
        let source = self.object.page(page);
        // SAFETY: a page of the mapping, and a buffer of one page.
        unsafe { copy_racy(source, self.present.as_mut_ptr(), PAGE_BYTES as usize) };
        self.committed != self.present
    }
}
