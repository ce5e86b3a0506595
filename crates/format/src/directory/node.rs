//! A directory: a B+ tree of slots, ordered by the hash of the names.
//!
//! ```text
//!  leaf      │ hash 8 │ inode 4 │ kind 1 │ length 1 │ name │ hash 8 │ …        ascending by hash, then by name
//!  interior  │ hash 8 │ child 4 │ hash 8 │ child 4 │ …                       child i has hashes from hash i on, below hash i + 1
//! ```
//!
//! The first hash of an interior node is 0 and stands for the start of the node's own range. So
//! each boundary between two nodes is stored in one place, and if a node loses its first child,
//! only that node changes. The bytes after the last entry are zero. No node is empty: an empty
//! directory has no node.
//!
//! The order by hash never changes while a name exists, so a program that reads a directory in
//! pieces, and remembers the last hash, sees every name that existed all the time exactly once.
//! Names with the same hash lie in one leaf; more than fit there cannot be in one directory (the
//! hash has 63 bits and a seed per directory).
//!
//! `.` and `..` are not stored: the inode of a directory has its parent. They come before the first
//! name, so a hash is a position that `telldir` can return: [`FIRST_HASH`] is the position after
//! both, and the position after [`LAST_HASH`] is the end.

mod view;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use view::{Entries, EntryView, NodeView, Place};

use crate::FormatError;
use crate::file::FileKind;
use crate::inode::MAX_NAME_BYTES;
use crate::slot_bytes::{SLOT_BYTES, SlotBytes, UNSEALED, check, seal};

/// The magic of such a slot.
pub const MAGIC: [u8; 4] = *b"AQDN";
/// Bytes for the entries of a node.
pub const NODE_BYTES: usize = 480;
/// Bytes of an entry in a leaf, without its name.
pub const ENTRY_BYTES: usize = 14;
/// Bytes of an entry in an interior node.
pub const CHILD_BYTES: usize = 12;
/// The most children of an interior node.
pub const MAX_CHILDREN: usize = NODE_BYTES / CHILD_BYTES;
/// The most entries of a leaf: with names of one byte.
pub const MAX_ENTRIES: usize = NODE_BYTES / (ENTRY_BYTES + 1);
/// The maximum depth of a tree: levels are 0 (a leaf) to this one.
pub const MAX_LEVEL: u16 = 12;
/// The smallest hash of a name: the positions before are those of `.` and `..`.
pub const FIRST_HASH: u64 = 2;
/// The greatest hash of a name: the next number, the greatest `off_t`, is the position of the end.
pub const LAST_HASH: u64 = i64::MAX as u64 - 1;

/// The hash of a name, which is its position in the directory.
#[inline]
pub fn hash_name(seed: u64, name: &[u8]) -> u64 {
    (xxhash_rust::xxh3::xxh3_64_with_seed(name, seed) >> 1).clamp(FIRST_HASH, LAST_HASH)
}

/// A name and the inode it refers to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirectoryEntry {
    /// [`hash_name`] of the name.
    pub hash: u64,
    /// Any bytes but NUL and `/`, 1 to 255 of them; not `.` or `..`.
    pub name: Vec<u8>,
    /// The inode.
    pub inode: u64,
    /// The inode's kind, which never changes.
    pub kind: FileKind,
}

impl DirectoryEntry {
    /// Its length in a leaf.
    pub fn len_bytes(&self) -> usize {
        ENTRY_BYTES + self.name.len()
    }
}

/// A child of an interior node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Child {
    /// No name below the child has a smaller hash; 0 for the first child.
    pub from_hash: u64,
    /// Its slot.
    pub slot: u64,
}

/// The content of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeContent {
    /// Names, ascending by hash, then by name: at least one.
    Leaf(Vec<DirectoryEntry>),
    /// Children, ascending: at least one.
    Interior {
        /// The number of levels below this node; at least 1.
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
    /// Its content.
    pub content: NodeContent,
}

#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
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

/// Whether a name is valid in a directory.
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

/// The bytes of a leaf entry before its name.
///
/// # Errors
/// [`FormatError::Field`] if the inode number or the name is too long.
pub fn entry_head(
    hash: u64,
    inode: u64,
    kind: FileKind,
    name: &[u8],
) -> Result<[u8; ENTRY_BYTES], FormatError> {
    let name_len = u8::try_from(name.len())
        .map_err(|_| FormatError::Field { field: "name", value: name.len() as u64 })?;
    let (hash, inode) = (U64::new(hash), slot_number(inode)?);
    let raw = RawEntry { hash, inode, kind: kind.code(), name_len };
    Ok(zerocopy::transmute!(raw))
}

