//! What private copies held when they were written last, for those that stay.
//!
//! A copy that stays hides what others write to its page of the file from then on. Written once more as a whole, it would take
//! their bytes back. So its content is kept beside it, and the next time only the bytes that differ from that are written: those
//! that were stored to. A store of what the copy holds already changes nothing and is none.
//!
//! Copies stay where nothing can keep stores out while they are dropped (the program has a pointer to store through), where they
//! are not durable yet, and where the program locks its memory. All others go with the flush, and cost nothing here.

use std::collections::HashMap;
use std::ops::Range;

use aquifer_sys::memory::SMALL_PAGE_BYTES;

use crate::{PageIndex, PageRun};

/// Copies as they were written last, by page.
#[derive(Debug, Default)]
pub(super) struct Bases(HashMap<PageIndex, Box<[u8]>>);

impl Bases {
    /// A page was written with this content, and its copy stays.
    pub fn set(&mut self, page: PageIndex, content: &[u8]) {
        assert_eq!(content.len(), SMALL_PAGE_BYTES, "a page");
        match self.0.get_mut(&page) {
            Some(base) => base.copy_from_slice(content),
            None => _ = self.0.insert(page, content.into()),
        }
    }

    /// A part of a copy was filled from the file: it counts as written.
    pub fn take_in(&mut self, page: PageIndex, at: usize, bytes: &[u8]) {
        if let Some(base) = self.0.get_mut(&page) {
            base[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    pub fn get(&self, page: PageIndex) -> Option<&[u8]> {
        self.0.get(&page).map(|base| &**base)
    }

    /// Whether there is one of any of these pages.
    pub fn has_any(&self, run: PageRun) -> bool {
        !self.0.is_empty() && run.pages().any(|page| self.0.contains_key(&page))
    }

    /// These have to be written again as a whole, or have no copy any more.
    pub fn forget(&mut self, runs: &[PageRun]) {
        if !self.0.is_empty() {
            runs.iter().flat_map(|run| run.pages()).for_each(|page| _ = self.0.remove(&page));
        }
    }
}

/// Where two contents differ: ranges of offsets.
pub(super) fn differences(before: &[u8], now: &[u8]) -> Vec<Range<usize>> {
    const BLOCK: usize = 64;
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (index, (old, new)) in before.chunks(BLOCK).zip(now.chunks(BLOCK)).enumerate() {
        if old == new {
            continue;
        }
        for (offset, _) in old.iter().zip(new).enumerate().filter(|(_, (old, new))| old != new) {
            let at = index * BLOCK + offset;
            match ranges.last_mut() {
                Some(last) if last.end == at => last.end = at + 1,
                _ => ranges.push(at..at + 1),
            }
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_testkit::rng::Rng;

    #[test]
    fn differences_are_the_bytes_that_differ_in_runs() {
        let mut rng = Rng::new(1);
        for round in 0..200 {
            let before: Vec<u8> = (0..SMALL_PAGE_BYTES).map(|_| rng.below(3) as u8).collect();
            let mut now = before.clone();
            for _ in 0..rng.below(20) {
                let at = rng.below(4000) as usize;
                now[at..at + 1 + rng.below(90) as usize].fill(rng.below(3) as u8);
            }
            let ranges = differences(&before, &now);
            let mut seen = vec![false; SMALL_PAGE_BYTES];
            ranges.iter().for_each(|range| seen[range.clone()].fill(true));
            assert!(ranges.windows(2).all(|two| two[0].end < two[1].start), "round {round}");
            for at in 0..SMALL_PAGE_BYTES {
                assert_eq!(seen[at], before[at] != now[at], "round {round}, byte {at}");
            }
        }
    }
}
