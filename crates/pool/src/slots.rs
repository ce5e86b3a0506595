//! The interface to slots for structures built on them: reads are of one moment, changes are
//! atomic.
//!
//! Directories, run lists and byte chains depend only on these two traits: a
//! [`Transaction`](crate::Transaction) implements both, a reader's view of the metadata implements
//! the first, and a map in memory serves their tests.

use crate::error::Result;
use crate::format::inode::{SLOT_BYTES, SlotBytes};
use crate::format::slot;

/// Reads slots, all as of one moment.
pub trait ReadSlots {
    /// The bytes of a slot; zeros for one that does not exist.
    ///
    /// # Errors
    /// [`PoolError`](crate::PoolError) if the metadata cannot be read.
    fn slot(&self, number: u64) -> Result<SlotBytes>;

    /// As [`slot`](ReadSlots::slot), with the bytes copied directly to `into`: for lookups, where a
    /// second copy would dominate the cost. After an error the bytes are undefined.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    #[inline]
    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<()> {
        *into = self.slot(number)?;
        Ok(())
    }

    /// A word of a slot, in the byte order of the slot: for callers that read a few fields, where
    /// copying the slot would dominate the cost.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    #[inline]
    fn word(&self, number: u64, index: usize) -> Result<[u8; 8]> {
        Ok(slot::word(&self.slot(number)?, index))
    }

    /// How often a slot has been used, if it is an inode or free; 0 for a part.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn generation(&self, number: u64) -> Result<u64> {
        if slot::has_generation(self.word(number, 0)?) {
            Ok(u64::from_le_bytes(self.word(number, slot::INCARNATION_WORD)?))
        } else {
            Ok(0)
        }
    }
}

impl<S: ReadSlots + ?Sized> ReadSlots for &S {
    fn slot(&self, number: u64) -> Result<SlotBytes> {
        (**self).slot(number)
    }

    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<()> {
        (**self).load(number, into)
    }

    fn word(&self, number: u64, index: usize) -> Result<[u8; 8]> {
        (**self).word(number, index)
    }
}

/// Changes slots. Later reads return what was put.
pub trait ChangeSlots: ReadSlots {
    /// Puts the bytes of a slot, sealed or not.
    fn put(&mut self, number: u64, bytes: SlotBytes);

    /// As [`ChangeSlots::put`], with bytes that `make` writes in place: it gets undefined bytes,
    /// and must leave those of the slot. If it fails, the change must be abandoned.
    ///
    /// # Errors
    /// Those of `make`.
    #[inline]
    fn put_with<E>(
        &mut self,
        number: u64,
        make: impl FnOnce(&mut SlotBytes) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let mut bytes = [0; SLOT_BYTES];
        make(&mut bytes)?;
        self.put(number, bytes);
        Ok(())
    }

    /// Takes a free slot for a part or an inode. It stays free until something is put there.
    ///
    /// # Errors
    /// [`PoolError::NoFreeInode`](crate::PoolError::NoFreeInode).
    fn take_slot(&mut self) -> Result<u64>;

    /// The generation of an inode that is created now in this slot, which must have been taken:
    /// unique among all inodes that the slot ever had.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn new_generation(&self, number: u64) -> Result<u64>;

    /// Frees a slot.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn give_back(&mut self, number: u64) -> Result<()>;

    /// Whether no process has an inode open, nor will have before the change ends: then the change
    /// that removes its last name can free it. If this is not known, the inode stays, without a
    /// name, for a later change.
    fn claim_unused(&mut self, number: u64) -> bool {
        let _ = number;
        false
    }
}