/// Composes, over any bytes, a leaf of `count` entries, whose bytes are the concatenation of
/// `parts`; without the checksum.
///
/// # Errors
/// [`FormatError::Field`] if they do not fit.
pub fn compose_leaf(
    bytes: &mut SlotBytes,
    number: u64,
    owner: u64,
    count: usize,
    parts: &[&[u8]],
) -> Result<(), FormatError> {
    compose(bytes, (number, owner), 0, count, parts)
}

fn compose(
    bytes: &mut SlotBytes,
    (number, owner): (u64, u64),
    level: u16,
    count: usize,
    parts: &[&[u8]],
) -> Result<(), FormatError> {
    let raw = RawNode::mut_from_bytes(bytes).map_err(|_| FormatError::Short)?;
    raw.magic = MAGIC;
    raw.level = U16::new(level);
    raw.count = U16::new(count as u16);
    raw.number = U64::new(number);
    raw.owner = U64::new(owner);
    raw.checksum = U64::new(UNSEALED);
    let mut end = 0;
    for part in parts {
        let wrong = FormatError::Field { field: "entries", value: (end + part.len()) as u64 };
        raw.entries.get_mut(end..end + part.len()).ok_or(wrong)?.copy_from_slice(part);
        end += part.len();
    }
    raw.entries[end..].fill(0);
    Ok(())
}

impl Node {
    /// Encodes it as bytes.
    ///
    /// # Errors
    /// [`FormatError::Field`] if the entries do not fit.
    pub fn encode(&self) -> Result<SlotBytes, FormatError> {
        let mut entries = Vec::with_capacity(NODE_BYTES);
        let (level, count) = match &self.content {
            NodeContent::Leaf(leaf) => {
                for entry in leaf {
                    let head = entry_head(entry.hash, entry.inode, entry.kind, &entry.name)?;
                    entries.extend_from_slice(&head);
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
        let mut bytes = [0; SLOT_BYTES];
        compose(&mut bytes, (self.number, self.owner), level, count, &[&entries])?;
        seal(&mut bytes);
        Ok(bytes)
    }

    /// Decodes the node in slot `number`.
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

#[inline]
fn check_count(count: usize, most: usize) -> Result<(), FormatError> {
    if (1..=most).contains(&count) {
        Ok(())
    } else {
        Err(FormatError::Field { field: "count", value: count as u64 })
    }
}

fn check_reserved(bytes: &[u8]) -> Result<(), FormatError> {
    match bytes.iter().find(|&&byte| byte != 0) {
        None => Ok(()),
        Some(&byte) => Err(FormatError::Field { field: "reserved", value: byte.into() }),
    }
}

fn decode_leaf(bytes: &[u8], count: usize) -> Result<Vec<DirectoryEntry>, FormatError> {
    check_count(count, MAX_ENTRIES)?;
    let mut found: Vec<DirectoryEntry> = Vec::with_capacity(count);
    let mut entries = Entries::new(bytes, count);
    for entry in &mut entries {
        let entry = entry?;
        let is_behind =
            |last: &DirectoryEntry| (last.hash, last.name.as_slice()) < (entry.hash, entry.name);
        if !is_name(entry.name) || !found.last().is_none_or(is_behind) {
            return Err(FormatError::Field { field: "name", value: entry.hash });
        }
        let (kind, name) = (entry.kind()?, entry.name.to_vec());
        found.push(DirectoryEntry { hash: entry.hash, name, inode: entry.inode, kind });
    }
    check_reserved(&bytes[entries.offset()..])?;
    Ok(found)
}

fn decode_children(bytes: &[u8], count: usize) -> Result<Vec<Child>, FormatError> {
    check_count(count, MAX_CHILDREN)?;
    let (raw, rest) =
        <[RawChild]>::ref_from_prefix_with_elems(bytes, count).map_err(|_| FormatError::Short)?;
    check_reserved(rest)?;
    let children: Vec<Child> = (raw.iter())
        .map(|child| Child { from_hash: child.from_hash.get(), slot: child.slot.get().into() })
        .collect();
    let wrong = |child: &Child| FormatError::Field { field: "hash", value: child.from_hash };
    match children.windows(2).find(|pair| pair[0].from_hash >= pair[1].from_hash) {
        Some(pair) => Err(wrong(&pair[1])),
        None if children[0].from_hash != 0 => Err(wrong(&children[0])),
        None => Ok(children),
    }
}
