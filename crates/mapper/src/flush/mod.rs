//! Exact flush: writes the pages of a private mapping that were stored to, and makes them durable.
//!
//! ```text
//!             store                   written                    synced
//!   clean ───────────────▶ dirty ───────────────▶ unsynced ─────────────────▶ clean
//!     ▲                      ▲ ▲  write failed       │ │
//!     │                      │ └─────────────────────┘ │ sync failed
//!     │ copy dropped         └─────────────────────────┘
//! ```
//! * *dirty*: a private copy differs from the file. The tracker finds these pages
//!   ([`aquifer_vm::dirty`]); those it has reported are kept in `dirty`.
//! * *unsynced*: the page cache holds the bytes, so that other readers see them; the device may
//!   not.
//!
//! # Guarantees
//! * A store that happened before a flush began is in that flush. A concurrent one is in it, or
//!   stays dirty.
//! * Only pages that were stored to are written, and of them only bytes of the view. Clean pages in
//!   short gaps between them are written onto themselves from the page cache, where that is cheaper
//!   (`plan`), and only while the file is not open or mapped elsewhere ([`aquifer_sys::lease`]): a
//!   concurrent store by another process to a word being copied would be lost.
//! * Conflicts with other processes are resolved by whole pages, because pages are tracked: if
//!   another process writes to a page between a store here and its flush, one of the two versions
//!   of the page survives. Writers that store and flush in turns lose nothing (see below).
//! * A flush that returns `Ok` has made its pages and the length of the file durable. Until then, a
//!   crash of the machine leaves any mixture of old and new pages; each naturally aligned word is
//!   old or new, provided that the device writes its sectors whole. A crash of the process alone
//!   keeps what was written so far.
//! * Pages that fail stay dirty, and the next flush writes them again. This includes pages that
//!   were written but could not be synced: the kernel may have discarded them, and reports that
//!   only once. For that reason private copies are never dropped before the sync. Such pages are
//!   written whole and past the page cache, whose state may be wrong (`Pass::write_lost`).
//! * A flush works by range: it does not wait for pages of the file that other processes dirtied,
//!   where the file system allows that ([`aquifer_sys::range_sync`]).
//!
//! # Copies
//! A private copy hides other processes' writes to its page of the file. So a flush drops the
//! copies it has made durable, at 0.3 to 0.6 µs a page, and the next store to such a page copies it
//! again, at 2 µs. The view then shows the file again, and two processes that store and flush in
//! turns see each other's bytes and overwrite none. Dropping requires that no thread stores, so it
//! stops permanently once the program has a pointer to store through. From then on the content of
//! each copy is kept as it was written, and when the page is written again, only the bytes that
//! differ from it (`base`): other processes' bytes stay in the file, though the view does not show
//! them. The same holds between [`write_out`](super::FileView::write_out) and the next flush. It
//! costs a copy in memory of each flushed page, and 0.6 µs to make it, some 4 µs if that memory was
//! never used before.
//!
//! Lock order: `State`, then the lock that keeps stores out.

mod base;
mod cached_range;
mod content;
mod plan;
#[cfg(test)]
mod tests;
mod write;

use std::ops::Range;

use aquifer_sys::fallible;
use aquifer_sys::io::read_at;
use aquifer_sys::memory::SMALL_PAGE_BYTES;
use aquifer_sys::range_sync::RangeSync;

use super::error::{FlushCause, MapError, Result};
use super::writable::Writable;
use aquifer_vm::dirty::{Stores, runs};
use aquifer_vm::{DirtyTracker, PageIndex, PageRun, TrackedKind, TrackerForm};

use base::Bases;
use content::Contents;
use write::{Pass, Written};

pub(crate) use plan::Choice;

const PAGE: u64 = SMALL_PAGE_BYTES as u64;
/// The result of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Flushed {
    /// Pages of 4096 bytes that had been stored to, and were written.
    pub pages: u64,
    /// Bytes written to the file: the part of these pages inside the view, and clean pages between
    /// them.
    pub bytes_written: u64,
}

/// The state of the pages of a private mapping.
pub(super) struct State {
    tracker: DirtyTracker,
    /// Reported by the tracker and not yet written.
    dirty: Vec<PageRun>,
    /// Written, and not known to be durable.
    unsynced: Vec<PageRun>,
    /// The dirty pages that were written and may have been lost by the device.
    lost: Vec<PageRun>,
    contents: Contents,
    bases: Bases,
    choice: Choice,
    durable: RangeSync,
    /// Where the next write-back begins.
    next_page: PageIndex,
}

