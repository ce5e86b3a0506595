//! The heap in an attached object, as safe Rust.
//!
//! Whether an object's content is a heap is decided when it is created. In such an object nothing but the heap may be
//! stored to by safe code, so what the heap finds there is what a heap left there.
//!
//! `psync` takes the attachment mutably, and so does entering its heap: safe code cannot store while a capture runs.
//! To commit in the middle of a scope, there is [`AttachedHeap::enter_with`], whose commits need the scope itself,
//! so that no reference into it is alive.

use std::marker::PhantomData;
use std::ops::Deref;

use crate::access::Access;
use crate::attach::Attached;
use crate::attachment::Attachment;
use crate::error::{ObjectError, Result};
use crate::heap::{HeapError, ObjectHeap, Placement, Scope};
use crate::psync::{self, Stores};

/// The heap in an attached object, for as long as the attachment is borrowed:
///
/// ```compile_fail
/// fn swap(one: &mut aquifer_object::Attachment, other: &mut aquifer_object::Attachment) {
///     std::mem::swap(&mut *one.heap().unwrap(), &mut *other.heap().unwrap());
/// }
/// ```
///
/// Gives everything that [`ObjectHeap`] does by shared reference.
#[derive(Debug)]
pub struct AttachedHeap<'a> {
    /// Not handed out mutably: it could be swapped with the heap of another attachment, and outlive its memory.
    heap: &'a mut ObjectHeap,
    attached: &'a Attached,
}

/// Commits in the middle of a scope. See [`AttachedHeap::enter_with`].
#[derive(Debug)]
pub struct ScopePsync<'h, 'a> {
    attached: &'a Attached,
    heap: PhantomData<fn(&'h ()) -> &'h ()>,
}

impl Attachment {
    /// The heap in the object; made by the first who attaches it for writing, and durable with the next psync. It
    /// takes in what the object was made larger by, unless that is a page or the heap's header is full
    /// ([`ObjectHeap::grow`]).
    ///
    /// # Errors
    /// [`ObjectError::NoHeap`] if the object was not created for one; [`ObjectError::Heap`];
    /// [`ObjectError::Forked`].
    pub fn heap(&mut self) -> Result<AttachedHeap<'_>> {
        self.attached.check_process()?;
        if !self.attached.is_heap {
            return Err(ObjectError::NoHeap { name: self.name() });
        }
        if self.heap.is_none() {
            let opened = self.open_heap();
            self.heap =
                Some(opened.map_err(|source| ObjectError::Heap { name: self.name(), source })?);
        }
        let heap = self.heap.as_mut().expect("opened just now");
        Ok(AttachedHeap { heap, attached: &self.attached })
    }

    fn open_heap(&self) -> std::result::Result<ObjectHeap, HeapError> {
        let (start, len_bytes) = (self.start(), self.len_bytes());
        if self.access() == Access::Read {
            // SAFETY: mapped and readable as long as the attachment lives, which drops the heap first; nobody stores to
            // it. What is there was left by a heap, or is zero: safe code cannot store anything else there.
            return unsafe { ObjectHeap::open_read_only(start, len_bytes) };
        }
        let placement = match self.attached.is_relocatable {
            true => Placement::Relocatable,
            false => Placement::Fixed,
        };
        // SAFETY: as above, and writable; slices to store to are not given out for such an object.
        let heap = unsafe { ObjectHeap::open_or_format(start, len_bytes, placement) }?;
        if heap.len_bytes() < len_bytes {
            // SAFETY: as above.
            match unsafe { heap.grow(len_bytes) } {
                // Too little to be of use to it, or too often: what it has is there all the same.
                Err(HeapError::TooSmall { .. } | HeapError::TooManyZones { .. }) => {}
                grown => grown?,
            }
        }
        Ok(heap)
    }
}

impl Deref for AttachedHeap<'_> {
    type Target = ObjectHeap;

    fn deref(&self) -> &ObjectHeap {
        self.heap
    }
}

impl AttachedHeap<'_> {
    /// Calls `enter` with the object's content: see [`ObjectHeap::enter`].
    pub fn enter<R>(&mut self, enter: impl for<'h> FnOnce(&mut Scope<'h>) -> R) -> R {
        self.heap.enter(enter)
    }

    /// As [`AttachedHeap::enter`], with the means to commit in the middle.
    pub fn enter_with<R>(
        &mut self,
        enter: impl for<'h> FnOnce(&mut Scope<'h>, &ScopePsync<'h, '_>) -> R,
    ) -> R {
        let attached = self.attached;
        self.heap.enter(|scope| enter(scope, &ScopePsync { attached, heap: PhantomData }))
    }
}

impl<'h> ScopePsync<'h, '_> {
    /// Makes everything durable that the root leads to: see [`Attachment::psync`]. Values that are not in the root yet
    /// take their space from the heap, and nothing leads there after a crash. Other threads may work on such values
    /// meanwhile, so this does not keep the shadow below its budget.
    ///
    /// # Errors
    /// As for [`Attachment::psync`].
    pub fn psync(&self, scope: &mut Scope<'h>) -> Result<()> {
        scope
            .quiesced(|| psync::psync(&[self.attached], Stores::OutOfReach))
            .map_err(|source| ObjectError::Heap { name: self.attached.name_text(), source })?
    }
}
