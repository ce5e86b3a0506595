//! The last written content of pages that still have a private copy, for trackers that compare.
//!
//! Such a tracker has to know of each private page whether it differs from what was last written.
//! The file cannot tell: if another process has changed it, a page that was not stored to here
//! would look dirty and overwrite that change. So the written content is remembered, as a hash of
//! 128 bits: two contents collide by chance once in 10^38.
//!
//! The hash is computed from the very bytes that were written, out of a buffer. A hash of the page,
//! taken before or after the write, may be of content that the file never had: a store in between
//! that is later undone would be lost.

use std::collections::HashMap;

use xxhash_rust::xxh3::xxh3_128;

use aquifer_vm::{PageIndex, PageRun};

/// Hashes of the last written content of pages.
#[derive(Debug, Default)]
pub(super) struct Contents(HashMap<PageIndex, u128>);

impl Contents {
    /// Records that a page was written with this content.
    pub fn note(&mut self, page: PageIndex, content: &[u8]) {
        self.0.insert(page, xxh3_128(content));
    }

    /// Whether a page with this content was stored to since it was written. True if nothing is
    /// recorded.
    pub fn is_changed(&self, page: PageIndex, content: &[u8]) -> bool {
        self.0.get(&page) != Some(&xxh3_128(content))
    }

    /// Forgets pages that have to be written again, or that no longer have a private copy.
    pub fn forget(&mut self, runs: &[PageRun]) {
        if !self.0.is_empty() {
            runs.iter().flat_map(|run| run.pages()).for_each(|page| _ = self.0.remove(&page));
        }
    }
}
