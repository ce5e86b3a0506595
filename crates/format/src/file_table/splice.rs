//! Edits of a table in memory.

use crate::file::FILE_RUNS;
use crate::run::{MAX_PAGES, Run};
use crate::run_list::LIST_RUNS;
use crate::slots::StructureError;

use super::FileTable;
use super::list::{List, mapped_pages, push, skip, take};
use super::units::{Extent, FilePage, FilePages};

/// The most runs in a list.
fn capacity(list: usize) -> usize {
    if list == 0 { FILE_RUNS } else { LIST_RUNS }
}

/// Strips the holes at the end of `runs`.
fn without_last_holes(mut runs: &[Run]) -> &[Run] {
    while let Some((last, before)) = runs.split_last()
        && (last.is_hole() || last.is_empty())
    {
        runs = before;
    }
    runs
}

/// Where to cut runs that need several lists, into about equal parts; the first has at most
/// `first_capacity` runs.
fn cut_evenly(runs: usize, first_capacity: usize) -> Vec<usize> {
    let lists = 1 + runs.saturating_sub(first_capacity).div_ceil(LIST_RUNS);
    let first = runs.div_ceil(lists).min(first_capacity);
    (0..lists).map(|index| first + ((runs - first) * index).div_ceil((lists - 1).max(1))).collect()
}

/// Where to cut runs so that each list except the last is full.
fn cut_full(runs: usize, first_capacity: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = (first_capacity..runs).step_by(LIST_RUNS).collect();
    cuts.push(runs);
    cuts
}

/// The lists that an edit touches, and their new runs.
struct Touched<'a> {
    /// The index of the first list.
    first: usize,
    first_runs: &'a [Run],
    last: usize,
    last_runs: &'a [Run],
    runs: &'a [Run],
    /// Whether no old run comes after the edit.
    is_at_end: bool,
}

impl Touched<'_> {
    /// Where to cut the runs into lists so that as few lists as possible change: the end of each
    /// part.
    fn cuts(&self) -> Vec<usize> {
        let (len, first_capacity) = (self.runs.len(), capacity(self.first));
        if self.first == self.last {
            return match len <= first_capacity {
                true => vec![len],
                false if self.is_at_end => cut_full(len, first_capacity),
                false => cut_evenly(len, first_capacity),
            };
        }
        let before_last = self.runs.ends_with(self.last_runs).then(|| len - self.last_runs.len());
        let behind_first = self.runs.starts_with(self.first_runs).then_some(self.first_runs.len());
        let (least, most) = (len.saturating_sub(LIST_RUNS), len.min(first_capacity));
        let kept = (self.runs.iter().rev().zip(self.last_runs.iter().rev()))
            .take_while(|(new, old)| new == old)
            .count();
        let between = (least <= most).then(|| (len - kept).clamp(least, most));
        let fits = |cut: &usize| (least..=most).contains(cut);
        match [before_last, behind_first, between].into_iter().flatten().find(fits) {
            Some(cut) => vec![cut, len],
            None if self.is_at_end => cut_full(len, first_capacity),
            None => match (before_last, behind_first) {
                (Some(cut), _) => [cut_evenly(cut, first_capacity), vec![len]].concat(),
                (None, Some(cut)) => {
                    let behind = cut_evenly(len - cut, LIST_RUNS).into_iter().map(|end| cut + end);
                    [cut].into_iter().chain(behind).collect()
                }
                (None, None) => cut_evenly(len, first_capacity),
            },
        }
    }

    /// Cuts the runs; each part comes with the index of the list that it replaces, or `None` for a
    /// new list. The first list is kept. So is the last one: in its place if its runs are
    /// unchanged, else directly after the first, which then need not be re-linked.
    fn parts(&self) -> Vec<(Option<usize>, &[Run])> {
        let mut start = 0;
        let cuts = self.cuts();
        let parts = cuts.iter().map(|end| &self.runs[std::mem::replace(&mut start, *end)..*end]);
        let mut parts: Vec<(Option<usize>, &[Run])> = parts.map(|part| (None, part)).collect();
        parts[0].0 = Some(self.first);
        if self.first != self.last && parts.len() > 1 {
            let end = parts.len() - 1;
            let index = if parts[end].1 == self.last_runs { end } else { 1 };
            parts[index].0 = Some(self.last);
        }
        parts
    }
}

