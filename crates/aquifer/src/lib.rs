//! Aquifer: a memory-mapped I/O engine for Linux.
pub use aquifer_cache as cache;
pub use aquifer_device as device;
