//! The heap inside a persistent object.
//!
//! `psync` makes the whole object durable or leaves it as it was. So an ordinary allocator whose state lies in the
//! object is crash-consistent by itself: after a crash the object is as one `psync` left it, and the allocator's
//! state fits the program's data. There is no log, no reference counting and no recovery here.
//!
//! ```
//! use aquifer_object::collections::{PString, PVec};
//! use aquifer_object::heap::{HeapError, ObjectHeap, Placement};
//!
//! aquifer_object::persist! {
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
//! * **Typed**, as above: [`ObjectHeap::enter`] lends a [`Scope`] in which the object's content is ordinary safe Rust,
//!   made of [`Persist`] types. The lifetime `'h` names the heap: what lives in it can neither leave the scope nor get
//!   into another heap. For objects at fixed addresses.
//! * **Raw**: [`ObjectHeap::alloc`], [`ObjectHeap::dealloc`] and [`ObjectHeap::root`] with plain pointers and `unsafe`, as in
//!   C. In an object that may move, keep [`RelPtr`](crate::pointer::RelPtr)s instead.
//!
//! # Few pages
//! `psync` writes each *page* that was stored to, so the allocator's aim is not to be fast in the first place but to
//! store to as few pages as it can:
//!
//! * Small allocations come from slabs whose bitmap lies in the page of the blocks themselves: one page is
//!   dirtied, and it is the one that the program is about to fill.
//! * No lists are threaded through the object. Which pages are free and which slabs have room is remembered in DRAM
//!   and found again, after a restart, by one pass over the page maps (a byte a page).
//! * A block is taken from the slab that was used last, else from the lowest with room.
//! * A page map is stored to when a page changes hands or when a slab becomes full or gets noticeable room again (an
//!   eighth of its blocks; so a slab that is filled and emptied by one block in turn leaves the map alone, and
//!   after a restart at most that eighth is forgotten until something in the slab is freed).
//! * There are no counters. The header changes with the root, with `grow`, and when a page of map is first used:
//!   once in 16 MiB.
//!
//! So a transaction of a few small allocations and frees dirties about one page per size class, and one of map
//! if a slab was opened or filled.
//!
//! # Invariants
//! * Where the object's bytes and what DRAM remembers differ, the object's bytes are right.
//! * A byte of map that says *free* means nobody uses the page; bytes of maps that are not ready mean nothing.
//! * A slab's header says what the map says of it: class and place. Bits behind its last block are zero.
//! * All places are offsets from the heap's start.
//!
//! # Damage
//! The header has a checksum and is validated when the heap is opened. Maps and slabs are validated as they are used:
//! damage is [`HeapError::Damaged`], and can make the heap hand out memory twice, but never lead it outside the object.
//! [`ObjectHeap::check`] looks at everything. What the *program* stores is not validated beyond the root's type.
//!
//! # Freeing wrongly
//! Freeing twice, and freeing what is not the start of an allocation, is [`HeapError::NotAllocated`]; collections
//! and the `Allocator` implementation panic on it. It is undetected if the place was allocated anew meanwhile.
//!
//! # Threads and processes
//! All methods may be called from many threads; the lock over the allocator is in DRAM. An object has one
//! writing process at a time. A forked child gets [`HeapError::Forked`].
//!
//! Lock order: the registry of heaps, then nothing; a heap's state, then nothing.

mod allocator;
mod error;
mod free_runs;
mod index;
mod layout;
mod memory;
mod pages;
pub(crate) mod registry;
mod root;
mod scope;
pub(crate) mod shared;
mod size_class;
mod slab;
mod state;
mod statistics;

use std::alloc::Layout;
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

/// Whether a heap may lie at another address some day.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Always at the address it was formatted at: plain pointers stay valid.
    Fixed,
    /// Anywhere: only offsets and [`RelPtr`](crate::pointer::RelPtr)s stay valid.
    Relocatable,
}

/// An allocator in the memory of an object. See the module's documentation.
#[derive(Debug)]
pub struct ObjectHeap {
    shared: Arc<Shared>,
}

