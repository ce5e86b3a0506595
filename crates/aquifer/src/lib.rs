//! Aquifer: memory as the interface to storage.
//!
//! # Files larger than memory
//! Mapped through a DRAM cache whose size the application chooses.
//!
//! ```
//! use aquifer::{Cache, MemoryDevice};
//!
//! # fn main() -> aquifer::Result<()> {
//! let cache = Cache::builder().budget_bytes(8 << 20).build()?;
//! let device = MemoryDevice::from_bytes(&[7; 1 << 20])?;
//! let mapping = cache.map_mut(device)?; //             `cache.open_mut(path)` for a file
//! mapping.set(4096, 42u64)?; //                        a call that returns errors
//! // SAFETY: inside the mapping, which outlives the load.
//! let first = unsafe { *mapping.as_ptr() }; //         or a plain load
//! assert_eq!(first, 7);
//! mapping.flush_all()?; //                             durable from here on
//! # Ok(())
//! # }
//! ```
//!
//! * [`Cache`] owns a DRAM budget; many devices share it.
//! * [`Mapping`] is a device as memory, [`MappingMut`] one to store to; [`Pages`] is a device as
//!   guarded pages.
//! * [`Mapping::visit_many`] and [`Pages::visit_many`] take all the ranges or pages that are needed,
//!   in any order, and visit each as it has been read: several times faster than loads, where the
//!   order does not matter.
//! * Calls that end in `_async` return futures for any executor; [`Ready`] is for programs without
//!   one, whose event loop waits for a file descriptor.
//! * [`Rows`] is a cache of fixed-length rows of a file, with a budget of its own: for embedding
//!   tables and feature stores.
//! * [`FileDevice`], [`MemoryDevice`], [`DaxDevice`] are devices; implement the trait [`Device`]
//!   for others.
//!
//! # Ordinary files, mapped well
//! A replacement for mmap: cached mappings, batched unmapping, and faults that are errors.
//!
//! ```
//! use aquifer::{FileAccess, Mapper};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("notes");
//! # std::fs::write(&path, "some text")?;
//! let mapper = Mapper::builder().build()?;
//! let view = mapper.map(&path, FileAccess::Write, ..)?;
//! let length = view.read(|bytes| bytes.len())?; //     an error if the file was truncated
//! view.write_all_at(b"TEXT", 5)?; //                   other processes see it
//! view.flush()?; //                                    now it is durable
//! assert_eq!((length, std::fs::read(&path)?), (9, b"some TEXT".to_vec()));
//! # Ok(())
//! # }
//! ```
//!
//! * [`Mapper`] maps files and keeps mappings for reuse; [`FileView`] is a range of a file. More in
//!   [`mapper`].
//!
//! # Data structures that survive
//! Named objects in a pool, at stable addresses, made crash-consistent by one call.
//!
//! ```
//! use aquifer::{Objects, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("notes.pool");
//! let pool = Pool::create(&path, 16 << 20)?;
//! let objects = Objects::new(pool);
//! objects.create("counter", 4096)?;
//! let mut counter = objects.attach_mut("counter")?;
//! counter.as_mut_slice()?[0] += 1; //                  plain stores
//! counter.psync()?; //                                 durable, all of them or none
//! # drop((counter, objects));
//! # let objects = Objects::new(Pool::options().read_only(true).open(&path)?);
//! # assert_eq!(objects.attach("counter")?.as_slice()?[0], 1);
//! # Ok(())
//! # }
//! ```
//!
//! * [`Pool`] is a formatted file or device that holds objects; [`Objects`] gives access to the
//!   objects of a pool.
//! * [`Attachment`] is an object as memory. [`ObjectHeap`] allocates inside one;
//!   [`object::collections`] are stored in it.
//! * Format version 1 is frozen: later versions of Aquifer read pools made now.
//!
//! # Files that processes share, and read without system calls
//! The same pool holds a file system: names, directories and links, with the methods of `std::fs`.
//!
//! ```
//! use aquifer::{Files, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("data.pool");
//! let pool = Pool::create(&path, 16 << 20)?;
//! let files = Files::new(pool);
//! files.create_dir_all("/logs/2026")?;
//! files.write("/logs/2026/today", "started\n")?; //       copied in, visible to every process
//! files.rename("/logs/2026/today", "/logs/current")?; //  atomic, also in a crash
//! let text = files.read_to_string("/logs/current")?; //   a copy out, without a lock
//! assert_eq!(text, "started\n");
//! files.sync()?; //                                       durable from here on
//! # Ok(())
//! # }
//! ```
//!
//! * [`Files`] gives access to the files of a pool, by path; [`File`] is an open one. More in
//!   [`fs`].
//! * Mounted by the kernel, it serves every program: module `fuse`, with the feature `fuse`.
//! * From a shell: `aquifer put`, `ls`, `cat`, `get` and other commands, with paths like
//!   `data.pool:/logs/current`.
//!
//! # Objects of object stores
//! Module `remote`, with the feature `remote`: `RemoteDevice` is an object of S3, Google Cloud Storage, Azure or an HTTP
//! server as a read-only device of a [`Cache`].
//!
//! # Watching it run
//! * *Statistics* are structs: [`Cache::stats`], [`Mapper::stats`], [`Pool::info`]; as OpenMetrics
//!   text, [`metrics`]. `aquifer stat` shows the caches of running programs that have called
//!   [`CacheBuilder::publish`].
//! * *Events* of the crate `tracing`, with the feature `tracing`: a pool was opened, with the number
//!   of records that it recovered (info), a checkpoint (debug) or its failure (error), an object was
//!   attached (debug), misses waited for a free frame (debug), loads or background write-back failed
//!   (warn). The last three come once in 200 ms at most, from a background thread of the cache. A
//!   subscriber must not wait for the cache, pool or mapper that emits the event.
//!
//! # Conventions
//! * *Units.* Lengths, offsets and budgets are in bytes; names of other quantities include the
//!   unit. Pools and objects are rounded to pages of 4,096 bytes.
//! * *Errors.* Failures are returned as values: [`CacheError`] for caches, [`DeviceError`] for
//!   devices, [`MapError`] for mapped files, [`PoolError`] for pools, [`ObjectError`] for objects,
//!   [`FsError`] for the files of a pool. Each names the object concerned and says what to do next,
//!   and `?` turns all of them into one [`Error`], which tells its [kind](Error::kind), path and
//!   offset. Only a load through a raw pointer still raises SIGBUS, as with mmap.
//! * *Values.* `get` and `set` take plain data: types with the traits [`zerocopy::FromBytes`], and
//!   [`zerocopy::IntoBytes`] and [`zerocopy::Immutable`]. Numbers and arrays have them; a struct
//!   derives them, as below.
//! * *Durability.* Nothing is durable before a call that makes it durable has returned:
//!   [`MappingMut::flush_all`], [`Attachment::psync`], [`FileView::flush`], [`Files::sync`],
//!   [`File::sync_all`]. Creating, resizing and destroying objects is durable on return.
//! * *Threads.* [`Cache`], [`Mapping`], [`Pages`], [`Rows`], [`Mapper`], [`FileView`], [`Pool`],
//!   [`Objects`], [`Files`] and [`File`] can be shared between threads. An [`Attachment`] is changed by one
//!   thread at a time, as `&mut` requires.
//! * *Processes.* A cache belongs to one process. Many processes can open a pool; an object has one
//!   writer or many readers, a file any number of both. In a forked child, inherited objects return
//!   errors; the child must reopen them.
//!
//! ```
//! use aquifer::zerocopy::{FromBytes, Immutable, IntoBytes};
//!
//! #[derive(FromBytes, IntoBytes, Immutable, Clone, Copy, PartialEq, Debug)]
//! #[zerocopy(crate = "aquifer::zerocopy")] // not needed where `zerocopy` is a dependency
//! #[repr(C)]
//! struct Entry {
//!     key: u64,
//!     value: [u32; 2],
//! }
//!
//! # fn main() -> aquifer::Result<()> {
//! let cache = aquifer::Cache::builder().budget_bytes(8 << 20).build()?;
//! let mapping = cache.map_mut(aquifer::MemoryDevice::new(1 << 20)?)?;
//! let entry = Entry { key: 7, value: [1, 2] };
//! mapping.set(4096, entry)?;
//! assert_eq!(mapping.get::<Entry>(4096)?, entry);
//! # Ok(())
//! # }
//! ```
//!
//! ```
//! fn shared_between_threads<T: Send + Sync>() {}
//! shared_between_threads::<aquifer::Cache>();
//! shared_between_threads::<aquifer::Mapping>();
//! shared_between_threads::<aquifer::MappingMut>();
//! shared_between_threads::<aquifer::Pages>();
//! shared_between_threads::<aquifer::Rows>();
//! shared_between_threads::<aquifer::Mapper>();
//! shared_between_threads::<aquifer::FileView>();
//! shared_between_threads::<aquifer::Pool>();
//! shared_between_threads::<aquifer::Objects>();
//! shared_between_threads::<aquifer::Files>();
//! shared_between_threads::<aquifer::File>();
//! shared_between_threads::<aquifer::View>();
//! shared_between_threads::<aquifer::ViewMut>();
//! shared_between_threads::<aquifer::Attachment>();
//! shared_between_threads::<aquifer::Ready<aquifer::Result<()>>>();
//! ```

