//! Page-aligned memory: direct I/O requires it, and the kernel's copies to it are faster.

use aquifer_sys::memory::SMALL_PAGE_BYTES;

/// Whole pages; empty until it is lengthened.
#[derive(Default)]
pub(super) struct PageBuffer(Vec<Page>);

#[derive(Clone, Copy)]
#[repr(align(4096))]
#[allow(dead_code, reason = "its bytes are reached all at once, those of all pages together")]
struct Page([u8; SMALL_PAGE_BYTES]);

const _: () = assert!(size_of::<Page>() == SMALL_PAGE_BYTES);

impl PageBuffer {
    /// An empty buffer.
    pub const fn new() -> PageBuffer {
        PageBuffer(Vec::new())
    }

    /// Makes it at least this long.
    pub fn lengthen(&mut self, len_bytes: usize) {
        let pages = len_bytes.div_ceil(SMALL_PAGE_BYTES);
        if pages > self.0.len() {
            self.0.resize(pages, Page([0; SMALL_PAGE_BYTES]));
        }
    }

    /// All bytes of the buffer.
    pub fn bytes(&mut self) -> &mut [u8] {
        let len_bytes = self.0.len() * SMALL_PAGE_BYTES;
        // SAFETY: a page is exactly its bytes, as asserted above, and `u8` has no invalid values.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len_bytes) }
    }
}
