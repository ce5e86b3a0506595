//! The memory behind `Pages`: frames of a huge-page arena, translated in software.
//!
//! The table of page words holds the version of each page's bytes as well, beside the word: an
//! optimistic read needs both, and finds them in one cache line.

use std::ops::Range;
use std::sync::Arc;

use crate::engine::{Engine, Kind};
use crate::error::Result;
use crate::frames::FramePool;
use crate::geometry::Geometry;
use crate::ids::FrameId;
use crate::lazy::{LazyArray, ZeroInit};
use crate::page_word::PageWord;
use crate::store::{PageMemory, page_table};
use crate::sync::{Ordering, fence};
use crate::version::Version;

/// The state of a page and the version of its bytes.
#[repr(C, align(16))]
pub(crate) struct Entry {
    pub word: PageWord,
    pub version: Version,
}

// SAFETY: two words for which zero is valid: an absent page, and a version at rest.
unsafe impl ZeroInit for Entry {}

/// The memory of an arena's frames, which are always mapped: pages need no installing or
/// discarding.
pub(crate) struct ArenaMemory {
    engine: Arc<Engine>,
    entries: LazyArray<Entry>,
    page_bytes: usize,
}

impl ArenaMemory {
    pub fn new(engine: Arc<Engine>, geometry: Geometry) -> Result<ArenaMemory> {
        let entries = page_table(geometry.pages())?;
        Ok(ArenaMemory { engine, entries, page_bytes: geometry.page_bytes })
    }

    /// The entry of a page; `None` if the device has no such page.
    #[inline]
    pub fn entry(&self, page: u64) -> Option<&Entry> {
        self.entries.get(usize::try_from(page).ok()?)
    }

    #[inline]
    pub fn version(&self, page: u64) -> &Version {
        &self.entries[page as usize].version
    }

    /// A fence before bytes are written to a frame. The frame may just have been another page's,
    /// which an optimistic read may still be reading. Pairs with the fence that ends an optimistic
    /// read: a reader that sees a new byte sees that the page was evicted.
    fn before_new_bytes() {
        fence(Ordering::Release);
    }
}

impl PageMemory for ArenaMemory {
    const CONTIGUOUS: bool = false;
    const PROTECTS: bool = false;
    const KIND: Kind = Kind::Arena;

    #[inline]
    fn word(&self, page: u64) -> &PageWord {
        &self.entries[page as usize].word
    }

    #[inline]
    fn pool<'a>(&self, engine: &'a Engine) -> &'a FramePool {
        &engine.arena
    }

    #[inline]
    fn bytes(&self, _page: u64, frame: FrameId) -> *mut u8 {
        self.engine.arena_memory().bytes(frame)
    }

    fn landing(&self, frame: FrameId) -> Option<*mut u8> {
        Self::before_new_bytes();
        Some(self.engine.arena_memory().bytes(frame))
    }

    unsafe fn install(
        &self,
        first: u64,
        frames: &[FrameId],
        data: *const u8,
        _protect: bool,
    ) -> std::io::Result<()> {
        Self::before_new_bytes();
        for (index, &frame) in frames.iter().enumerate() {
            let source = data.wrapping_add(index * self.page_bytes);
            let target = self.bytes(first + index as u64, frame);
            if !std::ptr::eq(source, target) {
                // SAFETY: the frames are the caller's, and the data is readable.
                unsafe { std::ptr::copy_nonoverlapping(source, target, self.page_bytes) };
            }
            // The page may have been in this same frame before. The word names the frame only after
            // this.
            self.version(first + index as u64).skip();
        }
        Ok(())
    }

    fn protect(&self, _pages: Range<u64>) -> std::io::Result<()> {
        Ok(())
    }

    fn make_writable(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn unprotect(&self, _page: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn discard(&self, _runs: &[Range<u64>]) -> std::io::Result<()> {
        Ok(())
    }

    fn discards_vectored(&self) -> bool {
        true
    }
}
