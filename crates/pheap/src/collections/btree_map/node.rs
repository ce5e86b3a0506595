//! Nodes of a B-tree: their memory layout, and moving entries between them.
//!
//! ```text
//!  ┌────────────┬─────────────────┬───────────────────┬──────────────────────────┐
//!  │ len, level │ keys: CAPACITY  │ values: CAPACITY  │ edges: CAPACITY + 1      │
//!  └────────────┴─────────────────┴───────────────────┴──────────────────────────┘
//!                                                       not in leaves (level 0)
//! ```
//!
//! A node's capacity follows from the size of its entries: a leaf is about a quarter of a page, so
//! that an insertion moves little and dirties one page.
//!
//! A [`Node`] is used only while its tree is borrowed, mutably where it is modified; this makes its
//! methods sound. Cheap index checks run in debug builds.

use std::alloc::Layout;
use std::marker::PhantomData;
use std::ptr::{NonNull, with_exposed_provenance_mut};

use crate::collections::place::free;
use crate::heap::HeapError;
use crate::heap::recorded::{note, note_bytes};
use crate::heap::shared::Shared;

/// The largest size of a leaf, unless entries are large.
const LEAF_BYTES: usize = 1008;
const LEAST_CAPACITY: usize = 5;
const MOST_CAPACITY: usize = 127;
const HEADER_BYTES: usize = 8;

/// A pointer to an existing node.
pub(super) struct Node<K, V> {
    at: NonNull<u8>,
    entries: PhantomData<*mut (K, V)>,
}

impl<K, V> Clone for Node<K, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K, V> Copy for Node<K, V> {}

impl<K, V> PartialEq for Node<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

const fn larger(one: usize, other: usize) -> usize {
    if one > other { one } else { other }
}

const fn align_up(offset: usize, align: usize) -> usize {
    offset.next_multiple_of(align)
}

/// An entry to be inserted into a node, and the subtree after it.
pub(super) struct Carry<K, V> {
    pub key: K,
    pub value: V,
    pub right: Option<Node<K, V>>,
}

impl<K, V> Node<K, V> {
    /// The number of entries a node has room for.
    pub const CAPACITY: usize = {
        let entry = size_of::<K>() + size_of::<V>();
        assert!(size_of::<K>() > 0, "keys without a size need no map");
        let padding = larger(align_of::<K>(), HEADER_BYTES) + align_of::<V>();
        let fit = LEAF_BYTES.saturating_sub(padding) / entry;
        if fit < LEAST_CAPACITY {
            LEAST_CAPACITY
        } else if fit > MOST_CAPACITY {
            MOST_CAPACITY
        } else {
            fit
        }
    };
    /// The least number of entries in every node but the root.
    pub const LEAST: usize = (Self::CAPACITY - 1) / 2;

    const KEYS: usize = align_up(HEADER_BYTES, align_of::<K>());
    const VALUES: usize = align_up(Self::KEYS + Self::CAPACITY * size_of::<K>(), align_of::<V>());
    const EDGES: usize =
        align_up(Self::VALUES + Self::CAPACITY * size_of::<V>(), align_of::<u64>());
    const ALIGN: usize = larger(align_of::<u64>(), larger(align_of::<K>(), align_of::<V>()));

    fn layout(level: usize) -> Layout {
        let edges = if level == 0 { 0 } else { Self::CAPACITY + 1 };
        Layout::from_size_align(Self::EDGES + edges * size_of::<u64>(), Self::ALIGN)
            .expect("a few entries")
    }

    /// A new node without entries.
    pub fn allocate(heap: &Shared, level: usize) -> Result<Self, HeapError> {
        let node = Node::at(heap.allocate(Self::layout(level))?.cast());
        note_bytes(node.at, HEADER_BYTES);
        // SAFETY: just allocated with this header.
        unsafe { node.at.cast::<[u32; 2]>().write([0, level as u32]) };
        Ok(node)
    }

