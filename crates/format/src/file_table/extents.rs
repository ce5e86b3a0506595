//! Reading a table in order.

use super::list::{List, continues, skip, take};
use super::units::{Extent, FilePages};
use crate::run::Run;

/// Iterates over the extents of a range of pages, in order: see
/// [`FileTable::extents`](super::FileTable::extents).
#[derive(Debug, Clone)]
pub struct Extents<'a> {
    /// The lists from the one with the next page on.
    lists: &'a [List],
    /// The index in the first list of the run with the next page.
    run: usize,
    /// The pages that are left.
    left: FilePages,
}

impl<'a> Extents<'a> {
    /// Starts at `range.first`, which must be in the first of `lists`, or beyond all of them.
    pub(super) fn new(lists: &'a [List], range: FilePages) -> Extents<'a> {
        let run = lists.first().map_or(0, |list| list.find(range.first));
        Extents { lists, run, left: range }
    }

    /// The next stored run.
    fn peek(&mut self) -> Option<Extent> {
        while let Some(list) = self.lists.first() {
            match list.extent(self.run) {
                Some(extent) => return Some(extent),
                None => (self.lists, self.run) = (&self.lists[1..], 0),
            }
        }
        None
    }
}

impl Iterator for Extents<'_> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        let FilePages { first, pages } = self.left;
        if pages == 0 {
            return None;
        }
        let mut run = match self.peek() {
            Some(stored) => {
                self.run += 1;
                skip(stored.run, first.0 - stored.first.0)
            }
            None => Run { start_page: 0, pages },
        };
        while run.pages < pages {
            match self.peek() {
                Some(next) if continues(run, next.run) => run.pages += next.run.pages,
                None if run.is_hole() => run.pages = pages,
                _ => break,
            }
            self.run += 1;
        }
        let run = take(run, pages);
        self.left = FilePages {
            first: FilePages { first, pages: run.pages }.end(),
            pages: pages - run.pages,
        };
        Some(Extent { first, run })
    }
}
