//! One value in an object.

use std::alloc::Layout;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use super::place::Place;
use crate::heap::recorded::{note, note_drop};
use crate::heap::{HeapError, HeapRef};
use crate::persist::{Persist, Shape};

/// Owns a value in the heap with the lifetime `'h`, like `Box`.
///
/// Eight bytes; `Option<PBox>` too, and `None` is zero.
#[repr(transparent)]
pub struct PBox<'h, T: Persist<'h>> {
    place: Place<'h>,
    value: PhantomData<T>,
}

const _: () = assert!(size_of::<Option<PBox<'static, u8>>>() == 8);

// SAFETY: `repr(transparent)` over a number that is not zero: the address of a value in the heap
// `'h`.
unsafe impl<'h, T: Persist<'h>> Persist<'h> for PBox<'h, T> {
    fn shape(shape: &mut Shape) {
        shape.own_parts::<Self>("box", T::shape);
    }
}

// SAFETY: the language defines the layout of an `Option` of a transparent number that is not zero.
unsafe impl<'h, T: Persist<'h>> Persist<'h> for Option<PBox<'h, T>> {
    fn shape(shape: &mut Shape) {
        shape.own_parts::<Self>("optional box", T::shape);
    }
}

impl<'h, T: Persist<'h>> PBox<'h, T> {
    /// Moves a value into the heap.
    ///
    /// # Errors
    /// Those of [`ObjectHeap::alloc`](crate::heap::ObjectHeap::alloc); the value is dropped then.
    pub fn new_in(value: T, heap: HeapRef<'h>) -> Result<PBox<'h, T>, HeapError> {
        let memory = heap.shared().allocate(Layout::new::<T>())?.cast::<T>();
        note(memory, 1);
        // SAFETY: just allocated for a `T`.
        unsafe { memory.write(value) };
        Ok(PBox { place: Place::of(memory.cast()), value: PhantomData })
    }

    /// Moves the value out of the heap.
    pub fn into_inner(self) -> T {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: the box owns a value there, and is not used again.
        let value = unsafe { this.place.pointer::<T>().read() };
        // SAFETY: the value was moved out.
        unsafe { this.place.free() };
        value
    }
}

impl<'h, T: Persist<'h>> Deref for PBox<'h, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the box owns a value there.
        unsafe { self.place.pointer::<T>().as_ref() }
    }
}

impl<'h, T: Persist<'h>> DerefMut for PBox<'h, T> {
    fn deref_mut(&mut self) -> &mut T {
        let mut value = self.place.pointer::<T>();
        note(value, 1);
        // SAFETY: as above, and it is borrowed uniquely.
        unsafe { value.as_mut() }
    }
}

impl<'h, T: Persist<'h>> Drop for PBox<'h, T> {
    fn drop(&mut self) {
        if self.place.is_parents() {
            return;
        }
        let value = self.place.pointer::<T>();
        note_drop(value, 1);
        // SAFETY: the box owns a value there, which is not used any more.
        unsafe { value.drop_in_place() };
        // SAFETY: as above.
        unsafe { self.place.free() };
    }
}

impl<'h, T: Persist<'h> + fmt::Debug> fmt::Debug for PBox<'h, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(formatter)
    }
}

impl<'h, T: Persist<'h> + PartialEq> PartialEq for PBox<'h, T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<'h, T: Persist<'h> + Eq> Eq for PBox<'h, T> {}
