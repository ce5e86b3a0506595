//! The regions of a device that ever had a page in memory: those that the teardown of a store
//! visits.

use std::io;

use crate::lazy::LazyArray;
use crate::sync::{AtomicU64, Ordering};

/// A bit for each region, set by the first page that is loaded and never cleared.
pub(crate) struct LoadedRegions {
    words: LazyArray<AtomicU64>,
}

impl LoadedRegions {
    pub fn new(regions: usize) -> io::Result<LoadedRegions> {
        Ok(LoadedRegions { words: LazyArray::new(regions.div_ceil(64))? })
    }

    /// Marks a region that a page is loaded into. Costs one load, except the first time.
    #[inline]
    pub fn mark(&self, region: usize) {
        let (word, bit) = (&self.words[region / 64], 1 << (region % 64));
        // Relaxed: read only when no thread loads any more, which orders the read after all loads.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// The marked regions, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(index, word)| {
            let word = word.load(Ordering::Relaxed);
            (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| index * 64 + bit)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn regions_come_in_order() {
        let loaded = LoadedRegions::new(1000).unwrap();
        for region in [999, 0, 64, 63, 64] {
            loaded.mark(region);
        }
        assert_eq!(loaded.iter().collect::<Vec<_>>(), [0, 63, 64, 999]);
    }
}
