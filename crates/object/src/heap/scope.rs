//! The object's content as safe Rust.
//!
//! [`ObjectHeap::enter`] calls a function with a lifetime `'h` that nothing else has: it is invariant and made up for
//! this one call. Everything that owns memory of the heap carries it, and the root must be made of such things and of
//! plain data ([`Persist`]). So the compiler knows of each value which heap it belongs to. It cannot
//! be kept when the scope ends:
//!
//! ```compile_fail
//! # use aquifer_object::heap::ObjectHeap;
//! # use aquifer_object::collections::PBox;
//! fn keep(heap: &mut ObjectHeap) {
//!     let mut kept = None;
//!     heap.enter(|scope| kept = Some(PBox::new_in(1u64, scope.heap())));
//! }
//! ```
//!
//! and it cannot get into another object, whose pointers would dangle where this one is not attached:
//!
//! ```compile_fail
//! # use aquifer_object::heap::{HeapError, ObjectHeap};
//! # use aquifer_object::collections::PBox;
//! fn mix(one: &mut ObjectHeap, other: &mut ObjectHeap) -> Result<(), HeapError> {
//!     one.enter(|one| other.enter(|other| {
//!         let number = PBox::new_in(1u64, one.heap())?;
//!         other.root_or_insert_with(1, |_| Ok(number))?;
//!         Ok(())
//!     }))
//! }
//! ```
//!
//! Nor can anything be stored that means nothing after a restart:
//!
//! ```compile_fail
//! # use aquifer_object::heap::{HeapError, ObjectHeap};
//! # use aquifer_object::collections::PBox;
//! fn point_to_the_executable(heap: &mut ObjectHeap) -> Result<(), HeapError> {
//!     heap.enter(|scope| {
//!         PBox::new_in("static text", scope.heap())?;
//!         Ok(())
//!     })
//! }
//! ```
//!
//! `enter` borrows the heap exclusively, and the root is lent through the scope: so there is never a second
//! reference to what is borrowed uniquely.

use std::alloc::Layout;
use std::marker::PhantomData;

use super::ObjectHeap;
use super::error::{HeapError, RootTag};
use super::shared::Shared;
use crate::persist::{Persist, Shape};

/// Makes a lifetime neither longer nor shorter than itself.
pub(crate) type Invariant<'h> = PhantomData<fn(&'h ()) -> &'h ()>;

/// The heap of a scope, to allocate from: copied freely, between threads too.
#[derive(Debug, Clone, Copy)]
pub struct HeapRef<'h> {
    shared: &'h Shared,
    heap: Invariant<'h>,
}

impl<'h> HeapRef<'h> {
    pub(crate) fn shared(&self) -> &'h Shared {
        self.shared
    }
}

/// An object's content, entered through [`ObjectHeap::enter`].
///
/// Stays on its thread: what it lends is `Send` and `Sync` as its type says.
#[derive(Debug)]
pub struct Scope<'h> {
    heap: HeapRef<'h>,
    /// Two threads with a shared scope would both get the root, which need not be `Sync`.
    _on_one_thread: PhantomData<*mut ()>,
}

impl ObjectHeap {
    /// Calls `enter` with the object's content.
    pub fn enter<R>(&mut self, enter: impl for<'h> FnOnce(&mut Scope<'h>) -> R) -> R {
        // SAFETY: the heap is borrowed uniquely meanwhile, and the function takes any lifetime, so that nothing else
        // has this one.
        enter(&mut unsafe { self.scope() })
    }

    /// The object's content, for callers that cannot be called back.
    ///
    /// # Safety
    /// No other scope of the heap exists as long as this one or anything lent by it, and `'h` is a lifetime
    /// that no value of another heap has.
    pub unsafe fn scope<'h>(&'h self) -> Scope<'h> {
        let heap = HeapRef { shared: self.shared(), heap: PhantomData };
        Scope { heap, _on_one_thread: PhantomData }
    }
}

