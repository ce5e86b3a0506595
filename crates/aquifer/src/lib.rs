//! Aquifer: memory-mapped I/O through a DRAM cache of a size the application chooses.
//!
//! ```
//! use std::sync::Arc;
//! use aquifer::{Cache, MemoryDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Arc::new(MemoryDevice::from_bytes(&[7; 1 << 20])?);
//! let cache = Cache::builder().budget_bytes(8 << 20).build()?;
//! let mapping = cache.map_mut(device)?;
//! mapping.set(4096, 42u64)?; //                        a call that returns errors
//! // SAFETY: inside the mapping, which lives on.
//! let first = unsafe { *mapping.as_ptr() }; //         or a plain load
//! assert_eq!(first, 7);
//! mapping.flush_all()?; //                             durable from here on
//! # Ok(())
//! # }
//! ```
//!
//! * [`Cache`] owns a DRAM budget; many devices share it.
//! * [`Mapping`] is a device as memory; [`Pages`] is a device as guarded pages.
//! * [`FileDevice`], [`MemoryDevice`], [`DaxDevice`] are devices; [`Device`] is a trait for your own.

pub use aquifer_cache::{
    Advice, Backend, Bytes, Cache, CacheBuilder, Calibration, Error, FrameId, Histogram,
    HistogramSnapshot, MapOptions, MappedArena, MappedVec, Mapping, PageId, PageKey, PageMut,
    PageRef, Pages, Pinned, Pod, Result, Stats, StoreId, calibrate, calibrations, policy, publish,
};
pub use aquifer_device::{
    self as device, AlignedBuffer, Batch, Counting, DaxDevice, Device, DeviceError, Direct, Faulty,
    FileDevice, IoOperation, MemoryDevice, Request, Throttled,
};
pub use aquifer_vm::prepare_thread;

/// The example of the README is compiled with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