impl FileTable {
    /// Replaces the pages of `range` by `replacement`, and returns what was there: runs and holes
    /// in order, up to the end of the table or of the range.
    ///
    /// Pages of the range that the replacement does not reach become a hole. So this covers every
    /// edit that leaves the other pages in place:
    ///
    /// | edit | range | replacement |
    /// |---|---|---|
    /// | append, fill a hole | the new pages | their runs |
    /// | truncate | [`FilePages::all_from`] the new end | nothing |
    /// | punch a hole | the hole | nothing |
    /// | replace | the pages | other runs, as long |
    /// | exchange with another file | the pages | what a splice of the other file removed |
    ///
    /// Removed pages must not be reused before the change is durable; the pool takes care of that.
    /// Nothing is stored before [`FileTable::store`].
    ///
    /// # Errors
    /// [`StructureError::FileTooLarge`] if the table would have more pages than a file can have;
    /// then nothing has changed.
    ///
    /// # Panics
    /// If the replacement is longer than the range, or refers to pages beyond any pool.
    pub fn splice(
        &mut self,
        range: FilePages,
        replacement: &[Run],
    ) -> Result<Vec<Run>, StructureError> {
        let len_pages = replacement.iter().fold(0u64, |sum, run| sum.saturating_add(run.pages));
        assert!(len_pages <= range.pages, "{len_pages} pages do not fit into {range:?}");
        assert!(replacement.iter().all(|run| run.end_page() <= MAX_PAGES), "no pool is so large");
        let put = without_last_holes(replacement);
        let put_pages = put.iter().map(|run| run.pages).sum();
        if !put.is_empty() && range.first.0.saturating_add(put_pages) > MAX_PAGES {
            return Err(StructureError::FileTooLarge);
        }
        let removed = self.runs_of(range);
        if put.is_empty() && removed.iter().all(|run| run.is_hole()) {
            return Ok(removed);
        }
        let mut put = put.to_vec();
        if range.end().0 < self.pages() {
            push(&mut put, Run { start_page: 0, pages: range.pages - put_pages });
        }
        self.replace(range, &put);
        self.mapped_pages += mapped_pages(&put);
        self.mapped_pages -= mapped_pages(&removed);
        Ok(removed)
    }

    /// Removes the pages of `range` and moves all pages behind it to its place: the file gets
    /// shorter. Returns what was there, as [`FileTable::splice`].
    ///
    /// Lists hold no positions, so this changes the lists at both ends of the range, however many
    /// come after it.
    pub fn collapse(&mut self, range: FilePages) -> Vec<Run> {
        let removed = self.runs_of(range);
        if removed.is_empty() {
            return removed;
        }
        self.replace(range, &[]);
        self.mapped_pages -= mapped_pages(&removed);
        removed
    }

    /// Inserts a hole: its first page is `hole.first`, and the page that was there and all behind
    /// it move back. Changes as few lists as [`FileTable::collapse`].
    ///
    /// # Errors
    /// [`StructureError::FileTooLarge`] if the table would have more pages than a file can have;
    /// then nothing has changed.
    pub fn insert(&mut self, hole: FilePages) -> Result<(), StructureError> {
        // Behind the table there is a hole anyway.
        if hole.pages == 0 || hole.first.0 >= self.pages() {
            return Ok(());
        }
        if self.pages().saturating_add(hole.pages) > MAX_PAGES {
            return Err(StructureError::FileTooLarge);
        }
        let before = FilePages { pages: 0, ..hole };
        self.replace(before, &[Run { start_page: 0, pages: hole.pages }]);
        Ok(())
    }

    /// Returns the runs in a range, clipped to it.
    fn runs_of(&self, range: FilePages) -> Vec<Run> {
        let range = FilePages::between(range.first, FilePage(range.end().0.min(self.pages())));
        self.extents(range).map(|extent| extent.run).collect()
    }

