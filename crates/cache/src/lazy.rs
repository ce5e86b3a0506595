//! Large arrays of atomics that use memory only where they are touched.

use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64};

use aquifer_sys::memory;

/// Types for which all-zero bytes are a valid, initial value.
///
/// # Safety
/// The type is valid for all-zero bytes and has no destructor.
pub unsafe trait ZeroInit: Sync {}

// SAFETY: plain atomics.
unsafe impl ZeroInit for AtomicU32 {}
// SAFETY: as above.
unsafe impl ZeroInit for AtomicU64 {}
#[cfg(loom)]
// SAFETY: under loom no array is created: the models create single words.
unsafe impl ZeroInit for crate::sync::AtomicU64 {}

/// A fixed-length array in its own zeroed mapping.
pub struct LazyArray<T: ZeroInit> {
    base: *mut T,
    len: usize,
    _owned: PhantomData<T>,
}

// SAFETY: owns its memory; shared access is to `Sync` elements only.
unsafe impl<T: ZeroInit> Send for LazyArray<T> {}
// SAFETY: as above.
unsafe impl<T: ZeroInit> Sync for LazyArray<T> {}

impl<T: ZeroInit> LazyArray<T> {
    /// An array of `len` zero elements. Allocates only address space.
    pub fn new(len: usize) -> io::Result<LazyArray<T>> {
        let base = memory::map_anonymous(Self::bytes(len))?.cast();
        Ok(LazyArray { base, len, _owned: PhantomData })
    }

    /// Makes the array all zero in children of a fork.
    pub fn wiped_on_fork(self) -> io::Result<LazyArray<T>> {
        // SAFETY: our own mapping; this process keeps its contents.
        unsafe {
            memory::advise(self.base.cast(), Self::bytes(self.len), memory::Advice::WipeOnFork)?;
        }
        Ok(self)
    }

    fn bytes(len: usize) -> usize {
        (len.max(1) * size_of::<T>()).next_multiple_of(memory::SMALL_PAGE_BYTES)
    }
}

impl<T: ZeroInit> Deref for LazyArray<T> {
    type Target = [T];
    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `len` elements, zero is a valid element (`ZeroInit`), and the
        // mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl<T: ZeroInit> Drop for LazyArray<T> {
    fn drop(&mut self) {
        // SAFETY: made by `map_anonymous` with the same length; no borrow of it is left.
        let _ = unsafe { memory::unmap(self.base.cast(), Self::bytes(self.len)) };
    }
}
