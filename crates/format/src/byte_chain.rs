//! Bytes that belong to an inode and are neither names nor content: a chain of slots.
//!
//! Extended attributes lie in one chain, consecutively: length of the name (1 byte), length of the
//! value (4 bytes), name, value. So does the target of a symbolic link that is too long for its
//! inode.
//!
//! Chains are short ([`MAX_CHAIN_BYTES`]), so they are read and replaced whole. Slots that stay the
//! same are not written again: an append changes the last slot only. A chain belongs to an inode,
//! its owner, and is named by its first slot; 0 names the empty chain, which has no slots.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::FormatError;
use crate::slot_bytes::{self, SLOT_BYTES, SlotBytes, seal};
use crate::slots::{ChangeSlots, ReadSlots, StructureError};

/// The magic of such a slot.
pub const MAGIC: [u8; 4] = *b"AQBC";
/// The most bytes in one slot.
pub const CHAIN_BYTES: usize = 472;
/// The most bytes in one chain.
pub const MAX_CHAIN_BYTES: usize = 128 << 10;

/// One slot of the chain, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByteChain {
    /// Its slot.
    pub number: u64,
    /// The inode.
    pub owner: u64,
    /// The slot with the following bytes; 0 if there are none.
    pub next: u64,
    /// The bytes: at least one, and a full slot unless it is the last.
    pub bytes: Vec<u8>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawChain {
    magic: [u8; 4],
    len_bytes: U16,
    reserved: [u8; 2],
    number: U64,
    owner: U64,
    next: U64,
    bytes: [u8; CHAIN_BYTES],
    checksum: U64,
}

const _: () = assert!(size_of::<RawChain>() == SLOT_BYTES);

fn check_len(len: usize, next: u64) -> Result<(), FormatError> {
    if (1..=CHAIN_BYTES).contains(&len) && (next == 0 || len == CHAIN_BYTES) {
        Ok(())
    } else {
        Err(FormatError::Field { field: "length", value: len as u64 })
    }
}

impl ByteChain {
    /// Encodes it as bytes.
    ///
    /// # Errors
    /// [`FormatError::Field`] if there are too many of them, or none.
    pub fn encode(&self) -> Result<SlotBytes, FormatError> {
        check_len(self.bytes.len(), self.next)?;
        let mut raw = RawChain {
            magic: MAGIC,
            len_bytes: U16::new(self.bytes.len() as u16),
            reserved: [0; 2],
            number: U64::new(self.number),
            owner: U64::new(self.owner),
            next: U64::new(self.next),
            bytes: [0; CHAIN_BYTES],
            checksum: U64::ZERO,
        };
        raw.bytes[..self.bytes.len()].copy_from_slice(&self.bytes);
        let mut bytes = [0; SLOT_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        seal(&mut bytes);
        Ok(bytes)
    }

    /// Decodes slot `number` of a chain.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &SlotBytes, number: u64) -> Result<ByteChain, FormatError> {
        slot_bytes::check(bytes, MAGIC, number)?;
        let raw = RawChain::ref_from_bytes(bytes).map_err(|_| FormatError::Short)?;
        let (len, next) = (usize::from(raw.len_bytes.get()), raw.next.get());
        check_len(len, next)?;
        if raw.bytes[len..].iter().any(|&byte| byte != 0) {
            return Err(FormatError::Field { field: "length", value: len as u64 });
        }
        Ok(ByteChain { number, owner: raw.owner.get(), next, bytes: raw.bytes[..len].to_vec() })
    }
}

fn damaged(owner: u64, reason: impl ToString) -> StructureError {
    StructureError::damaged(format!("a chain of bytes of inode {owner}"), reason)
}

/// The slots of a chain; ends at the first error. A chain with a cycle soon exceeds the length
/// limit.
struct Chain<'a, S> {
    slots: &'a S,
    owner: u64,
    next: u64,
    len_bytes: usize,
}

