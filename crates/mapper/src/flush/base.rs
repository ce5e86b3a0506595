//! The last written content of the private copies that stay after a flush.
//!
//! A copy that stays hides other processes' later writes to its page of the file. Writing the whole
//! copy again would overwrite them. So its written content is kept here, and the next flush writes
//! only the bytes that differ from it: those that were stored to. A store that does not change a
//! byte is not detected.
//!
//! Copies stay where stores cannot be kept out while they are dropped (the program has a pointer to
//! store through), where they are not durable yet, and where the program locks its memory. All
//! other copies are dropped by the flush and cost nothing here.

use std::collections::HashMap;
use std::ops::Range;
use std::ptr;

use aquifer_sys::memory::{self, Advice, SMALL_PAGE_BYTES};

use aquifer_vm::{PageIndex, PageRun};

/// Pages per chunk of memory: of the first chunk, and of the largest, which use huge pages.
/// Faulting memory in page by page costs more than copying to it.
const CHUNK_PAGES: [usize; 2] = [16, 2048];

/// The last written content of copies, by page.
#[derive(Debug, Default)]
pub(super) struct Bases {
    /// The place of each: a page of a chunk, used by it alone.
    places: HashMap<PageIndex, *mut u8>,
    /// Unused pages of chunks.
    free: Vec<*mut u8>,
    chunks: Vec<memory::Range>,
}

// SAFETY: `self` owns the chunks, and the pointers into them are only reached through it.
unsafe impl Send for Bases {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Bases {}

impl Bases {
    /// Records that a page was written with this content, and its copy stays.
    pub fn set(&mut self, page: PageIndex, content: &[u8]) {
        assert_eq!(content.len(), SMALL_PAGE_BYTES, "a page");
        let place = match self.places.get(&page) {
            Some(&place) => place,
            None => {
                let place = self.take();
                self.places.insert(page, place);
                place
            }
        };
        // SAFETY: `place` is a page of a chunk, used for this page alone.
        unsafe { ptr::copy_nonoverlapping(content.as_ptr(), place, SMALL_PAGE_BYTES) };
    }

    /// Takes an unused page of a chunk; its content is arbitrary.
    fn take(&mut self) -> *mut u8 {
        if self.free.is_empty() {
            let [first, largest] = CHUNK_PAGES;
            let pages = (first << self.chunks.len().min(usize::BITS as usize / 2)).min(largest);
            let len_bytes = pages * SMALL_PAGE_BYTES;
            let Ok(address) = memory::map_anonymous(len_bytes) else {
                let layout = std::alloc::Layout::array::<u8>(len_bytes).expect("a few megabytes");
                std::alloc::handle_alloc_error(layout);
            };
            if pages == largest {
                // SAFETY: mapped above. The advice is a hint.
                let _ = unsafe { memory::advise(address, len_bytes, Advice::HugePage) };
            }
            self.chunks.push(memory::Range { address, len_bytes });
            // In reverse, so that the first page is taken next.
            self.free.extend((0..pages).rev().map(|n| address.wrapping_add(n * SMALL_PAGE_BYTES)));
        }
        self.free.pop().expect("just filled")
    }

    /// Records that a part of a copy was filled from the file: it counts as written.
    pub fn take_in(&mut self, page: PageIndex, at: usize, bytes: &[u8]) {
        if let Some(&place) = self.places.get(&page) {
            // SAFETY: as in `set`; `self` is borrowed mutably, so this is the only reference.
            let base = unsafe { std::slice::from_raw_parts_mut(place, SMALL_PAGE_BYTES) };
            base[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    pub fn get(&self, page: PageIndex) -> Option<&[u8]> {
        let &place = self.places.get(&page)?;
        // SAFETY: as in `set`; nothing changes the page while `self` is borrowed.
        Some(unsafe { std::slice::from_raw_parts(place, SMALL_PAGE_BYTES) })
    }

    /// Whether any of these pages has a base.
    pub fn has_any(&self, run: PageRun) -> bool {
        !self.places.is_empty() && run.pages().any(|page| self.places.contains_key(&page))
    }

    /// Forgets pages that have to be written again whole, or that no longer have a copy.
    pub fn forget(&mut self, runs: &[PageRun]) {
        if self.places.is_empty() {
            return;
        }
        let pages = runs.iter().flat_map(|run| run.pages());
        self.free.extend(pages.filter_map(|page| self.places.remove(&page)));
        if self.places.is_empty() {
            self.give_back();
        }
    }

    fn give_back(&mut self) {
        self.free.clear();
        for chunk in self.chunks.drain(..) {
            // SAFETY: mapped by `take`, and no pointer into it is left.
            let _ = unsafe { memory::unmap(chunk.address, chunk.len_bytes) };
        }
    }
}

impl Drop for Bases {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Returns the ranges of offsets at which two contents differ.
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
    fn each_page_has_a_copy_of_its_own_until_it_is_forgotten() {
        let mut rng = Rng::new(2);
        let (mut bases, mut model) = (Bases::default(), HashMap::new());
        for round in 0..20_000u64 {
            let page = PageIndex(rng.below(3000));
            match rng.below(if round < 15_000 { 10 } else { 3 }) {
                0 => {
                    bases.forget(&[PageRun { first: page, count: 3 }]);
                    (0..3).for_each(|n| _ = model.remove(&PageIndex(page.0 + n)));
                }
                1 => {
                    bases.take_in(page, 100, &[9; 10]);
                    model.entry(page).and_modify(|(_, taken_in)| *taken_in = true);
                }
                _ => {
                    bases.set(page, &[round as u8; SMALL_PAGE_BYTES]);
                    model.insert(page, (round as u8, false));
                }
            }
            assert_eq!(bases.get(page).is_some(), model.contains_key(&page));
        }
        for (&page, &(value, taken_in)) in &model {
            let base = bases.get(page).unwrap();
            assert_eq!([base[0], base[99], base[110], base[4095]], [value; 4]);
            assert_eq!(base[100], if taken_in { 9 } else { value });
        }
        bases.forget(&[PageRun { first: PageIndex(0), count: 4000 }]);
        assert!(
            bases.chunks.is_empty() && !bases.has_any(PageRun { first: PageIndex(0), count: 4000 })
        );
    }

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
