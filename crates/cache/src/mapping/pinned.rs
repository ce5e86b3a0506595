//! Pinned memory of a mapping.

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::error::Result;
use crate::kernel::KernelFile;
use crate::page_word::PinKind;
use crate::store::Access;
use crate::user::UserStore;
use aquifer_vm::Bytes;

/// A resident range of a mapping that is not evicted while this exists. May be passed to system
/// calls.
///
/// With the kernel backend the file may still be truncated: then reading [`Pinned::bytes`] beyond
/// its end raises SIGBUS, and a system call fails with EFAULT.
pub struct Pinned<'a> {
    holder: Holder<'a>,
    range: Range<u64>,
}

enum Holder<'a> {
    User { store: &'a Arc<UserStore>, pages: Range<u64> },
    Kernel { file: &'a KernelFile, id: u64 },
}

impl<'a> Pinned<'a> {
    /// Pins pages of a user-backed mapping.
    pub(crate) fn user(
        store: &'a Arc<UserStore>,
        range: Range<u64>,
        pages: Range<u64>,
        kind: PinKind,
    ) -> Result<Pinned<'a>> {
        let access = if kind == PinKind::Write { Access::Write } else { Access::Read };
        if pages.end - pages.start > 1 && kind == PinKind::Read {
            // At queue depth; the loop below loads the pages that this leaves out.
            store.load_hinted(std::slice::from_ref(&pages));
        }
        // Grows page by page, so that an error unpins exactly the pinned pages.
        let mut pinned =
            Pinned { holder: Holder::User { store, pages: pages.start..pages.start }, range };
        for page in pages {
            store
                .ensure(page, access, Some(kind), false)
                .map_err(|refused| store.error(page, refused))?;
            if let Holder::User { pages, .. } = &mut pinned.holder {
                pages.end = page + 1;
            }
        }
        Ok(pinned)
    }

    /// Pins a range of a kernel-backed mapping.
    pub(crate) fn kernel(file: &'a KernelFile, range: Range<u64>) -> Result<Pinned<'a>> {
        let id = file.pin(&range)?;
        Ok(Pinned { holder: Holder::Kernel { file, id }, range })
    }

    /// The bytes of the range.
    pub fn bytes(&self) -> Bytes<'_> {
        // SAFETY: the pages are pinned, so readable, while `self` is borrowed.
        unsafe { Bytes::new(self.as_ptr(), self.len()) }
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *const u8 {
        match self.holder {
            Holder::User { store, .. } => {
                store.memory.address(0).wrapping_add(self.range.start as usize)
            }
            Holder::Kernel { file, .. } => file.address(self.range.start),
        }
    }

    /// The length of the range in bytes.
    pub fn len(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    /// Whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        match &self.holder {
            Holder::User { store, pages } => {
                if store.engine.mark.is_current() {
                    for page in pages.clone() {
                        store.unpin(page);
                    }
                }
            }
            Holder::Kernel { file, id } => file.unpin(*id),
        }
    }
}

/// A pinned range that the program and system calls may also write. Derefs to [`Pinned`].
///
/// If it is forgotten, its pages stay pinned as long as the mapping lives; what is stored there until the mapping is dropped is
/// written.
pub struct PinnedMut<'a> {
    pinned: Pinned<'a>,
}

impl<'a> PinnedMut<'a> {
    pub(crate) fn new(
        store: &'a Arc<UserStore>,
        range: Range<u64>,
        pages: Range<u64>,
    ) -> Result<PinnedMut<'a>> {
        Ok(PinnedMut { pinned: Pinned::user(store, range, pages, PinKind::Write)? })
    }

    /// The first byte.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.as_ptr().cast_mut()
    }
}

impl<'a> Deref for PinnedMut<'a> {
    type Target = Pinned<'a>;
    fn deref(&self) -> &Pinned<'a> {
        &self.pinned
    }
}
