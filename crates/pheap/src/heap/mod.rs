//! A heap whose whole state is in the memory it manages.
//!
//! That memory is called the *object*, and `psync` is whatever makes the whole object durable or
//! leaves it as it was: in `aquifer-object` a call of this name. So an ordinary allocator whose
//! state is stored in the object is crash-consistent without further work: after a crash the object
//! has the content of one `psync`, and the allocator's state matches the program's data. There is
//! no log, no reference counting and no recovery.
//!
//! ```
//! use aquifer_pheap::collections::{PString, PVec};
//! use aquifer_pheap::heap::{HeapError, ObjectHeap, Placement};
//!
//! aquifer_pheap::persist! {
//!     /// What the object holds.
//!     struct Notes<'h> { notes: PVec<'h, PString<'h>> }
//! }
//! const NOTES: u64 = 1;
//!
//! fn add(heap: &mut ObjectHeap, text: &str) -> Result<usize, HeapError> {
//!     heap.enter(|scope| {
//!         let heap = scope.heap();
//!         let root = scope.root_or_insert_with(NOTES, |heap| {
//!             Ok(Notes { notes: PVec::new_in(heap) })
//!         })?;
//!         root.notes.push(PString::from_str_in(text, heap)?)?;
//!         Ok(root.notes.len())
//!     })
//! }
//!
//! # let layout = std::alloc::Layout::from_size_align(1 << 20, 4096)?;
//! # // SAFETY: the layout has a size.
//! # let start = std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
//! // An object's memory: zero at first.
//! # // SAFETY: the memory is ours, and lives longer than the heap.
//! let mut heap = unsafe { ObjectHeap::open_or_format(start, 1 << 20, Placement::Fixed) }?;
//! assert_eq!(add(&mut heap, "survives")?, 1);
//! drop(heap);
//!
//! // After a restart the object is at the same address again.
//! # // SAFETY: as above.
//! let mut heap = unsafe { ObjectHeap::open_or_format(start, 1 << 20, Placement::Fixed) }?;
//! assert_eq!(add(&mut heap, "too")?, 2);
//! heap.enter(|scope| {
//!     let notes = &scope.root::<Notes>(NOTES)?.notes;
//!     assert_eq!(&*notes[0], "survives");
//!     Ok::<(), HeapError>(())
//! })?;
//! # drop(heap);
//! # // SAFETY: allocated above with this layout.
//! # unsafe { std::alloc::dealloc(start.as_ptr(), layout) };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Two ways to use it
//! * **Typed**, as above: [`ObjectHeap::enter`] lends a [`Scope`] in which the object's content is
//!   ordinary safe Rust, made of [`Persist`] types. The lifetime `'h` identifies the heap: a value
//!   stored in it can neither leave the scope nor enter another heap. For objects at fixed
//!   addresses.
//! * **Raw**: [`ObjectHeap::alloc`], [`ObjectHeap::dealloc`] and [`ObjectHeap::root`] with plain
//!   pointers and `unsafe`, as in C. In a relocatable object, store
//!   [`RelPtr`](crate::pointer::RelPtr)s instead.
//!
//! # Few pages
//! `psync` writes each *page* that was stored to, so the allocator primarily minimizes the number
//! of dirtied pages rather than CPU time:
//!
//! * Small allocations come from slabs whose bitmap is in the same page as the blocks: one page is
//!   dirtied, the one that the program is about to fill.
//! * No lists are threaded through the object. The set of free pages and of slabs with room is kept
//!   in DRAM and rebuilt after a restart by one pass over the page maps (one byte per page).
//! * A block is taken from the most recently used slab, else from the lowest one with room.
//! * A page map is stored to when a page is allocated or freed, or when a slab becomes full or gets
//!   noticeable room again (an eighth of its blocks). So a slab that alternates between full and
//!   one free block does not dirty the map; after a restart at most that eighth is unused until
//!   something in the slab is freed.
//! * There are no counters. The header changes with the root, with `grow`, and when a page of map
//!   is first used: once in 16 MiB.
//!
//! So a transaction of a few small allocations and frees dirties about one page per size class,
//! plus one map page if a slab was created or filled.
//!
//! # Invariants
//! * Where the object's bytes and the DRAM index differ, the object's bytes are right.
//! * A map byte of *free* means the page is unused; bytes of maps that are not ready mean nothing.
//! * A slab's header has the same class and page as the map. Bits after its last block are zero.
//! * All references are offsets from the heap's start.
//!
//! # Damage
//! The header has a checksum and is validated when the heap is opened. Maps and slabs are validated
//! when they are used: damage is reported as [`HeapError::Damaged`]. It can make the heap hand out
//! memory twice, but never memory outside the object. [`ObjectHeap::check`] validates everything.
//! The *program's* data is not validated beyond the root's type.
//!
//! # Invalid frees
//! Freeing an address twice, or one that is not the start of an allocation, fails with
//! [`HeapError::NotAllocated`]; collections and the `Allocator` implementation panic on it. A
//! double free is undetected if the address was allocated again in between.
//!
//! # Threads and processes
//! All methods may be called from many threads; the allocator's lock is in DRAM. An object has one
//! writing process at a time. Calls in a forked child fail with [`HeapError::Forked`].
//!
//! Lock order: a heap's state, the registries, a heap's recorded stores.

