//! The memory of `Pages`' frames: one arena with huge pages, so that hits rarely miss the TLB.

use std::io;

use aquifer_sys::memory::{self, Advice, REGION_BYTES};

use crate::ids::FrameId;
use crate::memory_on_demand::MemoryOnDemand;

/// Address space for frames; memory is allocated when a frame is first loaded.
pub(crate) struct FrameArena {
    memory: MemoryOnDemand,
    page_bytes: usize,
}

impl FrameArena {
    pub fn new(page_bytes: usize, max_frames: usize) -> io::Result<FrameArena> {
        let memory = MemoryOnDemand::new(page_bytes * max_frames, REGION_BYTES)?;
        // Huge pages may be switched off; small ones work as well.
        let _ = memory.advise(Advice::HugePage);
        Ok(FrameArena { memory, page_bytes })
    }

    /// Makes the first `frames` usable, see [`MemoryOnDemand::provide`].
    pub fn provide(&self, frames: usize) -> io::Result<()> {
        self.memory.provide(frames * self.page_bytes)
    }

    /// The number of usable frames.
    pub fn provided(&self) -> usize {
        self.memory.writable_bytes() / self.page_bytes
    }

    /// A frame's first byte.
    #[inline]
    pub fn bytes(&self, frame: FrameId) -> *mut u8 {
        self.memory.base().wrapping_add(frame.0 as usize * self.page_bytes)
    }

    /// Gives back the memory of all frames from `first` on, none of which is in use.
    pub fn release_above(&self, first: usize) {
        let offset = (first * self.page_bytes).next_multiple_of(REGION_BYTES);
        let end = self.memory.len_bytes();
        if offset < end {
            // SAFETY: inside the arena, above every frame in use.
            let _ = unsafe {
                let start = self.memory.base().wrapping_add(offset);
                memory::advise(start, end - offset, Advice::DontNeed)
            };
        }
    }
}
