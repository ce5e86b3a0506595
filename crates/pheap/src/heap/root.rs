//! The root: the allocation from which all others in the object are reached.

use std::ptr::NonNull;

use super::ObjectHeap;
use super::error::{Damage, HeapError, NotAllocated, RootTag};
use super::layout::Root;
use super::shared::Shared;

impl RootTag {
    /// The tag of a type with the program's `type_id`, and a shape.
    pub(crate) fn of<T>(type_id: u64, shape: u64) -> RootTag {
        RootTag {
            size_bytes: size_of::<T>() as u64,
            align_bytes: align_of::<T>() as u64,
            type_id,
            shape,
        }
    }
}

impl Shared {
    /// The root's tag.
    pub fn root_tag(&self) -> Result<Option<RootTag>, HeapError> {
        Ok(self.read()?.pages.header.root.map(|root| root.tag))
    }

    /// The root, if its tag equals what `expected` returns.
    pub fn root(&self, expected: impl Fn(RootTag) -> RootTag) -> Result<NonNull<u8>, HeapError> {
        let state = self.read()?;
        let root = state.pages.header.root.ok_or(HeapError::NoRoot)?;
        let expected = expected(root.tag);
        if root.tag != expected {
            return Err(HeapError::RootType { expected, found: root.tag });
        }
        state.check_root()?;
        let place = state.pages.memory.at(root.offset, root.tag.size_bytes)?;
        if (place.as_ptr() as u64).is_multiple_of(root.tag.align_bytes.max(1)) {
            Ok(place)
        } else {
            Err(HeapError::Damaged { offset_bytes: root.offset, damage: Damage::Root })
        }
    }

    /// Sets the root to an allocation, or clears it.
    pub fn set_root(&self, root: Option<(NonNull<u8>, RootTag)>) -> Result<(), HeapError> {
        let mut state = self.write()?;
        let mut header_root = None;
        if let Some((pointer, tag)) = root {
            let address = pointer.as_ptr() as u64;
            let refuse = |reason| HeapError::NotAllocated { address, reason };
            let memory = state.pages.memory;
            let offset = memory.offset(address).ok_or(refuse(NotAllocated::Foreign))?;
            let found = state.pages.find(offset)?;
            if found.usable_bytes() < tag.size_bytes || !address.is_multiple_of(tag.align_bytes) {
                return Err(refuse(NotAllocated::Interior));
            }
            header_root = Some(Root { offset, tag });
        }
        state.pages.header.root = header_root;
        state.pages.write_header()
    }
}

impl ObjectHeap {
    /// Makes an allocation the root, replacing the previous one. `type_id` is the program's id for
    /// its type; [`ObjectHeap::root`] must be called with the same id and a type of the same size
    /// and alignment.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`] if the pointer is not the start of an allocation that can hold a
    /// `T`; [`HeapError::ReadOnly`]; [`HeapError::Damaged`].
    pub fn set_root<T>(&self, root: NonNull<T>, type_id: u64) -> Result<(), HeapError> {
        self.shared().set_root(Some((root.cast(), RootTag::of::<T>(type_id, 0))))
    }

    /// The root.
    ///
    /// # Errors
    /// [`HeapError::NoRoot`]; [`HeapError::RootType`] if it was set with another id, size or
    /// alignment; [`HeapError::Damaged`].
    pub fn root<T>(&self, type_id: u64) -> Result<NonNull<T>, HeapError> {
        self.shared().lend_pointers();
        let root = self.shared().root(|found| RootTag::of::<T>(type_id, found.shape))?;
        Ok(root.cast())
    }

    /// The root's tag, if there is a root.
    ///
    /// # Errors
    /// [`HeapError::Forked`].
    pub fn root_tag(&self) -> Result<Option<RootTag>, HeapError> {
        self.shared().root_tag()
    }

    /// Clears the root. Its allocation stays allocated.
    ///
    /// # Errors
    /// [`HeapError::ReadOnly`].
    pub fn clear_root(&self) -> Result<(), HeapError> {
        self.shared().set_root(None)
    }
}