mod allocator;
mod error;
mod free_runs;
mod index;
mod layout;
mod memory;
mod pages;
pub(crate) mod recorded;
mod registry;
mod root;
mod scope;
pub(crate) mod shared;
mod size_class;
mod slab;
mod state;
mod statistics;

use std::alloc::Layout;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

pub use error::{Damage, HeapError, NotAllocated, RootTag};
pub use layout::{HEAP_FORMAT_VERSION, PAGE_BYTES};
pub(crate) use scope::Invariant;
pub use scope::{HeapRef, Scope};
pub use statistics::Statistics;

use aquifer_sys::futex::MutexGuard;
use layout::{Header, Zone};
use memory::Memory;
use pages::Pages;
use shared::Shared;
use state::State;

#[allow(unused_imports, reason = "for the documentation")]
use crate::persist::Persist;

/// Whether a heap may later be mapped at another address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Always at the address it was formatted at: plain pointers stay valid.
    Fixed,
    /// At any address: only offsets and [`RelPtr`](crate::pointer::RelPtr)s stay valid.
    Relocatable,
}

/// An allocator in the memory of an object. See the module's documentation.
#[derive(Debug)]
pub struct ObjectHeap {
    shared: Arc<Shared>,
}

impl ObjectHeap {
    /// Creates an empty heap in the memory, overwriting its content. Stores only to its first page.
    ///
    /// # Errors
    /// [`HeapError::TooSmall`], [`HeapError::Misaligned`] or [`HeapError::AlreadyOpen`].
    ///
    /// # Safety
    /// The memory is readable and writable for `len_bytes` as long as the heap exists, and is
    /// accessed only through it.
    pub unsafe fn format(
        start: NonNull<u8>,
        len_bytes: u64,
        placement: Placement,
    ) -> Result<ObjectHeap, HeapError> {
        let pages = len_bytes / PAGE_BYTES;
        let zone = pages.checked_sub(1).and_then(|behind_header| Zone::fresh(1, behind_header));
        let too_small = HeapError::TooSmall { given_bytes: len_bytes, least_bytes: 3 * PAGE_BYTES };
        let zone = zone.ok_or(too_small)?;
        let address = start.as_ptr() as u64;
        let header = Header {
            address: (placement == Placement::Fixed).then_some(address),
            len_bytes: pages * PAGE_BYTES,
            root: None,
            zones: vec![zone],
        };
        // SAFETY: the caller's promise.
        let heap = unsafe { ObjectHeap::new(start, header, true) }?;
        heap.shared.write()?.pages.write_header()?;
        Ok(heap)
    }

