//! What was written last of pages that still have a private copy, for trackers that compare.
//!
//! Such a tracker asks of each private page whether it differs from what was written. The file cannot tell: another process
//! may have changed it meanwhile, and a page that nobody here has stored to would be written over that. So what was
//! written is remembered, as a hash of 128 bits: two contents share one by chance once in 10^38.
//!
//! The hash is of the very bytes that were written, out of a buffer. One of the page, a moment before or after, may be
//! of a content that the file never had: a store in between that is undone later would be lost.

use std::collections::HashMap;

use xxhash_rust::xxh3::xxh3_128;

use aquifer_vm::{PageIndex, PageRun};

/// Hashes of pages as they were written last.
#[derive(Debug, Default)]
pub(super) struct Contents(HashMap<PageIndex, u128>);

impl Contents {
    /// A page was written with this content.
    pub fn note(&mut self, page: PageIndex, content: &[u8]) {
        self.0.insert(page, xxh3_128(content));
    }

    /// Whether a page with this content was stored to since it was written. If nothing is known of it, it was.
    pub fn is_changed(&self, page: PageIndex, content: &[u8]) -> bool {
        self.0.get(&page) != Some(&xxh3_128(content))
    }

    /// These have to be written again, or have no private copy any more.
    pub fn forget(&mut self, runs: &[PageRun]) {
        if !self.0.is_empty() {
            runs.iter().flat_map(|run| run.pages()).for_each(|page| _ = self.0.remove(&page));
        }
    }
}