impl State {
    /// # Safety
    /// The mapping is private, and no other code tracks it or drops pages of it.
    pub unsafe fn new(
        mapping: &Writable,
        form: Option<TrackerForm>,
        choice: Choice,
    ) -> Result<State> {
        let len_bytes = mapping.capacity_pages() * PAGE;
        let kind = TrackedKind::PrivateFile;
        // SAFETY: forwarded to the caller.
        let tracker = unsafe { DirtyTracker::new(mapping.base(), len_bytes, form, kind) }?;
        let durable = RangeSync::of_file(mapping.file()).map_err(MapError::open(mapping.path()))?;
        Ok(State {
            tracker,
            dirty: Vec::new(),
            unsynced: Vec::new(),
            lost: Vec::new(),
            contents: Contents::default(),
            bases: Bases::default(),
            choice,
            durable,
            next_page: PageIndex(0),
        })
    }

    /// The size of the file's folios, once a flush has measured it.
    pub fn folio_bytes(&self) -> Option<u64> {
        self.choice.folio_bytes
    }

    /// The form of tracking in use.
    pub fn form(&self) -> TrackerForm {
        self.tracker.form()
    }

    /// Pages that had a private copy when the tracker last searched for them.
    pub fn private_pages(&self) -> u64 {
        self.tracker.known_private_pages()
    }

    /// Bytes of pages that are dirty.
    pub fn dirty_bytes(&mut self, mapping: &Writable) -> Result<u64> {
        self.collect(mapping)?;
        Ok(self.dirty.iter().map(|run| run.count).sum::<u64>() * PAGE)
    }

    /// Adds the pages stored to since the last call to `dirty`.
    fn collect(&mut self, mapping: &Writable) -> Result<()> {
        let compares = self.tracker.form() == TrackerForm::Compare;
        let mut page_there = [0; SMALL_PAGE_BYTES];
        let contents = &self.contents;
        let mut is_changed = |page: PageIndex| {
            let Some(page_now) = load(mapping, page) else { return true };
            if compares {
                return contents.is_changed(page, &page_now);
            }
            // A scan cannot tell whether this page is private: it is if it differs from the file.
            page_there.fill(0);
            let offset = mapping.first_byte() + page.0 * PAGE;
            let there = read_at(mapping.file(), &mut page_there, offset);
            there.is_err() || page_there != page_now
        };
        let mut stored = Vec::new();
        // Stores go on during a flush.
        self.tracker.take(Stores::InProgress, &mut is_changed, &mut stored)?;
        self.dirty.append(&mut stored);
        runs::normalise(&mut self.dirty);
        self.dirty = mapping.without_replaced(&self.dirty);
        Ok(())
    }

    /// Writes dirty pages, with gaps as `choice` allows. With `keeps_copies`, their copies stay
    /// after the next sync.
    fn write(
        &mut self,
        mapping: &Writable,
        dirty: &[PageRun],
        keeps_copies: bool,
        choice: &mut Choice,
    ) -> Written {
        let mut lost = Vec::new();
        dirty.iter().for_each(|&run| runs::intersect(&self.lost, run, &mut |run| lost.push(run)));
        let remembers = self.tracker.form() == TrackerForm::Compare;
        let contents = remembers.then_some(&mut self.contents);
        let mut pass = Pass::new(mapping, contents, &mut self.bases, keeps_copies);
        pass.write_lost(&lost);
        pass.write(&runs::subtract(dirty, &lost), choice);
        let mut written = pass.into_written();
        runs::normalise(&mut written.pages);
        self.dirty = runs::subtract(&self.dirty, &written.pages);
        self.unsynced.extend_from_slice(&written.pages);
        runs::normalise(&mut self.unsynced);
        written
    }

    /// Flushes the dirty pages of a range. With `keeps_copies`, the caller drops no copies
    /// afterwards.
    pub fn flush(
        &mut self,
        mapping: &Writable,
        pages: PageRun,
        keeps_copies: bool,
    ) -> Result<Flushed> {
        self.collect(mapping)?;
        let dirty = within(&self.dirty, pages);
        let mut choice = self.choice;
        let written = self.write(mapping, &dirty, keeps_copies, &mut choice);
        self.choice = choice;
        self.sync(mapping, pages)?;
        match written.failed {
            None => Ok(Flushed {
                pages: written.pages.iter().map(|run| run.count).sum(),
                bytes_written: written.bytes,
            }),
            Some((range, cause)) => {
                Err(MapError::Flush { path: mapping.path().to_owned(), range, cause })
            }
        }
    }

    /// Makes the written pages of a range durable.
    fn sync(&mut self, mapping: &Writable, pages: PageRun) -> Result<()> {
        let mut written = within(&self.unsynced, pages);
        runs::normalise(&mut written);
        let view = mapping.view_in_file();
        let ranges: Vec<Range<u64>> = written
            .iter()
            .map(|run| {
                let byte = |page: PageIndex| mapping.first_byte() + page.0 * PAGE;
                byte(run.first).max(view.start)..byte(run.end()).min(view.end)
            })
            .filter(|range| range.start < range.end)
            .collect();
        match self.durable.make_durable(mapping.file(), &ranges) {
            Ok(()) => {
                self.unsynced = runs::subtract(&self.unsynced, &written);
                self.lost = runs::subtract(&self.lost, &written);
                Ok(())
            }
            Err(error) => {
                // The error may concern any page that was written, and the kernel reports it only
                // once.
                let lost = std::mem::take(&mut self.unsynced);
                self.contents.forget(&lost);
                self.bases.forget(&lost);
                for runs in [&mut self.dirty, &mut self.lost] {
                    runs.extend_from_slice(&lost);
                    runs::normalise(runs);
                }
                let (first, last) = (ranges.first(), ranges.last());
                Err(MapError::Flush {
                    path: mapping.path().to_owned(),
                    range: first.map_or(0, |range| range.start)..last.map_or(0, |range| range.end),
                    cause: FlushCause::of_sync(&error),
                })
            }
        }
    }

