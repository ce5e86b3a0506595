//! The cache engine: memory-mapped I/O through a DRAM cache of a size the application chooses.
//!
//! ```text
//!        Mapping (pointers)          Pages (guards)    the two interfaces
//!      ┌─────────┴─────────┐              │
//!   kernel             user_store         │            what serves a mapping; choose, calibrate
//!      │                   └──────┬───────┘
//!      │                        store                  a device's pages: load, evict, write back, flush
//!      │             page_word · dirty · gate          what it is made of
//!      └──────────────────┬───────┘
//!                       engine                         registry, budget, reclaim, evictor
//!                  frames · policy · jobs              what it is made of
//! ```
//!
//! [`Rows`] stands beside this: a cache of fixed-length rows of one device, with a budget of its own.
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
mod choose;
mod claims;
mod dirty;
mod duties;
mod engine;
mod error;
mod evict;
mod frame_arena;
mod frame_word;
mod frames;
mod gate;
mod geometry;
mod guess;
mod heap;
mod ids;
mod jobs;
mod kernel;
mod lazy;
#[cfg(all(test, loom))]
mod loom_models;
mod map_options;
mod mapped_memory;
mod mapping;
mod memory_on_demand;
mod options;
mod page_word;
mod pages;
mod pinned;
pub mod policy;
pub mod publish;
mod rows;
mod running;
mod serving;
mod stats;
mod store;
mod sync;
mod user_store;
mod version;
mod visit;
mod write_style;
mod writeback;

pub use aquifer_vm::bytes::{Bytes, BytesReader};
pub use cache::{Cache, CacheBuilder};
pub use calibrate::{Calibration, calibrate, calibrations};
pub use error::CacheError;
pub use heap::{MappedArena, MappedVec};
pub use ids::{FrameId, PageId, PageKey, StoreId};
pub use map_options::{Advice, Backend, MapOptions};
pub use mapping::{Mapping, MappingMut};
pub use pages::{PageMut, PageRef, Pages, RawPage};
pub use pinned::{Pinned, PinnedMut};
pub use rows::{Rows, RowsOptions, RowsStats};
pub use stats::{Histogram, HistogramSnapshot, Stats};
pub use visit::Visited;
