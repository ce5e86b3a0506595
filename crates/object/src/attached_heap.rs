//! The heap in an attached object, as a safe interface.
//!
//! Whether an object holds a heap is decided when it is created. Safe code can store to such an
//! object only through the heap, so everything the heap reads there was written by a heap.
//!
//! `psync` and entering the heap both borrow the attachment mutably: safe code cannot store while a
//! capture runs. [`AttachedHeap::enter_with`] commits in the middle of a scope; it borrows the
//! scope mutably, so that no reference into the heap is alive.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_vm::dirty::Stores;

use crate::access::Access;
use crate::attach::Attached;
use crate::attachment::Attachment;
use crate::error::{ObjectError, Result};
use crate::heap::{HeapError, ObjectHeap, Placement, Scope};
use crate::psync;

/// The heap in an attached object, borrowed from the attachment:
///
/// ```compile_fail
/// fn swap(one: &mut aquifer_object::Attachment, other: &mut aquifer_object::Attachment) {
///     std::mem::swap(&mut *one.heap().unwrap(), &mut *other.heap().unwrap());
/// }
/// ```
///
/// Dereferences to [`ObjectHeap`], by shared reference only.
#[derive(Debug)]
pub struct AttachedHeap<'a> {
    /// Never handed out mutably: it could be swapped with the heap of another attachment and
    /// outlive its memory.
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
    /// The heap in the object. The first attachment for writing creates it, and the next psync
    /// makes it durable. If the object has grown, the heap takes in the new memory, unless that is
    /// only one page or the heap's header is full ([`ObjectHeap::grow`]).
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
            let heap = opened.map_err(|source| ObjectError::Heap { name: self.name(), source })?;
            // Relaxed: the attachment is borrowed mutably.
            if self.attached.records_stores.load(Relaxed) {
                heap.record_stores();
            }
            self.heap = Some(heap);
        }
        let heap = self.heap.as_mut().expect("opened just now");
        Ok(AttachedHeap { heap, attached: &self.attached })
    }

    fn open_heap(&self) -> std::result::Result<ObjectHeap, HeapError> {
        let (start, len_bytes) = (self.first_byte(), self.len_bytes());
        if self.access() == Access::Read {
            // SAFETY: the memory is mapped and readable as long as the attachment lives, which
            // drops the heap first. The shared lock excludes writers. Safe code can only leave
            // zeros or a heap in this object.
            return unsafe { ObjectHeap::open_read_only(start, len_bytes) };
        }
        let placement =
            if self.attached.is_relocatable { Placement::Relocatable } else { Placement::Fixed };
        // SAFETY: as above, and writable; no mutable slices are given out for an object with a
        // heap.
        let heap = unsafe { ObjectHeap::open_or_format(start, len_bytes, placement) }?;
        if heap.len_bytes() < len_bytes {
            // SAFETY: as above.
            match unsafe { heap.grow(len_bytes) } {
                // Too small an extension, or too many of them: the heap works without it.
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
    /// Calls `enter` with the object's content. See [`ObjectHeap::enter`].
    pub fn enter<R>(&mut self, enter: impl for<'h> FnOnce(&mut Scope<'h>) -> R) -> R {
        self.heap.enter(enter)
    }

    /// Like [`AttachedHeap::enter`], with a [`ScopePsync`] to commit in the middle of the scope.
    pub fn enter_with<R>(
        &mut self,
        enter: impl for<'h> FnOnce(&mut Scope<'h>, &ScopePsync<'h, '_>) -> R,
    ) -> R {
        let attached = self.attached;
        self.heap.enter(|scope| enter(scope, &ScopePsync { attached, heap: PhantomData }))
    }
}

impl<'h> ScopePsync<'h, '_> {
    /// Makes everything reachable from the root durable. See [`Attachment::psync`]. Values that are
    /// not yet reachable from the root occupy heap space and are unreachable after a crash. Other
    /// threads may modify such values during the call, so it does not enforce the shadow budget.
    ///
    /// # Errors
    /// As for [`Attachment::psync`].
    pub fn psync(&self, scope: &mut Scope<'h>) -> Result<()> {
        scope.quiesced(|| psync::psync(&[self.attached], Stores::InProgress)).map_err(|source| {
            ObjectError::Heap { name: self.attached.object.name_text(), source }
        })?
    }
}