    /// Writes up to `most_bytes` of dirty pages, continuing where the last call ended, and starts
    /// their I/O. Returns how many bytes it wrote. Pages that fail stay dirty: the next flush
    /// reports the error.
    pub fn write_back(&mut self, mapping: &Writable, most_bytes: u64) -> Result<u64> {
        if runs::subtract(&self.dirty, &self.lost).is_empty() {
            self.collect(mapping)?;
        }
        // Lost pages are left to a flush, which also syncs them and so finds out whether they are
        // durable.
        let ordinary = runs::subtract(&self.dirty, &self.lost);
        let chosen = choose(&ordinary, self.next_page, most_bytes.div_ceil(PAGE));
        let Some(last) = chosen.last() else { return Ok(0) };
        self.next_page = last.end();
        let mut chosen = chosen;
        runs::normalise(&mut chosen);
        // Without gaps: they would exceed the pace.
        let mut exact = Choice { forced_gap_pages: Some(0), ..self.choice };
        Ok(self.write(mapping, &chosen, true, &mut exact).bytes)
    }

    /// Records that a part of a copy was filled from the file.
    pub fn take_in(&mut self, mapping: &Writable, file_byte: u64, bytes: &[u8]) {
        let offset = file_byte - mapping.first_byte();
        self.bases.take_in(PageIndex(offset / PAGE), (offset % PAGE) as usize, bytes);
    }

    /// Drops the copies that are clean and durable. Those of locked memory stay.
    ///
    /// # Safety
    /// No thread stores to the mapping during the call.
    pub unsafe fn drop_copies(&mut self, mapping: &Writable) {
        if self.tracker.known_private_pages() == 0 {
            return;
        }
        let State { tracker, dirty, unsynced, contents, bases, .. } = self;
        let mut is_changed =
            |page| load(mapping, page).is_none_or(|page_now| contents.is_changed(page, &page_now));
        let mut clean = Vec::new();
        let mut may_drop = |page| {
            let may = !runs::contains(dirty, page) && !runs::contains(unsynced, page);
            if may {
                clean.push(page);
            }
            may
        };
        // SAFETY: the caller guarantees that no thread stores. The dropped pages were written and
        // are durable; if the file differs now, its content is newer. References into the mapping
        // exist only if their owner guarantees that the file does not change.
        let _ = unsafe { tracker.drop_clean(u64::MAX, &mut is_changed, &mut may_drop) };
        for page in clean {
            if tracker.has_private_copy(page) {
                // It could not be dropped. It is clean and no thread stores, so it holds what was
                // written.
                if let Some(page_now) = load(mapping, page) {
                    bases.set(page, &page_now);
                }
                continue;
            }
            let run = [PageRun { first: page, count: 1 }];
            bases.forget(&run);
            // If the page gets a copy again, that copy holds a store, whatever its content.
            contents.forget(&run);
        }
    }
}

/// What a page of the mapping holds; `None` if it cannot be read.
fn load(mapping: &Writable, page: PageIndex) -> Option<[u8; SMALL_PAGE_BYTES]> {
    let mut page_now = [0; SMALL_PAGE_BYTES];
    let source = mapping.base().wrapping_add((page.0 * PAGE) as usize);
    // SAFETY: a page of the mapping, and a buffer of one page.
    unsafe { fallible::try_copy(source, page_now.as_mut_ptr(), SMALL_PAGE_BYTES) }
        .then_some(page_now)
}

/// The part of a normalised set that lies in a range.
fn within(runs: &[PageRun], pages: PageRun) -> Vec<PageRun> {
    let mut inside = Vec::new();
    runs::intersect(runs, pages, &mut |run| inside.push(run));
    inside
}

/// The first `most_pages` pages of a normalised set, starting at `from` and wrapping around.
fn choose(runs: &[PageRun], from: PageIndex, most_pages: u64) -> Vec<PageRun> {
    let mut chosen = Vec::new();
    let mut left = most_pages;
    for part in [PageRun::new(from.0..u64::MAX), PageRun::new(0..from.0)] {
        for run in within(runs, part) {
            let count = run.count.min(left);
            if count == 0 {
                return chosen;
            }
            chosen.push(PageRun { count, ..run });
            left -= count;
        }
    }
    chosen
}
