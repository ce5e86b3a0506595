//! What an attachment for writing has besides its memory: which pages were stored to, what they were before, and how
//! many copies it keeps.
//!
//! Pages that were stored to have a private copy, the *shadow*. It stays after the commit, because the program will
//! probably store to it again, until there are more of them than the budget: then those that hold nothing new are
//! dropped, once what was committed of them is at its place, where the mapping shows it.

use aquifer_pool::format::PAGE_BYTES;
use aquifer_sys::memory::copy_racy;
use aquifer_vm::DirtyTracker;
use aquifer_vm::dirty::{PageIndex, PageRun};

use crate::attach::Attached;
use crate::base::{Bases, Changes, Page};
use crate::error::{ObjectError, Result, text};
use crate::psync::Stores;
use crate::shadow::Shadow;

/// The writing side of an attachment.
pub(crate) struct Writing {
    pub tracker: DirtyTracker,
    /// What the capture under way, or the last one, took.
    pub captured: Vec<PageRun>,
    /// What is committed of them.
    pub changes: Changes,
    /// What these changes are relative to.
    pub bases: Bases,
    /// Whether a capture failed, and none has succeeded since.
    pub is_behind: bool,
    /// The end of the last commit that was captured, in the log.
    pub last_lsn: u64,
    /// Whether what was taken is in the log, and its bases do not know of it yet.
    pub is_captured: bool,
    /// Where large commits are put aside.
    pub shadow: Shadow,
    /// Private copies and twins above this number are dropped when they can be.
    pub budget_pages: u64,
}

impl Writing {
    /// Takes the pages stored to since the last time, and those that failed commits have left, into `captured`. After an
    /// error nothing is forgotten.
    pub fn collect(&mut self, attached: &Attached, stores: Stores) -> Result<()> {
        // Not empty if the last capture panicked.
        self.give_back();
        self.trim(attached, stores);
        let mut last = LastCommit::new(attached, self.last_lsn);
        self.tracker
            .take(&mut |page| last.differs(page), &mut self.captured)
            .map_err(|source| ObjectError::Memory { name: text(&attached.name), source })
    }

    /// Finds out what has changed in the pages that were taken.
    pub fn compare(&mut self, attached: &Attached) {
        self.bases.catch_up(attached.shared.pool.applied_lsn(), self.last_lsn);
        let most_twins = self.budget_pages.saturating_sub(self.tracker.known_private_pages());
        self.bases.compare(attached, &self.captured, most_twins, &mut self.changes);
    }

    /// Notes that what was taken is in the log before `end_lsn`. [`Writing::committed`] follows, or a panic has come between.
    pub fn was_captured(&mut self, end_lsn: u64) {
        if !self.captured.is_empty() {
            self.last_lsn = end_lsn;
            self.is_captured = true;
        }
    }

    /// Notes in the bases what is in the log: as changes, or with all the pages that were put `aside`.
    /// `twins` are copies of what is there of whole pages.
    pub fn committed(&mut self, aside: Option<&[PageRun]>, twins: Vec<(PageIndex, Page)>) {
        if self.captured.is_empty() {
            return;
        }
        match aside {
            Some(pages) => self.bases.forget(pages),
            None => self.bases.commit(&self.changes, twins),
        }
        self.is_captured = false;
    }

    /// Has the pages that were taken reported again.
    pub fn give_back(&mut self) {
        self.is_behind |= !self.captured.is_empty();
        if std::mem::take(&mut self.is_captured) {
            // The last capture panicked when it had taken its place in the log.
            self.bases.forget(&self.captured);
        }
        self.tracker.give_back(&self.captured);
        self.captured.clear();
    }

    /// Drops twins and private copies beyond the budget that hold nothing that is not at its place, if nobody stores to the object
    /// meanwhile.
    ///
    /// Does what it can: a pool that fails is noticed by the next commit, and a program that locks its memory keeps it.
    pub fn trim(&mut self, attached: &Attached, stores: Stores) {
        let returned = attached.flights.take_returned();
        self.is_behind |= !returned.is_empty();
        self.bases.forget(&returned);
        self.tracker.give_back(&returned);
        let private_pages = self.tracker.known_private_pages();
        if private_pages + self.bases.twins() > self.budget_pages {
            self.bases.drop_twins();
        }
        if private_pages <= self.budget_pages || stores != Stores::Excluded {
            return;
        }
        let mut last = LastCommit::new(attached, self.last_lsn);
        if !last.is_applied() {
            return;
        }
        let wanted = private_pages - self.budget_pages;
        // SAFETY: stores are excluded. What is clean was committed last with this content or never stored to,
        // all commits are applied and none is under way, so the file holds what the page holds: who looks at it through
        // a reference sees no change.
        let _ = unsafe {
            self.tracker.drop_clean(wanted, &mut |page| last.differs(page), &mut |_| true)
        };
    }
}

/// The content of the object as of its last commit: the primary, once that commit is applied.
struct LastCommit<'a> {
    attached: &'a Attached,
    lsn: u64,
    is_applied: Option<bool>,
    committed: Vec<u8>,
    present: Vec<u8>,
}

impl LastCommit<'_> {
    fn new(attached: &Attached, lsn: u64) -> LastCommit<'_> {
        LastCommit { attached, lsn, is_applied: None, committed: Vec::new(), present: Vec::new() }
    }

    /// Brings the primary up to date, the first time it is asked. Says whether it is.
    fn is_applied(&mut self) -> bool {
        *self.is_applied.get_or_insert_with(|| {
            let (flights, pool) = (&self.attached.flights, &self.attached.shared.pool);
            flights.wait_landed(flights.last_begun());
            pool.apply_through(self.lsn).is_ok() && pool.applied_lsn() >= self.lsn
        })
    }

    /// Whether a page has another content now. What cannot be known is taken to differ.
    fn differs(&mut self, page: PageIndex) -> bool {
        if !self.is_applied() {
            return true;
        }
        self.committed.resize(PAGE_BYTES as usize, 0);
        self.present.resize(PAGE_BYTES as usize, 0);
        let offset = self.attached.media.offset_bytes + page.0 * PAGE_BYTES;
        if self.attached.shared.pool.media().read_at(offset, &mut self.committed).is_err() {
            return true;
        }
        let source = self.attached.page(page);
        // SAFETY: a page of the mapping, and a buffer of one page.
        unsafe { copy_racy(source, self.present.as_mut_ptr(), PAGE_BYTES as usize) };
        self.committed != self.present
    }
}
