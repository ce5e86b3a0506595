//! Runs of free pages, in DRAM.
//!
//! Best fit, the lowest of equals: small requests fill small gaps, and used pages stay together at
//! the front. Nothing of this is stored in the object: it is rebuilt from the page maps.

use std::collections::{BTreeMap, BTreeSet};

/// Free runs, by page for merging and by length for allocation.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct FreeRuns {
    by_page: BTreeMap<u64, u64>,
    by_length: BTreeSet<(u64, u64)>,
    pages: u64,
}

impl FreeRuns {
    /// The total number of free pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages of the longest run.
    pub fn longest(&self) -> u64 {
        self.by_length.last().map_or(0, |&(length, _)| length)
    }

    /// Takes `length` pages. `misfit` returns the distance in pages from a page to the next page
    /// the run may start at: 0 except for large alignments.
    pub fn take(&mut self, length: u64, misfit: impl Fn(u64) -> u64) -> Option<u64> {
        let fits = |&(found, page): &(u64, u64)| {
            let skip = misfit(page);
            (skip.checked_add(length)? <= found).then_some((page, found, skip))
        };
        let (page, found, skip) = self.by_length.range((length, 0)..).find_map(fits)?;
        self.remove(page, found);
        self.add(page, skip);
        self.add(page + skip + length, found - skip - length);
        Some(page + skip)
    }

    /// Takes the `length` pages at `page`, if they are free.
    pub fn take_at(&mut self, page: u64, length: u64) -> bool {
        let found = self.by_page.range(..=page).next_back().map(|(&start, &found)| (start, found));
        let Some((start, found)) = found.filter(|&(start, found)| {
            page.checked_add(length).is_some_and(|end| end <= start + found)
        }) else {
            return false;
        };
        self.remove(start, found);
        self.add(start, page - start);
        self.add(page + length, start + found - page - length);
        true
    }

    /// Returns pages to the free runs, merging neighbours.
    pub fn insert(&mut self, mut page: u64, mut length: u64) {
        if let Some((&before, &found)) = self.by_page.range(..page).next_back()
            && before + found == page
        {
            self.remove(before, found);
            page = before;
            length += found;
        }
        if let Some(&found) = self.by_page.get(&(page + length)) {
            self.remove(page + length, found);
            length += found;
        }
        self.add(page, length);
    }

    fn add(&mut self, page: u64, length: u64) {
        if length > 0 {
            self.by_page.insert(page, length);
            self.by_length.insert((length, page));
            self.pages += length;
        }
    }

    fn remove(&mut self, page: u64, length: u64) {
        self.by_page.remove(&page);
        self.by_length.remove(&(length, page));
        self.pages -= length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_testkit::rng::Rng;

    /// Compares with a model of one flag per page.
    #[test]
    fn agrees_with_a_bitmap() {
        const PAGES: usize = 200;
        let mut rng = Rng::new(11);
        let mut free = FreeRuns::default();
        let mut model = [false; PAGES];
        for _ in 0..20_000 {
            let length = 1 + rng.below(12) as usize;
            let page = rng.below((PAGES - length) as u64) as usize;
            let range = page..page + length;
            let all = |model: &[bool; PAGES], want| {
                model[page..page + length].iter().all(|&is_free| is_free == want)
            };
            match rng.below(3) {
                0 if all(&model, false) => {
                    free.insert(page as u64, length as u64);
                    model[range].fill(true);
                }
                1 => {
                    let can = all(&model, true);
                    assert_eq!(free.take_at(page as u64, length as u64), can);
                    if can {
                        model[range].fill(false);
                    }
                }
                _ => {
                    let align = 1 << rng.below(4);
                    let found = free.take(length as u64, |page| page.wrapping_neg() % align);
                    let fits = |at: usize| {
                        at.is_multiple_of(align as usize)
                            && model[at..at + length].iter().all(|&free| free)
                    };
                    assert_eq!(found.is_some(), (0..=PAGES - length).any(fits));
                    if let Some(found) = found {
                        assert!(fits(found as usize));
                        model[found as usize..][..length].fill(false);
                    }
                }
            }
            assert_eq!(free.pages(), model.iter().filter(|&&is_free| is_free).count() as u64);
            let longest = model.split(|&is_free| !is_free).map(<[bool]>::len).max().unwrap_or(0);
            assert_eq!(free.longest(), longest as u64);
        }
    }

    #[test]
    fn the_lowest_of_the_tightest_is_taken() {
        let mut free = FreeRuns::default();
        for (page, length) in [(0, 9), (20, 3), (30, 3), (40, 2)] {
            free.insert(page, length);
        }
        assert_eq!(free.take(3, |_| 0), Some(20));
        assert_eq!(free.take(1, |_| 0), Some(40));
        assert_eq!(free.take(4, |_| 0), Some(0));
    }
}
