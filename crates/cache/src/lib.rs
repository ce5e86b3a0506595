//! The cache engine: memory-mapped I/O through a DRAM cache of a size the application chooses.
//!
//! ```text
//!   Mapping (pointers)      Pages (guards)        the two interfaces
//!        └─────────┬───────────┘
//!                store                            a device's pages: load, evict, write back, flush
//!     page_word · dirty · gate                    what it is made of
//!                  │
//!                engine                           budget, threads, registry
//!     frames · policy · probation · jobs          what it is made of
//! ```
//!
//! Start with [`Cache`]. The states of a page are in `page_word`, loading is in `store` and
//! `batch`, eviction in `evict` and `writeback`.

mod arena_memory;
mod asynchronous;
mod attached;
mod batch;
mod bits;
mod bounce;
mod cache;
mod calibrate;
mod claims;
mod dirty;
mod duties;
mod engine;
mod error;
mod evict;
mod frame_word;
mod frames;
mod gate;
mod guess;
mod heap;
mod ids;
mod jobs;
mod lazy;
#[cfg(all(test, loom))]
mod loom_models;
mod mapped_memory;
mod mapping;
mod memory_on_demand;
mod options;
mod page_word;
mod pages;
pub mod policy;
mod probation;
pub mod publish;
mod stats;
mod store;
mod sync;
mod version;
mod writeback;

pub use aquifer_vm::{Bytes, Pod};
pub use cache::{Cache, CacheBuilder};
pub use calibrate::{Calibration, calibrate, calibrations};
pub use error::{Error, Result};
pub use heap::{MappedArena, MappedVec};
pub use ids::{FrameId, PageId, PageKey, StoreId};
pub use mapping::{Advice, Backend, MapOptions, Mapping, Pinned};
pub use pages::{PageMut, PageRef, Pages};
pub use stats::{Histogram, HistogramSnapshot, Stats};
