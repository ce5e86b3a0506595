//! The validated options of a cache.

use std::sync::Arc;

use crate::error::{CacheError, Result};
use crate::page_word::MAX_FRAMES;
use crate::policy::{Policy, PolicyKind};

/// Creates the policy instances of a cache: one for mappings, one for `Pages`.
#[derive(Clone)]
pub(crate) enum PolicySource {
    BuiltIn(PolicyKind),
    Custom(Arc<dyn Fn() -> Box<dyn Policy> + Send + Sync>),
}

impl PolicySource {
    pub fn build(&self) -> Box<dyn Policy> {
        match self {
            PolicySource::BuiltIn(kind) => kind.build(),
            PolicySource::Custom(make) => make(),
        }
    }
}

/// Validated options.
#[derive(Clone)]
pub(crate) struct Options {
    pub budget_bytes: u64,
    pub max_budget_bytes: u64,
    pub page_bytes: usize,
    pub policy: PolicySource,
    /// Whether a policy or a page size was requested that the kernel backend does not support.
    pub needs_user_backend: bool,
    pub io_threads: usize,
    pub serving_thread: bool,
    pub without_vectored_discard: bool,
    pub without_userfaultfd: bool,
}

/// Minimum number of frames of a cache.
const MIN_FRAMES: u64 = 512;
/// Three kinds of interface share a budget in whole regions.
const MIN_BUDGET_BYTES: u64 = 6 << 20;

impl Options {
    /// The smallest budget that works with a page size.
    pub fn min_budget_bytes(page_bytes: usize) -> u64 {
        (MIN_FRAMES * page_bytes as u64 / 2).max(MIN_BUDGET_BYTES)
    }

    pub fn check_budget(&self, budget_bytes: u64) -> Result<()> {
        let min_bytes = Options::min_budget_bytes(self.page_bytes);
        if budget_bytes < min_bytes || budget_bytes > self.max_budget_bytes {
            return Err(CacheError::Budget {
                budget_bytes,
                min_bytes,
                max_bytes: self.max_budget_bytes,
            });
        }
        Ok(())
    }

    pub fn check(&self) -> Result<()> {
        let page_bytes = self.page_bytes;
        if !page_bytes.is_power_of_two() || !(4096..=65536).contains(&page_bytes) {
            return Err(CacheError::PageSize { page_bytes });
        }
        self.check_budget(self.budget_bytes)
    }

    /// The number of frames of the largest possible budget.
    pub fn max_frames(&self) -> usize {
        ((self.max_budget_bytes / self.page_bytes as u64) as usize).min(MAX_FRAMES)
    }
}
