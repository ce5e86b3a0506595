//! Pointers for objects that may move.
//!
//! An object that is not relocatable is at the same address for ever, and plain pointers do. In one that may be
//! attached elsewhere, a [`RelPtr`] says how far away its target is, and stays right as long as both move together.
//!
//! ```
//! use aquifer_object::pointer::RelPtr;
//!
//! #[repr(C)]
//! struct Pair { to: RelPtr<u64>, value: u64 }
//!
//! let mut pair = Box::new(Pair { to: RelPtr::null(), value: 7 });
//! let value = &raw mut pair.value;
//! pair.to.set(value);
//! // The whole moves: the pointer in it leads to the value's new place.
//! let moved = Box::new(*pair);
//! assert_eq!(moved.to.get().cast_const(), &raw const moved.value);
//! ```

use std::fmt;
use std::marker::PhantomData;
use std::ptr::with_exposed_provenance_mut;

/// A pointer that is the distance from itself to its target; zero is null.
///
/// It is meaningful in its place only: it is neither `Copy` nor `Clone`, and one that is moved by itself, and not
/// together with its target, leads elsewhere. So it is set where it lies ([`RelPtr::set`]); to have another
/// lead to the same target, set that to what [`get`](RelPtr::get) returns.
///
/// What [`get`](RelPtr::get) returns is made from an address. It may be used where a pointer into the target's memory
/// was exposed before, as the memory of every open heap is.
#[repr(transparent)]
pub struct RelPtr<T> {
    /// In bytes. Zero is null; a pointer to itself, which would be zero, is [`ITSELF`].
    distance: i64,
    target: PhantomData<*mut T>,
}

/// No address is so far away.
const ITSELF: i64 = i64::MIN;

// SAFETY: a number. What it leads to is reached through `unsafe` only.
unsafe impl<T> Send for RelPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for RelPtr<T> {}

impl<T> RelPtr<T> {
    /// Leads nowhere. So do eight zero bytes.
    pub const fn null() -> RelPtr<T> {
        RelPtr { distance: 0, target: PhantomData }
    }

    /// Whether it leads nowhere.
    pub const fn is_null(&self) -> bool {
        self.distance == 0
    }

    /// Makes it lead to `target`, or nowhere.
    pub fn set(&mut self, target: *mut T) {
        let here = (&raw const *self).addr();
        self.distance = match target.expose_provenance() {
            0 => 0,
            there if there == here => ITSELF,
            there => there.wrapping_sub(here) as i64,
        };
    }

    /// Where it leads; null if nowhere.
    pub fn get(&self) -> *mut T {
        let here = (&raw const *self).addr();
        match self.distance {
            0 => std::ptr::null_mut(),
            ITSELF => with_exposed_provenance_mut(here),
            distance => with_exposed_provenance_mut(here.wrapping_add(distance as usize)),
        }
    }

    /// The target, unless it leads nowhere.
    ///
    /// # Safety
    /// It leads to a `T`, which nobody changes during `'a`.
    pub unsafe fn as_ref<'a>(&self) -> Option<&'a T> {
        // SAFETY: the caller's promise.
        unsafe { self.get().as_ref() }
    }

    /// The target, to change, unless it leads nowhere.
    ///
    /// # Safety
    /// It leads to a `T`, which nobody else uses during `'a`.
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
        // SAFETY: the list's nodes lie in a buffer that lives.
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
        // Forwards and backwards, and far and near: node i leads to node 5 i.
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
        // SAFETY: both were allocated above; nothing leads to the old one any more.
        unsafe { std::alloc::dealloc(old.cast(), layout) };
        assert_eq!(values(new), expected);
        // SAFETY: as above.
        unsafe { std::alloc::dealloc(new.cast(), layout) };
    }

    /// The sentinel of a ring leads to itself while the ring is empty; that is not null.
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
