//! Access to mapped bytes that other threads and processes may change.

use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};

use aquifer_sys::memory::copy_racy;

/// Plain data of which any bytes are a valid value.
///
/// # Safety
/// Every bit pattern of `size_of::<Self>()` bytes is a valid value, and the type has no padding.
pub unsafe trait Pod: Copy + 'static {}

macro_rules! pod {
    ($($t:ty),*) => { $(
        // SAFETY: integers and floats have no invalid bit patterns and no padding.
        unsafe impl Pod for $t {}
    )* };
}
pod!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);
// SAFETY: an array of plain data is plain data without padding.
unsafe impl<T: Pod, const N: usize> Pod for [T; N] {}

/// Returns the bytes of a value.
pub fn bytes_of<T: Pod>(value: &T) -> &[u8] {
    // SAFETY: plain data without padding consists of its initialised bytes.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }
}

/// Reads a value that may change concurrently: with one load where the machine can.
///
/// # Safety
/// `source` is readable for the value; any alignment.
#[inline]
pub unsafe fn read_racy<T: Pod>(source: *const u8) -> T {
    #[repr(C, packed)]
    struct Unaligned<T>(T);
    // SAFETY: forwarded to the caller; the wrapper has alignment 1.
    unsafe { source.cast::<Unaligned<T>>().read_volatile() }.0
}

/// The first byte of a range, and the one behind the last; an open end is `end`. The start may lie
/// behind the end.
pub fn bounds_of(range: &impl RangeBounds<u64>, end: u64) -> Range<u64> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => end,
    };
    start..end
}

const BLOCK_BYTES: usize = 4096;

/// Bytes of a mapping, readable while this exists.
///
/// Not a slice: a writable mapping, or the file under a kernel-backed one, may change at any time.
/// Reading copies, so a result may be torn but is always valid bytes.
#[derive(Clone, Copy)]
pub struct Bytes<'a> {
    base: *const u8,
    len: usize,
    _borrow: PhantomData<&'a u8>,
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice is readable as long as it is borrowed.
        unsafe { Bytes::new(bytes.as_ptr(), bytes.len()) }
    }
}

impl<'a> Bytes<'a> {
    /// `len` bytes from `base`.
    ///
    /// # Safety
    /// `base` is readable for `len` bytes during `'a`.
    pub unsafe fn new(base: *const u8, len: usize) -> Bytes<'a> {
        Bytes { base, len, _borrow: PhantomData }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A pointer to the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.base
    }

    /// Copies `target.len()` bytes from `offset`.
    ///
    /// # Panics
    /// If they do not lie inside, like slice indexing.
    pub fn copy_to(&self, offset: usize, target: &mut [u8]) {
        let end = offset.checked_add(target.len());
        assert!(end.is_some_and(|end| end <= self.len), "range outside the bytes");
        // SAFETY: inside the bytes, which are readable; the target belongs to the caller.
        unsafe { copy_racy(self.base.add(offset), target.as_mut_ptr(), target.len()) };
    }

    /// The value at `offset`, in the machine's byte order; any alignment.
    ///
    /// # Panics
    /// If it does not lie inside, like slice indexing.
    pub fn get<T: Pod>(&self, offset: usize) -> T {
        let end = offset.checked_add(size_of::<T>());
        assert!(end.is_some_and(|end| end <= self.len), "value outside the bytes");
        // SAFETY: inside the bytes; every bit pattern is a `T`.
        unsafe { read_racy(self.base.add(offset)) }
    }

    /// Calls `visit` with consecutive blocks, each a private copy.
    pub fn for_each_block(&self, mut visit: impl FnMut(&[u8])) {
        let mut block = [0u8; BLOCK_BYTES];
        let mut offset = 0;
        while offset < self.len {
            let len = BLOCK_BYTES.min(self.len - offset);
            self.copy_to(offset, &mut block[..len]);
            visit(&block[..len]);
            offset += len;
        }
    }

    /// Returns a private copy.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        self.copy_to(0, &mut copy);
        copy
    }

    /// The bytes as a slice.
    ///
    /// # Safety
    /// No thread changes them during `'a`: none stores to the mapping through a pointer or a call,
    /// and for a kernel-backed mapping no process writes to the file.
    pub unsafe fn as_slice(&self) -> &'a [u8] {
        // SAFETY: readable during `'a`; the caller guarantees that they do not change.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}
