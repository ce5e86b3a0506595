//! Memory that stays.

use std::ops::Range;
use std::sync::Arc;

use crate::bytes::Bytes;
use crate::error::Result;
use crate::mapping::UserStore;
use crate::page_word::PinKind;
use crate::store::Access;

/// A resident range of a mapping that is not evicted while this exists. Safe to hand to system calls.
pub struct Pinned<'a> {
    store: &'a Arc<UserStore>,
    range: Range<u64>,
    pages: Range<u64>,
    writable: bool,
}

impl<'a> Pinned<'a> {
    pub(crate) fn new(
        store: &'a Arc<UserStore>,
        range: Range<u64>,
        pages: Range<u64>,
        kind: PinKind,
    ) -> Result<Pinned<'a>> {
        let access = if kind == PinKind::Write { Access::Write } else { Access::Read };
        // Grows page by page, so that an error unpins exactly what was pinned.
        let mut pinned = Pinned {
            store,
            range,
            pages: pages.start..pages.start,
            writable: kind == PinKind::Write,
        };
        if pages.end - pages.start > 1 && kind == PinKind::Read {
            // At queue depth; whatever it does not bring is loaded below.
            let _ = store.load_many(std::slice::from_ref(&pages), false);
        }
        for page in pages {
            store
                .ensure(page, access, Some(kind), false)
                .map_err(|refused| store.error(page, refused))?;
            pinned.pages.end = page + 1;
        }
        Ok(pinned)
    }

    /// The bytes, for looking at.
    pub fn bytes(&self) -> Bytes<'_> {
        // SAFETY: the pages are pinned, so readable, while `self` is borrowed.
        unsafe { Bytes::new(self.as_ptr(), self.len()) }
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.store.memory.address(0).wrapping_add(self.range.start as usize)
    }

    /// The first byte, for stores, also by the kernel; `None` if this was not pinned for writing.
    pub fn as_mut_ptr(&self) -> Option<*mut u8> {
        self.writable.then(|| self.as_ptr().cast_mut())
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        if self.store.engine.mark.is_current() {
            for page in self.pages.clone() {
                self.store.unpin(page);
            }
        }
    }
}