    /// Opens the heap in the memory.
    ///
    /// `len_bytes` may exceed the heap's length, if the object has grown and the heap has not
    /// ([`ObjectHeap::grow`]).
    ///
    /// # Errors
    /// [`HeapError::NotFormatted`] if the memory's first page is zero, as in a fresh object;
    /// [`HeapError::NotAHeap`], [`HeapError::Version`], [`HeapError::Damaged`],
    /// [`HeapError::Length`], [`HeapError::Moved`], [`HeapError::Misaligned`],
    /// [`HeapError::TooSmall`] or [`HeapError::AlreadyOpen`].
    ///
    /// # Safety
    /// As for [`ObjectHeap::format`]. If the memory holds a heap, its content was written through a
    /// heap. (A damaged heap is allowed as long as its content is not trusted:
    /// [`ObjectHeap::check`].)
    pub unsafe fn open(start: NonNull<u8>, len_bytes: u64) -> Result<ObjectHeap, HeapError> {
        // SAFETY: the caller's promise.
        unsafe { ObjectHeap::open_with(start, len_bytes, true) }
    }

    /// Like [`ObjectHeap::open`], for read-only memory: modifying calls fail with
    /// [`HeapError::ReadOnly`].
    ///
    /// # Errors
    /// Those of [`ObjectHeap::open`].
    ///
    /// # Safety
    /// As for [`ObjectHeap::open`], except that the memory need not be writable; and no other code
    /// or process modifies it.
    pub unsafe fn open_read_only(
        start: NonNull<u8>,
        len_bytes: u64,
    ) -> Result<ObjectHeap, HeapError> {
        // SAFETY: the caller's promise.
        unsafe { ObjectHeap::open_with(start, len_bytes, false) }
    }

    /// Opens the heap, or creates one if the memory is zero.
    ///
    /// # Errors
    /// Those of [`ObjectHeap::open`] but [`HeapError::NotFormatted`].
    ///
    /// # Safety
    /// As for [`ObjectHeap::open`].
    pub unsafe fn open_or_format(
        start: NonNull<u8>,
        len_bytes: u64,
        placement: Placement,
    ) -> Result<ObjectHeap, HeapError> {
        // SAFETY: the caller's promise.
        match unsafe { ObjectHeap::open(start, len_bytes) } {
            // SAFETY: the caller's promise.
            Err(HeapError::NotFormatted { .. }) => unsafe {
                ObjectHeap::format(start, len_bytes, placement)
            },
            opened => opened,
        }
    }

    /// # Safety
    /// As for [`ObjectHeap::open`] or [`ObjectHeap::open_read_only`].
    unsafe fn open_with(
        start: NonNull<u8>,
        len_bytes: u64,
        writable: bool,
    ) -> Result<ObjectHeap, HeapError> {
        let address = start.as_ptr() as u64;
        if len_bytes < PAGE_BYTES {
            return Err(HeapError::TooSmall { given_bytes: len_bytes, least_bytes: PAGE_BYTES });
        }
        let mut page = [0; PAGE_BYTES as usize];
        // SAFETY: the caller's promise.
        unsafe { Memory::new(start, len_bytes) }.copy_to(0, &mut page)?;
        let header = Header::decode(&page, address)?;
        if header.len_bytes > len_bytes {
            return Err(HeapError::Length {
                recorded_bytes: header.len_bytes,
                given_bytes: len_bytes,
            });
        }
        if let Some(recorded) = header.address.filter(|&recorded| recorded != address) {
            return Err(HeapError::Moved { recorded, given: address });
        }
        // The root is validated when it is requested: a heap whose root was freed can still get
        // another.
        // SAFETY: the caller's promise.
        unsafe { ObjectHeap::new(start, header, writable) }
    }

