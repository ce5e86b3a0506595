//! The runs of one slot, in memory.

use std::sync::Arc;

use crate::run::{MAX_PAGES, MAX_RUN_PAGES, Run};

use super::units::{Extent, FilePage};

/// Returns a run without its first `pages` pages.
pub(super) fn skip(run: Run, pages: u64) -> Run {
    let start_page = if run.is_hole() { 0 } else { run.start_page + pages };
    Run { start_page, pages: run.pages - pages }
}

/// Returns the first pages of a run, at most `pages`.
pub(super) fn take(run: Run, pages: u64) -> Run {
    Run { pages: run.pages.min(pages), ..run }
}

/// Whether `next` continues `run`: its pages follow those of `run`, or both are holes.
pub(super) fn continues(run: Run, next: Run) -> bool {
    if run.is_hole() { next.is_hole() } else { next.start_page == run.end_page() }
}

/// Appends a run of any length, joined with the last one where possible.
pub(super) fn push(runs: &mut Vec<Run>, mut run: Run) {
    let max_pages = if run.is_hole() { MAX_PAGES - 1 } else { MAX_RUN_PAGES };
    if let Some(last) = runs.last_mut().filter(|last| continues(**last, run)) {
        let joined = take(run, max_pages.saturating_sub(last.pages));
        last.pages += joined.pages;
        run = skip(run, joined.pages);
    }
    while !run.is_empty() {
        let part = take(run, max_pages);
        runs.push(part);
        run = skip(run, part.pages);
    }
}

/// Counts the pages of runs that are not holes.
pub(super) fn mapped_pages(runs: &[Run]) -> u64 {
    runs.iter().filter(|run| !run.is_hole()).map(|run| run.pages).sum()
}

/// Runs, and where each of them ends.
#[derive(Debug, Default)]
struct Runs {
    runs: Vec<Run>,
    /// The end page of each run, relative to the first page of the list.
    ends: Vec<u64>,
}

/// The runs of one slot. Clones share the runs, so that cloning a whole table is cheap.
#[derive(Debug, Clone)]
pub(super) struct List {
    /// The page of the file at which they start.
    pub first: FilePage,
    /// The slot; 0 for the inode's own runs, and for a list that was never stored.
    pub slot: u64,
    /// The next slot according to the stored list.
    pub stored_next: u64,
    /// Whether the runs differ from the stored list.
    pub is_changed: bool,
    runs: Arc<Runs>,
}

impl List {
    /// A list as it is stored in a slot.
    pub fn stored(first: FilePage, slot: u64, next: u64, runs: Vec<Run>) -> List {
        List { first, slot, stored_next: next, is_changed: false, ..List::new(runs) }
    }

    /// A list that is not stored yet; the caller sets `first`.
    pub fn new(runs: Vec<Run>) -> List {
        let ends = runs.iter().scan(0, |end, run| {
            *end += run.pages;
            Some(*end)
        });
        let runs = Runs { ends: ends.collect(), runs };
        let first = FilePage(0);
        List { first, slot: 0, stored_next: 0, is_changed: true, runs: Arc::new(runs) }
    }

    /// Returns the same list with other runs.
    pub fn with_runs(&self, runs: &[Run]) -> List {
        if self.runs() == runs {
            self.clone()
        } else {
            List {
                first: self.first,
                slot: self.slot,
                stored_next: self.stored_next,
                ..List::new(runs.to_vec())
            }
        }
    }

    pub fn runs(&self) -> &[Run] {
        &self.runs.runs
    }

    pub fn len(&self) -> usize {
        self.runs.runs.len()
    }

    /// The first page of the file after the list.
    pub fn end(&self) -> FilePage {
        FilePage(self.first.0 + self.runs.ends.last().copied().unwrap_or(0))
    }

    /// Returns the index of the run with this page; [`List::len`] if the page is beyond the list.
    /// The page must not be before the list.
    pub fn find(&self, page: FilePage) -> usize {
        let offset = page.0 - self.first.0;
        self.runs.ends.partition_point(|end| *end <= offset)
    }

    /// Returns the run of this index.
    pub fn extent(&self, index: usize) -> Option<Extent> {
        let run = *self.runs.runs.get(index)?;
        Some(Extent { first: FilePage(self.first.0 + self.runs.ends[index] - run.pages), run })
    }

    /// Returns the runs from this index on, in order.
    pub fn extents_from(&self, index: usize) -> impl Iterator<Item = Extent> + '_ {
        (index..self.len()).map_while(|index| self.extent(index))
    }
}
