//! A growable array in an object.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Index, IndexMut};
use std::ptr::NonNull;
use std::slice::SliceIndex;

use super::place::{Place, array_layout};
use crate::heap::recorded::{note, note_bytes, note_drop};
use crate::heap::{HeapError, HeapRef};
use crate::persist::{Persist, Shape};

/// A growable array in the heap with the lifetime `'h`, like `Vec`; derefs to a slice.
///
/// Elements must not be zero-sized: `PVec<()>` does not compile.
#[repr(C)]
pub struct PVec<'h, T: Persist<'h>> {
    place: Place<'h>,
    len: u64,
    /// Zero while there is no memory.
    capacity: u64,
    elements: PhantomData<T>,
}

// SAFETY: `repr(C)`: two numbers and the address of the elements in the heap `'h`.
unsafe impl<'h, T: Persist<'h>> Persist<'h> for PVec<'h, T> {
    fn shape(shape: &mut Shape) {
        shape.own_parts::<Self>("vec", T::shape);
    }
}

impl<'h, T: Persist<'h>> PVec<'h, T> {
    /// An empty vector, without memory.
    pub fn new_in(heap: HeapRef<'h>) -> PVec<'h, T> {
        const { assert!(size_of::<T>() > 0, "elements without a size need no vector") };
        PVec { place: Place::none(heap), len: 0, capacity: 0, elements: PhantomData }
    }

    /// An empty vector with room for `capacity` elements.
    ///
    /// # Errors
    /// Those of [`ObjectHeap::alloc`](crate::heap::ObjectHeap::alloc).
    pub fn with_capacity_in(capacity: usize, heap: HeapRef<'h>) -> Result<PVec<'h, T>, HeapError> {
        let mut vec = PVec::new_in(heap);
        vec.set_capacity(capacity)?;
        Ok(vec)
    }

    /// Takes over the memory of a vector in the same heap, without moving its elements.
    pub fn from_vec(vec: allocator_api2::vec::Vec<T, HeapRef<'h>>) -> PVec<'h, T> {
        let mut vec = ManuallyDrop::new(vec);
        let mut taken = PVec::new_in(*vec.allocator());
        if vec.capacity() > 0 {
            let elements = NonNull::new(vec.as_mut_ptr()).expect("a vector's memory is not null");
            taken.place.set(elements.cast());
            taken.len = vec.len() as u64;
            taken.capacity = vec.capacity() as u64;
        }
        taken
    }

    /// Converts to a vector of `allocator-api2`, without moving the elements.
    pub fn into_vec(self, heap: HeapRef<'h>) -> allocator_api2::vec::Vec<T, HeapRef<'h>> {
        heap.shared().lend_pointers();
        let this = ManuallyDrop::new(self);
        let (len, capacity) = (this.len as usize, this.capacity as usize);
        if capacity == 0 {
            return allocator_api2::vec::Vec::new_in(heap);
        }
        // SAFETY: memory of this heap with room for `capacity` elements, the first `len`
        // initialized.
        unsafe {
            allocator_api2::vec::Vec::from_raw_parts_in(
                this.place.pointer().as_ptr(),
                len,
                capacity,
                heap,
            )
        }
    }

    /// Elements that fit without allocating.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    fn start(&self) -> NonNull<T> {
        if self.capacity == 0 { NonNull::dangling() } else { self.place.pointer() }
    }

    /// Makes room for at least `capacity` elements, which must not be less than the length.
    fn set_capacity(&mut self, capacity: usize) -> Result<(), HeapError> {
        if capacity == 0 {
            return Ok(());
        }
        let heap = self.place.heap();
        let layout = array_layout::<T>(&heap, capacity)?;
        let memory = if self.capacity == 0 {
            heap.allocate(layout)?
        } else {
            // SAFETY: the vector's own memory; all elements fit in the new layout.
            unsafe { heap.reallocate(self.place.pointer(), layout) }?
        };
        self.place.set(memory.cast());
        self.capacity = (memory.len() / size_of::<T>()) as u64;
        Ok(())
    }

    /// Makes room for `additional` more elements.
    ///
    /// # Errors
    /// [`HeapError::Full`].
    pub fn reserve(&mut self, additional: usize) -> Result<(), HeapError> {
        let needed = self.len().saturating_add(additional);
        if needed <= self.capacity() {
            return Ok(());
        }
        // Doubling keeps pushes amortised. If that much is not free, allocate only what is needed.
        match self.set_capacity(needed.max(self.capacity().saturating_mul(2))) {
            Err(HeapError::Full { .. }) => self.set_capacity(needed),
            done => done,
        }
    }

    /// Frees unused capacity.
    ///
    /// # Errors
    /// [`HeapError::Damaged`].
    pub fn shrink_to_fit(&mut self) -> Result<(), HeapError> {
        if self.len == 0 && self.capacity > 0 {
            self.capacity = 0;
            // SAFETY: the vector has memory, which contains no element.
            unsafe { self.place.free() };
            return Ok(());
        }
        self.set_capacity(self.len())
    }

    /// Appends an element.
    ///
    /// # Errors
    /// [`HeapError::Full`]; the element is dropped then.
    pub fn push(&mut self, element: T) -> Result<(), HeapError> {
        self.reserve(1)?;
        // SAFETY: there is room for it.
        let place = unsafe { self.start().add(self.len()) };
        note(place, 1);
        // SAFETY: as above.
        unsafe { place.write(element) };
        self.len += 1;
        Ok(())
    }

    /// Removes the last element.
    pub fn pop(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        // SAFETY: it was the last element, and the vector does not own it any more.
        Some(unsafe { self.start().add(self.len()).read() })
    }

    /// Inserts an element before the one at `index`.
    ///
    /// # Errors
    /// [`HeapError::Full`]; the element is dropped then.
    ///
    /// # Panics
    /// If `index` is greater than the length.
    pub fn insert(&mut self, index: usize, element: T) -> Result<(), HeapError> {
        let len = self.len();
        assert!(index <= len, "insertion at {index} in {len} elements");
        self.reserve(1)?;
        // SAFETY: at most just after the last element.
        let place = unsafe { self.start().add(index) };
        note(place, len + 1 - index);
        // SAFETY: there is room for one more.
        unsafe { place.copy_to(place.add(1), len - index) };
        // SAFETY: the previous element was moved on.
        unsafe { place.write(element) };
        self.len += 1;
        Ok(())
    }

    /// Removes the element at `index`; later ones move up.
    ///
    /// # Panics
    /// If there is none.
    pub fn remove(&mut self, index: usize) -> T {
        let len = self.len();
        assert!(index < len, "removal at {index} of {len} elements");
        // SAFETY: an element.
        let place = unsafe { self.start().add(index) };
        // SAFETY: the slot is overwritten below, or lies after the last element then.
        let removed = unsafe { place.read() };
        note(place, len - index);
        // SAFETY: the elements after it.
        unsafe { place.copy_from(place.add(1), len - index - 1) };
        self.len -= 1;
        removed
    }

    /// Removes the element at `index`; the last one replaces it.
    ///
    /// # Panics
    /// If there is none.
    pub fn swap_remove(&mut self, index: usize) -> T {
        let last = self.len().checked_sub(1).expect("removal of no elements");
        assert!(index <= last, "removal at {index} of {} elements", last + 1);
        for moved in [index, last] {
            // SAFETY: an element.
            note(unsafe { self.start().add(moved) }, 1);
        }
        self.elements_mut().swap(index, last);
        self.pop().expect("it has a last element")
    }

    /// The elements, mutably, without recording that they may be stored to.
    fn elements_mut(&mut self) -> &mut [T] {
        // SAFETY: the first `len` elements are initialized, and the vector is borrowed mutably.
        unsafe { NonNull::slice_from_raw_parts(self.start(), self.len as usize).as_mut() }
    }

    /// An element or a part of the vector, mutably, like `slice::get_mut`; records this part only as
    /// stored to ([`ObjectHeap::record_stores`](crate::heap::ObjectHeap::record_stores)).
    pub fn get_mut<I: SliceIndex<[T]>>(&mut self, index: I) -> Option<&mut I::Output> {
        let part = self.elements_mut().get_mut(index)?;
        note_bytes(NonNull::from(&mut *part).cast(), size_of_val(part));
        Some(part)
    }

    /// Drops the elements from `len` on.
    pub fn truncate(&mut self, len: usize) {
        let Some(surplus) = self.len().checked_sub(len) else { return };
        // Set first, so that an element whose drop panics is not dropped again.
        self.len = len as u64;
        // SAFETY: the elements after the new length.
        let behind = unsafe { self.start().add(len) };
        note_drop(behind, surplus);
        let behind = NonNull::slice_from_raw_parts(behind, surplus);
        // SAFETY: the vector does not own them any more.
        unsafe { behind.drop_in_place() };
    }

    /// Drops all elements; keeps the memory.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Appends copies of `elements`.
    ///
    /// # Errors
    /// [`HeapError::Full`].
    pub fn extend_from_slice(&mut self, elements: &[T]) -> Result<(), HeapError>
    where
        T: Copy,
    {
        self.reserve(elements.len())?;
        // SAFETY: there is room.
        let end = unsafe { self.start().add(self.len()) };
        note(end, elements.len());
        // SAFETY: a slice cannot overlap memory that is borrowed mutably.
        unsafe { end.copy_from_nonoverlapping(NonNull::from(elements).cast(), elements.len()) };
        self.len += elements.len() as u64;
        Ok(())
    }

    /// Changes the length to `len`, filling with copies of `element`.
    ///
    /// # Errors
    /// [`HeapError::Full`].
    pub fn resize(&mut self, len: usize, element: T) -> Result<(), HeapError>
    where
        T: Copy,
    {
        self.reserve(len.saturating_sub(self.len()))?;
        while self.len() < len {
            self.push(element)?;
        }
        self.truncate(len);
        Ok(())
    }
}

impl<'h, T: Persist<'h>> Deref for PVec<'h, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the first `len` elements are initialized.
        unsafe { NonNull::slice_from_raw_parts(self.start(), self.len as usize).as_ref() }
    }
}