    /// Replaces the pages of a range by runs of any length; pages behind the range move by the
    /// difference.
    fn replace(&mut self, range: FilePages, put: &[Run]) {
        // The list with the page before the range, and the one with the page after it: runs at the
        // borders may be joined.
        let first = self.list_with(FilePage(range.first.0.saturating_sub(1)));
        let last = self.list_with(range.end());
        let is_at_end = range.end().0 >= self.pages();
        let runs = self.touched_runs((first, last), range, put);
        let touched = Touched {
            first,
            first_runs: self.lists[first].runs(),
            last,
            last_runs: self.lists[last].runs(),
            runs: &runs,
            is_at_end,
        };
        let place = |(list, part): (Option<usize>, &[Run])| match list {
            Some(list) => self.lists[list].with_runs(part),
            None => List::new(part.to_vec()),
        };
        let lists: Vec<List> = touched.parts().into_iter().map(place).collect();
        let count = lists.len();
        self.exchange_lists(first..last + 1, lists);
        self.merge_short(first.saturating_sub(1), first + count);
        self.drop_last_holes();
        self.number_from(first.saturating_sub(1));
        self.is_edited = true;
    }

    /// Returns the new runs of the lists from `first` to `last`.
    fn touched_runs(
        &self,
        (first, last): (usize, usize),
        range: FilePages,
        put: &[Run],
    ) -> Vec<Run> {
        let mut runs = Vec::with_capacity(LIST_RUNS + put.len() + 2);
        let before = |extent: &Extent| extent.first < range.first;
        for extent in self.lists[first].extents_from(0).take_while(before) {
            push(&mut runs, take(extent.run, range.first.0 - extent.first.0));
        }
        let gap_pages = range.first.0.saturating_sub(self.pages());
        push(&mut runs, Run { start_page: 0, pages: gap_pages });
        put.iter().for_each(|run| push(&mut runs, *run));
        let behind = range.end();
        if behind.0 < self.pages() {
            let list = &self.lists[last];
            for extent in list.extents_from(list.find(behind)) {
                push(&mut runs, skip(extent.run, behind.0.saturating_sub(extent.first.0)));
            }
        }
        runs
    }

    /// Replaces lists. Drops empty ones, and notes the slots that become unused.
    fn exchange_lists(&mut self, range: std::ops::Range<usize>, mut lists: Vec<List>) {
        let mut index = range.start;
        lists.retain(|list| {
            index += 1;
            list.len() > 0 || index == 1
        });
        let kept: Vec<u64> = lists.iter().map(|list| list.slot).collect();
        let old = self.lists.splice(range, lists).map(|list| list.slot);
        self.unused_slots.extend(old.filter(|slot| *slot != 0 && !kept.contains(slot)));
    }

    /// Merges short neighbours among the lists from `from` to `to`. Two unchanged lists stay: a
    /// merge would write one more.
    fn merge_short(&mut self, from: usize, mut to: usize) {
        let mut index = from;
        while index < to && index + 1 < self.lists.len() {
            let (list, next) = (&self.lists[index], &self.lists[index + 1]);
            // Leave some room: otherwise the next edit would split the list again.
            let is_short = list.len() + next.len() <= capacity(index) / 4 * 3;
            if !is_short || !(list.is_changed || next.is_changed) {
                index += 1;
                continue;
            }
            let mut runs = list.runs().to_vec();
            next.runs().iter().for_each(|run| push(&mut runs, *run));
            let merged = list.with_runs(&runs);
            self.exchange_lists(index..index + 2, vec![merged]);
            to -= 1;
        }
    }

    fn drop_last_holes(&mut self) {
        loop {
            let index = self.lists.len() - 1;
            let list = &self.lists[index];
            let left = without_last_holes(list.runs());
            if left.len() == list.len() && (!left.is_empty() || index == 0) {
                return;
            }
            let left = list.with_runs(left);
            self.exchange_lists(index..index + 1, vec![left]);
            if self.lists.len() == index + 1 {
                return;
            }
        }
    }

    /// Updates the first pages of the lists from `first` on.
    fn number_from(&mut self, first: usize) {
        let start = first.min(self.lists.len() - 1);
        let mut page = self.lists[start].first;
        for list in &mut self.lists[start..] {
            list.first = page;
            page = list.end();
        }
    }
}
