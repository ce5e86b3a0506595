//! Collections stored in a persistent object.
//!
//! | here | like | |
//! |---|---|---|
//! | [`PBox`] | `Box` | one value; `Option<PBox<T>>` is as small, and null when the memory is zero |
//! | [`PVec`] | `Vec` | derefs to a slice |
//! | [`PString`] | `String` | derefs to `str` |
//! | [`PBTreeMap`] | `BTreeMap` | nodes of about a quarter of a page |
//! | [`PHashMap`] | `HashMap` | one table, hash and entry side by side; hashes by [`StableHash`] |
//!
//! They are `repr(C)` and hold plain addresses, so they are used in place, without opening,
//! decoding or a handle to pass. Each is created with a [`HeapRef`](crate::heap::HeapRef), owns its
//! memory and frees it on drop, as in `std`. Allocating methods return a `Result`, because an
//! object can be full. On an error nothing has changed.
//!
//! ```
//! use aquifer_pheap::collections::{PBTreeMap, PString};
//! use aquifer_pheap::heap::{HeapError, ObjectHeap};
//!
//! aquifer_pheap::persist! {
//!     struct Ages<'h> { by_name: PBTreeMap<'h, PString<'h>, u32> }
//! }
//!
//! fn birthday(heap: &mut ObjectHeap, name: &str) -> Result<u32, HeapError> {
//!     heap.enter(|scope| {
//!         let heap = scope.heap();
//!         let ages = scope.root_or_insert_with(1, |heap| {
//!             Ok(Ages { by_name: PBTreeMap::new_in(heap) })
//!         })?;
//!         if let Some(age) = ages.by_name.get_mut(name) {
//!             *age += 1;
//!             return Ok(*age);
//!         }
//!         ages.by_name.insert(PString::from_str_in(name, heap)?, 0)?;
//!         Ok(0)
//!     })
//! }
//! # let layout = std::alloc::Layout::from_size_align(1 << 20, 4096)?;
//! # // SAFETY: the layout has a size.
//! # let start = std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
//! # use aquifer_pheap::heap::Placement;
//! # // SAFETY: the memory is ours, and lives longer than the heap.
//! # let mut heap = unsafe { ObjectHeap::open_or_format(start, 1 << 20, Placement::Fixed) }?;
//! # assert_eq!(birthday(&mut heap, "Ada")?, 0);
//! # assert_eq!(birthday(&mut heap, "Ada")?, 1);
//! # drop(heap);
//! # // SAFETY: allocated above with this layout.
//! # unsafe { std::alloc::dealloc(start.as_ptr(), layout) };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Panics
//! A collection panics if its memory cannot be freed because the allocator's metadata is damaged.
//!
//! # Fork
//! A forked child has neither the heap nor its memory. Dropping an inherited collection does
//! nothing; accessing it faults.

mod boxed;
mod btree_map;
mod hash_map;
mod place;
mod stable_hash;
mod string;
mod vec;

pub use boxed::PBox;
pub use btree_map::{Iter as BTreeIter, IterMut as BTreeIterMut, PBTreeMap};
pub use hash_map::{Iter as HashIter, IterMut as HashIterMut, PHashMap};
pub use stable_hash::{StableHash, combine};
pub use string::PString;
pub use vec::PVec;
