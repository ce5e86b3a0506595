//! A sorted linked list: like a list of `Box`es, with an explicit heap.

use aquifer_object::collections::PBox;
use aquifer_object::heap::{HeapError, HeapRef};
use aquifer_object::persist;

type Link<'h> = Option<PBox<'h, Node<'h>>>;

persist! {
    struct Node<'h> {
        value: u64,
        next: Link<'h>,
    }
}

persist! {
    /// Numbers in ascending order.
    pub struct SortedList<'h> {
        first: Link<'h>,
    }
}

impl<'h> SortedList<'h> {
    /// An empty list.
    pub fn new() -> SortedList<'h> {
        SortedList { first: None }
    }

    /// Inserts a number before the first one that is not smaller.
    pub fn insert(&mut self, value: u64, heap: HeapRef<'h>) -> Result<(), HeapError> {
        let mut node = PBox::new_in(Node { value, next: None }, heap)?;
        let link = self.link_to(value);
        node.next = link.take();
        *link = Some(node);
        Ok(())
    }

    /// Removes one occurrence of a number; returns whether there was one.
    pub fn remove(&mut self, value: u64) -> bool {
        let link = self.link_to(value);
        match link.take() {
            Some(mut node) if node.value == value => {
                *link = node.next.take();
                true
            }
            other => {
                *link = other;
                false
            }
        }
    }

    /// The link to the first node that is not smaller than `value`.
    fn link_to(&mut self, value: u64) -> &mut Link<'h> {
        let mut link = &mut self.first;
        while link.as_ref().is_some_and(|node| node.value < value) {
            link = &mut link.as_mut().expect("it has a node").next;
        }
        link
    }

    /// The numbers in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        let mut link = &self.first;
        std::iter::from_fn(move || {
            let node = link.as_ref()?;
            link = &node.next;
            Some(node.value)
        })
    }
}

impl Drop for SortedList<'_> {
    /// Drops node by node: recursive drops would need a stack as deep as the list.
    fn drop(&mut self) {
        let mut link = self.first.take();
        while let Some(mut node) = link {
            link = node.next.take();
        }
    }
}
