//! `allocator-api2` collections in a heap, and what may be stored in it.
//!
//! `&ObjectHeap` and [`HeapRef`] are allocators, so `allocator_api2::vec::Vec` and
//! `allocator_api2::boxed::Box` work in an object's memory, and so does any other collection that
//! takes an `Allocator`:
//!
//! ```
//! # use aquifer_pheap::heap::{ObjectHeap, Placement};
//! # let layout = std::alloc::Layout::from_size_align(1 << 20, 4096)?;
//! # // SAFETY: the layout has a size.
//! # let start = std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
//! # // SAFETY: the memory is ours, and lives longer than the heap.
//! # let heap = unsafe { ObjectHeap::format(start, 1 << 20, Placement::Fixed) }?;
//! let mut vec = allocator_api2::vec::Vec::new_in(&heap);
//! vec.extend([1u64, 2, 3]);
//! assert!(heap.contains(vec.as_ptr().cast()));
//! # drop(vec);
//! # drop(heap);
//! # // SAFETY: allocated above with this layout.
//! # unsafe { std::alloc::dealloc(start.as_ptr(), layout) };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Such collections are not persistent
//! They use the object's memory, but must not themselves be *stored* in the object:
//!
//! * **The allocator handle** is a pointer into DRAM, which is invalid after a restart.
//! * **The layout** is the compiler's choice (`repr(Rust)`) and may differ in the next build of the
//!   program. That applies to `Vec`, `String`, `Box<T, A>`, `Option<T>`, tuples and every struct
//!   without `repr(C)`.
//! * **hashbrown's tables** (`HashMap`, `HashSet`) point, while empty, at static data of the
//!   executable, which has another address in every run. Their hasher also gets a new seed in every
//!   process.
//! * **`Rc`, `Arc`** count owners that do not exist any more after a crash.
//! * **References, function pointers, `dyn` objects** point into the executable or the stack.
//!
//! Stored values must be [`Persist`](crate::persist::Persist), which none of these is. Use the
//! [collections](crate::collections) of this crate: [`PBox`], [`PVec`], [`PString`], [`PBTreeMap`]
//! and [`PHashMap`]. A `Vec` over a [`HeapRef`] converts to a [`PVec`] and back without copying:
//! [`PVec::from_vec`] and [`PVec::into_vec`].
//!
//! If a collection is alive when the program ends, and its memory was in the last `psync`, that
//! memory stays allocated without an owner.
//!
//! [`PBox`]: crate::collections::PBox
//! [`PVec`]: crate::collections::PVec
//! [`PVec::from_vec`]: crate::collections::PVec::from_vec
//! [`PVec::into_vec`]: crate::collections::PVec::into_vec
//! [`PString`]: crate::collections::PString
//! [`PBTreeMap`]: crate::collections::PBTreeMap
//! [`PHashMap`]: crate::collections::PHashMap

use std::alloc::Layout;
use std::ptr::{NonNull, without_provenance_mut};

use allocator_api2::alloc::{AllocError, Allocator};

use super::shared::Shared;
use super::{HeapRef, ObjectHeap};

fn empty(layout: Layout) -> NonNull<[u8]> {
    let aligned = NonNull::new(without_provenance_mut(layout.align()));
    NonNull::slice_from_raw_parts(aligned.expect("an alignment is not zero"), 0)
}

impl Shared {
    fn allocate_any(&self, layout: Layout, zeroed: bool) -> Result<NonNull<[u8]>, AllocError> {
        self.lend_pointers();
        let allocated = match (layout.size(), zeroed) {
            (0, _) => return Ok(empty(layout)),
            (_, false) => self.allocate(layout),
            (_, true) => self.allocate_zeroed(layout),
        };
        allocated.map_err(|_| AllocError)
    }

    /// # Safety
    /// As for [`Allocator::deallocate`].
    unsafe fn deallocate_any(&self, pointer: NonNull<u8>, layout: Layout) {
        if layout.size() > 0 {
            // SAFETY: forwarded to the caller.
            if let Err(error) = unsafe { self.free(pointer) } {
                panic!("cannot free: {error}");
            }
        }
    }

    /// # Safety
    /// As for [`Allocator::grow`] and [`Allocator::shrink`].
    unsafe fn reallocate_any(
        &self,
        pointer: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        self.lend_pointers();
        match (old.size(), new.size()) {
            (0, _) => self.allocate_any(new, false),
            (_, 0) => {
                // SAFETY: forwarded to the caller.
                unsafe { self.deallocate_any(pointer, old) };
                Ok(empty(new))
            }
            // SAFETY: forwarded to the caller.
            _ => unsafe { self.reallocate(pointer, new) }.map_err(|_| AllocError),
        }
    }
}

macro_rules! allocator {
    ($handle:ty) => {
        // SAFETY: an allocation stays in place until it is freed; copies of the handle refer to the
        // same heap, which outlives them. Freeing memory that is not allocated panics.
        unsafe impl Allocator for $handle {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                self.shared().allocate_any(layout, false)
            }

            fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                self.shared().allocate_any(layout, true)
            }

            unsafe fn deallocate(&self, pointer: NonNull<u8>, layout: Layout) {
                // SAFETY: forwarded to the caller.
                unsafe { self.shared().deallocate_any(pointer, layout) }
            }

            unsafe fn grow(
                &self,
                pointer: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: forwarded to the caller.
                unsafe { self.shared().reallocate_any(pointer, old, new) }
            }

            unsafe fn shrink(
                &self,
                pointer: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: forwarded to the caller.
                unsafe { self.shared().reallocate_any(pointer, old, new) }
            }
        }
    };
}
allocator!(&ObjectHeap);
allocator!(HeapRef<'_>);
