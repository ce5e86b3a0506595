//! The limit of VMAs of a mapper.
//!
//! A process may have 65,530 (`vm.max_map_count`), including its executable, libraries and
//! allocations. At the limit everything fails: allocations of the program, and even the calls that
//! would make room. So mappings made here stay below half of it, less what the process had before,
//! and a request beyond that returns an error in time.

use crate::sync::{AtomicUsize, Ordering};

/// Linux's default of `vm.max_map_count`.
const USUAL_LIMIT: u64 = 65_530;

/// The budget of VMAs and its use. Shared by everything that maps for one mapper.
#[derive(Debug)]
pub struct VmaBudget {
    limit: usize,
    used: AtomicUsize,
}

impl VmaBudget {
    /// Half of what the system allows, less what the process has already.
    pub fn of_process() -> VmaBudget {
        let limits = aquifer_sys::features::limits();
        let half = limits.max_mappings.unwrap_or(USUAL_LIMIT) / 2;
        let left = half.saturating_sub(limits.mappings.unwrap_or(0));
        VmaBudget::new(usize::try_from(left).unwrap_or(usize::MAX))
    }

    /// A budget of `limit` VMAs.
    pub fn new(limit: usize) -> VmaBudget {
        VmaBudget { limit, used: AtomicUsize::new(0) }
    }

    /// The limit.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// VMAs in use.
    pub fn used(&self) -> usize {
        // Relaxed: a counter that guards nothing.
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `count` VMAs if so many are left.
    pub fn try_take(&self, count: usize) -> bool {
        // Relaxed: a counter that guards nothing; the thread makes the VMAs after counting them.
        let (set, read) = (Ordering::Relaxed, Ordering::Relaxed);
        self.used
            .fetch_update(set, read, |used| {
                used.checked_add(count).filter(|&after| after <= self.limit)
            })
            .is_ok()
    }

    /// Returns `count` VMAs that were taken.
    pub fn give_back(&self, count: usize) {
        let before = self.used.fetch_sub(count, Ordering::Relaxed);
        debug_assert!(before >= count, "more VMAs given back than taken");
    }
}
