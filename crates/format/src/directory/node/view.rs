//! A view of a node in place, used to look up names.
//!
//! Nothing is decoded or allocated, and the checksum is not computed: the image of a pool was
//! checked when it was read from media. But a reader may have a torn copy of a slot, one half older
//! than the other, and detects that only afterwards. So any byte may be wrong: each operation of a
//! view ends after at most as many steps as a node can have entries, accesses nothing outside of
//! the node, and returns an error if necessary.

use std::cmp::Ordering;

use zerocopy::FromBytes;

use super::{
    Child, DirectoryEntry, ENTRY_BYTES, MAGIC, MAX_CHILDREN, MAX_ENTRIES, MAX_LEVEL, RawChild,
    RawEntry, RawNode, check_count, decode_leaf,
};
use crate::FormatError;
use crate::file::FileKind;
use crate::slot_bytes::SlotBytes;

/// A node in its slot.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a> {
    raw: &'a RawNode,
    level: u16,
    count: usize,
}

/// The position of a name in a leaf, existing or not.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The offset of its entry among the bytes of the entries.
    pub offset: usize,
    /// The name's entry, if it exists.
    pub entry: Option<EntryView<'a>>,
}

impl<'a> NodeView<'a> {
    /// Views the node in slot `number`; its checksum is not checked.
    ///
    /// # Errors
    /// What is wrong with it.
    #[inline]
    pub fn new(bytes: &'a SlotBytes, number: u64) -> Result<NodeView<'a>, FormatError> {
        let raw = RawNode::ref_from_bytes(bytes).map_err(|_| FormatError::Short)?;
        if raw.magic != MAGIC {
            return Err(FormatError::Magic);
        }
        if raw.number.get() != number {
            return Err(FormatError::Identity { found: raw.number.get(), expected: number });
        }
        let (level, count) = (raw.level.get(), usize::from(raw.count.get()));
        if level > MAX_LEVEL {
            return Err(FormatError::Field { field: "level", value: level.into() });
        }
        check_count(count, if level == 0 { MAX_ENTRIES } else { MAX_CHILDREN })?;
        Ok(NodeView { raw, level, count })
    }

    /// The directory it belongs to.
    #[inline]
    pub fn owner(&self) -> u64 {
        self.raw.owner.get()
    }

    /// 0 for a leaf.
    #[inline]
    pub fn level(&self) -> u16 {
        self.level
    }

    /// The number of its entries or children.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    #[inline]
    fn children(&self) -> &'a [RawChild] {
        let count = if self.level == 0 { 0 } else { self.count };
        <[RawChild]>::ref_from_prefix_with_elems(&self.raw.entries, count)
            .map_or(&[], |(children, _)| children)
    }

    /// The index of the child with names of this hash; 0 in a leaf, which has no children.
    #[inline]
    pub fn child_index(&self, hash: u64) -> usize {
        let behind_first = self.children().get(1..).unwrap_or_default();
        behind_first.partition_point(|child| child.from_hash.get() <= hash)
    }

    /// A child of an interior node.
    #[inline]
    pub fn child(&self, index: usize) -> Option<Child> {
        let child = self.children().get(index)?;
        Some(Child { from_hash: child.from_hash.get(), slot: child.slot.get().into() })
    }

    /// The entries of a leaf.
    #[inline]
    pub fn entries(&self) -> Entries<'a> {
        Entries::new(&self.raw.entries, if self.level == 0 { self.count } else { 0 })
    }

    /// Finds the position of a name in a leaf, existing or not.
    ///
    /// # Errors
    /// What is wrong with the entries before it.
    #[inline]
    pub fn place(&self, hash: u64, name: &[u8]) -> Result<Place<'a>, FormatError> {
        let mut entries = self.entries();
        loop {
            let offset = entries.offset;
            let Some(entry) = entries.next() else {
                return Ok(Place { offset, entry: None });
            };
            let entry = entry?;
            match entry.hash.cmp(&hash).then_with(|| entry.name.cmp(name)) {
                Ordering::Less => {}
                Ordering::Equal => return Ok(Place { offset, entry: Some(entry) }),
                Ordering::Greater => return Ok(Place { offset, entry: None }),
            }
        }
    }

    /// The bytes of all entries of a leaf.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn entry_bytes(&self) -> Result<&'a [u8], FormatError> {
        let mut entries = self.entries();
        entries.try_for_each(|entry| entry.map(|_| ()))?;
        Ok(&self.raw.entries[..entries.offset])
    }

    /// Decodes the entries of a leaf, with the checks of [`Node::decode`](super::Node::decode).
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn decode_entries(&self) -> Result<Vec<DirectoryEntry>, FormatError> {
        decode_leaf(&self.raw.entries, self.count)
    }
}

/// An entry of a leaf, in place.
#[derive(Debug, Clone, Copy)]
pub struct EntryView<'a> {
    /// Its offset.
    pub offset: usize,
    /// [`hash_name`](super::hash_name) of the name.
    pub hash: u64,
    /// The name.
    pub name: &'a [u8],
    /// The inode.
    pub inode: u64,
    kind: u8,
}

impl EntryView<'_> {
    /// The offset of the next entry.
    #[inline]
    pub fn end(&self) -> usize {
        self.offset + ENTRY_BYTES + self.name.len()
    }

    /// The kind of the inode.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    #[inline]
    pub fn kind(&self) -> Result<FileKind, FormatError> {
        let wrong = FormatError::Field { field: "kind", value: self.kind.into() };
        FileKind::from_code(self.kind).ok_or(wrong)
    }
}

/// The entries of a leaf, in place, in order. After an error the iteration ends.
#[derive(Debug, Clone)]
pub struct Entries<'a> {
    bytes: &'a [u8],
    offset: usize,
    left: usize,
}

impl<'a> Entries<'a> {
    /// Iterates over the first `count` entries in `bytes`.
    #[inline]
    pub fn new(bytes: &'a [u8], count: usize) -> Entries<'a> {
        Entries { bytes, offset: 0, left: count }
    }

    /// The offset of the next entry, or the end of the last one.
    #[inline]
    pub fn offset(&self) -> usize {
        self.offset
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<EntryView<'a>, FormatError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let rest = &self.bytes[self.offset..];
        let found = RawEntry::ref_from_prefix(rest).ok().and_then(|(raw, behind)| {
            let name = behind.get(..raw.name_len.into())?;
            let (hash, inode) = (raw.hash.get(), raw.inode.get().into());
            Some(EntryView { offset: self.offset, hash, name, inode, kind: raw.kind })
        });
        match found {
            Some(entry) => self.offset = entry.end(),
            None => self.left = 0,
        }
        Some(found.ok_or(FormatError::Short))
    }
}
