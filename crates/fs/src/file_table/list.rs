//! The runs of one slot, in memory.

use std::sync::Arc;

use aquifer_pool::format::run::{MAX_PAGES, MAX_RUN_PAGES, Run};

use super::units::{Extent, FilePage};

/// A run without its first `pages` pages.
pub(super) fn skip(run: Run, pages: u64) -> Run {
    let start_page = if run.is_hole() { 0 } else { run.start_page + pages };
    Run { start_page, pages: run.pages - pages }
}

/// The first pages of a run, at most so many.
pub(super) fn take(run: Run, pages: u64) -> Run {
    Run { pages: run.pages.min(pages), ..run }
}

/// Whether the pages of `next` follow those of `run`, as a hole follows a hole.
pub(super) fn continues(run: Run, next: Run) -> bool {
    match run.is_hole() {
        true => next.is_hole(),
        false => next.start_page == run.end_page(),
    }
}

/// Adds a run of any length behind others, and joins it with the last one where it can.
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

/// Pages of runs that are not holes.
pub(super) fn mapped_pages(runs: &[Run]) -> u64 {
    runs.iter().filter(|run| !run.is_hole()).map(|run| run.pages).sum()
}

/// Runs and where each of them ends.
#[derive(Debug, Default)]
struct Runs {
    runs: Vec<Run>,
    /// Of each run, the first page behind it, counted from the first page of the list.
    ends: Vec<u64>,
}

/// The runs of one slot. A clone has the runs in common with its original, so that a clone of a whole table is cheap.
#[derive(Debug, Clone)]
pub(super) struct List {
    /// Where in the file they begin.
    pub first: FilePage,
    /// The slot; 0 for the inode's own runs, and for a list that was never stored.
    pub slot: u64,
    /// The slot that the stored list says comes next.
    pub stored_next: u64,
    /// Whether the stored list has other runs.
    pub is_changed: bool,
    runs: Arc<Runs>,
}

impl List {
    /// A list as it is stored in a slot.
    pub fn stored(first: FilePage, slot: u64, next: u64, runs: Vec<Run>) -> List {
        List { first, slot, stored_next: next, is_changed: false, ..List::new(runs) }
    }

    /// A list that is not stored yet; its place in the file is to be set.
    pub fn new(runs: Vec<Run>) -> List {
        let ends = runs.iter().scan(0, |end, run| {
            *end += run.pages;
            Some(*end)
        });
        let runs = Runs { ends: ends.collect(), runs };
        let first = FilePage(0);
        List { first, slot: 0, stored_next: 0, is_changed: true, runs: Arc::new(runs) }
    }

    /// The same list with these runs.
    pub fn with_runs(&self, runs: &[Run]) -> List {
        match self.runs() == runs {
            true => self.clone(),
            false => List {
                first: self.first,
                slot: self.slot,
                stored_next: self.stored_next,
                ..List::new(runs.to_vec())
            },
        }
    }

    pub fn runs(&self) -> &[Run] {
        &self.runs.runs
    }

    pub fn len(&self) -> usize {
        self.runs.runs.len()
    }

    /// The first page of the file behind it.
    pub fn end(&self) -> FilePage {
        FilePage(self.first.0 + self.runs.ends.last().copied().unwrap_or(0))
    }

    /// The index of the run with this page, which is not before the list; [`List::len`] if it is behind it.
    pub fn find(&self, page: FilePage) -> usize {
        let offset = page.0 - self.first.0;
        self.runs.ends.partition_point(|end| *end <= offset)
    }

    /// The run of this index.
    pub fn extent(&self, index: usize) -> Option<Extent> {
        let run = *self.runs.runs.get(index)?;
        Some(Extent { first: FilePage(self.first.0 + self.runs.ends[index] - run.pages), run })
    }

    /// The runs from this index on, in order.
    pub fn extents_from(&self, index: usize) -> impl Iterator<Item = Extent> + '_ {
        (index..self.len()).map_while(|index| self.extent(index))
    }
}
