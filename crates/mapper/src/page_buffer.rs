//! Memory that begins with a page: direct I/O wants that, and the kernel's copies to it are faster.

use aquifer_sys::memory::SMALL_PAGE_BYTES;

/// Whole pages; none until it is asked to be longer.
#[derive(Default)]
pub(super) struct PageBuffer(Vec<Page>);

#[derive(Clone, Copy)]
#[repr(align(4096))]
#[allow(dead_code, reason = "its bytes are reached all at once, those of all pages together")]
struct Page([u8; SMALL_PAGE_BYTES]);

const _: () = assert!(size_of::<Page>() == SMALL_PAGE_BYTES);

impl PageBuffer {
    /// Of no pages.
    pub const fn new() -> PageBuffer {
        PageBuffer(Vec::new())
    }

    /// Makes it longer if it is shorter than that.
    pub fn lengthen(&mut self, len_bytes: usize) {
        let pages = len_bytes.div_ceil(SMALL_PAGE_BYTES);
        if pages > self.0.len() {
            self.0.resize(pages, Page([0; SMALL_PAGE_BYTES]));
        }
    }

    /// All of it.
    pub fn bytes(&mut self) -> &mut [u8] {
        let len_bytes = self.0.len() * SMALL_PAGE_BYTES;
        // SAFETY: pages are nothing but their bytes, one after the other, which was asserted.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len_bytes) }
    }
}
