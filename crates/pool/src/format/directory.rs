//! A directory: a B+ tree of slots, ordered by the hash of the names.
//!
//! ```text
//!  leaf      │ hash 8 │ inode 4 │ kind 1 │ length 1 │ name │ hash 8 │ …        ascending by hash, then by name
//!  interior  │ hash 8 │ child 4 │ hash 8 │ child 4 │ …                       child i has hashes from hash i on, below hash i + 1
//! ```
//!
//! The order by hash never changes while a name is there, so a program that reads a directory piece by piece, and remembers
//! the hash it has come to, sees every name that was there all the time exactly once. Names of one hash lie in one leaf; more
//! than fit there cannot be in one directory (the hash has 63 bits, and a seed that is the directory's own).
//!
//! `.` and `..` are not stored: the inode of a directory knows its parent.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::FormatError;
use super::file::FileKind;
use super::inode::{MAX_NAME_BYTES, SLOT_BYTES, SlotBytes};
use super::slot::{check, seal};

/// How such a slot begins.
pub const MAGIC: [u8; 4] = *b"AQDN";
/// Bytes for the entries of a node.
pub const NODE_BYTES: usize = 480;
/// Bytes of an entry in a leaf, without its name.
pub const ENTRY_BYTES: usize = 14;
/// Bytes of an entry in an interior node.
pub const CHILD_BYTES: usize = 12;
/// The most children of an interior node.
pub const MAX_CHILDREN: usize = NODE_BYTES / CHILD_BYTES;
/// No tree is deeper: levels are 0 (a leaf) to this one.
pub const MAX_LEVEL: u16 = 12;

/// The place of a name in its directory.
///
/// The highest bit is zero, so that it is a position that `telldir` can return.
pub fn hash_name(seed: u64, name: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(name, seed) >> 1
}

/// A name and what it leads to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirectoryEntry {
    /// [`hash_name`] of the name.
    pub hash: u64,
    /// Any bytes but NUL and `/`, 1 to 255 of them; not `.` or `..`.
    pub name: Vec<u8>,
    /// The inode.
    pub inode: u64,
    /// Of what kind it is; that never changes.
    pub kind: FileKind,
}

impl DirectoryEntry {
    /// Bytes it takes in a leaf.
    pub fn len_bytes(&self) -> usize {
        ENTRY_BYTES + self.name.len()
    }
}

/// A child of an interior node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Child {
    /// No name below the child has a smaller hash.
    pub from_hash: u64,
    /// Its slot.
    pub slot: u64,
}

/// What a node has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeContent {
    /// Names, ascending by hash, then by name; perhaps none.
    Leaf(Vec<DirectoryEntry>),
    /// Children, ascending: at least one.
    Interior {
        /// Of its children's children, and so on, until there are leaves; at least 1.
        level: u16,
        /// The children.
        children: Vec<Child>,
    },
}

/// A node, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its slot.
    pub number: u64,
    /// The directory.
    pub owner: u64,
    /// What it has.
    pub content: NodeContent,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawNode {
    magic: [u8; 4],
    level: U16,
    count: U16,
    number: U64,
    owner: U64,
    entries: [u8; NODE_BYTES],
    checksum: U64,
}

const _: () = assert!(size_of::<RawNode>() == SLOT_BYTES);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry {
    hash: U64,
    inode: U32,
    kind: u8,
    name_len: u8,
}

const _: () = assert!(size_of::<RawEntry>() == ENTRY_BYTES);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawChild {
    from_hash: U64,
    slot: U32,
}

const _: () = assert!(size_of::<RawChild>() == CHILD_BYTES);

/// Whether a name can be in a directory.
pub fn is_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && name != b"."
        && name != b".."
        && !name.iter().any(|&byte| byte == 0 || byte == b'/')
}

fn slot_number(number: u64) -> Result<U32, FormatError> {
    let wrong = |_| FormatError::Field { field: "slot", value: number };
    Ok(U32::new(u32::try_from(number).map_err(wrong)?))
}

