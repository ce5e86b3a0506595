//! The dirty pages of a device, as a bitmap sorted by construction.
//!
//! Aquila keeps dirty pages in red-black trees, one per core, and merges them by offset at
//! write-back. A bitmap with a summary needs no merging: it is sorted by position, marking is one
//! atomic OR on a word that 64 consecutive pages share, and walking a range skips 4,096 clean pages
//! with one load. It is a hint that errs on the side of dirty; the page word decides. A page is
//! marked before stores to it succeed, and so before its word says Dirty. It is unmarked while it
//! is Cleaning, when no thread can mark it.

use std::io;
use std::ops::Range;

use crate::lazy::LazyArray;
use crate::sync::{AtomicU64, Ordering};

const PAGES_PER_WORD: u64 = 64;
const PAGES_PER_SUMMARY_BIT: u64 = PAGES_PER_WORD * 64;

/// The dirty pages of one device.
pub struct DirtyMap {
    words: LazyArray<AtomicU64>,
    /// One bit for 64 words. Never cleared while a bit below may be set.
    summary: LazyArray<AtomicU64>,
}

impl DirtyMap {
    /// A map for `pages` pages, all clean.
    pub fn new(pages: u64) -> io::Result<DirtyMap> {
        let words = pages.div_ceil(PAGES_PER_WORD) as usize;
        Ok(DirtyMap {
            words: LazyArray::new(words)?,
            summary: LazyArray::new(words.div_ceil(64 * 64))?,
        })
    }

    /// Marks a page.
    pub fn mark(&self, page: u64) {
        let summary = page / PAGES_PER_SUMMARY_BIT;
        mark(
            &self.words[(page / PAGES_PER_WORD) as usize],
            1 << (page % PAGES_PER_WORD),
            &self.summary[(summary / 64) as usize],
            1 << (summary % 64),
        );
    }

    /// Unmarks a page. Its summary bit stays, which sometimes costs a walk 64 loads.
    pub fn unmark(&self, page: u64) {
        let word = (page / PAGES_PER_WORD) as usize;
        self.words[word].fetch_and(!(1 << (page % PAGES_PER_WORD)), Ordering::AcqRel);
    }

    /// Calls `visit` for every marked page of a range, in order, until it returns `false`.
    pub fn walk(&self, pages: Range<u64>, mut visit: impl FnMut(u64) -> bool) {
        let mut page = pages.start;
        while page < pages.end {
            let summary = page / PAGES_PER_SUMMARY_BIT;
            let group = self.summary[(summary / 64) as usize].load(Ordering::Acquire);
            if group >> (summary % 64) & 1 == 0 {
                page = (summary + 1) * PAGES_PER_SUMMARY_BIT;
                continue;
            }
            let word = page / PAGES_PER_WORD;
            let bits = self.words[word as usize].load(Ordering::Acquire) >> (page % PAGES_PER_WORD);
            if bits == 0 {
                page = (word + 1) * PAGES_PER_WORD;
                continue;
            }
            page += u64::from(bits.trailing_zeros());
            if page >= pages.end || !visit(page) {
                return;
            }
            page += 1;
        }
    }
}

/// Sets a page's bit and the summary bit above it.
///
/// The summary bit is set first, by every thread that finds it unset. If a thread left that to
/// another one that marks a page, a flush by the first thread could run before the bit is set and
/// miss its page. A set summary bit is never cleared.
pub(crate) fn mark(word: &AtomicU64, bit: u64, summary: &AtomicU64, summary_bit: u64) {
    // Acquire: what the thread that set the bit did before happens before this mark.
    if summary.load(Ordering::Acquire) & summary_bit == 0 {
        summary.fetch_or(summary_bit, Ordering::AcqRel);
    }
    // Release pairs with the acquire in `walk`.
    word.fetch_or(bit, Ordering::AcqRel);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn walks_in_order_and_within_the_range() {
        let map = DirtyMap::new(1 << 20).unwrap();
        for page in [0, 63, 64, 4095, 4096, 500_000, (1 << 20) - 1] {
            map.mark(page);
        }
        map.unmark(64);
        let collect = |range| {
            let mut seen = vec![];
            map.walk(range, |page| {
                seen.push(page);
                true
            });
            seen
        };
        assert_eq!(collect(0..1 << 20), [0, 63, 4095, 4096, 500_000, (1 << 20) - 1]);
        assert_eq!(collect(1..4096), [63, 4095]);
        assert_eq!(collect(4096..4097), [4096]);
        assert!(collect(64..4095).is_empty());
    }
}
