//! An ordered map in an object.
//!
//! A B-tree. An insertion or a removal dirties the page of one leaf and that of the map itself,
//! which stores the length; splitting or merging a node dirties one or two more. All nodes that an
//! insertion needs are allocated before any change, so that an insertion into a full object leaves
//! the map unchanged.
//!
//! # Invariants
//! * Keys are in order, within a node and between an entry and the subtrees on its sides.
//! * All leaves are at level 0, and a node's subtrees one level below it.
//! * Every node but the root is at least about half full; the root has an entry.

mod iter;
mod node;
mod path;

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

pub use iter::{Iter, IterMut};

use super::place::Place;
use crate::heap::recorded::{note, note_drop};
use crate::heap::shared::Shared;
use crate::heap::{HeapError, HeapRef};
use crate::persist::{Persist, Shape};
use iter::Span;
use node::{Carry, Node};
use path::{MOST_LEVELS, Path};

/// An ordered map in the heap with the lifetime `'h`, like `BTreeMap`.
#[repr(C)]
pub struct PBTreeMap<'h, K: Persist<'h>, V: Persist<'h>> {
    place: Place<'h>,
    len: u64,
    /// Zero while there is no root.
    levels: u64,
    entries: PhantomData<(K, V)>,
}

// SAFETY: `repr(C)`: two numbers and the address of a node in the heap `'h`, whose layout is
// defined by `node.rs`.
unsafe impl<'h, K: Persist<'h>, V: Persist<'h>> Persist<'h> for PBTreeMap<'h, K, V> {
    fn shape(shape: &mut Shape) {
        shape.own_parts::<Self>("b-tree map", |shape| {
            shape.at(Node::<K, V>::CAPACITY);
            K::shape(shape);
            V::shape(shape);
        });
    }
}

impl<'h, K: Persist<'h>, V: Persist<'h>> PBTreeMap<'h, K, V> {
    /// An empty map, without memory.
    pub fn new_in(heap: HeapRef<'h>) -> PBTreeMap<'h, K, V> {
        PBTreeMap { place: Place::none(heap), len: 0, levels: 0, entries: PhantomData }
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn root(&self) -> Option<Node<K, V>> {
        (self.levels > 0).then(|| Node::at(self.place.pointer()))
    }

    /// Descends to a key. Returns the path, and whether the key was found.
    fn find<Q: Ord + ?Sized>(&self, key: &Q) -> (Path<K, V>, bool)
    where
        K: Borrow<Q>,
    {
        let mut path = Path::empty();
        let mut next = self.root();
        while let Some(node) = next {
            let found = node.search(|other| other.borrow().cmp(key));
            let (Ok(index) | Err(index)) = found;
            path.push(node, index);
            if found.is_ok() {
                return (path, true);
            }
            next = (!node.is_leaf()).then(|| node.edge(index));
        }
        (path, false)
    }

    fn entry<Q: Ord + ?Sized>(&self, key: &Q) -> Option<(Node<K, V>, usize)>
    where
        K: Borrow<Q>,
    {
        let mut node = self.root()?;
        loop {
            match node.search(|other| other.borrow().cmp(key)) {
                Ok(index) => return Some((node, index)),
                Err(_) if node.is_leaf() => return None,
                Err(index) => node = node.edge(index),
            }
        }
    }

    /// The value of a key.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        // SAFETY: an initialized entry, and the map is borrowed.
        self.entry(key).map(|(node, index)| unsafe { node.value(index).as_ref() })
    }

    /// The value of a key, mutably.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let (node, index) = self.entry(key)?;
        note(node.value(index), 1);
        // SAFETY: an initialized entry, and the map is borrowed mutably.
        Some(unsafe { node.value(index).as_mut() })
    }

