//! Iterators over a tree.

use std::marker::PhantomData;

use super::PBTreeMap;
use super::node::Node;
use super::path::Path;
use crate::heap::recorded::note;
use crate::persist::Persist;

/// The entries from one place up to another.
pub(super) struct Span<K, V> {
    /// The path to the next entry; empty at the end.
    pub front: Path<K, V>,
    /// The entry to stop before; `None` to run to the end.
    pub end: Option<(Node<K, V>, usize)>,
}

impl<K, V> Span<K, V> {
    fn next(&mut self) -> Option<(Node<K, V>, usize)> {
        let here = self.front.last()?;
        if self.end == Some(here) {
            return None;
        }
        self.front.advance();
        Some(here)
    }
}

/// Entries of a [`PBTreeMap`], in key order.
pub struct Iter<'a, 'h, K: Persist<'h>, V: Persist<'h>> {
    span: Span<K, V>,
    map: PhantomData<&'a PBTreeMap<'h, K, V>>,
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> Iter<'a, 'h, K, V> {
    /// The span must be of a map that is borrowed for `'a`.
    pub(super) fn new(span: Span<K, V>) -> Self {
        Iter { span, map: PhantomData }
    }
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> Iterator for Iter<'a, 'h, K, V> {
    type Item = (&'a K, &'a V);
    fn next(&mut self) -> Option<Self::Item> {
        let (node, index) = self.span.next()?;
        // SAFETY: an entry of a map that is borrowed.
        Some((unsafe { node.key(index).as_ref() }, unsafe { node.value(index).as_ref() }))
    }
}

/// Entries of a [`PBTreeMap`], in key order, with mutable values.
pub struct IterMut<'a, 'h, K: Persist<'h>, V: Persist<'h>> {
    span: Span<K, V>,
    map: PhantomData<&'a mut PBTreeMap<'h, K, V>>,
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> IterMut<'a, 'h, K, V> {
    /// The span must be of a map that is borrowed mutably for `'a`.
    pub(super) fn new(span: Span<K, V>) -> Self {
        IterMut { span, map: PhantomData }
    }
}

impl<'a, 'h, K: Persist<'h>, V: Persist<'h>> Iterator for IterMut<'a, 'h, K, V> {
    type Item = (&'a K, &'a mut V);
    fn next(&mut self) -> Option<Self::Item> {
        let (node, index) = self.span.next()?;
        note(node.value(index), 1);
        // SAFETY: an entry of a map that is borrowed mutably; each is lent once.
        Some((unsafe { node.key(index).as_ref() }, unsafe { node.value(index).as_mut() }))
    }
}
