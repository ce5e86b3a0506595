//! Safe access to an object's content.
//!
//! [`ObjectHeap::enter`] calls a function with a unique lifetime `'h`: it is invariant and
//! generated for this one call. Every value that owns memory of the heap carries it, and the root
//! must consist of such values and plain data ([`Persist`]). So the compiler knows the heap of each
//! value. A value cannot be kept after the scope ends:
//!
//! ```compile_fail
//! # use aquifer_pheap::heap::ObjectHeap;
//! # use aquifer_pheap::collections::PBox;
//! fn keep(heap: &mut ObjectHeap) {
//!     let mut kept = None;
//!     heap.enter(|scope| kept = Some(PBox::new_in(1u64, scope.heap())));
//! }
//! ```
//!
//! and it cannot be stored in another object, where its pointers would dangle when this object is
//! not attached:
//!
//! ```compile_fail
//! # use aquifer_pheap::heap::{HeapError, ObjectHeap};
//! # use aquifer_pheap::collections::PBox;
//! fn mix(one: &mut ObjectHeap, other: &mut ObjectHeap) -> Result<(), HeapError> {
//!     one.enter(|one| other.enter(|other| {
//!         let number = PBox::new_in(1u64, one.heap())?;
//!         other.root_or_insert_with(1, |_| Ok(number))?;
//!         Ok(())
//!     }))
//! }
//! ```
//!
//! Nor can a value be stored that is meaningless after a restart:
//!
//! ```compile_fail
//! # use aquifer_pheap::heap::{HeapError, ObjectHeap};
//! # use aquifer_pheap::collections::PBox;
//! fn point_to_the_executable(heap: &mut ObjectHeap) -> Result<(), HeapError> {
//!     heap.enter(|scope| {
//!         PBox::new_in("static text", scope.heap())?;
//!         Ok(())
//!     })
//! }
//! ```
//!
//! `enter` borrows the heap exclusively, and the root is lent through the scope, so there is never
//! a second reference to what is borrowed mutably.

use std::alloc::Layout;
use std::marker::PhantomData;

use super::ObjectHeap;
use super::error::{HeapError, RootTag};
use super::recorded;
use super::shared::Shared;
use crate::persist::{Persist, Shape};

/// Makes a lifetime invariant.
pub(crate) type Invariant<'h> = PhantomData<fn(&'h ()) -> &'h ()>;

/// The heap of a scope, to allocate from. `Copy`, and usable from any thread.
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
/// It stays on its thread; values it lends are `Send` and `Sync` as their types are.
#[derive(Debug)]
pub struct Scope<'h> {
    heap: HeapRef<'h>,
    /// If threads could share a scope, each could get the root, which need not be `Sync`.
    _on_one_thread: PhantomData<*mut ()>,
}

impl ObjectHeap {
    /// Calls `enter` with the object's content.
    pub fn enter<R>(&mut self, enter: impl for<'h> FnOnce(&mut Scope<'h>) -> R) -> R {
        // SAFETY: the heap is borrowed exclusively during the call, and the function accepts any
        // lifetime, so no other value has this one.
        enter(&mut unsafe { self.scope() })
    }

    /// The object's content, for callers that cannot pass a closure.
    ///
    /// # Safety
    /// No other scope of the heap exists while this one or anything lent by it is alive, and `'h`
    /// is a lifetime that no value of another heap has.
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
    /// `type_id` is the program's id for the root's type and the meaning of its fields; change it
    /// when the meaning changes but the layout does not. The layout of every type reachable from
    /// the root's type is compared too.
    ///
    /// # Errors
    /// [`HeapError::NoRoot`]; [`HeapError::RootType`]; [`HeapError::Relocatable`];
    /// [`HeapError::Damaged`].
    pub fn root<T: Persist<'h>>(&self, type_id: u64) -> Result<&T, HeapError> {
        let root = self.find::<T>(type_id)?;
        // SAFETY: its tag shows that a `T` was stored there; the scope is borrowed, so it is not
        // modified.
        Ok(unsafe { root.as_ref() })
    }

    /// The root, mutably.
    ///
    /// # Errors
    /// Those of [`Scope::root`], and [`HeapError::ReadOnly`].
    pub fn root_mut<T: Persist<'h>>(&mut self, type_id: u64) -> Result<&mut T, HeapError> {
        if !self.heap.shared.is_writable() {
            return Err(HeapError::ReadOnly);
        }
        let mut root = self.find::<T>(type_id)?;
        recorded::note(root, 1);
        // SAFETY: its tag shows that a `T` was stored there; the scope is borrowed mutably.
        Ok(unsafe { root.as_mut() })
    }

    /// The root, mutably; created by `make` if there is none.
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
    /// [`HeapError::RootExists`]; [`HeapError::Relocatable`]; [`HeapError::Full`];
    /// [`HeapError::ReadOnly`]; [`HeapError::Damaged`]. The value is dropped then.
    pub fn insert_root<T: Persist<'h>>(&mut self, type_id: u64, root: T) -> Result<(), HeapError> {
        let shared = self.heap.shared;
        self.check_fixed()?;
        let tag = self.tag::<T>(type_id);
        if let Some(found) = shared.root_tag()? {
            return Err(HeapError::RootExists { found });
        }
        let place = shared.allocate(Layout::new::<T>())?.cast::<T>();
        recorded::note(place, 1);
        // SAFETY: just allocated for a `T`.
        unsafe { place.write(root) };
        shared.set_root(Some((place.cast(), tag)))
    }

    /// Removes the root and returns it.
    ///
    /// # Errors
    /// Those of [`Scope::root_mut`].
    pub fn remove_root<T: Persist<'h>>(&mut self, type_id: u64) -> Result<T, HeapError> {
        let shared = self.heap.shared;
        let place = self.find::<T>(type_id)?;
        shared.set_root(None)?;
        // SAFETY: its tag shows that a `T` was stored there, and nothing refers to it any more.
        let root = unsafe { place.read() };
        // SAFETY: its content was moved out.
        unsafe { shared.free(place.cast()) }?;
        Ok(root)
    }

    /// Calls `take` while the object's content is stable and consistent: no reference into the root
    /// exists, and other threads that allocate or free block. For `psync` in the middle of a scope.
    ///
    /// `take` must not allocate from the heap: it would deadlock.
    ///
    /// # Errors
    /// [`HeapError::Forked`].
    pub fn quiesced<R>(&mut self, take: impl FnOnce() -> R) -> Result<R, HeapError> {
        let _state = self.heap.shared.read()?;
        // References to what values on the stack own live on.
        self.heap.shared.recorded().is_incomplete();
        Ok(take())
    }

    fn find<T: Persist<'h>>(&self, type_id: u64) -> Result<std::ptr::NonNull<T>, HeapError> {
        self.check_fixed()?;
        let expected = self.tag::<T>(type_id);
        Ok(self.heap.shared.root(|_| expected)?.cast())
    }

    /// The tag of a root of the type that is about to be used. Ends recording if values of the type
    /// may lead to stores that are not recorded.
    fn tag<T: Persist<'h>>(&self, type_id: u64) -> RootTag {
        let shape = Shape::told_by::<T>();
        if self.heap.shared.recorded().is_on() && !shape.is_recorded() {
            self.heap.shared.lend_pointers();
        }
        RootTag::of::<T>(type_id, shape.hash())
    }

    fn check_fixed(&self) -> Result<(), HeapError> {
        let is_fixed = self.heap.shared.read()?.pages.header.address.is_some();
        if is_fixed { Ok(()) } else { Err(HeapError::Relocatable) }
    }
}
