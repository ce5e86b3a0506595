//! The common form of all slots: 512 bytes, the unit of metadata.
//!
//! ```text
//!  0        4      6      8          16                                            504        512
//!  ┌────────┬──────┬──────┬──────────┬─────────────────────────────────────────────┬──────────┐
//!  │ magic  │ two small   │ number   │ …                                           │ checksum │
//!  └────────┴──────┴──────┴──────────┴─────────────────────────────────────────────┴──────────┘
//! ```
//!
//! A slot has the size of the unit that a disk does not tear. There are two sorts: *inodes*, which
//! can have names, and *parts*, which belong to one inode and hold what does not fit into it:
//!
//! | magic | sort | what it is | module |
//! |---|---|---|---|
//! | `AQHD` | | slot 0: facts about the pool | [`inode`](crate::inode) |
//! | `AQIN` | inode | a free slot, or an object | [`inode`](crate::inode) |
//! | `AQFI` | inode | a file, a directory, a symbolic link | [`file`](crate::file) |
//! | `AQDN` | part | a node of a directory's tree | [`directory`](crate::directory) |
//! | `AQRN` | part | runs of a file, continued | [`run_list`](crate::run_list) |
//! | `AQBC` | part | bytes: extended attributes, a long symbolic link | [`byte_chain`](crate::byte_chain) |
//!
//! A part names its owner, and exactly one reference leads from the owner to it. A part that is
//! given back becomes a free inode.
//!
//! # Sealed or not
//! On media each slot has its checksum. In memory a changed slot has none: it would have to be
//! computed with every change, and has no use before the slot is written to media. There the
//! checksum is [`UNSEALED`], a value that no checksum has, and [`to_media`] computes it when the
//! slot is written. Bytes that are read pass [`from_media`], so that a slot that lost its checksum
//! on media is not taken for one that needs none.

use crate::byte_chain::ByteChain;
use crate::directory::Node;
use crate::file::FileInode;
use crate::inode::{Inode, InodeKind, SLOT_BYTES, SlotBytes};
use crate::run::{RawRun, Run};
use crate::run_list::RunList;
use crate::slot_change::SlotChange;
use crate::{FormatError, checksum};

/// The offset of the checksum.
pub const CHECKSUM_OFFSET: usize = SLOT_BYTES - 8;
const NUMBER_OFFSET: usize = 8;

/// The word with the generation, in slots that have one.
pub(crate) const INCARNATION_WORD: usize = 2;

/// A word of a slot.
#[inline]
pub fn word(bytes: &SlotBytes, index: usize) -> [u8; 8] {
    bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes")
}

/// Whether a slot with this first word has a generation.
#[inline]
pub fn has_generation(first_word: [u8; 8]) -> bool {
    matches!(first_word[..4].try_into(), Ok(crate::inode::INODE_MAGIC | crate::file::MAGIC))
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

/// A slot, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slot {
    /// A free slot, perhaps never used.
    Free(Inode),
    /// A persistent object.
    Object(Inode),
    /// A file, a directory or a symbolic link.
    File(Box<FileInode>),
    /// A node of a directory's tree.
    Node(Box<Node>),
    /// Runs of a file.
    Runs(Box<RunList>),
    /// Bytes.
    Bytes(Box<ByteChain>),
}

impl Slot {
    /// Decodes slot `number`, which must not be that of the pool's head.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &SlotBytes, number: u64) -> Result<Slot, FormatError> {
        match bytes[..4].try_into().expect("four bytes") {
            crate::file::MAGIC => Ok(Slot::File(Box::new(FileInode::decode(bytes, number)?))),
            crate::directory::MAGIC => Ok(Slot::Node(Box::new(Node::decode(bytes, number)?))),
            crate::run_list::MAGIC => Ok(Slot::Runs(Box::new(RunList::decode(bytes, number)?))),
            crate::byte_chain::MAGIC => {
                Ok(Slot::Bytes(Box::new(ByteChain::decode(bytes, number)?)))
            }
            _ => {
                let inode = Inode::decode(bytes, number)?;
                Ok(match inode.kind {
                    InodeKind::Free => Slot::Free(inode),
                    InodeKind::Object => Slot::Object(inode),
                })
            }
        }
    }

    /// Encodes it as bytes.
    ///
    /// # Errors
    /// [`FormatError::Field`] if something does not fit.
    pub fn encode(&self) -> Result<SlotBytes, FormatError> {
        match self {
            Slot::Free(inode) | Slot::Object(inode) => inode.encode(),
            Slot::File(inode) => inode.encode(),
            Slot::Node(node) => node.encode(),
            Slot::Runs(list) => list.encode(),
            Slot::Bytes(chain) => chain.encode(),
        }
    }

    /// All runs of pages that it names.
    pub fn runs(&self) -> Vec<Run> {
        let named = |runs: &[Run]| runs.iter().copied().filter(|run| !run.is_hole()).collect();
        match self {
            Slot::Object(inode) => inode.all_runs().collect(),
            Slot::File(inode) => named(&inode.runs),
            Slot::Runs(list) => named(&list.runs),
            Slot::Free(_) | Slot::Node(_) | Slot::Bytes(_) => Vec::new(),
        }
    }

    /// The inode that a part belongs to; `None` for an inode.
    pub fn owner(&self) -> Option<u64> {
        match self {
            Slot::Node(node) => Some(node.owner),
            Slot::Runs(list) => Some(list.owner),
            Slot::Bytes(chain) => Some(chain.owner),
            Slot::Free(_) | Slot::Object(_) | Slot::File(_) => None,
        }
    }
}