    /// Frees the node. Its entries must have been moved out.
    pub fn free(self, heap: &Shared) {
        // SAFETY: nothing refers to the node any more.
        unsafe { free(heap, self.at) };
    }

    pub fn at(at: NonNull<u8>) -> Self {
        Node { at, entries: PhantomData }
    }

    pub fn address(self) -> NonNull<u8> {
        self.at
    }

    fn header(self) -> [u32; 2] {
        // SAFETY: every node begins with this header.
        unsafe { self.at.cast::<[u32; 2]>().read() }
    }

    pub fn len(self) -> usize {
        self.header()[0] as usize
    }

    pub fn is_leaf(self) -> bool {
        self.header()[1] == 0
    }

    pub fn is_full(self) -> bool {
        self.len() == Self::CAPACITY
    }

    fn set_len(self, len: usize) {
        debug_assert!(len <= Self::CAPACITY);
        note_bytes(self.at, HEADER_BYTES);
        // SAFETY: every node begins with its length.
        unsafe { self.at.cast::<u32>().write(len as u32) };
    }

    /// The address of a key slot.
    pub fn key(self, index: usize) -> NonNull<K> {
        debug_assert!(index < Self::CAPACITY);
        // SAFETY: inside the node.
        unsafe { self.at.add(Self::KEYS).cast::<K>().add(index) }
    }

    /// The address of a value slot.
    pub fn value(self, index: usize) -> NonNull<V> {
        debug_assert!(index < Self::CAPACITY);
        // SAFETY: inside the node.
        unsafe { self.at.add(Self::VALUES).cast::<V>().add(index) }
    }

    fn edge_place(self, index: usize) -> NonNull<u64> {
        debug_assert!(!self.is_leaf() && index <= Self::CAPACITY);
        // SAFETY: inside the node, which is not a leaf.
        unsafe { self.at.add(Self::EDGES).cast::<u64>().add(index) }
    }

    /// The subtree before the entry `index`, or after the last entry.
    pub fn edge(self, index: usize) -> Self {
        debug_assert!(index <= self.len());
        // SAFETY: the node has an edge at this index.
        let address = unsafe { self.edge_place(index).read() };
        Node::at(NonNull::new(with_exposed_provenance_mut(address as usize)).expect("a subtree"))
    }

    pub fn set_edge(self, index: usize, below: Self) {
        note(self.edge_place(index), 1);
        // SAFETY: inside the node.
        unsafe { self.edge_place(index).write(below.at.as_ptr().expose_provenance() as u64) };
    }

    /// Finds a key: `Ok` with its index, or `Err` with the index of the subtree it would be in.
    pub fn search(self, compare: impl FnMut(&K) -> std::cmp::Ordering) -> Result<usize, usize> {
        // SAFETY: the first `len` keys are initialized, and the tree is borrowed.
        let keys = unsafe { NonNull::slice_from_raw_parts(self.key(0), self.len()).as_ref() };
        keys.binary_search_by(compare)
    }

    /// Moves entries to another node, or within this one. Overwritten entries are not dropped.
    fn move_entries(self, from: usize, target: Self, to: usize, count: usize) {
        if count > 0 {
            note(target.key(to), count);
            note(target.value(to), count);
            // SAFETY: inside the two nodes.
            unsafe { self.key(from).copy_to(target.key(to), count) };
            // SAFETY: as above.
            unsafe { self.value(from).copy_to(target.value(to), count) };
        }
    }

    /// Like [`Node::move_entries`], for subtrees; does nothing in leaves.
    fn move_edges(self, from: usize, target: Self, to: usize, count: usize) {
        if !self.is_leaf() && count > 0 {
            note(target.edge_place(to), count);
            // SAFETY: inside the two nodes, neither of which is a leaf.
            unsafe { self.edge_place(from).copy_to(target.edge_place(to), count) };
        }
    }