impl<'h, T: Persist<'h>> DerefMut for PVec<'h, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        note(self.start(), self.len());
        self.elements_mut()
    }
}

impl<'h, T: Persist<'h>, I: SliceIndex<[T]>> Index<I> for PVec<'h, T> {
    type Output = I::Output;
    fn index(&self, index: I) -> &I::Output {
        &(**self)[index]
    }
}

/// Records the part as stored to, where `DerefMut` records the whole vector.
impl<'h, T: Persist<'h>, I: SliceIndex<[T]>> IndexMut<I> for PVec<'h, T> {
    fn index_mut(&mut self, index: I) -> &mut I::Output {
        let part = &mut self.elements_mut()[index];
        note_bytes(NonNull::from(&mut *part).cast(), size_of_val(part));
        part
    }
}

impl<'h, T: Persist<'h>> Drop for PVec<'h, T> {
    fn drop(&mut self) {
        if self.place.is_parents() {
            return;
        }
        self.clear();
        if self.capacity > 0 {
            // SAFETY: the vector has memory, which contains no element any more.
            unsafe { self.place.free() };
        }
    }
}

impl<'a, 'h, T: Persist<'h>> IntoIterator for &'a PVec<'h, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, 'h, T: Persist<'h>> IntoIterator for &'a mut PVec<'h, T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<'h, T: Persist<'h> + fmt::Debug> fmt::Debug for PVec<'h, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(formatter)
    }
}

impl<'h, T: Persist<'h> + PartialEq> PartialEq for PVec<'h, T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<'h, T: Persist<'h> + Eq> Eq for PVec<'h, T> {}
