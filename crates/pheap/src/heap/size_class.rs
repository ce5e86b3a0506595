//! Size classes of small allocations.
//!
//! A slab is one page with a header of 64 bytes, and a class's blocks fill the rest: so block sizes
//! are not powers of two but divisions of 4032 bytes. An allocation then dirties one page, header
//! included. Only the largest classes, of which too few blocks would fit in one page, have slabs of
//! four pages.
//!
//! Allocations larger than the largest class, or aligned to more than 64 bytes, get whole pages.

/// Size of a slab's header, which precedes its blocks.
pub(crate) const SLAB_HEADER_BYTES: u64 = 64;
/// The largest alignment of a block.
const MAX_BLOCK_ALIGN: u64 = 64;
const GRANULE_BYTES: u64 = 16;

/// Block size, and pages per slab.
const CLASSES: [(u16, u8); 26] = [
    (16, 1),
    (32, 1),
    (48, 1),
    (64, 1),
    (80, 1),
    (96, 1),
    (112, 1),
    (128, 1),
    (160, 1),
    (192, 1),
    (224, 1),
    (256, 1),
    (288, 1),
    (336, 1),
    (400, 1),
    (448, 1),
    (496, 1),
    (576, 1),
    (672, 1),
    (800, 1),
    (1008, 1),
    (1344, 1),
    (2016, 1),
    (2304, 4),
    (2720, 4),
    (3264, 4),
];

/// The number of classes.
pub(crate) const CLASS_COUNT: usize = CLASSES.len();
/// The largest block size.
pub(crate) const MAX_BLOCK_BYTES: u64 = CLASSES[CLASS_COUNT - 1].0 as u64;
/// The most pages a slab has.
pub(crate) const MAX_SLAB_PAGES: u64 = 4;

/// The smallest class for each number of granules.
const BY_GRANULES: [u8; (MAX_BLOCK_BYTES / GRANULE_BYTES) as usize + 1] = {
    let mut table = [0; (MAX_BLOCK_BYTES / GRANULE_BYTES) as usize + 1];
    let (mut granules, mut class) = (0, 0);
    while granules < table.len() {
        if granules as u64 * GRANULE_BYTES > CLASSES[class].0 as u64 {
            class += 1;
        }
        table[granules] = class as u8;
        granules += 1;
    }
    table
};

/// A size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SizeClass(u8);

impl SizeClass {
    /// The smallest class with this size and alignment; `None` if whole pages are needed.
    pub fn for_size(size: u64, align: u64) -> Option<SizeClass> {
        if size > MAX_BLOCK_BYTES || align > MAX_BLOCK_ALIGN {
            return None;
        }
        let first = BY_GRANULES[size.div_ceil(GRANULE_BYTES) as usize];
        // The header's size is the largest alignment, so a block is aligned if its size is a
        // multiple.
        (first..CLASS_COUNT as u8)
            .map(SizeClass)
            .find(|class| class.block_bytes().is_multiple_of(align))
    }

    /// The class with this number.
    pub fn from_number(number: u8) -> Option<SizeClass> {
        (usize::from(number) < CLASS_COUNT).then_some(SizeClass(number))
    }

    pub fn number(self) -> u8 {
        self.0
    }

    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = SizeClass> {
        (0..CLASS_COUNT as u8).map(SizeClass)
    }

    pub fn block_bytes(self) -> u64 {
        CLASSES[usize::from(self.0)].0.into()
    }

    pub fn slab_pages(self) -> u64 {
        CLASSES[usize::from(self.0)].1.into()
    }

    /// Blocks in a slab.
    pub fn blocks(self) -> u64 {
        (self.slab_pages() * super::layout::PAGE_BYTES - SLAB_HEADER_BYTES) / self.block_bytes()
    }

    /// Free blocks from which on a slab is marked as having room. A slab marked full has fewer; see
    /// the module documentation of the heap.
    pub fn room_worth_noting(self) -> u64 {
        (self.blocks() / 8).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_the_smallest_class_that_holds_it() {
        for size in 0..=MAX_BLOCK_BYTES {
            for align in [1, 2, 4, 8, 16, 32, 64] {
                let class = SizeClass::for_size(size, align);
                let expected = SizeClass::all()
                    .find(|class| class.block_bytes() >= size && class.block_bytes() % align == 0);
                assert_eq!(class, expected, "{size} aligned to {align}");
            }
        }
        assert_eq!(SizeClass::for_size(MAX_BLOCK_BYTES + 1, 1), None);
        assert_eq!(SizeClass::for_size(16, 128), None);
    }

    #[test]
    fn slabs_are_filled_and_their_bits_fit() {
        for class in SizeClass::all() {
            assert!(class.blocks() <= 256 && class.slab_pages() <= MAX_SLAB_PAGES);
            let payload = class.slab_pages() * 4096 - SLAB_HEADER_BYTES;
            let waste = payload - class.blocks() * class.block_bytes();
            assert!(waste * 20 <= payload, "{} wastes {waste}", class.block_bytes());
        }
    }
}
