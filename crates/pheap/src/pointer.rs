//! Pointers for objects that may move.
//!
//! An object that is not relocatable always has the same address, so plain pointers suffice in it.
//! In a relocatable object, a [`RelPtr`] stores the distance to its target, and stays valid as long
//! as both move together.
//!
//! ```
//! use aquifer_pheap::pointer::RelPtr;
//!
//! #[repr(C)]
//! struct Pair { to: RelPtr<u64>, value: u64 }
//!
//! let mut pair = Box::new(Pair { to: RelPtr::null(), value: 7 });
//! let value = &raw mut pair.value;
//! pair.to.set(value);
//! // The pair moves as a whole: the pointer in it points to the value's new address.
//! let moved = Box::new(*pair);
//! assert_eq!(moved.to.get().cast_const(), &raw const moved.value);
//! ```

use std::fmt;
use std::marker::PhantomData;
use std::ptr::with_exposed_provenance_mut;

/// A pointer stored as the distance from itself to its target; zero is null.
///
/// It is valid only at its own address: it is neither `Copy` nor `Clone`, and moving it without its
/// target makes it point elsewhere. Set it in place ([`RelPtr::set`]). To point a second `RelPtr`
/// to the same target, set it to the result of [`get`](RelPtr::get).
///
/// [`get`](RelPtr::get) makes a pointer from an address. It may be used where a pointer into the
/// target's memory was exposed before, as is the case for every open heap.
#[repr(transparent)]
pub struct RelPtr<T> {
    /// In bytes. Zero is null; a pointer to itself, whose distance is zero, is [`ITSELF`].
    distance: i64,
    target: PhantomData<*mut T>,
}

/// Not a possible distance between two addresses.
const ITSELF: i64 = i64::MIN;

// SAFETY: a number; its target is accessed only through `unsafe`.
unsafe impl<T> Send for RelPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for RelPtr<T> {}

impl<T> RelPtr<T> {
    /// The null pointer. Eight zero bytes are null too.
    pub const fn null() -> RelPtr<T> {
        RelPtr { distance: 0, target: PhantomData }
    }

    /// Whether it is null.
    pub const fn is_null(&self) -> bool {
        self.distance == 0
    }

    /// Points it to `target`, which may be null.
    pub fn set(&mut self, target: *mut T) {
        let here = (&raw const *self).addr();
        self.distance = match target.expose_provenance() {
            0 => 0,
            there if there == here => ITSELF,
            there => there.wrapping_sub(here) as i64,
        };
    }

    /// The target's address; null if it is null.
    pub fn get(&self) -> *mut T {
        let here = (&raw const *self).addr();
        match self.distance {
            0 => std::ptr::null_mut(),
            ITSELF => with_exposed_provenance_mut(here),
            distance => with_exposed_provenance_mut(here.wrapping_add(distance as usize)),
        }
    }

    /// The target; `None` if it is null.
    ///
    /// # Safety
    /// It is null or points to a `T` that is not modified during `'a`.
    pub unsafe fn as_ref<'a>(&self) -> Option<&'a T> {
        // SAFETY: the caller's promise.
        unsafe { self.get().as_ref() }
    }

    /// The target, mutably; `None` if it is null.
    ///
    /// # Safety
    /// It is null or points to a `T` that is not accessed in any other way during `'a`.
    pub unsafe fn as_mut<'a>(&mut self) -> Option<&'a mut T> {
        // SAFETY: the caller's promise.
        unsafe { self.get().as_mut() }
    }
}

impl<T> Default for RelPtr<T> {
    fn default() -> Self {
        RelPtr::null()
    }
}

impl<T> fmt::Debug for RelPtr<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.distance {
            0 => formatter.write_str("null"),
            ITSELF => formatter.write_str("here"),
            distance => write!(formatter, "here{distance:+}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct Node {
        next: RelPtr<Node>,
        value: u64,
    }

    fn values(first: *const Node) -> Vec<u64> {
        let mut values = Vec::new();
        let mut node = first;
        // SAFETY: the list's nodes are in a buffer that is alive.
        while let Some(here) = unsafe { node.as_ref() } {
            values.push(here.value);
            node = here.next.get();
        }
        values
    }

    #[test]
    fn a_list_survives_moving_its_buffer() {
        const NODES: usize = 64;
        let layout = std::alloc::Layout::array::<Node>(NODES).unwrap();
        // SAFETY: the layout has a size.
        let allocate = || unsafe { std::alloc::alloc_zeroed(layout) }.cast::<Node>();
        let (old, new) = (allocate(), allocate());
        // Forwards and backwards, near and far: node i points to node 5 i.
        let at = |i: usize| old.wrapping_add(i * 5 % NODES);
        for i in 0..NODES {
            // SAFETY: inside the buffer, which is zero: null pointers.
            let node = unsafe { &mut *at(i) };
            node.value = i as u64;
            assert!(node.next.is_null());
            if i + 1 < NODES {
                node.next.set(at(i + 1));
            }
        }
        old.expose_provenance();
        new.expose_provenance();
        let expected: Vec<_> = (0..NODES as u64).collect();
        assert_eq!(values(old), expected);
        // SAFETY: two buffers of that many nodes.
        unsafe { old.copy_to_nonoverlapping(new, NODES) };
        // SAFETY: both were allocated above; no pointer into the old one is left.
        unsafe { std::alloc::dealloc(old.cast(), layout) };
        assert_eq!(values(new), expected);
        // SAFETY: as above.
        unsafe { std::alloc::dealloc(new.cast(), layout) };
    }

    /// The sentinel of an empty ring points to itself; that is not null.
    #[test]
    fn a_pointer_to_itself_is_not_null() {
        let mut node = Box::new(Node { next: RelPtr::null(), value: 1 });
        let itself = &raw mut *node;
        node.next.set(itself);
        assert!(!node.next.is_null());
        assert_eq!(node.next.get(), itself);
        node.next.set(std::ptr::null_mut());
        assert!(node.next.is_null() && node.next.get().is_null());
    }
}
