//! The interface to slots for structures built on them: reads are of one moment, changes are
//! atomic.
//!
//! Directories, file tables and byte chains depend only on these two traits: a transaction of a pool
//! implements both, a reader's view of the metadata implements the first, and a map in memory serves
//! their tests.

use crate::file::MAX_FILE_BYTES;
use crate::inode::MAX_NAME_BYTES;
use crate::slot_bytes::{self, SLOT_BYTES, SlotBytes};

/// Reads slots, all as of one moment.
pub trait ReadSlots {
    /// Why slots cannot be read or changed, or what is wrong with a structure made of them.
    type Error: From<StructureError>;

    /// The bytes of a slot; zeros for one that does not exist.
    ///
    /// # Errors
    /// [`ReadSlots::Error`] if the metadata cannot be read.
    fn slot(&self, number: u64) -> Result<SlotBytes, Self::Error>;

    /// As [`slot`](ReadSlots::slot), with the bytes copied directly to `into`: for lookups, where a
    /// second copy would dominate the cost. After an error the bytes are undefined.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    #[inline]
    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<(), Self::Error> {
        *into = self.slot(number)?;
        Ok(())
    }

    /// A word of a slot, in the byte order of the slot: for callers that read a few fields, where
    /// copying the slot would dominate the cost.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    #[inline]
    fn word(&self, number: u64, index: usize) -> Result<[u8; 8], Self::Error> {
        Ok(slot_bytes::word(&self.slot(number)?, index))
    }

    /// How often a slot has been used, if it is an inode or free; 0 for a part.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn generation(&self, number: u64) -> Result<u64, Self::Error> {
        if has_generation(self.word(number, 0)?) {
            Ok(u64::from_le_bytes(self.word(number, slot_bytes::INCARNATION_WORD)?))
        } else {
            Ok(0)
        }
    }
}

/// Whether a slot with this first word has a generation.
#[inline]
fn has_generation(first_word: [u8; 8]) -> bool {
    matches!(first_word[..4].try_into(), Ok(crate::inode::INODE_MAGIC | crate::file::MAGIC))
}

impl<S: ReadSlots + ?Sized> ReadSlots for &S {
    type Error = S::Error;

    fn slot(&self, number: u64) -> Result<SlotBytes, Self::Error> {
        (**self).slot(number)
    }

    fn load(&self, number: u64, into: &mut SlotBytes) -> Result<(), Self::Error> {
        (**self).load(number, into)
    }

    fn word(&self, number: u64, index: usize) -> Result<[u8; 8], Self::Error> {
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
        make: impl FnOnce(&mut SlotBytes) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut bytes = [0; SLOT_BYTES];
        make(&mut bytes)?;
        self.put(number, bytes);
        Ok(())
    }

    /// Takes a free slot for a part or an inode. It stays free until something is put there.
    ///
    /// # Errors
    /// [`ReadSlots::Error`] if all slots are in use.
    fn take_slot(&mut self) -> Result<u64, Self::Error>;

    /// The generation of an inode that is created now in this slot, which must have been taken:
    /// unique among all inodes that the slot ever had.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn new_generation(&self, number: u64) -> Result<u64, Self::Error>;

    /// Frees a slot.
    ///
    /// # Errors
    /// As [`ReadSlots::slot`].
    fn give_back(&mut self, number: u64) -> Result<(), Self::Error>;

    /// Whether no process has an inode open, nor will have before the change ends: then the change
    /// that removes its last name can free it. If this is not known, the inode stays, without a
    /// name, for a later change.
    fn claim_unused(&mut self, number: u64) -> bool {
        let _ = number;
        false
    }
}

/// An error of a structure over slots: the tree of a directory, a file table, a byte chain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StructureError {
    /// The slots of the structure contradict each other, or one of them cannot be decoded.
    #[error("{structure} is damaged: {reason}")]
    Damaged {
        /// Which structure.
        structure: String,
        /// What is wrong.
        reason: String,
    },
    /// The directory has this name already.
    #[error("the directory has a name {} already", name.escape_ascii())]
    Exists {
        /// The name.
        name: Vec<u8>,
    },
    /// A name is too long.
    #[error("the name {} has more than {MAX_NAME_BYTES} bytes", name.escape_ascii())]
    NameTooLong {
        /// The name.
        name: Vec<u8>,
    },
    /// Nothing can have this name.
    #[error("{} cannot be a name: {reason}", name.escape_ascii())]
    BadName {
        /// The name.
        name: Vec<u8>,
        /// Why not.
        reason: &'static str,
    },
    /// The directory has no room for another name with the same hash.
    #[error("a directory has no room for this name; another name will do")]
    TooManyCollisions,
    /// The file would exceed the maximum length.
    #[error("a file cannot be longer than {MAX_FILE_BYTES} bytes")]
    FileTooLarge,
}

impl StructureError {
    /// A structure that is damaged.
    pub(crate) fn damaged(structure: String, reason: impl ToString) -> StructureError {
        StructureError::Damaged { structure, reason: reason.to_string() }
    }
}
