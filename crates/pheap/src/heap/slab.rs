//! Slabs: pages of equally sized blocks, preceded by a header with one bit per block.
//!
//! The header is in the slab's own first page, so that allocating a block dirties the page that the
//! program is about to write anyway. Slabs are not linked to each other: links would dirty
//! additional pages.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::{Damage, HeapError, NotAllocated};
use super::layout::PAGE_BYTES;
use super::memory::Memory;
use super::size_class::{SLAB_HEADER_BYTES, SizeClass};

const MAGIC: u32 = u32::from_le_bytes(*b"Slab");
const WORDS: usize = 4;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawSlab {
    magic: U32,
    class: u8,
    reserved: [u8; 3],
    page: U64,
    /// Bit `i` of word `i / 64` is set while block `i` is allocated.
    allocated: [U64; WORDS],
    reserved_end: [u8; 16],
}

const ALLOCATED_OFFSET: u64 = 16;
const _: () = {
    assert!(size_of::<RawSlab>() == SLAB_HEADER_BYTES as usize);
    assert!(std::mem::offset_of!(RawSlab, allocated) == ALLOCATED_OFFSET as usize);
};

/// The bits of a bitmap word that correspond to blocks.
fn blocks_in_word(class: SizeClass, index: usize) -> u64 {
    match class.blocks().saturating_sub(64 * index as u64) {
        64.. => u64::MAX,
        some => (1 << some) - 1,
    }
}

/// A slab's header, decoded and validated. Changes are written to the object immediately.
#[derive(Debug)]
pub(crate) struct Slab {
    page: u64,
    class: SizeClass,
    allocated: [u64; WORDS],
}

impl Slab {
    /// Creates an empty slab in free pages.
    pub fn format(memory: &Memory, page: u64, class: SizeClass) -> Result<(), HeapError> {
        let raw = RawSlab {
            magic: U32::new(MAGIC),
            class: class.number(),
            reserved: [0; 3],
            page: U64::new(page),
            allocated: [U64::ZERO; WORDS],
            reserved_end: [0; 16],
        };
        memory.store(page * PAGE_BYTES, raw)
    }

    /// Reads the slab of a class that starts at a page.
    pub fn read(memory: &Memory, page: u64, class: SizeClass) -> Result<Slab, HeapError> {
        let offset_bytes = page * PAGE_BYTES;
        // The whole slab must be inside the memory.
        memory.at(offset_bytes, class.slab_pages() * PAGE_BYTES)?;
        let raw: RawSlab = memory.load(offset_bytes)?;
        let slab = Slab { page, class, allocated: raw.allocated.map(|word| word.get()) };
        let is_it = raw.magic.get() == MAGIC
            && raw.class == class.number()
            && raw.page.get() == page
            && raw.reserved == [0; 3]
            && raw.reserved_end == [0; 16]
            && (0..WORDS).all(|index| slab.allocated[index] & !blocks_in_word(class, index) == 0);
        if is_it {
            Ok(slab)
        } else {
            Err(HeapError::Damaged { offset_bytes, damage: Damage::Slab })
        }
    }

    pub fn live(&self) -> u64 {
        self.allocated.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    pub fn free(&self) -> u64 {
        self.class.blocks() - self.live()
    }

    pub fn is_allocated(&self, block: u64) -> bool {
        self.allocated[(block / 64) as usize] >> (block % 64) & 1 != 0
    }

    /// Allocates the first free block. Returns its offset, or `None` if the slab is full.
    pub fn take(&mut self, memory: &Memory) -> Result<Option<u64>, HeapError> {
        let first_free = |index: usize| {
            let free = !self.allocated[index] & blocks_in_word(self.class, index);
            (free != 0).then(|| 64 * index as u64 + u64::from(free.trailing_zeros()))
        };
        let Some(block) = (0..WORDS).find_map(first_free) else { return Ok(None) };
        self.flip(memory, block)?;
        Ok(Some(self.block_offset(block)))
    }

    /// Frees an allocated block.
    pub fn give_back(&mut self, memory: &Memory, block: u64) -> Result<(), HeapError> {
        debug_assert!(self.is_allocated(block));
        self.flip(memory, block)
    }

    fn flip(&mut self, memory: &Memory, block: u64) -> Result<(), HeapError> {
        let index = (block / 64) as usize;
        let word = self.allocated[index] ^ (1 << (block % 64));
        let place = self.page * PAGE_BYTES + ALLOCATED_OFFSET + 8 * index as u64;
        memory.store(place, U64::new(word))?;
        self.allocated[index] = word;
        Ok(())
    }

    /// The allocated block that starts at an offset inside the slab.
    pub fn block_at(&self, offset: u64) -> Result<u64, NotAllocated> {
        let within = offset - self.page * PAGE_BYTES;
        let Some(within) = within.checked_sub(SLAB_HEADER_BYTES) else {
            return Err(NotAllocated::Metadata);
        };
        let block = within / self.class.block_bytes();
        if block >= self.class.blocks() {
            return Err(NotAllocated::Metadata);
        }
        if !self.is_allocated(block) {
            return Err(NotAllocated::Free);
        }
        if within.is_multiple_of(self.class.block_bytes()) {
            Ok(block)
        } else {
            Err(NotAllocated::Interior)
        }
    }

    fn block_offset(&self, block: u64) -> u64 {
        self.page * PAGE_BYTES + SLAB_HEADER_BYTES + block * self.class.block_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;

    #[test]
    fn blocks_are_taken_from_the_first_on() {
        let mut bytes = [0u8; 4096];
        // SAFETY: the array outlives the memory and is not accessed otherwise while it is used.
        let memory = unsafe { Memory::new(NonNull::from(&mut bytes).cast(), 4096) };
        for class in [16, 64, 1344].map(|size| SizeClass::for_size(size, 1).unwrap()) {
            Slab::format(&memory, 0, class).unwrap();
            let mut slab = Slab::read(&memory, 0, class).unwrap();
            for block in 0..class.blocks() {
                let offset = SLAB_HEADER_BYTES + block * class.block_bytes();
                assert_eq!(slab.take(&memory), Ok(Some(offset)));
                assert_eq!(slab.block_at(offset), Ok(block));
            }
            assert_eq!((slab.take(&memory), slab.free()), (Ok(None), 0));
            slab.give_back(&memory, 1).unwrap();
            let mut again = Slab::read(&memory, 0, class).unwrap();
            assert_eq!((again.free(), again.is_allocated(1)), (1, false));
            assert!(again.take(&memory).unwrap().is_some());
        }
    }

    /// Otherwise a block outside the memory would be handed out.
    #[test]
    fn a_slab_that_ends_outside_is_damaged() {
        let mut bytes = [0u8; 4 * 4096];
        let class = SizeClass::for_size(2304, 1).unwrap();
        // SAFETY: the array outlives the memory and is not accessed otherwise while it is used.
        let memory = unsafe { Memory::new(NonNull::from(&mut bytes).cast(), 4 * 4096) };
        Slab::format(&memory, 0, class).unwrap();
        assert!(Slab::read(&memory, 0, class).is_ok());
        assert!(Slab::read(&memory.with_len(3 * 4096), 0, class).is_err());
    }
}
