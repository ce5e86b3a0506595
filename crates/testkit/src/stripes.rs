//! A byte array that several threads write at once, with exact expectations for each.
//!
//! Bytes belong to threads in blocks of [`BLOCK_BYTES`], dealt out in turn, so that every page is shared and
//! no byte is: a thread knows what its bytes are at any time, whatever the others do beside them.
//!
//! ```
//! use aquifer_testkit::stripes::Stripes;
//!
//! let [mut one, mut other] = [0, 1].map(|thread| Stripes::new(thread, 2, vec![0; 4096]));
//! let (at, len) = one.block(0, 3);
//! one.bytes_mut(at..at + len).fill(1);
//! let (at, len) = other.block(0, 3);
//! other.bytes_mut(at..at + len).fill(2);
//! assert!(one.agrees_with(0, &one.content()[..512]));
//! let all = Stripes::merge(&[one, other]);
//! assert_eq!((all[6 * 64], all[7 * 64]), (1, 2));
//! ```

use std::ops::Range;

/// Length of a block.
pub const BLOCK_BYTES: usize = 64;

/// One thread's view: its own blocks are what it wrote last, the others' what they were at first.
#[derive(Debug, Clone)]
pub struct Stripes {
    thread: usize,
    threads: usize,
    bytes: Vec<u8>,
}

impl Stripes {
    /// The view of one of `threads` threads on bytes that start as given.
    pub fn new(thread: usize, threads: usize, bytes: Vec<u8>) -> Stripes {
        assert!(thread < threads);
        Stripes { thread, threads, bytes }
    }

    /// Whose byte this is.
    pub fn owner(&self, at: usize) -> usize {
        at / BLOCK_BYTES % self.threads
    }

    /// Place and length of the thread's block number `index` counted from the block at or after `from`; shorter, or
    /// empty, at the end of the bytes.
    pub fn block(&self, from: usize, index: usize) -> (usize, usize) {
        let first = from.div_ceil(BLOCK_BYTES);
        let skip = (self.thread + self.threads - first % self.threads) % self.threads;
        let at = ((first + skip + index * self.threads) * BLOCK_BYTES).min(self.bytes.len());
        (at, BLOCK_BYTES.min(self.bytes.len() - at))
    }

    /// The thread's blocks that lie in a range, cut to it.
    pub fn blocks_in(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let first = range.start / BLOCK_BYTES;
        (first..range.end.div_ceil(BLOCK_BYTES))
            .filter(|block| block % self.threads == self.thread)
            .map(move |block| {
                let start = (block * BLOCK_BYTES).max(range.start);
                start..((block + 1) * BLOCK_BYTES).min(range.end)
            })
    }

    /// The thread's own bytes in a range within one of its blocks.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.check_own(&range);
        &self.bytes[range]
    }

    /// As [`Stripes::bytes`], to change them.
    pub fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.check_own(&range);
        &mut self.bytes[range]
    }

    fn check_own(&self, range: &Range<usize>) {
        let one_block =
            range.is_empty() || range.start / BLOCK_BYTES == (range.end - 1) / BLOCK_BYTES;
        assert!(one_block && self.owner(range.start) == self.thread, "another thread's bytes");
    }

    /// Whether bytes read from `at` on have the thread's own as they must be.
    pub fn agrees_with(&self, at: usize, read: &[u8]) -> bool {
        self.blocks_in(at..at + read.len())
            .all(|block| self.bytes[block.clone()] == read[block.start - at..block.end - at])
    }

    /// All bytes as this thread knows them.
    pub fn content(&self) -> &[u8] {
        &self.bytes
    }

    /// What all threads' views come to.
    pub fn merge(views: &[Stripes]) -> Vec<u8> {
        let mut merged = views[0].bytes.clone();
        for view in views {
            for block in view.blocks_in(0..merged.len()) {
                merged[block.clone()].copy_from_slice(&view.bytes[block]);
            }
        }
        merged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_owner() {
        let len = 1000;
        let views = [0, 1, 2].map(|thread| Stripes::new(thread, 3, vec![0; len]));
        let mut owned = vec![0; len];
        for view in &views {
            for block in view.blocks_in(0..len) {
                assert!(block.clone().all(|at| view.owner(at) == view.thread));
                owned[block].iter_mut().for_each(|count| *count += 1);
            }
        }
        assert!(owned.iter().all(|&count| count == 1));
    }

    #[test]
    fn blocks_are_found_from_anywhere() {
        let view = Stripes::new(1, 3, vec![0; 1024]);
        assert_eq!(view.block(0, 0), (64, 64));
        assert_eq!(view.block(64, 0), (64, 64));
        assert_eq!(view.block(65, 0), (256, 64));
        assert_eq!(view.block(0, 2), (448, 64));
        assert_eq!(view.block(1000, 0), (1024, 0));
        assert_eq!(view.blocks_in(70..300).collect::<Vec<_>>(), [70..128, 256..300]);
    }
}
