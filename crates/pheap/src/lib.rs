//! A persistent heap, and collections in it, in any memory.
//!
//! A [`heap`] keeps its whole state in the memory it manages. If that memory comes back as it was,
//! so do the allocator and everything allocated from it, without recovery: a copy taken between two
//! operations is a complete heap. [`collections`] are stored in place and used as ordinary Rust
//! values.
//!
//! This crate does not make memory durable, and does not decide where it lies. The crate
//! `aquifer-object` does both: it attaches an object at the same address in every process, and its
//! `psync` makes everything stored in it durable at once. Other memory works as well if the program
//! saves it as a whole while no operation runs ([`heap::ObjectHeap::quiesce`]) and maps it at the
//! same address again, or formats the heap as relocatable. In this documentation *object* means the
//! memory of a heap, and *psync* the saving.
//!
//! ```
//! use aquifer_pheap::collections::{PString, PVec};
//! use aquifer_pheap::heap::{HeapError, ObjectHeap, Placement};
//!
//! # let layout = std::alloc::Layout::from_size_align(1 << 20, 4096)?;
//! # // SAFETY: the layout has a size.
//! # let start = std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
//! // 1 MiB at `start`: zero, or what an earlier run left there.
//! # // SAFETY: the memory is ours, and lives longer than the heap.
//! let mut heap = unsafe { ObjectHeap::open_or_format(start, 1 << 20, Placement::Fixed) }?;
//! heap.enter(|scope| {
//!     let heap = scope.heap();
//!     let list: &mut PVec<'_, PString<'_>> =
//!         scope.root_or_insert_with(1, |heap| Ok(PVec::new_in(heap)))?;
//!     list.push(PString::from_str_in("survives", heap)?)
//! })?;
//! # drop(heap);
//! # // SAFETY: allocated above with this layout.
//! # unsafe { std::alloc::dealloc(start.as_ptr(), layout) };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! * [`heap`]: the allocator, its format, and scopes that lend its content to safe Rust.
//! * [`collections`]: a box, a vector, a string, an ordered map and a hash map.
//! * [`mod@persist`]: which types may be stored, and the macro that declares them.
//! * [`mod@pointer`]: a pointer that stays valid when a heap is mapped at another address.

pub mod collections;
pub mod heap;
pub mod persist;
pub mod pointer;
