//! What all slots have in common: 512 bytes, the unit of metadata.
//!
//! ```text
//!  0        4      6      8          16                                            504        512
//!  ┌────────┬──────┬──────┬──────────┬─────────────────────────────────────────────┬──────────┐
//!  │ magic  │ two small   │ number   │ …                                           │ checksum │
//!  └────────┴──────┴──────┴──────────┴─────────────────────────────────────────────┴──────────┘
//! ```
//!
//! A slot is as long as the unit that a disk does not tear. There are two sorts: *inodes*, which are things that have a name,
//! and *parts*, which belong to one inode and have what does not fit into it:
//!
//! | magic | sort | what it is | module |
//! |---|---|---|---|
//! | `AQHD` | | slot 0: facts about the pool | [`inode`](super::inode) |
//! | `AQIN` | inode | a free slot, or an object | [`inode`](super::inode) |
//! | `AQFI` | inode | a file, a directory, a symbolic link | [`file`](super::file) |
//! | `AQDN` | part | a node of a directory's tree | [`directory`](super::directory) |
//! | `AQRN` | part | runs of a file, continued | [`run_list`](super::run_list) |
//! | `AQBC` | part | bytes: extended attributes, a long symbolic link | [`byte_chain`](super::byte_chain) |
//!
//! A part names its owner, and is reached from it in exactly one way. A part that is given back becomes a free inode.

use super::byte_chain::ByteChain;
use super::directory::Node;
use super::file::FileInode;
use super::inode::{Inode, InodeKind, SLOT_BYTES, SlotBytes};
use super::run::{RawRun, Run};
use super::run_list::RunList;
use super::{FormatError, checksum};

/// Where the checksum lies.
pub const CHECKSUM_OFFSET: usize = SLOT_BYTES - 8;
const NUMBER_OFFSET: usize = 8;

/// Puts the checksum where it belongs.
pub fn seal(bytes: &mut SlotBytes) {
    let (covered, sum) = bytes.split_at_mut(CHECKSUM_OFFSET);
    sum.copy_from_slice(&checksum(&[covered]).to_le_bytes());
}

/// Whether these are whole bytes of slot `number` that begin with `magic`.
///
/// # Errors
/// What is wrong.
pub fn check(bytes: &SlotBytes, magic: [u8; 4], number: u64) -> Result<(), FormatError> {
    if bytes[..4] != magic {
        return Err(FormatError::Magic);
    }
    let (covered, sum) = bytes.split_at(CHECKSUM_OFFSET);
    let stored = u64::from_le_bytes(sum.try_into().expect("eight bytes"));
    let computed = checksum(&[covered]);
    if stored != computed {
        return Err(FormatError::Checksum { stored, computed });
    }
    let found = &bytes[NUMBER_OFFSET..NUMBER_OFFSET + 8];
    let found = u64::from_le_bytes(found.try_into().expect("eight bytes"));
    if found != number {
        return Err(FormatError::Identity { found, expected: number });
    }
    Ok(())
}

/// A slot, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Slot {
    /// It can be used; perhaps it never was.
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
    /// Reads slot `number`, which is not that of the pool's head.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &SlotBytes, number: u64) -> Result<Slot, FormatError> {
        match bytes[..4].try_into().expect("four bytes") {
            super::file::MAGIC => Ok(Slot::File(Box::new(FileInode::decode(bytes, number)?))),
            super::directory::MAGIC => Ok(Slot::Node(Box::new(Node::decode(bytes, number)?))),
            super::run_list::MAGIC => Ok(Slot::Runs(Box::new(RunList::decode(bytes, number)?))),
            super::byte_chain::MAGIC => {
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

    /// As bytes.
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

    /// All pages it names.
    pub fn runs(&self) -> Vec<Run> {
        let named = |runs: &[Run]| runs.iter().copied().filter(|run| !run.is_hole()).collect();
        match self {
            Slot::Object(inode) => inode.all_runs().collect(),
            Slot::File(inode) => named(&inode.runs),
            Slot::Runs(list) => named(&list.runs),
            Slot::Free(_) | Slot::Node(_) | Slot::Bytes(_) => Vec::new(),
        }
    }

    /// The inode that a part belongs to; `None` for what is an inode itself.
    pub fn owner(&self) -> Option<u64> {
        match self {
            Slot::Node(node) => Some(node.owner),
            Slot::Runs(list) => Some(list.owner),
            Slot::Bytes(chain) => Some(chain.owner),
            Slot::Free(_) | Slot::Object(_) | Slot::File(_) => None,
        }
    }
}

/// All pages that a slot names, of bytes that are known to be right; of others, some pages or none.
pub(crate) fn named_runs(bytes: &SlotBytes, runs: &mut Vec<Run>) {
    use zerocopy::FromBytes;

    let part = match bytes[..4].try_into().expect("four bytes") {
        super::inode::INODE_MAGIC => super::inode::RUNS_RANGE,
        super::file::MAGIC if !super::file::is_link(bytes) => super::file::RUNS_RANGE,
        super::run_list::MAGIC => super::run_list::RUNS_RANGE,
        _ => return,
    };
    let raw = <[RawRun]>::ref_from_bytes(&bytes[part]).expect("whole runs");
    let named = raw.iter().map(|run| run.unpack()).filter(|run| !run.is_empty() && !run.is_hole());
    runs.extend(named);
}

/// The inode whose pages slot `number` names, of bytes that are known to be right.
pub(crate) fn owner_of_runs(bytes: &SlotBytes, number: u64) -> u64 {
    match bytes[..4].try_into().expect("four bytes") {
        super::run_list::MAGIC => super::run_list::owner(bytes).unwrap_or(number),
        _ => number,
    }
}

/// Whether there is an object in a slot, of bytes that are known to be right.
pub(crate) fn is_object_slot(bytes: &SlotBytes) -> bool {
    bytes[..4] == super::inode::INODE_MAGIC && !is_free_slot(bytes)
}

/// Whether there is nothing in a slot, of bytes that are known to be right.
pub(crate) fn is_free_slot(bytes: &SlotBytes) -> bool {
    const FREE_KIND: [u8; 2] = [0, 0];
    let magic: [u8; 4] = bytes[..4].try_into().expect("four bytes");
    magic == [0; 4] || (magic == super::inode::INODE_MAGIC && bytes[4..6] == FREE_KIND)
}
