//! A sorted list with plain pointers, as in C: an object is at the same address in every process
//! and after every restart, so the pointers in it stay valid. Nothing is looked up or converted.
//!
//! Compare `sorted_list.rs`, which is the same without `unsafe`.

use std::alloc::Layout;
use std::ptr::null_mut;

use aquifer_object::heap::{HeapError, ObjectHeap};

const LIST: u64 = 0x706c_6169_6e21;

#[repr(C)]
struct Node {
    data: u64,
    next: *mut Node,
}

/// The list that is the object's root.
pub struct PlainList<'a> {
    heap: &'a ObjectHeap,
    head: *mut *mut Node,
}

impl<'a> PlainList<'a> {
    /// Finds the list in the heap, or creates one.
    ///
    /// # Safety
    /// No other `PlainList` of this heap exists at the same time, and a root with the list's id is
    /// a list.
    pub unsafe fn open(heap: &'a ObjectHeap) -> Result<PlainList<'a>, HeapError> {
        let head = match heap.root(LIST) {
            Err(HeapError::NoRoot) => {
                let head = heap.alloc(Layout::new::<*mut Node>())?.cast();
                // SAFETY: just allocated for it.
                unsafe { head.write(null_mut()) };
                heap.set_root(head, LIST)?;
                head
            }
            found => found?,
        };
        Ok(PlainList { heap, head: head.as_ptr() })
    }

    /// Inserts a number in order.
    pub fn insert(&mut self, data: u64) -> Result<(), HeapError> {
        let new_node = self.heap.alloc(Layout::new::<Node>())?.cast::<Node>().as_ptr();
        // SAFETY: the head is in the object as long as the list; the list is borrowed mutably.
        let mut link = unsafe { &mut *self.head };
        // SAFETY: null or a node, which is reached from here only.
        while let Some(node) = unsafe { link.as_mut() } {
            if node.data >= data {
                break;
            }
            link = &mut node.next;
        }
        // SAFETY: just allocated for a node.
        unsafe { new_node.write(Node { data, next: *link }) };
        *link = new_node;
        Ok(())
    }

    /// The numbers in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        // SAFETY: the head and each `next` are null or a node; the list is borrowed.
        let mut next = unsafe { *self.head };
        std::iter::from_fn(move || {
            // SAFETY: as above.
            let node = unsafe { next.as_ref() }?;
            next = node.next;
            Some(node.data)
        })
    }
}
