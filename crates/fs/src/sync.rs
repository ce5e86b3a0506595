//! Atomics, real or modelled: code that takes its atomics from this module runs unchanged under
//! loom (`--cfg loom`, see `loom_models`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, fence};