    /// Whether the key has a value.
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.entry(key).is_some()
    }

    /// Sets the value of a key; returns the previous one. An existing key is kept.
    ///
    /// # Errors
    /// [`HeapError::Full`]; key and value are dropped then.
    pub fn insert(&mut self, key: K, value: V) -> Result<Option<V>, HeapError>
    where
        K: Ord,
    {
        let (path, found) = self.find(&key);
        if found && let Some((node, index)) = path.last() {
            note(node.value(index), 1);
            // SAFETY: an initialized entry, and the map is borrowed mutably.
            let old = unsafe { node.value(index).as_mut() };
            return Ok(Some(std::mem::replace(old, value)));
        }
        let mut carry = Carry { key, value, right: None };
        let full = path.steps().iter().rev().take_while(|(node, _)| node.is_full()).count();
        let spares = self.allocate_spares(full)?;
        let mut up = path.steps().iter().rev();
        for (spare, &(node, index)) in spares.iter().flatten().zip(up.by_ref().take(full)) {
            carry = node.split_insert(index, carry, *spare);
        }
        match (up.next(), spares[full]) {
            (Some(&(node, index)), _) => node.insert(index, carry),
            (None, Some(root)) => {
                if let Some(old) = self.root() {
                    root.set_edge(0, old);
                }
                root.insert(0, carry);
                self.place.set(root.address());
                self.levels += 1;
            }
            (None, None) => {
                unreachable!("a new root was allocated for a tree that is full to the top")
            }
        }
        self.len += 1;
        Ok(None)
    }

    /// Allocates a new node for each of the lowest `full` levels, and a new root if all levels are
    /// full.
    fn allocate_spares(&self, full: usize) -> Result<[Option<Node<K, V>>; MOST_LEVELS], HeapError> {
        let mut spares = [None; MOST_LEVELS];
        let count = if full as u64 == self.levels { full + 1 } else { full };
        if count == 0 {
            return Ok(spares);
        }
        let heap = self.place.heap();
        for level in 0..count {
            match Node::allocate(&heap, level) {
                Ok(node) => spares[level] = Some(node),
                Err(error) => {
                    spares.into_iter().flatten().for_each(|node| node.free(&heap));
                    return Err(error);
                }
            }
        }
        Ok(spares)
    }

    /// Removes a key; returns its value, if it was present.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.remove_entry(key).map(|(_, value)| value)
    }

    /// Removes a key; returns the key and its value, if it was present.
    pub fn remove_entry<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<(K, V)>
    where
        K: Borrow<Q>,
    {
        let (path, found) = self.find(key);
        if found { self.remove_at(path) } else { None }
    }

    /// The entry with the least key.
    pub fn first_key_value(&self) -> Option<(&K, &V)> {
        self.iter().next()
    }

    /// The entry with the greatest key.
    pub fn last_key_value(&self) -> Option<(&K, &V)> {
        let mut path = Path::empty();
        path.descend(self.root(), Node::len);
        let (node, len) = path.last()?;
        // SAFETY: no node is empty, and the map is borrowed.
        Some((unsafe { node.key(len - 1).as_ref() }, unsafe { node.value(len - 1).as_ref() }))
    }

    /// Removes the entry with the least key.
    pub fn pop_first(&mut self) -> Option<(K, V)> {
        self.remove_at(Path::first(self.root()))
    }

    /// Removes the entry at the end of a path.
    fn remove_at(&mut self, mut path: Path<K, V>) -> Option<(K, V)> {
        let (node, index) = path.last()?;
        let removed = if node.is_leaf() {
            node.remove(index)
        } else {
            // Its predecessor, which is in a leaf, replaces it.
            path.descend(Some(node.edge(index)), Node::len);
            let (leaf, len) = path.last()?;
            node.replace(index, leaf.remove(len - 1))
        };
        self.len -= 1;
        self.rebalance(path);
        Some(removed)
    }

    /// Refills nodes with too few entries, from the end of a path upwards.
    fn rebalance(&mut self, mut path: Path<K, V>) {
        while let Some((node, _)) = path.pop() {
            let Some((parent, index)) = path.last() else {
                if node.len() == 0 {
                    self.remove_root(node);
                }
                return;
            };
            let least = Node::<K, V>::LEAST;
            if node.len() >= least {
                return;
            }
            if index > 0 && parent.edge(index - 1).len() > least {
                parent.rotate_right(index - 1);
            } else if index < parent.len() && parent.edge(index + 1).len() > least {
                parent.rotate_left(index);
            } else {
                parent.merge(index.saturating_sub(1)).free(&self.place.heap());
            }
        }
    }

    /// Replaces an empty root by its only subtree, or by nothing.
    fn remove_root(&mut self, root: Node<K, V>) {
        let heap = self.place.heap();
        self.place.set(if root.is_leaf() { heap.base() } else { root.edge(0).address() });
        self.levels -= 1;
        root.free(&heap);
    }

    /// Drops all entries.
    pub fn clear(&mut self) {
        if let Some(root) = self.root() {
            let heap = self.place.heap();
            // Reset first, so that an entry whose drop panics is not dropped again.
            self.place.set(heap.base());
            (self.levels, self.len) = (0, 0);
            Self::drop_tree(root, &heap);
        }
    }

    fn drop_tree(node: Node<K, V>, heap: &Shared) {
        note_drop(node.key(0), node.len());
        note_drop(node.value(0), node.len());
        for index in 0..node.len() {
            // SAFETY: an entry of a tree that nothing refers to any more.
            unsafe { node.key(index).drop_in_place() };
            // SAFETY: as above.
            unsafe { node.value(index).drop_in_place() };
        }
        if !node.is_leaf() {
            for index in 0..=node.len() {
                Self::drop_tree(node.edge(index), heap);
            }
        }
        node.free(heap);
    }

    /// All entries, in key order.
    pub fn iter(&self) -> Iter<'_, 'h, K, V> {
        Iter::new(Span { front: Path::first(self.root()), end: None })
    }

    /// All entries, in key order, with mutable values.
    pub fn iter_mut(&mut self) -> IterMut<'_, 'h, K, V> {
        IterMut::new(Span { front: Path::first(self.root()), end: None })
    }

    /// The entries with keys in a range, in key order.
    ///
    /// # Panics
    /// If the range's start is after its end, as with `BTreeMap`.
    pub fn range<Q: Ord + ?Sized, R: RangeBounds<Q>>(&self, range: R) -> Iter<'_, 'h, K, V>
    where
        K: Borrow<Q>,
    {
        Iter::new(self.span(&range))
    }

    /// Like [`PBTreeMap::range`], with mutable values.
    ///
    /// # Panics
    /// If the range's start is after its end.
    pub fn range_mut<Q: Ord + ?Sized, R: RangeBounds<Q>>(
        &mut self,
        range: R,
    ) -> IterMut<'_, 'h, K, V>
    where
        K: Borrow<Q>,
    {
        IterMut::new(self.span(&range))
    }

    fn span<Q: Ord + ?Sized>(&self, range: &impl RangeBounds<Q>) -> Span<K, V>
    where
        K: Borrow<Q>,
    {
        use Bound::{Excluded, Included, Unbounded};
        match (range.start_bound(), range.end_bound()) {
            (Excluded(start), Excluded(end)) => assert!(start < end, "a range without a middle"),
            (Included(start) | Excluded(start), Included(end) | Excluded(end)) => {
                assert!(start <= end, "a range that starts behind its end");
            }
            _ => {}
        }
        let front = match range.start_bound() {
            Unbounded => Path::first(self.root()),
            Included(key) => self.first_not(|other| other.cmp(key) == Ordering::Less),
            Excluded(key) => self.first_not(|other| other.cmp(key) != Ordering::Greater),
        };
        let end = match range.end_bound() {
            Unbounded => None,
            Included(key) => self.first_not(|other| other.cmp(key) != Ordering::Greater).last(),
            Excluded(key) => self.first_not(|other| other.cmp(key) == Ordering::Less).last(),
        };
        Span { front, end }
    }

    /// The path to the first entry whose key is not `before`.
    fn first_not<Q: ?Sized>(&self, before: impl Fn(&Q) -> bool) -> Path<K, V>
    where
        K: Borrow<Q>,
    {
        let order = |key: &K| if before(key.borrow()) { Ordering::Less } else { Ordering::Greater };
        let mut path = Path::empty();
        path.descend(self.root(), |node| {
            let (Ok(index) | Err(index)) = node.search(order);
            index
        });
        path.settle();
        path
    }
}