impl ObjectHeap {
    /// Makes an empty heap of the memory, whatever it held. Stores to its first page only.
    ///
    /// # Errors
    /// [`HeapError::TooSmall`], [`HeapError::Misaligned`] or [`HeapError::AlreadyOpen`].
    ///
    /// # Safety
    /// The memory is readable and writable for `len_bytes` as long as the heap exists, and used through it only.
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
    /// `len_bytes` may be more than the heap has, when the object was made larger and the heap not yet
    /// ([`ObjectHeap::grow`]).
    ///
    /// # Errors
    /// [`HeapError::NotFormatted`] if the memory's first page is zero, as in a fresh object;
    /// [`HeapError::NotAHeap`], [`HeapError::Version`], [`HeapError::Damaged`], [`HeapError::Length`],
    /// [`HeapError::Moved`], [`HeapError::Misaligned`], [`HeapError::TooSmall`] or [`HeapError::AlreadyOpen`].
    ///
    /// # Safety
    /// As for [`ObjectHeap::format`]. And what the memory holds, if it is a heap, is what the use of one left there.
    /// (A damaged heap is no breach of that as long as its content is not trusted: [`ObjectHeap::check`].)
    pub unsafe fn open(start: NonNull<u8>, len_bytes: u64) -> Result<ObjectHeap, HeapError> {
        // SAFETY: the caller's promise.
        unsafe { ObjectHeap::open_with(start, len_bytes, true) }
    }

    /// As [`ObjectHeap::open`], for memory that cannot be written: what would change it is
    /// [`HeapError::ReadOnly`].
    ///
    /// # Errors
    /// Those of [`ObjectHeap::open`].
    ///
    /// # Safety
    /// As for [`ObjectHeap::open`], but for being writable; and nobody else changes the memory either.
    pub unsafe fn open_read_only(
        start: NonNull<u8>,
        len_bytes: u64,
    ) -> Result<ObjectHeap, HeapError> {
        // SAFETY: the caller's promise.
        unsafe { ObjectHeap::open_with(start, len_bytes, false) }
    }

    /// Opens the heap, or makes one if the memory is fresh.
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
        // Whether the root is an allocation is for who asks for it: a heap whose root was freed can have another.
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
        registry::insert(&shared, len_bytes)?;
        Ok(ObjectHeap { shared })
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Where the heap starts.
    pub fn start(&self) -> NonNull<u8> {
        self.shared.base()
    }

    /// How long it is.
    pub fn len_bytes(&self) -> u64 {
        self.shared.read().map_or(0, |state| state.pages.memory.len_bytes())
    }

    /// Whether it may lie elsewhere some day.
    pub fn placement(&self) -> Placement {
        match self.shared.read() {
            Ok(state) if state.pages.header.address.is_none() => Placement::Relocatable,
            _ => Placement::Fixed,
        }
    }

    /// Whether it may be changed.
    pub fn is_writable(&self) -> bool {
        self.shared.is_writable()
    }

    /// Whether an address lies in the heap.
    pub fn contains(&self, address: *const u8) -> bool {
        self.shared.read().is_ok_and(|state| state.pages.memory.offset(address as u64).is_some())
    }

    /// Allocates memory for `layout`, at least 16 bytes. What it holds is arbitrary.
    ///
    /// # Errors
    /// [`HeapError::Full`]; [`HeapError::Alignment`] above 4096 in a relocatable heap; [`HeapError::ReadOnly`];
    /// [`HeapError::Damaged`].
    pub fn alloc(&self, layout: Layout) -> Result<NonNull<u8>, HeapError> {
        self.shared.allocate(layout).map(NonNull::cast)
    }

    /// As [`ObjectHeap::alloc`], all zero. Pages that are zero already are not stored to.
    ///
    /// # Errors
    /// Those of [`ObjectHeap::alloc`].
    pub fn alloc_zeroed(&self, layout: Layout) -> Result<NonNull<u8>, HeapError> {
        self.shared.allocate_zeroed(layout).map(NonNull::cast)
    }

