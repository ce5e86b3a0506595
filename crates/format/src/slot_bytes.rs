//! The common form of all slots: 512 bytes, the unit of metadata.
//!
//! ```text
//!  0        4      6      8          16                                            504        512
//!  ┌────────┬──────┬──────┬──────────┬─────────────────────────────────────────────┬──────────┐
//!  │ magic  │ two small   │ number   │ …                                           │ checksum │
//!  └────────┴──────┴──────┴──────────┴─────────────────────────────────────────────┴──────────┘
//! ```
//!
//! # Sealed or not
//! On media each slot has its checksum. In memory a changed slot has none: it would have to be
//! computed with every change, and has no use before the slot is written to media. There the
//! checksum is [`UNSEALED`], a value that no checksum has, and [`to_media`] computes it when the
//! slot is written. Bytes that are read pass [`from_media`], so that a slot that lost its checksum
//! on media is not taken for one that needs none.

use crate::{FormatError, checksum};

/// Bytes of a slot.
pub const SLOT_BYTES: usize = 512;

/// Bytes of one slot.
pub type SlotBytes = [u8; SLOT_BYTES];

/// The offset of the checksum.
pub const CHECKSUM_OFFSET: usize = SLOT_BYTES - 8;

/// The offset of the slot's number.
const NUMBER_OFFSET: usize = 8;

/// The word with the generation, in slots that have one.
pub(crate) const INCARNATION_WORD: usize = 2;

/// A word of a slot.
#[inline]
pub fn word(bytes: &SlotBytes, index: usize) -> [u8; 8] {
    bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes")
}

/// Replaces the checksum of a slot that was changed in memory.
pub const UNSEALED: u64 = 0;

/// The checksum of a slot, which is never [`UNSEALED`].
pub(crate) fn checksum_of(bytes: &[u8]) -> u64 {
    checksum(&[&bytes[..CHECKSUM_OFFSET]]).max(1)
}

fn stored_checksum(bytes: &SlotBytes) -> u64 {
    u64::from_le_bytes(bytes[CHECKSUM_OFFSET..].try_into().expect("eight bytes"))
}

fn set_checksum(bytes: &mut SlotBytes, sum: u64) {
    bytes[CHECKSUM_OFFSET..].copy_from_slice(&sum.to_le_bytes());
}

/// Computes and stores the checksum.
pub fn seal(bytes: &mut SlotBytes) {
    set_checksum(bytes, checksum_of(bytes));
}

/// Seals a slot that is written from memory to media, if it was changed in memory. A slot that was
/// never used, or is damaged, stays as it is.
pub fn to_media(bytes: &mut SlotBytes) {
    if stored_checksum(bytes) == UNSEALED && bytes[..4] != [0; 4] {
        seal(bytes);
    }
}

/// Converts a slot read from media for memory: a slot without a checksum is damaged, and stays so.
pub fn from_media(bytes: &mut SlotBytes) {
    if stored_checksum(bytes) == UNSEALED && bytes.iter().any(|&byte| byte != 0) {
        let wrong = if checksum_of(bytes) == 1 { 2 } else { 1 };
        set_checksum(bytes, wrong);
    }
}

/// Checks that these are valid bytes of slot `number` that begin with `magic`. The checksum of an
/// unsealed slot is not checked.
///
/// # Errors
/// What is wrong with it.
pub fn check(bytes: &SlotBytes, magic: [u8; 4], number: u64) -> Result<(), FormatError> {
    if bytes[..4] != magic {
        return Err(FormatError::Magic);
    }
    check_sum(bytes, stored_checksum(bytes))?;
    let found = &bytes[NUMBER_OFFSET..NUMBER_OFFSET + 8];
    let found = u64::from_le_bytes(found.try_into().expect("eight bytes"));
    if found != number {
        return Err(FormatError::Identity { found, expected: number });
    }
    Ok(())
}

/// Checks the checksum of a sealed slot; an unsealed one passes.
pub(crate) fn check_sum(bytes: &[u8], stored: u64) -> Result<(), FormatError> {
    if stored == UNSEALED {
        return Ok(());
    }
    let computed = checksum_of(bytes);
    if stored == computed { Ok(()) } else { Err(FormatError::Checksum { stored, computed }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inode::Inode;
    use crate::slot::Slot;

    #[test]
    fn what_is_unsealed_in_memory_is_sealed_on_media() {
        let sealed = Inode::free(7, 3).encode().unwrap();
        let mut bytes = sealed;
        set_checksum(&mut bytes, UNSEALED);
        assert!(Slot::decode(&bytes, 7).is_ok() && Slot::decode(&bytes, 8).is_err());
        let mut on_media = bytes;
        to_media(&mut on_media);
        assert_eq!(on_media, sealed);
        from_media(&mut bytes);
        assert!(Slot::decode(&bytes, 7).is_err(), "it has lost its checksum on media");
        to_media(&mut bytes);
        assert!(Slot::decode(&bytes, 7).is_err(), "and does not get it back");
        let mut never_used = [0; SLOT_BYTES];
        to_media(&mut never_used);
        from_media(&mut never_used);
        assert_eq!(never_used, [0; SLOT_BYTES]);
    }
}