    fn write(self, index: usize, key: K, value: V) {
        note(self.key(index), 1);
        note(self.value(index), 1);
        // SAFETY: inside the node; the previous entry was moved out.
        unsafe { self.key(index).write(key) };
        // SAFETY: as above.
        unsafe { self.value(index).write(value) };
    }

    fn read(self, index: usize) -> (K, V) {
        // SAFETY: an initialized entry, which the caller overwrites or forgets.
        (unsafe { self.key(index).read() }, unsafe { self.value(index).read() })
    }

    /// Replaces an entry; returns the old one.
    pub fn replace(self, index: usize, (key, value): (K, V)) -> (K, V) {
        let old = self.read(index);
        self.write(index, key, value);
        old
    }

    /// Inserts an entry, and the subtree after it, before the entry `index`. There must be room.
    pub fn insert(self, index: usize, carry: Carry<K, V>) {
        let len = self.len();
        self.move_entries(index, self, index + 1, len - index);
        self.write(index, carry.key, carry.value);
        if let Some(right) = carry.right {
            self.move_edges(index + 1, self, index + 2, len - index);
            self.set_edge(index + 1, right);
        }
        self.set_len(len + 1);
    }

    /// Like [`Node::insert`], into a full node whose upper half moves to `right`. Returns the entry
    /// between the halves.
    pub fn split_insert(self, index: usize, carry: Carry<K, V>, right: Self) -> Carry<K, V> {
        let middle = Self::CAPACITY / 2;
        let moved = Self::CAPACITY - middle - 1;
        self.move_entries(middle + 1, right, 0, moved);
        self.move_edges(middle + 1, right, 0, moved + 1);
        let (key, value) = self.read(middle);
        self.set_len(middle);
        right.set_len(moved);
        if index <= middle {
            self.insert(index, carry);
        } else {
            right.insert(index - middle - 1, carry);
        }
        Carry { key, value, right: Some(right) }
    }

    /// Removes an entry without a subtree; leaves only.
    pub fn remove(self, index: usize) -> (K, V) {
        debug_assert!(self.is_leaf());
        let removed = self.read(index);
        self.move_entries(index + 1, self, index, self.len() - index - 1);
        self.set_len(self.len() - 1);
        removed
    }

    /// Moves the last entry of the subtree before the entry `index` up, and that entry down to the
    /// front of the subtree after it.
    pub fn rotate_right(self, index: usize) {
        let (left, right) = (self.edge(index), self.edge(index + 1));
        let (last, len) = (left.len() - 1, right.len());
        right.move_entries(0, right, 1, len);
        right.move_edges(0, right, 1, len + 1);
        let (key, value) = self.replace(index, left.read(last));
        right.write(0, key, value);
        left.move_edges(last + 1, right, 0, 1);
        left.set_len(last);
        right.set_len(len + 1);
    }

    /// The mirror image of [`Node::rotate_right`].
    pub fn rotate_left(self, index: usize) {
        let (left, right) = (self.edge(index), self.edge(index + 1));
        let (end, len) = (left.len(), right.len());
        let (key, value) = self.replace(index, right.read(0));
        left.write(end, key, value);
        right.move_edges(0, left, end + 1, 1);
        right.move_entries(1, right, 0, len - 1);
        right.move_edges(1, right, 0, len);
        left.set_len(end + 1);
        right.set_len(len - 1);
    }

    /// Merges the subtrees on both sides of the entry `index`, and that entry, into one node.
    /// Returns the emptied node.
    pub fn merge(self, index: usize) -> Self {
        let (left, right) = (self.edge(index), self.edge(index + 1));
        let (end, moved, len) = (left.len(), right.len(), self.len());
        let (key, value) = self.read(index);
        left.write(end, key, value);
        right.move_entries(0, left, end + 1, moved);
        right.move_edges(0, left, end + 1, moved + 1);
        left.set_len(end + 1 + moved);
        self.move_entries(index + 1, self, index, len - index - 1);
        self.move_edges(index + 2, self, index + 1, len - index - 1);
        self.set_len(len - 1);
        right
    }
}