    /// Gives an allocation back.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`] if it is none (any more); [`HeapError::ReadOnly`]; [`HeapError::Damaged`].
    ///
    /// # Safety
    /// Nobody uses the allocation any more.
    pub unsafe fn dealloc(&self, pointer: NonNull<u8>) -> Result<(), HeapError> {
        // SAFETY: the caller's promise.
        unsafe { self.shared.free(pointer) }
    }

    /// Makes an allocation hold `layout`: in place where possible, else elsewhere, with as much of its content as there
    /// is room for.
    ///
    /// # Errors
    /// Those of [`ObjectHeap::alloc`] and [`ObjectHeap::dealloc`]; the allocation is as it was then.
    ///
    /// # Safety
    /// The caller owns the allocation, and uses only what comes back, if anything does.
    pub unsafe fn realloc(
        &self,
        pointer: NonNull<u8>,
        layout: Layout,
    ) -> Result<NonNull<u8>, HeapError> {
        // SAFETY: the caller's promise.
        unsafe { self.shared.reallocate(pointer, layout) }.map(NonNull::cast)
    }

    /// Makes an allocation hold `size_bytes` where it is; whether that was possible.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`], [`HeapError::ReadOnly`] or [`HeapError::Damaged`].
    ///
    /// # Safety
    /// Nobody uses what lies behind `size_bytes` in the allocation any more.
    pub unsafe fn resize_in_place(
        &self,
        pointer: NonNull<u8>,
        size_bytes: usize,
    ) -> Result<bool, HeapError> {
        // SAFETY: the caller's promise.
        let resized = unsafe { self.shared.resize_in_place(pointer, size_bytes) }?;
        Ok(resized.is_some())
    }

    /// Bytes that the owner of an allocation may use: at least what was asked for.
    ///
    /// # Errors
    /// [`HeapError::NotAllocated`] or [`HeapError::Damaged`].
    pub fn usable_size(&self, pointer: NonNull<u8>) -> Result<usize, HeapError> {
        self.shared.usable_bytes(pointer).map(|bytes| bytes as usize)
    }

    /// Takes in memory behind the heap, after the object was made larger.
    ///
    /// The new pages join the last run of pages if the heap at most doubles since it was formatted or last got a new
    /// page map; otherwise no allocation extends from the old memory into the new. There are at most 64 maps: enough
    /// to double that often, or for a hundred thousand equal steps.
    ///
    /// # Errors
    /// [`HeapError::TooSmall`] if it would shrink, or grow by too little for a new page map;
    /// [`HeapError::TooManyZones`], [`HeapError::ReadOnly`] or [`HeapError::Damaged`].
    ///
    /// # Safety
    /// The memory from [`ObjectHeap::start`] on is now `len_bytes` long, as [`ObjectHeap::format`] asks for.
    pub unsafe fn grow(&self, len_bytes: u64) -> Result<(), HeapError> {
        let grown = {
            let mut state = self.shared.write()?;
            state.grow(len_bytes)?;
            state.pages.memory.len_bytes()
        };
        registry::grow(&self.shared, grown);
        Ok(())
    }

    /// Walks through everything; figures about it, or the first contradiction.
    ///
    /// Reads the page maps and the header of every slab.
    ///
    /// # Errors
    /// [`HeapError::Damaged`] says what is wrong and where.
    pub fn check(&self) -> Result<Statistics, HeapError> {
        self.shared.read()?.check()
    }

    /// Keeps the allocator still: while the guard lives, no allocation is half done, and other threads that allocate
    /// or free wait. For taking the object's content as one.
    ///
    /// A thread that holds the guard must not allocate or free itself: it would wait for ever.
    ///
    /// # Errors
    /// [`HeapError::Forked`].
    pub fn quiesce(&self) -> Result<Quiet<'_>, HeapError> {
        Ok(Quiet { _state: self.shared.read()? })
    }
}

impl Drop for ObjectHeap {
    fn drop(&mut self) {
        // A forked child does not have it.
        if self.shared.is_ours() {
            registry::remove(&self.shared);
        }
    }
}

/// While it lives, nobody allocates or frees. See [`ObjectHeap::quiesce`].
#[must_use = "the allocator is still only while this lives"]
pub struct Quiet<'a> {
    _state: MutexGuard<'a, State>,
}
