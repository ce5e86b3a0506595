//! Nodes of a B-tree: how they lie in memory, and what moves between them.
//!
//! ```text
//!  ┌────────────┬─────────────────┬───────────────────┬──────────────────────────┐
//!  │ len, level │ keys: CAPACITY  │ values: CAPACITY  │ edges: CAPACITY + 1      │
//!  └────────────┴─────────────────┴───────────────────┴──────────────────────────┘
//!                                                       not in leaves (level 0)
//! ```
//!
//! How many entries a node has room for follows from their size: a leaf is about a quarter of a page, so that an
//! insertion moves little and dirties one page.
//!
//! A [`Node`] is used only while its tree is borrowed, uniquely where it changes: that is what makes its methods
//! sound. Indices are checked where they are cheap to check, in debug builds.

use std::alloc::Layout;
use std::marker::PhantomData;
use std::ptr::{NonNull, with_exposed_provenance_mut};

use crate::collections::place::free;
use crate::heap::HeapError;
use crate::heap::shared::Shared;

/// What a leaf is at most, unless entries are large.
const LEAF_BYTES: usize = 1008;
const LEAST_CAPACITY: usize = 5;
const MOST_CAPACITY: usize = 127;
const HEADER_BYTES: usize = 8;

/// A node that exists.
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

/// An entry on its way into a node, and the subtree behind it.
pub(super) struct Carry<K, V> {
    pub key: K,
    pub value: V,
    pub right: Option<Node<K, V>>,
}

impl<K, V> Node<K, V> {
    /// How many entries a node has room for.
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
    /// How many entries every node but the root has at least.
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
        // SAFETY: just allocated with this header.
        unsafe { node.at.cast::<[u32; 2]>().write([0, level as u32]) };
        Ok(node)
    }

    /// Gives the node back. Its entries must have gone elsewhere.
    pub fn free(self, heap: &Shared) {
        // SAFETY: a node that nothing leads to any more.
        unsafe { free(heap, self.at) };
    }

    pub fn at(at: NonNull<u8>) -> Self {
        Node { at, entries: PhantomData }
    }

    pub fn address(self) -> NonNull<u8> {
        self.at
    }

    fn header(self) -> [u32; 2] {
        // SAFETY: every node begins so.
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
        // SAFETY: every node begins so.
        unsafe { self.at.cast::<u32>().write(len as u32) };
    }

    /// Where a key is, or would be.
    pub fn key(self, index: usize) -> NonNull<K> {
        debug_assert!(index < Self::CAPACITY);
        // SAFETY: inside the node.
        unsafe { self.at.add(Self::KEYS).cast::<K>().add(index) }
    }

    /// Where a value is, or would be.
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

    /// The subtree in front of the entry `index`, or behind the last.
    pub fn edge(self, index: usize) -> Self {
        debug_assert!(index <= self.len());
        // SAFETY: so many subtrees are there.
        let address = unsafe { self.edge_place(index).read() };
        Node::at(NonNull::new(with_exposed_provenance_mut(address as usize)).expect("a subtree"))
    }

    pub fn set_edge(self, index: usize, below: Self) {
        // SAFETY: inside the node.
        unsafe { self.edge_place(index).write(below.at.as_ptr().expose_provenance() as u64) };
    }

    /// Finds a key: `Ok` with its index, or `Err` with the index of the subtree it would be in.
    pub fn search(self, compare: impl FnMut(&K) -> std::cmp::Ordering) -> Result<usize, usize> {
        // SAFETY: so many keys are there, and the tree is borrowed.
        let keys = unsafe { NonNull::slice_from_raw_parts(self.key(0), self.len()).as_ref() };
        keys.binary_search_by(compare)
    }

    /// Moves entries to another node, or within this one. What was there is forgotten.
    fn move_entries(self, from: usize, target: Self, to: usize, count: usize) {
        if count > 0 {
            // SAFETY: inside the two nodes.
            unsafe { self.key(from).copy_to(target.key(to), count) };
            // SAFETY: as above.
            unsafe { self.value(from).copy_to(target.value(to), count) };
        }
    }

    /// As [`Node::move_entries`], for subtrees; nothing in leaves.
    fn move_edges(self, from: usize, target: Self, to: usize, count: usize) {
        if !self.is_leaf() && count > 0 {
            // SAFETY: inside the two nodes, neither of which is a leaf.
            unsafe { self.edge_place(from).copy_to(target.edge_place(to), count) };
        }
    }

    fn write(self, index: usize, key: K, value: V) {
        // SAFETY: inside the node; what was there has gone elsewhere.
        unsafe { self.key(index).write(key) };
        // SAFETY: as above.
        unsafe { self.value(index).write(value) };
    }

    fn read(self, index: usize) -> (K, V) {
        // SAFETY: an entry, which the caller overwrites or forgets.
        (unsafe { self.key(index).read() }, unsafe { self.value(index).read() })
    }

    /// Puts other contents into an entry; what was there.
    pub fn replace(self, index: usize, (key, value): (K, V)) -> (K, V) {
        let old = self.read(index);
        self.write(index, key, value);
        old
    }

    /// Puts an entry, and the subtree behind it, in front of the entry `index`. There must be room.
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

    /// As [`Node::insert`] into a full node, whose upper half goes to `right`: returns the entry between the halves.
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

    /// Takes an entry out, without a subtree: leaves only.
    pub fn remove(self, index: usize) -> (K, V) {
        debug_assert!(self.is_leaf());
        let removed = self.read(index);
        self.move_entries(index + 1, self, index, self.len() - index - 1);
        self.set_len(self.len() - 1);
        removed
    }

    /// Moves the last entry of the subtree in front of the entry `index` up, and that one down behind it.
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

    /// The other way round.
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

    /// Makes one node of the subtrees on both sides of the entry `index`, which joins them; the one that is left over.
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
