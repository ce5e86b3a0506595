//! Slots as structures over them see them: read as of one moment, changed all at once or not at all.
//!
//! Directories, run lists and byte chains are written against these two traits, and know of nothing else: a
//! [`Transaction`](crate::Transaction) is both of them, a reader's look at the metadata is the first, and a map in memory serves their
//! tests.

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

    /// As [`slot`](ReadSlots::slot), with the bytes copied straight to where they are wanted: for lookups, of which a second copy
    /// would be the greater part. After an error the bytes are any.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    #[inline]
    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<()> {
        *into = self.slot(number)?;
        Ok(())
    }

    /// A word of a slot, as its bytes lie there: for who looks at a few fields, of which copying the slot would be the greater part.
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
    fn incarnation(&self, number: u64) -> Result<u64> {
        match slot::has_incarnation(self.word(number, 0)?) {
            true => Ok(u64::from_le_bytes(self.word(number, slot::INCARNATION_WORD)?)),
            false => Ok(0),
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

/// Changes slots. What was put is what is read from then on.
pub trait ChangeSlots: ReadSlots {
    /// Puts the bytes of a slot, sealed or not.
    fn put(&mut self, number: u64, bytes: SlotBytes);

    /// As [`ChangeSlots::put`], of bytes that `make` makes where they are kept: it gets any, and leaves those of the slot. If it fails, the
    /// change has to be given up.
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

    /// Takes a free slot for a part or an inode. Until something is put there it stays free.
    ///
    /// # Errors
    /// [`PoolError::NoFreeInode`](crate::PoolError::NoFreeInode).
    fn take_slot(&mut self) -> Result<u64>;

    /// The incarnation of an inode that is made now in this slot, which was taken: no other inode that ever was in the slot has it.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn new_incarnation(&self, number: u64) -> Result<u64>;

    /// Makes a slot free.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn give_back(&mut self, number: u64) -> Result<()>;

    /// Whether no process has an inode open, nor will have before the change is over: then it can be given back by the
    /// change that takes its last name. Where that is not known it stays, without a name, for a later change.
    fn claim_unused(&mut self, number: u64) -> bool {
        let _ = number;
        false
    }
}
