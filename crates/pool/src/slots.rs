//! Slots as structures over them see them: read as of one moment, changed all at once or not at all.
//!
//! Directories, run lists and byte chains are written against these two traits, and know of nothing else: a
//! [`Transaction`](crate::Transaction) is both of them, a reader's look at the metadata is the first, and a map in memory serves their
//! tests.

use crate::error::Result;
use crate::format::inode::SlotBytes;

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
}

impl<S: ReadSlots + ?Sized> ReadSlots for &S {
    fn slot(&self, number: u64) -> Result<SlotBytes> {
        (**self).slot(number)
    }

    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<()> {
        (**self).load(number, into)
    }
}

/// Changes slots. What was put is what is read from then on.
pub trait ChangeSlots: ReadSlots {
    /// Puts the bytes of a slot, sealed.
    fn put(&mut self, number: u64, bytes: SlotBytes);

    /// Takes a free slot for a part or an inode. Until something is put there it stays free.
    ///
    /// # Errors
    /// [`PoolError::NoFreeInode`](crate::PoolError::NoFreeInode).
    fn take_slot(&mut self) -> Result<u64>;

    /// Makes a slot free.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn give_back(&mut self, number: u64) -> Result<()>;
}
