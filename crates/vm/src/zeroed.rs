//! Slices of zeros that take memory only where they are used.
//!
//! Rust's allocator gets zeroed memory by `calloc` only up to an alignment of 16 bytes: memory of a
//! larger alignment is allocated and then written, all of it.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

use aquifer_sys::memory::{self, Advice};
use zerocopy::FromZeros;

/// A slice of values that are zero at first, in memory of its own. The kernel allocates each page
/// when it is first touched, and the end of the slice frees them.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use aquifer_vm::ZeroedSlice;
///
/// let words = ZeroedSlice::<AtomicU64>::new(1 << 20)?;
/// words[999_999].store(7, Ordering::Relaxed);
/// assert_eq!(words[0].load(Ordering::Relaxed), 0);
/// assert_eq!(words.iter().map(|word| word.load(Ordering::Relaxed)).sum::<u64>(), 7);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct ZeroedSlice<T> {
    start: *mut u8,
    len: usize,
    values: PhantomData<T>,
}

// SAFETY: the slice owns its values, as a box does.
unsafe impl<T: Send> Send for ZeroedSlice<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for ZeroedSlice<T> {}

impl<T> ZeroedSlice<T> {
    const ITS_MEMORY_IS_ALIGNED_AND_NEEDS_NO_DROP: () = {
        assert!(align_of::<T>() <= memory::SMALL_PAGE_BYTES && size_of::<T>() > 0);
        assert!(!std::mem::needs_drop::<T>());
    };

    /// Reserves the addresses of `len` values.
    ///
    /// # Errors
    /// `ENOMEM` if the process has no such range of addresses.
    pub fn new(len: usize) -> io::Result<ZeroedSlice<T>>
    where
        T: FromZeros,
    {
        let () = Self::ITS_MEMORY_IS_ALIGNED_AND_NEEDS_NO_DROP;
        if len == 0 {
            return Ok(ZeroedSlice::default());
        }
        let len_bytes =
            len.checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize);
        let len_bytes = len_bytes.ok_or(io::Error::from_raw_os_error(libc::ENOMEM))?;
        let start = memory::map_anonymous(len_bytes)?;
        Ok(ZeroedSlice { start, len, values: PhantomData })
    }
}

impl<T> ZeroedSlice<T> {
    /// Allocates the pages of some values now, which takes less time than a page fault for each. A
    /// failure has no effect, as if this had not been called.
    ///
    /// # Panics
    /// If the range is not in the slice.
    pub fn populate(&self, range: Range<usize>) {
        let values = &self[range];
        if values.is_empty() {
            return;
        }
        let values = values.as_ptr_range();
        let start = values.start.addr() / memory::SMALL_PAGE_BYTES * memory::SMALL_PAGE_BYTES;
        let len_bytes = values.end.addr() - start;
        let start = self.start.with_addr(start);
        // SAFETY: pages of the mapping that `self` owns, since it has values; the advice changes none.
        let _ = unsafe { memory::advise(start, len_bytes, Advice::PopulateWrite) };
    }
}

/// A slice of no values.
impl<T> Default for ZeroedSlice<T> {
    fn default() -> ZeroedSlice<T> {
        let start = std::ptr::without_provenance_mut(align_of::<T>());
        ZeroedSlice { start, len: 0, values: PhantomData }
    }
}

impl<T> Deref for ZeroedSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `new` mapped the memory of `len` values, page-aligned, for as long as `self`
        // lives, or `len` is 0; zeros are values of `T`.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len) }
    }
}

impl<T> Drop for ZeroedSlice<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: mapped by `new` with this length; no borrow outlives `self`.
            let _ = unsafe { memory::unmap(self.start, self.len * size_of::<T>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn the_slice_is_zero_and_keeps_what_is_stored() {
        let words = ZeroedSlice::<AtomicU64>::new(10_000).unwrap();
        assert_eq!(words.len(), 10_000);
        words[9_999].store(5, Relaxed);
        assert_eq!(words.iter().map(|word| word.load(Relaxed)).sum::<u64>(), 5);
        assert!(ZeroedSlice::<AtomicU64>::new(0).unwrap().is_empty());
        let error = ZeroedSlice::<AtomicU64>::new(usize::MAX).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    fn what_is_populated_takes_memory_and_stays_zero() {
        let words = ZeroedSlice::<AtomicU64>::new(8 << 9).unwrap();
        words[600].store(3, Relaxed);
        words.populate(513..4 << 9);
        words.populate(7 << 9 | 5..7 << 9 | 5);
        ZeroedSlice::<AtomicU64>::default().populate(0..0);
        let mut resident = [0; 8];
        memory::residency(words.as_ptr().cast(), 8 << 12, &mut resident).unwrap();
        // A huge page can take more.
        assert!(resident[1..4].iter().all(|&page| page & 1 == 1), "{resident:?}");
        assert!(resident[7] & 1 == resident[6] & 1, "no values take no memory: {resident:?}");
        assert_eq!(words.iter().map(|word| word.load(Relaxed)).sum::<u64>(), 3);
    }

    /// Only the page that was stored to takes memory.
    #[test]
    fn the_rest_takes_no_memory() {
        let words = ZeroedSlice::<AtomicU64>::new(1 << 20).unwrap();
        words[512 * 1024].store(1, Relaxed);
        let mut resident = vec![0; (8 << 20) / 4096];
        memory::residency(words.as_ptr().cast(), 8 << 20, &mut resident).unwrap();
        assert!(resident.iter().filter(|&&page| page & 1 == 1).count() < 1024, "half a huge page");
    }
}
