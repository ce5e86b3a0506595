//! The memory of `Pages`' frames: one arena with huge pages, so that a hit rarely misses the TLB.

use std::io;

use aquifer_sys::memory::{self, Advice, REGION_BYTES};
use aquifer_vm::ProcessMark;

use crate::ids::FrameId;

/// Address space for frames; memory appears when a frame is first loaded.
pub(crate) struct FrameArena {
    mark: ProcessMark,
    mapping: *mut u8,
    mapping_bytes: usize,
    base: *mut u8,
    page_bytes: usize,
    max_frames: usize,
}

// SAFETY: frames are handed out by the frame pool and used under their page's word.
unsafe impl Send for FrameArena {}
// SAFETY: as above.
unsafe impl Sync for FrameArena {}

impl FrameArena {
    pub fn new(page_bytes: usize, max_frames: usize) -> io::Result<FrameArena> {
        let len = (page_bytes * max_frames).next_multiple_of(REGION_BYTES);
        let mapping_bytes = len + REGION_BYTES;
        let mapping = memory::map_anonymous(mapping_bytes)?;
        let base = (mapping as usize).next_multiple_of(REGION_BYTES) as *mut u8;
        // SAFETY: inside the fresh mapping.
        unsafe {
            // Huge pages may be switched off; small ones work as well.
            let _ = memory::advise(base, len, Advice::HugePage);
            memory::advise(base, len, Advice::DontFork)?;
            memory::advise(base, len, Advice::DontDump)?;
        }
        Ok(FrameArena {
            mark: ProcessMark::new(),
            mapping,
            mapping_bytes,
            base,
            page_bytes,
            max_frames,
        })
    }

    /// A frame's first byte.
    #[inline]
    pub fn bytes(&self, frame: FrameId) -> *mut u8 {
        self.base.wrapping_add(frame.0 as usize * self.page_bytes)
    }

    /// Gives the memory of all frames from `first` on back; none of them is in use.
    pub fn release_above(&self, first: usize) {
        let offset = (first * self.page_bytes).next_multiple_of(REGION_BYTES);
        let end = (self.max_frames * self.page_bytes).next_multiple_of(REGION_BYTES);
        if offset < end {
            // SAFETY: inside the arena, above every frame in use.
            let _ = unsafe {
                memory::advise(self.base.wrapping_add(offset), end - offset, Advice::DontNeed)
            };
        }
    }
}

impl Drop for FrameArena {
    fn drop(&mut self) {
        if !self.mark.is_current() {
            return; // a hole in a child of a fork, where something else may be by now
        }
        // SAFETY: the engine is going away; every guard borrowed it.
        let _ = unsafe { memory::unmap(self.mapping, self.mapping_bytes) };
    }
}