mod error;
pub mod metrics;
mod ready;

pub use aquifer_cache::{
    Advice, Backend, Bytes, BytesReader, Cache, CacheBuilder, CacheError, Calibration, FrameId,
    Histogram, HistogramSnapshot, MapOptions, MappedArena, MappedVec, Mapping, MappingMut, PageId,
    PageKey, PageMut, PageRef, Pages, Pinned, PinnedMut, RawPage, Rows, RowsOptions, RowsStats,
    Stats, StoreId, Visited, calibrate, calibrations, policy, publish,
};
pub use aquifer_check as check;
pub use aquifer_device::{
    self as device, AlignedBuffer, Batch, Counting, DaxDevice, Device, DeviceError, DeviceIdentity,
    Direct, Faulty, FileDevice, IoOperation, MemoryDevice, Request, Throttled,
};
pub use aquifer_fs::{self as fs, File, FileOptions, Files, FsError, Lease, View, ViewMut};
#[cfg(feature = "fuse")]
pub use aquifer_fuse as fuse;
pub use aquifer_mapper::{
    self as mapper, FileAccess, FileView, MapError, Mapper, MapperBuilder, Stores, ViewOptions,
};
pub use aquifer_object::heap::{HeapError, ObjectHeap};
pub use aquifer_object::pointer::RelPtr;
pub use aquifer_object::{
    self as object, Access, AttachedHeap, Attachment, CreateObject, ObjectError, ObjectInfo,
    ObjectName, ObjectOptions, ObjectState, Objects, PendingPsync, Resized,
};
pub use aquifer_pool::media::{PersistenceDomain, WriteWindows};
pub use aquifer_pool::{self as pool, Pool, PoolError, PoolInfo, PoolOptions};
#[cfg(feature = "remote")]
pub use aquifer_remote as remote;
pub use aquifer_vm::{has_missed_faults, prepare_thread};
pub use error::{Error, ErrorKind, Result};
pub use ready::Ready;
pub use zerocopy;

/// Compiles the README's example with the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