impl<'h, K: Persist<'h>, V: Persist<'h>> Drop for PBTreeMap<'h, K, V> {
    fn drop(&mut self) {
        if !self.place.is_parents() {
            self.clear();
        }
    }
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> IntoIterator for &'a PBTreeMap<'h, K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, 'h, K, V>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> IntoIterator for &'a mut PBTreeMap<'h, K, V> {
    type Item = (&'a K, &'a mut V);
    type IntoIter = IterMut<'a, 'h, K, V>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<'h, K: Persist<'h> + fmt::Debug, V: Persist<'h> + fmt::Debug> fmt::Debug
    for PBTreeMap<'h, K, V>
{
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_map().entries(self).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{ObjectHeap, Placement};
    use aquifer_testkit::campaign::{seed, steps};
    use aquifer_testkit::rng::Rng;
    use std::alloc::Layout;
    use std::ptr::NonNull;

    /// Checks the invariants of a subtree; collects its keys.
    fn check<K: Copy + Ord, V>(node: Node<K, V>, level: u64, is_root: bool, keys: &mut Vec<K>) {
        assert_eq!(node.is_leaf(), level == 0);
        assert!(node.len() <= Node::<K, V>::CAPACITY);
        assert!(node.len() >= if is_root { 1 } else { Node::<K, V>::LEAST });
        for index in 0..=node.len() {
            if level > 0 {
                check(node.edge(index), level - 1, false, keys);
            }
            if index < node.len() {
                // SAFETY: an entry of a tree that is borrowed.
                keys.push(unsafe { node.key(index).read() });
            }
        }
    }

    fn check_map<'h, K: Persist<'h> + Copy + Ord, V: Persist<'h>>(map: &PBTreeMap<'h, K, V>) {
        let mut keys = Vec::new();
        if let Some(root) = map.root() {
            check(root, map.levels - 1, true, &mut keys);
        }
        assert_eq!(keys.len(), map.len());
        assert!(keys.is_sorted_by(|one, next| one < next));
    }

