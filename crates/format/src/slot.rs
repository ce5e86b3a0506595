//! What a slot is, by its magic, and the runs that it names. [`slot_bytes`](crate::slot_bytes) has the form
//! of all slots.
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

use crate::FormatError;
use crate::byte_chain::ByteChain;
use crate::directory::Node;
use crate::file::FileInode;
use crate::inode::{Inode, InodeKind};
use crate::run::{RawRun, Run};
use crate::run_list::RunList;
use crate::slot_bytes::SlotBytes;
use crate::slot_change::SlotChange;

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
