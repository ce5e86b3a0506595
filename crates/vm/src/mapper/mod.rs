//! Ordinary files mapped well.

#[allow(dead_code, reason = "what maps files comes next")]
mod error;
#[allow(dead_code, reason = "what maps files comes next")]
mod heap;

use std::time::Duration;

pub use error::{FaultCause, MapError, Result};
pub use heap::HeapStats;

/// When addresses of views that were dropped, and mappings that were evicted, are unmapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmap {
    /// At once. A load through a pointer kept by mistake raises SIGSEGV from then on.
    Sync,
    /// When so many pages came together, or after the delay at the latest: one TLB flush for many. Until then the
    /// files stay in use, and a pointer kept by mistake still sees them.
    Async {
        /// Pages, of 4096 bytes.
        threshold_pages: u64,
        /// At the latest.
        delay: Duration,
    },
}

impl Default for Unmap {
    fn default() -> Self {
        Unmap::Async { threshold_pages: 512, delay: Duration::from_millis(100) }
    }
}
