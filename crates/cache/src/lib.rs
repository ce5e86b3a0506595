//! The cache engine: memory-mapped I/O through a DRAM cache of a size the application chooses.
//!
//! ```text
//!        Mapping (pointers)          Pages (guards)    the two interfaces
//!      ┌─────────┴─────────┐              │
//!   kernel                user            │            what serves a mapping
//!      │                   └──────┬───────┘
//!      │                        store                  a device's pages: load, evict, write back, flush
//!      └──────────────────┬───────┘
//!                       engine                         registry, budget, reclaim, evictor, jobs
//!                      frames                          which page is in a frame
//!                      policy                          which frame is evicted
//! ```
//!
//! Each is a folder that uses those below it. `running`, the engine with its threads, and `publish` are between `kernel` and
//! the interfaces; `visit`, `cache` and `heap` are above them. Other files beside the folders are for all.
//!
//! [`Rows`] stands beside this: a cache of fixed-length rows of one device, with a budget of its own.
//!
//! Start with [`Cache`]. The states of a page are in `page_word`, loading is in `store` and
//! `store::batch`, eviction in `store::evict` and `store::writeback`.

mod bits;
mod cache;
mod engine;
mod error;
mod frames;
mod geometry;
mod heap;
mod ids;
mod kernel;
mod lazy;
#[cfg(all(test, loom))]
mod loom_models;
mod map_options;
mod mapping;
mod memory_on_demand;
mod page_word;
mod pages;
pub mod policy;
pub mod publish;
mod rows;
mod running;
mod stats;
mod store;
mod sync;
mod user;
mod version;
mod visit;

pub use aquifer_vm::bytes::{Bytes, BytesReader};
pub use cache::{Cache, CacheBuilder};
pub use error::CacheError;
pub use heap::{MappedArena, MappedVec};
pub use ids::{FrameId, PageId, PageKey, StoreId};
pub use map_options::{Advice, Backend, MapOptions};
pub use mapping::calibrate::{Calibration, calibrate, calibrations};
pub use mapping::pinned::{Pinned, PinnedMut};
pub use mapping::{Mapping, MappingMut};
pub use pages::{PageMut, PageRef, Pages, RawPage};
pub use rows::{Rows, RowsOptions, RowsStats};
pub use stats::{Histogram, HistogramSnapshot, Stats};
pub use visit::Visited;
