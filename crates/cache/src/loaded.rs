//! Which regions of a device had a page in memory at any time: where a store that is emptied has to look.

use std::io;

use crate::lazy::LazyArray;
use crate::sync::{AtomicU64, Ordering};

/// A bit for each region, set by the first page that comes in and never cleared.
pub(crate) struct LoadedRegions {
    words: LazyArray<AtomicU64>,
}

impl LoadedRegions {
    pub fn new(regions: usize) -> io::Result<LoadedRegions> {
        Ok(LoadedRegions { words: LazyArray::new(regions.div_ceil(64))? })
    }

    /// A page of a region comes in. Costs a load, but for the first one.
    #[inline]
    pub fn mark(&self, region: usize) {
        let (word, bit) = (&self.words[region / 64], 1 << (region % 64));
        // Relaxed: it is asked for when no thread loads any more, which orders it behind all loads.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// The regions, in order.
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