    fn churn<'h, V: Persist<'h> + Copy>(heap: HeapRef<'h>, rng: &mut Rng, value: V) {
        let mut map = PBTreeMap::<u64, V>::new_in(heap);
        let mut most_levels = 0;
        // In waves: grow, then shrink to nothing.
        for wave in 0..4 {
            for (share, count) in [(0.9, steps(3000)), (0.1, steps(4000))] {
                for turn in 0..count {
                    let key = rng.below(2000) << wave;
                    if rng.chance(share) {
                        map.insert(key, value).unwrap();
                    } else if rng.chance(0.1) {
                        map.pop_first();
                    } else {
                        map.remove(&key);
                    }
                    if turn % 16 == 0 {
                        check_map(&map);
                    }
                }
                most_levels = most_levels.max(map.levels);
            }
        }
        assert!(most_levels >= 2);
        while map.pop_first().is_some() {
            check_map(&map);
        }
        assert_eq!(map.levels, 0);
    }

    #[test]
    fn the_invariants_hold() {
        let mut rng = Rng::new(seed(15));
        let layout = Layout::from_size_align(16 << 20, 4096).unwrap();
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
        // SAFETY: fresh memory, which is used through the heap only.
        let heap = unsafe { ObjectHeap::format(start, 16 << 20, Placement::Fixed) };
        let mut heap = heap.unwrap();
        heap.enter(|scope| {
            // An even capacity, an odd one, and the smallest.
            assert_eq!(Node::<u64, u64>::CAPACITY, 62);
            churn(scope.heap(), &mut rng, 0u64);
            assert_eq!(Node::<u64, [u64; 12]>::CAPACITY, 9);
            churn(scope.heap(), &mut rng, [0u64; 12]);
            assert_eq!(Node::<u64, [u64; 100]>::CAPACITY, 5);
            churn(scope.heap(), &mut rng, [0u64; 100]);
        });
        assert_eq!(heap.check().unwrap().allocations, 0);
        drop(heap);
        // SAFETY: allocated above with this layout.
        unsafe { std::alloc::dealloc(start.as_ptr(), layout) };
    }
}