impl Node {
    /// As bytes.
    ///
    /// # Errors
    /// [`FormatError::Field`] if the entries do not fit.
    pub fn encode(&self) -> Result<SlotBytes, FormatError> {
        let mut entries = Vec::with_capacity(NODE_BYTES);
        let (level, count) = match &self.content {
            NodeContent::Leaf(leaf) => {
                for entry in leaf {
                    let raw = RawEntry {
                        hash: U64::new(entry.hash),
                        inode: slot_number(entry.inode)?,
                        kind: entry.kind.code(),
                        name_len: entry.name.len() as u8,
                    };
                    entries.extend_from_slice(raw.as_bytes());
                    entries.extend_from_slice(&entry.name);
                }
                (0, leaf.len())
            }
            NodeContent::Interior { level, children } => {
                for child in children {
                    let raw = RawChild {
                        from_hash: U64::new(child.from_hash),
                        slot: slot_number(child.slot)?,
                    };
                    entries.extend_from_slice(raw.as_bytes());
                }
                (*level, children.len())
            }
        };
        if entries.len() > NODE_BYTES {
            return Err(FormatError::Field { field: "entries", value: entries.len() as u64 });
        }
        let mut raw = RawNode {
            magic: MAGIC,
            level: U16::new(level),
            count: U16::new(count as u16),
            number: U64::new(self.number),
            owner: U64::new(self.owner),
            entries: [0; NODE_BYTES],
            checksum: U64::ZERO,
        };
        raw.entries[..entries.len()].copy_from_slice(&entries);
        let mut bytes = [0; SLOT_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the node in slot `number`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &SlotBytes, number: u64) -> Result<Node, FormatError> {
        check(bytes, MAGIC, number)?;
        let raw = RawNode::ref_from_bytes(bytes).map_err(|_| FormatError::Short)?;
        let count = usize::from(raw.count.get());
        let content = match raw.level.get() {
            0 => NodeContent::Leaf(decode_leaf(&raw.entries, count)?),
            level if level <= MAX_LEVEL => {
                NodeContent::Interior { level, children: decode_children(&raw.entries, count)? }
            }
            level => return Err(FormatError::Field { field: "level", value: level.into() }),
        };
        Ok(Node { number, owner: raw.owner.get(), content })
    }
}

fn decode_leaf(mut rest: &[u8], count: usize) -> Result<Vec<DirectoryEntry>, FormatError> {
    let mut entries: Vec<DirectoryEntry> = Vec::with_capacity(count.min(NODE_BYTES / ENTRY_BYTES));
    for _ in 0..count {
        let (raw, behind) = RawEntry::ref_from_prefix(rest).map_err(|_| FormatError::Short)?;
        let name = behind.get(..usize::from(raw.name_len)).ok_or(FormatError::Short)?;
        rest = &behind[name.len()..];
        let entry = DirectoryEntry {
            hash: raw.hash.get(),
            name: name.to_vec(),
            inode: raw.inode.get().into(),
            kind: FileKind::from_code(raw.kind)
                .ok_or(FormatError::Field { field: "kind", value: raw.kind.into() })?,
        };
        let is_behind = |last: &DirectoryEntry| {
            (last.hash, last.name.as_slice()) < (entry.hash, entry.name.as_slice())
        };
        if !is_name(name) || !entries.last().is_none_or(is_behind) {
            return Err(FormatError::Field { field: "name", value: entry.hash });
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn decode_children(bytes: &[u8], count: usize) -> Result<Vec<Child>, FormatError> {
    if !(1..=MAX_CHILDREN).contains(&count) {
        return Err(FormatError::Field { field: "children", value: count as u64 });
    }
    let (raw, _) =
        <[RawChild]>::ref_from_prefix_with_elems(bytes, count).map_err(|_| FormatError::Short)?;
    let children: Vec<Child> = (raw.iter())
        .map(|child| Child { from_hash: child.from_hash.get(), slot: child.slot.get().into() })
        .collect();
    match children.windows(2).all(|pair| pair[0].from_hash < pair[1].from_hash) {
        true => Ok(children),
        false => Err(FormatError::Field { field: "children", value: count as u64 }),
    }
}
