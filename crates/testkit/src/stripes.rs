//! A byte array that several threads write concurrently, with exact expectations for each.
//!
//! Bytes belong to threads in blocks of [`BLOCK_BYTES`], assigned round-robin, so that threads
//! share every page but no byte: a thread knows its bytes at any time, whatever other threads write
//! next to them.
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

/// One thread's view: its own blocks as last written, those of other threads as they were
/// initially.
#[derive(Debug, Clone)]
pub struct Stripes {
    thread: usize,
    threads: usize,
    bytes: Vec<u8>,
}

impl Stripes {
    /// Creates the view of one of `threads` threads on bytes with this initial content.
    pub fn new(thread: usize, threads: usize, bytes: Vec<u8>) -> Stripes {
        assert!(thread < threads);
        Stripes { thread, threads, bytes }
    }

    /// Returns the thread that owns a byte.
    pub fn owner(&self, at: usize) -> usize {
        at / BLOCK_BYTES % self.threads
    }

    /// Returns start and length of the thread's block number `index`, counted from the block at or
    /// after `from`; shorter, or empty, at the end of the bytes.
    pub fn block(&self, from: usize, index: usize) -> (usize, usize) {
        let first = from.div_ceil(BLOCK_BYTES);
        let skip = (self.thread + self.threads - first % self.threads) % self.threads;
        let at = ((first + skip + index * self.threads) * BLOCK_BYTES).min(self.bytes.len());
        (at, BLOCK_BYTES.min(self.bytes.len() - at))
    }

    /// Returns the thread's blocks in a range, clipped to it.
    pub fn blocks_in(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let first = range.start / BLOCK_BYTES;
        (first..range.end.div_ceil(BLOCK_BYTES))
            .filter(|block| block % self.threads == self.thread)
            .map(move |block| {
                let start = (block * BLOCK_BYTES).max(range.start);
                start..((block + 1) * BLOCK_BYTES).min(range.end)
            })
    }

    /// Returns the thread's own bytes in a range within one of its blocks.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.check_own(&range);
        &self.bytes[range]
    }

    /// As [`Stripes::bytes`], mutable.
    pub fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.check_own(&range);
        &mut self.bytes[range]
    }

    fn check_own(&self, range: &Range<usize>) {
        let one_block =
            range.is_empty() || range.start / BLOCK_BYTES == (range.end - 1) / BLOCK_BYTES;
        assert!(one_block && self.owner(range.start) == self.thread, "another thread's bytes");
    }

    /// Returns whether bytes read from `at` on contain the thread's own bytes as expected.
    pub fn agrees_with(&self, at: usize, read: &[u8]) -> bool {
        self.blocks_in(at..at + read.len())
            .all(|block| self.bytes[block.clone()] == read[block.start - at..block.end - at])
    }

    /// Returns all bytes as in this thread's view.
    pub fn content(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the combination of all threads' views.
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