    /// # Safety
    /// As for [`ObjectHeap::open`] or [`ObjectHeap::open_read_only`].
    unsafe fn new(
        start: NonNull<u8>,
        header: Header,
        writable: bool,
    ) -> Result<ObjectHeap, HeapError> {
        let address = start.as_ptr() as u64;
        if !address.is_multiple_of(PAGE_BYTES) {
            return Err(HeapError::Misaligned { address });
        }
        let len_bytes = header.len_bytes;
        // SAFETY: the caller's promise, for at least as many bytes.
        let memory = unsafe { Memory::new(start, len_bytes) };
        let state = State::new(Pages { memory, header });
        let shared = Arc::new(Shared::new(start, writable, state));
        shared.register(len_bytes)?;
        Ok(ObjectHeap { shared })
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The heap's first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.shared.lend_pointers();
        self.shared.base()
    }

    /// The heap's length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.shared.read().map_or(0, |state| state.pages.memory.len_bytes())
    }

    /// Whether the heap may be mapped at another address.
    pub fn placement(&self) -> Placement {
        match self.shared.read() {
            Ok(state) if state.pages.header.address.is_none() => Placement::Relocatable,
            _ => Placement::Fixed,
        }
    }

    /// Whether the heap may be modified.
    pub fn is_writable(&self) -> bool {
        self.shared.is_writable()
    }

    /// Whether the heap contains an address.
    pub fn contains(&self, address: *const u8) -> bool {
        self.shared.read().is_ok_and(|state| state.pages.memory.offset(address as u64).is_some())
    }

    /// Allocates memory for `layout`, at least 16 bytes. Its content is arbitrary.
    ///
    /// # Errors
    /// [`HeapError::Full`]; [`HeapError::Alignment`] above 4096 in a relocatable heap;
    /// [`HeapError::ReadOnly`]; [`HeapError::Damaged`].
    pub fn alloc(&self, layout: Layout) -> Result<NonNull<u8>, HeapError> {
        self.shared.lend_pointers();
        self.shared.allocate(layout).map(NonNull::cast)
    }

    /// Like [`ObjectHeap::alloc`], zeroed. Pages that are already zero are not stored to.
    ///
    /// # Errors
    /// Those of [`ObjectHeap::alloc`].
    pub fn alloc_zeroed(&self, layout: Layout) -> Result<NonNull<u8>, HeapError> {
        self.shared.lend_pointers();
        self.shared.allocate_zeroed(layout).map(NonNull::cast)
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`] if the pointer is not an allocation; [`HeapError::ReadOnly`];
    /// [`HeapError::Damaged`].
    ///
    /// # Safety
    /// The allocation is not used any more.
    pub unsafe fn dealloc(&self, pointer: NonNull<u8>) -> Result<(), HeapError> {
        // SAFETY: the caller's promise.
        unsafe { self.shared.free(pointer) }
    }

    /// Resizes an allocation to `layout`: in place where possible, otherwise by moving it, with as
    /// much of its content as fits.
    ///
    /// # Errors
    /// Those of [`ObjectHeap::alloc`] and [`ObjectHeap::dealloc`]; the allocation is unchanged
    /// then.
    ///
    /// # Safety
    /// The caller owns the allocation and, on success, uses only the returned pointer.
    pub unsafe fn realloc(
        &self,
        pointer: NonNull<u8>,
        layout: Layout,
    ) -> Result<NonNull<u8>, HeapError> {
        self.shared.lend_pointers();
        // SAFETY: the caller's promise.
        unsafe { self.shared.reallocate(pointer, layout) }.map(NonNull::cast)
    }

    /// Resizes an allocation to `size_bytes` in place; returns whether that was possible.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`], [`HeapError::ReadOnly`] or [`HeapError::Damaged`].
    ///
    /// # Safety
    /// Bytes of the allocation beyond `size_bytes` are not used any more.
    pub unsafe fn resize_in_place(
        &self,
        pointer: NonNull<u8>,
        size_bytes: usize,
    ) -> Result<bool, HeapError> {
        self.shared.lend_pointers();
        // SAFETY: the caller's promise.
        let resized = unsafe { self.shared.resize_in_place(pointer, size_bytes) }?;
        Ok(resized.is_some())
    }

    /// The bytes that the owner of an allocation may use: at least the requested size.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`] or [`HeapError::Damaged`].
    pub fn usable_size(&self, pointer: NonNull<u8>) -> Result<usize, HeapError> {
        self.shared.usable_bytes(pointer).map(|bytes| bytes as usize)
    }

    /// Extends the heap over the memory added to the object.
    ///
    /// The new pages join the last zone if its page map has room for them, which holds until the
    /// heap has doubled since it was formatted or last got a new page map. Otherwise no allocation
    /// spans the old and the new memory. There are at most 64 maps: enough for 64 doublings, or for
    /// a hundred thousand equal steps.
    ///
    /// # Errors
    /// [`HeapError::TooSmall`] if the heap would shrink, or grow by too little for a new page map;
    /// [`HeapError::TooManyZones`], [`HeapError::ReadOnly`] or [`HeapError::Damaged`].
    ///
    /// # Safety
    /// The memory from [`ObjectHeap::start`] on is now `len_bytes` long and meets the requirements
    /// of [`ObjectHeap::format`].
    pub unsafe fn grow(&self, len_bytes: u64) -> Result<(), HeapError> {
        let grown = {
            let mut state = self.shared.write()?;
            state.grow(len_bytes)?;
            state.pages.memory.len_bytes()
        };
        self.shared.has_grown(grown);
        Ok(())
    }

    /// Validates the whole heap; returns its statistics, or the first contradiction.
    ///
    /// Reads the page maps and the header of every slab.
    ///
    /// # Errors
    /// [`HeapError::Damaged`] tells what is wrong and where.
    pub fn check(&self) -> Result<Statistics, HeapError> {
        self.shared.read()?.check()
    }

    /// Blocks the allocator: while the guard lives, no allocation is half done, and other threads
    /// that allocate or free block. Used to capture the object's content consistently.
    ///
    /// A thread that holds the guard must not allocate or free: it would deadlock.
    ///
    /// # Errors
    /// [`HeapError::Forked`].
    pub fn quiesce(&self) -> Result<Quiet<'_>, HeapError> {
        Ok(Quiet { _state: self.shared.read()? })
    }

    /// Records from now on where the heap and the [collections](crate::collections) store, for
    /// [`ObjectHeap::take_recorded`].
    ///
    /// All stores of safe code are recorded. Recording ends for good, and `take_recorded` returns
    /// `None`, once unsafe code may store through pointers: after a call of a method that returns a
    /// raw pointer or takes one to resize, after allocating as an `Allocator`, after
    /// [`PVec::into_vec`](crate::collections::PVec::into_vec), and after access to a root whose type
    /// contains addresses or implements [`Persist`] by hand.
    ///
    /// Unsafe code that stores through pointers which it made from references, or computed, must not
    /// do so after the scope of those references has ended.
    pub fn record_stores(&self) {
        let may_begin = || self.is_writable() && !self.shared.lends_pointers();
        self.shared.recorded().begin(may_begin);
    }

    /// The bytes that may have been stored to since the last call, as offsets in the heap in any
    /// order, possibly overlapping; the next call returns those from here on. `None` if that is not
    /// known: stores can be anywhere. It is not known at the first call, if there were many stores
    /// (more than about 192 places, or 48 KiB), and if [`Scope::quiesced`] was called.
    pub fn take_recorded(&mut self) -> Option<Vec<Range<u64>>> {
        self.shared.recorded().take(self.shared.address())
    }

    /// Makes the next [`ObjectHeap::take_recorded`] return `None`: if what the last call returned
    /// could not be saved.
    pub fn forget_recorded(&mut self) {
        self.shared.recorded().is_incomplete();
    }
}

impl Drop for ObjectHeap {
    fn drop(&mut self) {
        // A forked child does not own the heap.
        if self.shared.is_ours() {
            self.shared.unregister();
        }
    }
}

/// Blocks allocating and freeing while it lives. See [`ObjectHeap::quiesce`].
#[must_use = "the allocator is still only while this lives"]
pub struct Quiet<'a> {
    _state: MutexGuard<'a, State>,
}
