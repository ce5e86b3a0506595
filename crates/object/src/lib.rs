//! Persistent objects: in-memory data structures that survive crashes.
//!
//! An *object* is a named range of memory in a pool. A program attaches it, uses it with plain
//! loads and stores, and calls `psync` at points where its data is consistent. After a crash of the
//! process or the machine, the object has the content of the last completed psync. An object has
//! the same address in every process and after every restart, so plain pointers inside objects and
//! between them stay valid.
//!
//! ```
//! use aquifer_object::Objects;
//! use aquifer_pool::Pool;
//!
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("pool");
//! let pool = Pool::create(&path, 16 << 20)?;
//! let objects = Objects::new(pool);
//! objects.create("numbers", 1 << 20)?;
//!
//! let mut numbers = objects.attach_mut("numbers")?;
//! numbers.as_mut_slice()?[..3].copy_from_slice(&[1, 2, 3]);
//! numbers.psync()?; // From here on they survive.
//! numbers.as_mut_slice()?[0] = 99; // This one does not: no psync follows.
//! numbers.detach()?;
//!
//! drop(objects);
//! let objects = Objects::open(&path)?;
//! let numbers = objects.attach("numbers")?;
//! assert_eq!(numbers.as_slice()?[..4], [1, 2, 3, 0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! An object created with [`CreateObject::heap`] holds an allocator and the structures allocated
//! from it, all in safe Rust:
//!
//! ```
//! use aquifer_object::collections::{PString, PVec};
//! use aquifer_object::heap::HeapError;
//! use aquifer_object::{CreateObject, Objects};
//! # use aquifer_pool::Pool;
//!
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("pool");
//! # let pool = Pool::create(&path, 16 << 20)?;
//! # let objects = Objects::new(pool);
//! CreateObject::new().heap(true).create(&objects, "notes", 1 << 20)?;
//! let mut notes = objects.attach_mut("notes")?;
//! notes.heap()?.enter(|scope| {
//!     let heap = scope.heap();
//!     let list: &mut PVec<'_, PString<'_>> =
//!         scope.root_or_insert_with(1, |heap| Ok(PVec::new_in(heap)))?;
//!     list.push(PString::from_str_in("survives", heap)?)?;
//!     Ok::<(), HeapError>(())
//! })?;
//! notes.psync()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The calls of the paper
//! This crate follows "PMOs: Fast and Easy Crash Consistency for Persistent Memory":
//!
//! | there | here |
//! |---|---|
//! | `pcreate(name, size, key)` | [`Objects::create`] |
//! | `attach(name, perm, key)` | [`Objects::attach`], [`Objects::attach_mut`]; [`ObjectOptions::attach_raw_mut`] gives a bare pointer |
//! | `psync(addr)` | [`Attachment::psync`]; [`Objects::psync_at`] |
//! | `detach(addr)` | [`Attachment::detach`], or dropping it; [`Objects::detach`] |
//! | `pdestroy(name, key)` | [`Objects::destroy`] |
//! | `key` | [`CreateObject::write_key`], [`ObjectOptions::key`] |
//! | | [`Objects::psync_many`]: atomic over several objects |
//! | | [`Attachment::psync_begin`]: returns when the object may be stored to again |
//! | | [`Attachment::psync_ranges`]: commits the bytes that it names, and nothing else |
//! | | [`Attachment::rollback`]: undoes what no psync has committed |
//! | | [`Objects::resize`], [`Objects::relocate`], [`Objects::rename`] |
//!
//! An object has one writer or many readers, never both. What the paper leaves undefined, such as
//! detaching an object that is not attached, is an error here. As in the paper, the program must
//! not store to an object while its psync captures it; in safe Rust the compiler enforces this.
//!
//! # How it works
//! ```text
//!   objects ── create ── resize ── shared names, sizes, keys: transactions of the pool's metadata
//!      │
//!   attach ── memory ── attachment       lock, private mapping at the object's address
//!      │
//!   psync ── writing ── shadow           capture: pages stored to, copied into one record of the pool's log
//!      │
//!   flight ── committer ── completion    makes the commit durable, in the caller or in the background
//!
//!   rollback                             the content of the last commit again
//!
//!   states ── keys ── name ── options    states, access control, names, how to use an object
//!   attached_heap                        the heap in an object (`aquifer-pheap`)
//! ```
//!
//! [`ObjectState`] maps the paper's five states to this implementation.

mod access;
mod attach;
mod attached_heap;
mod attachment;
mod base;
mod committer;
mod completion;
mod create;
mod error;
mod flight;
mod keys;
mod memory;
mod name;
mod objects;
mod options;
mod psync;
mod ranges;
mod raw;
mod resize;
mod rollback;
mod shadow;
mod shared;
mod states;
mod twins;
mod writing;

pub use aquifer_pheap::{collections, heap, persist, pointer};

pub use access::Access;
pub use attached_heap::{AttachedHeap, ScopePsync};
pub use attachment::{Attachment, PsyncStatistics};
pub use completion::PendingPsync;
pub use create::CreateObject;
pub use error::{ObjectError, Result};
pub use name::ObjectName;
pub use objects::{ObjectInfo, Objects};
pub use options::ObjectOptions;
pub use resize::Resized;
pub use states::ObjectState;
