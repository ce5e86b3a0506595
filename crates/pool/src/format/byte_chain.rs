//! Bytes that belong to an inode and are neither names nor content: a chain of slots.
//!
//! Extended attributes lie in one chain, consecutively: length of the name (1 byte), length of the
//! value (4 bytes), name, value. So does the target of a symbolic link that is too long for its
//! inode.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::FormatError;
use super::inode::{SLOT_BYTES, SlotBytes};
use super::slot::{check, seal};

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
        check(bytes, MAGIC, number)?;
        let raw = RawChain::ref_from_bytes(bytes).map_err(|_| FormatError::Short)?;
        let (len, next) = (usize::from(raw.len_bytes.get()), raw.next.get());
        check_len(len, next)?;
        if raw.bytes[len..].iter().any(|&byte| byte != 0) {
            return Err(FormatError::Field { field: "length", value: len as u64 });
        }
        Ok(ByteChain { number, owner: raw.owner.get(), next, bytes: raw.bytes[..len].to_vec() })
    }
}
