//! A node looked at where it lies: how names are found.
//!
//! Nothing is decoded and nothing allocated, and the checksum is not computed: what is in the image of a pool was checked when it
//! came from media. But a reader may have got a slot of which one half is older than the other, and learns that only
//! afterwards. So every byte is taken for possibly wrong: what is asked of a view ends after as many steps as a node can have
//! entries, reaches nothing outside of the node, and is answered with an error if need be.

use std::cmp::Ordering;

use zerocopy::FromBytes;

use super::{
    Child, DirectoryEntry, ENTRY_BYTES, MAGIC, MAX_CHILDREN, MAX_ENTRIES, MAX_LEVEL, RawChild,
    RawEntry, RawNode, check_count, decode_leaf,
};
use crate::format::FormatError;
use crate::format::file::FileKind;
use crate::format::inode::SlotBytes;

/// A node as it lies in its slot.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a> {
    raw: &'a RawNode,
    level: u16,
    count: usize,
}

/// Where a name is in a leaf, or belongs.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// Where its entry begins among the bytes of the entries.
    pub offset: usize,
    /// Its entry, if it is there.
    pub entry: Option<EntryView<'a>>,
}

impl<'a> NodeView<'a> {
    /// The node in slot `number`; its checksum is not looked at.
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

    /// How many entries it has, or children.
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

    /// The child below which names of this hash belong; 0 in a leaf, which has none.
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

    /// Where a name is in a leaf, or belongs.
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

    /// The entries of a leaf, decoded, each checked as [`Node::decode`](super::Node::decode) does.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn decode_entries(&self) -> Result<Vec<DirectoryEntry>, FormatError> {
        decode_leaf(&self.raw.entries, self.count)
    }
}

/// An entry of a leaf, where it lies.
#[derive(Debug, Clone, Copy)]
pub struct EntryView<'a> {
    /// Where it begins.
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
    /// Where the next one begins.
    #[inline]
    pub fn end(&self) -> usize {
        self.offset + ENTRY_BYTES + self.name.len()
    }

    /// Of what kind the inode is.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    #[inline]
    pub fn kind(&self) -> Result<FileKind, FormatError> {
        let wrong = FormatError::Field { field: "kind", value: self.kind.into() };
        FileKind::from_code(self.kind).ok_or(wrong)
    }
}

/// Entries as they lie in a leaf, one behind the other. After an error there are no more.
#[derive(Debug, Clone)]
pub struct Entries<'a> {
    bytes: &'a [u8],
    offset: usize,
    left: usize,
}

impl<'a> Entries<'a> {
    /// The first `count` entries that lie in `bytes`.
    #[inline]
    pub fn new(bytes: &'a [u8], count: usize) -> Entries<'a> {
        Entries { bytes, offset: 0, left: count }
    }

    /// Where the next one begins, or where the last one ended.
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
