//! Memory with the alignment that direct I/O requires.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// A zeroed byte buffer with an aligned start, as [`Device::alignment_bytes`] requires.
///
/// ```
/// use aquifer_device::AlignedBuffer;
/// let buffer = AlignedBuffer::new(8192, 4096);
/// assert_eq!(buffer.as_ptr() as usize % 4096, 0);
/// assert!(buffer.iter().all(|byte| *byte == 0));
/// ```
///
/// [`Device::alignment_bytes`]: crate::Device::alignment_bytes
#[derive(Debug)]
pub struct AlignedBuffer {
    start: NonNull<u8>,
    layout: Layout,
    len_bytes: usize,
}

impl AlignedBuffer {
    /// Allocates a buffer of `len_bytes` aligned to `alignment_bytes`.
    ///
    /// # Panics
    /// If the alignment is not a power of two.
    pub fn new(len_bytes: usize, alignment_bytes: usize) -> Self {
        let layout = Layout::from_size_align(len_bytes.max(1), alignment_bytes)
            .expect("the alignment is a power of two and the length fits the address space");
        // SAFETY: the layout's size is at least 1.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        AlignedBuffer { start, layout, len_bytes }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with at least this length, initialised to zero, and owned by `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed only here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

// SAFETY: the buffer owns its bytes as a `Vec<u8>` does.
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for AlignedBuffer {}
