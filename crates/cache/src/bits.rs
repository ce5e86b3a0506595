//! A bit for each page or region of a device, in memory that is taken where bits are set.

use std::io;

use crate::lazy::LazyArray;
use crate::sync::{AtomicU64, Ordering};

/// Bits that threads set and clear concurrently.
///
/// Relaxed throughout: a bit publishes nothing. Its user orders the accesses that must be ordered.
pub(crate) struct Bits {
    words: LazyArray<AtomicU64>,
}

impl Bits {
    /// Creates `count` bits, all clear.
    pub fn new(count: usize) -> io::Result<Bits> {
        Ok(Bits { words: LazyArray::new(count.div_ceil(64))? })
    }

    fn place(&self, index: usize) -> (&AtomicU64, u64) {
        (&self.words[index / 64], 1 << (index % 64))
    }

    #[inline]
    pub fn is_set(&self, index: usize) -> bool {
        let (word, bit) = self.place(index);
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// Sets a bit. Costs one load if it is set already.
    #[inline]
    pub fn set(&self, index: usize) {
        let (word, bit) = self.place(index);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Clears a bit, and returns whether this call did. Costs one load if it is clear already.
    #[inline]
    pub fn clear(&self, index: usize) -> bool {
        let (word, bit) = self.place(index);
        word.load(Ordering::Relaxed) & bit != 0
            && word.fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }

    /// The set bits, in order.
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
    fn bits_come_in_order_and_are_cleared_once() {
        let bits = Bits::new(1000).unwrap();
        for index in [999, 0, 64, 63, 64] {
            bits.set(index);
        }
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 63, 64, 999]);
        assert!(bits.clear(64) && !bits.clear(64) && !bits.is_set(64) && bits.is_set(63));
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 63, 999]);
    }
}