impl<'h> Scope<'h> {
    /// The heap, to allocate from.
    pub fn heap(&self) -> HeapRef<'h> {
        self.heap
    }

    /// The root.
    ///
    /// `type_id` is the program's name for what it is and what its fields mean; raise it when the meaning changes
    /// though the layout does not. The layout of everything that the root's type can reach is compared besides.
    ///
    /// # Errors
    /// [`HeapError::NoRoot`]; [`HeapError::RootType`]; [`HeapError::Relocatable`]; [`HeapError::Damaged`].
    pub fn root<T: Persist<'h>>(&self, type_id: u64) -> Result<&T, HeapError> {
        let root = self.find::<T>(type_id)?;
        // SAFETY: a `T` was stored there, says its tag; the scope is borrowed, so nobody changes it meanwhile.
        Ok(unsafe { root.as_ref() })
    }

    /// The root, to change.
    ///
    /// # Errors
    /// Those of [`Scope::root`], and [`HeapError::ReadOnly`].
    pub fn root_mut<T: Persist<'h>>(&mut self, type_id: u64) -> Result<&mut T, HeapError> {
        if !self.heap.shared.is_writable() {
            return Err(HeapError::ReadOnly);
        }
        let mut root = self.find::<T>(type_id)?;
        // SAFETY: a `T` was stored there, says its tag; the scope is borrowed uniquely.
        Ok(unsafe { root.as_mut() })
    }

    /// The root, to change; made by `make` if there is none.
    ///
    /// # Errors
    /// Those of [`Scope::root_mut`] but [`HeapError::NoRoot`], and those of `make`.
    pub fn root_or_insert_with<T: Persist<'h>>(
        &mut self,
        type_id: u64,
        make: impl FnOnce(HeapRef<'h>) -> Result<T, HeapError>,
    ) -> Result<&mut T, HeapError> {
        if self.heap.shared.root_tag()?.is_none() {
            self.insert_root(type_id, make(self.heap)?)?;
        }
        self.root_mut(type_id)
    }

    /// Makes a value the root of a heap that has none.
    ///
    /// # Errors
    /// [`HeapError::RootExists`]; [`HeapError::Relocatable`]; [`HeapError::Full`]; [`HeapError::ReadOnly`];
    /// [`HeapError::Damaged`]. The value is dropped then.
    pub fn insert_root<T: Persist<'h>>(&mut self, type_id: u64, root: T) -> Result<(), HeapError> {
        let shared = self.heap.shared;
        self.check_fixed()?;
        if let Some(found) = shared.root_tag()? {
            return Err(HeapError::RootExists { found });
        }
        let place = shared.allocate(Layout::new::<T>())?.cast::<T>();
        // SAFETY: just allocated for a `T`.
        unsafe { place.write(root) };
        let tag = RootTag::of::<T>(type_id, Shape::of::<T>());
        shared.set_root(Some((place.cast(), tag)))
    }

    /// Takes the root out; the heap has none then.
    ///
    /// # Errors
    /// Those of [`Scope::root_mut`].
    pub fn remove_root<T: Persist<'h>>(&mut self, type_id: u64) -> Result<T, HeapError> {
        let shared = self.heap.shared;
        let place = self.find::<T>(type_id)?;
        shared.set_root(None)?;
        // SAFETY: a `T` was stored there, says its tag, and nothing else leads to it any more.
        let root = unsafe { place.read() };
        // SAFETY: its content was taken out.
        unsafe { shared.free(place.cast()) }?;
        Ok(root)
    }

    /// Calls `take` while the object's content stands still and is whole: no reference into the root exists, and
    /// nobody allocates or frees. For `psync` in the middle of a scope.
    ///
    /// `take` must not allocate from the heap: it would wait for ever.
    ///
    /// # Errors
    /// [`HeapError::Forked`].
    pub fn quiesced<R>(&mut self, take: impl FnOnce() -> R) -> Result<R, HeapError> {
        let _state = self.heap.shared.read()?;
        Ok(take())
    }

    fn find<T: Persist<'h>>(&self, type_id: u64) -> Result<std::ptr::NonNull<T>, HeapError> {
        self.check_fixed()?;
        let expected = RootTag::of::<T>(type_id, Shape::of::<T>());
        Ok(self.heap.shared.root(|_| expected)?.cast())
    }

    fn check_fixed(&self) -> Result<(), HeapError> {
        let is_fixed = self.heap.shared.read()?.pages.header.address.is_some();
        if is_fixed { Ok(()) } else { Err(HeapError::Relocatable) }
    }
}
