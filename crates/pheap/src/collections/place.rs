//! The address that a collection stores: of its memory, or of its heap while it has none.
//!
//! In both cases it identifies the heap to allocate from, and is never null. It is stored as a
//! number: content of an object comes from a file, and becomes a pointer only on use.

use std::alloc::Layout;
use std::num::NonZeroU64;
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::Arc;

use crate::heap::shared::Shared;
use crate::heap::{HeapError, HeapRef, Invariant, shared};

/// See the module documentation.
#[repr(transparent)]
pub(crate) struct Place<'h> {
    address: NonZeroU64,
    heap: Invariant<'h>,
}

fn number(pointer: NonNull<u8>) -> NonZeroU64 {
    NonZeroU64::new(pointer.as_ptr().expose_provenance() as u64).expect("it is not null")
}

impl<'h> Place<'h> {
    /// The place of a collection without memory.
    pub fn none(heap: HeapRef<'h>) -> Place<'h> {
        Place::of(heap.shared().base())
    }

    /// Memory of the heap with this lifetime.
    pub fn of(memory: NonNull<u8>) -> Place<'h> {
        Place { address: number(memory), heap: std::marker::PhantomData }
    }

    pub fn pointer<T>(&self) -> NonNull<T> {
        NonNull::new(with_exposed_provenance_mut(self.address.get() as usize))
            .expect("it is not zero")
    }

    /// The heap that contains the address.
    ///
    /// # Panics
    /// If no open heap contains it, which means that the object's content is damaged.
    pub fn heap(&self) -> Arc<Shared> {
        shared::heap_at(self.address.get())
            .expect("a collection's memory lies in the heap that is entered; the object is damaged")
    }

    /// Whether this is a forked child's copy of a collection in its parent's heap: there is nothing
    /// to drop, and the memory is not mapped.
    pub fn is_parents(&self) -> bool {
        shared::is_parents(self.address.get())
    }

    /// Changes to other memory of the heap.
    pub fn set(&mut self, memory: NonNull<u8>) {
        self.address = number(memory);
    }

    /// Frees the memory; the collection has none then.
    ///
    /// # Safety
    /// The collection has memory, which is not used any more.
    pub unsafe fn free(&mut self) {
        let heap = self.heap();
        // SAFETY: the caller's promise.
        unsafe { free(&heap, self.pointer()) };
        self.set(heap.base());
    }
}

/// Frees memory of a heap.
///
/// # Safety
/// The memory is not used any more.
pub(crate) unsafe fn free(heap: &Shared, memory: NonNull<u8>) {
    // SAFETY: the caller's promise.
    if let Err(error) = unsafe { heap.free(memory) } {
        panic!("cannot free: {error}");
    }
}

/// The layout of `count` values, or the error that there is no room for so many.
pub(crate) fn array_layout<T>(heap: &Shared, count: usize) -> Result<Layout, HeapError> {
    Layout::array::<T>(count).map_err(|_| heap.full(u64::MAX))
}