/// The byte range of the runs in a slot with this magic.
fn place_of_runs(magic: &[u8]) -> Option<std::ops::Range<usize>> {
    match *magic.first_chunk::<4>()? {
        crate::inode::INODE_MAGIC => Some(crate::inode::RUNS_RANGE),
        crate::file::MAGIC => Some(crate::file::RUNS_RANGE),
        crate::run_list::MAGIC => Some(crate::run_list::RUNS_RANGE),
        _ => None,
    }
}

/// Adds all runs of pages that a slot names to `runs`, if its bytes are valid; otherwise some runs
/// or none.
pub fn named_runs(bytes: &SlotBytes, runs: &mut Vec<Run>) {
    use zerocopy::FromBytes;

    let Some(part) = place_of_runs(bytes) else { return };
    if crate::file::is_link(bytes) {
        return;
    }
    let raw = <[RawRun]>::ref_from_bytes(&bytes[part]).expect("whole runs");
    let used = raw.iter().filter(|run| **run != RawRun::EMPTY).map(|run| run.unpack());
    runs.extend(used.filter(|run| !run.is_empty() && !run.is_hole()));
}

/// The words with the runs of a slot with this first word.
fn words_of_runs(first_word: [u8; 8]) -> std::ops::Range<usize> {
    place_of_runs(&first_word).map_or(0..0, |part| part.start / 8..part.end.div_ceil(8))
}

/// Whether a change of a slot, which has these words before, can make it name other pages.
pub fn changes_runs(before: impl Fn(usize) -> [u8; 8], change: &SlotChange<'_>) -> bool {
    let (first, after) = (before(0), change.first_word(before(0)));
    let (had, has) = (words_of_runs(first), words_of_runs(after));
    let bits = |words: &std::ops::Range<usize>| (1u64 << words.end) - (1 << words.start);
    if first == after && !change.words.is_whole {
        return change.words.set & bits(&had) != 0;
    }
    // Without an early exit: nearly always there is none.
    let any = |words: std::ops::Range<usize>, of: u64| {
        let of =
            |index| if of & (1u64 << index) != 0 { u64::from_ne_bytes(before(index)) } else { 0 };
        words.fold(0, |any, index| any | of(index)) != 0
    };
    let sets_any = || change.set().any(|(index, value)| has.contains(&index) && value != [0; 8]);
    let left = if change.words.is_whole { 0 } else { !change.words.set };
    any(had, u64::MAX) || any(has.clone(), left) || sets_any()
}

/// The inode whose pages slot `number` names. The bytes must be known to be valid.
pub fn owner_of_runs(bytes: &SlotBytes, number: u64) -> u64 {
    match bytes[..4].try_into().expect("four bytes") {
        crate::run_list::MAGIC => crate::run_list::owner(bytes).unwrap_or(number),
        _ => number,
    }
}

/// Whether a slot with this first word has an object. The bytes must be known to be valid.
#[inline]
pub fn is_object_slot(bytes: [u8; 8]) -> bool {
    bytes[..4] == crate::inode::INODE_MAGIC && !is_free_slot(bytes)
}

/// Whether a slot with this first word is free. The bytes must be known to be valid.
#[inline]
pub fn is_free_slot(bytes: [u8; 8]) -> bool {
    const FREE_KIND: [u8; 2] = [0, 0];
    let magic: [u8; 4] = bytes[..4].try_into().expect("four bytes");
    magic == [0; 4] || (magic == crate::inode::INODE_MAGIC && bytes[4..6] == FREE_KIND)
}

#[cfg(test)]
mod tests {
    use super::*;

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
