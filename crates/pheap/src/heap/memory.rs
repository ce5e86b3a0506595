//! Checked access to a heap's bytes by offset.
//!
//! Every access of the allocator to the object goes through this module and is checked against the
//! length, so that damaged metadata cannot make the allocator access memory outside the object.

use std::ptr::NonNull;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::error::{Damage, HeapError};
use super::layout::PAGE_BYTES;
use super::recorded::note_bytes;

/// Memory of a known length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    len_bytes: u64,
}

// SAFETY: an address and a length; the lock over the heap's state serializes access to the bytes.
unsafe impl Send for Memory {}

impl Memory {
    /// # Safety
    /// The range is readable as long as this is used, and writable if anything is stored. No other
    /// code modifies bytes while they are loaded or stored here.
    pub unsafe fn new(base: NonNull<u8>, len_bytes: u64) -> Memory {
        Memory { base, len_bytes }
    }

    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The same memory with another length, for which the contract of [`Memory::new`] must hold.
    pub fn with_len(self, len_bytes: u64) -> Memory {
        Memory { len_bytes, ..self }
    }

    /// The address of an offset, without a check.
    pub fn address(&self, offset: u64) -> u64 {
        (self.base.as_ptr() as u64).wrapping_add(offset)
    }

    /// The offset of an address inside the memory.
    pub fn offset(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.address(0))?;
        (offset < self.len_bytes).then_some(offset)
    }

    /// A pointer to `len` bytes at `offset`.
    pub fn at(&self, offset: u64, len: u64) -> Result<NonNull<u8>, HeapError> {
        match offset.checked_add(len) {
            // SAFETY: inside the memory, whose length fits an `isize` because it is mapped.
            Some(end) if end <= self.len_bytes => Ok(unsafe { self.base.add(offset as usize) }),
            _ => Err(HeapError::Damaged { offset_bytes: offset, damage: Damage::Outside }),
        }
    }

    pub fn load<T: FromBytes>(&self, offset: u64) -> Result<T, HeapError> {
        let place = self.at(offset, size_of::<T>() as u64)?;
        // SAFETY: inside the memory; any bytes are a valid `T`.
        Ok(unsafe { place.cast::<T>().read_unaligned() })
    }

    pub fn store<T: IntoBytes + Immutable>(&self, offset: u64, value: T) -> Result<(), HeapError> {
        let place = self.at(offset, size_of::<T>() as u64)?;
        note_bytes(place, size_of::<T>());
        // SAFETY: inside the memory.
        unsafe { place.cast::<T>().write_unaligned(value) };
        Ok(())
    }

    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), HeapError> {
        let len = target.len();
        let source = self.at(offset, len as u64)?;
        // SAFETY: inside the memory; the target is a separate buffer of the caller.
        unsafe { source.copy_to_nonoverlapping(NonNull::from(target).cast(), len) };
        Ok(())
    }

    pub fn fill(&self, offset: u64, len: u64, byte: u8) -> Result<(), HeapError> {
        let place = self.at(offset, len)?;
        note_bytes(place, len as usize);
        // SAFETY: inside the memory.
        unsafe { place.write_bytes(byte, len as usize) };
        Ok(())
    }

    /// Zeroes bytes, storing only to pages that are not already zero: pages of a fresh object stay
    /// clean.
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), HeapError> {
        self.at(offset, len)?;
        let end = offset + len;
        let mut from = offset;
        while from < end {
            let until = (from / PAGE_BYTES + 1).saturating_mul(PAGE_BYTES).min(end);
            if !self.is_zero(from, until)? {
                self.fill(from, until - from, 0)?;
            }
            from = until;
        }
        Ok(())
    }

    fn is_zero(&self, mut from: u64, until: u64) -> Result<bool, HeapError> {
        while from + 8 <= until {
            if self.load::<u64>(from)? != 0 {
                return Ok(false);
            }
            from += 8;
        }
        while from < until {
            if self.load::<u8>(from)? != 0 {
                return Ok(false);
            }
            from += 1;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_is_reached() {
        let mut bytes = [0xaau8; 64];
        let inner = NonNull::new(bytes[16..48].as_mut_ptr()).unwrap();
        // SAFETY: the array outlives the memory and is not accessed otherwise while it is used.
        let memory = unsafe { Memory::new(inner, 32) };
        assert!(memory.store(24, 1u64).is_ok());
        for offset in [25, 32, 33, u64::MAX, u64::MAX - 7] {
            assert!(memory.store(offset, 2u64).is_err(), "{offset}");
            assert!(memory.load::<u64>(offset).is_err(), "{offset}");
            assert!(memory.zero(offset, 8).is_err(), "{offset}");
            assert!(memory.fill(offset, 8, 0).is_err(), "{offset}");
        }
        memory.zero(0, 32).unwrap();
        assert!(bytes[..16].iter().chain(&bytes[48..]).all(|&byte| byte == 0xaa));
        assert!(bytes[16..48].iter().all(|&byte| byte == 0));
    }
}