impl<S: ReadSlots> Chain<'_, S> {
    fn read(&mut self, number: u64) -> Result<ByteChain, S::Error> {
        let chain = ByteChain::decode(&self.slots.slot(number)?, number)
            .map_err(|error| damaged(self.owner, format!("slot {number}: {error}")))?;
        if chain.owner != self.owner {
            let reason = format!("slot {number} belongs to inode {}", chain.owner);
            return Err(damaged(self.owner, reason).into());
        }
        self.len_bytes += chain.bytes.len();
        if self.len_bytes <= MAX_CHAIN_BYTES {
            Ok(chain)
        } else {
            let reason = format!("it has more than {MAX_CHAIN_BYTES} bytes");
            Err(damaged(self.owner, reason).into())
        }
    }
}

impl<S: ReadSlots> Iterator for Chain<'_, S> {
    type Item = Result<ByteChain, S::Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let number = std::mem::take(&mut self.next);
        if number == 0 {
            return None;
        }
        let chain = self.read(number);
        if let Ok(chain) = &chain {
            self.next = chain.next;
        }
        Some(chain)
    }
}

fn chain<S: ReadSlots>(slots: &S, owner: u64, first: u64) -> Chain<'_, S> {
    Chain { slots, owner, next: first, len_bytes: 0 }
}

/// Reads all bytes of the chain that starts in slot `first`.
///
/// # Errors
/// [`StructureError::Damaged`]; those of `slots`.
pub fn read<S: ReadSlots>(slots: &S, owner: u64, first: u64) -> Result<Vec<u8>, S::Error> {
    check(slots, owner, first, |_| ())
}

/// Replaces all bytes of a chain. Returns its first slot, which may change.
///
/// # Errors
/// [`StructureError::Damaged`] if the chain is damaged; those of `slots`: after these the transaction must
/// not be committed.
///
/// # Panics
/// If there are more than [`MAX_CHAIN_BYTES`] bytes.
pub fn replace<S: ChangeSlots>(
    slots: &mut S,
    owner: u64,
    first: u64,
    bytes: &[u8],
) -> Result<u64, S::Error> {
    assert!(bytes.len() <= MAX_CHAIN_BYTES, "{} bytes are too many for a chain", bytes.len());
    let stored: Vec<ByteChain> = chain(slots, owner, first).collect::<Result<_, _>>()?;
    let mut next = 0;
    // Back to front, because each slot links to the next one.
    for (index, part) in bytes.chunks(CHAIN_BYTES).enumerate().rev() {
        let before = stored.get(index);
        let number = match before {
            Some(before) => before.number,
            None => slots.take_slot()?,
        };
        let after = ByteChain { number, owner, next, bytes: part.to_vec() };
        if before != Some(&after) {
            let encoded = after.encode().map_err(|error| damaged(owner, error))?;
            slots.put(number, encoded);
        }
        next = number;
    }
    for chain in stored.iter().skip(bytes.len().div_ceil(CHAIN_BYTES)) {
        slots.give_back(chain.number)?;
    }
    Ok(next)
}

/// Gives back at most `most_slots` slots of a chain, from its first on. Returns the first that is
/// left.
///
/// # Errors
/// As [`replace`].
pub fn give_back<S: ChangeSlots>(
    slots: &mut S,
    owner: u64,
    first: u64,
    most_slots: usize,
) -> Result<u64, S::Error> {
    let mut next = first;
    for _ in 0..most_slots {
        if next == 0 {
            break;
        }
        // A cycle leads back to a slot that is free by then.
        let part = chain(&*slots, owner, 0).read(next)?;
        slots.give_back(part.number)?;
        next = part.next;
    }
    Ok(next)
}

/// Reads a chain, whatever it holds: calls `on_slot` for each slot of it, then returns its bytes or
/// the first error. If the chain has a cycle, slots are reported several times.
///
/// # Errors
/// [`StructureError::Damaged`]: the first inconsistency. Nothing after it was read.
pub fn check<S: ReadSlots>(
    slots: &S,
    owner: u64,
    first: u64,
    mut on_slot: impl FnMut(u64),
) -> Result<Vec<u8>, S::Error> {
    let mut bytes = Vec::new();
    for chain in chain(slots, owner, first) {
        let chain = chain?;
        on_slot(chain.number);
        bytes.extend_from_slice(&chain.bytes);
    }
    Ok(bytes)
}
