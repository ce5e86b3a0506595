//! How many VMAs a mapper may have.
//!
//! A process has 65,530 (`vm.max_map_count`), its executable, its libraries and what it allocates included. At the
//! limit everything fails: an allocation of the program, and even the calls that would make room. So what is mapped
//! here stays below half of it, less what the process had before, and who asks for more gets an error in time.

use crate::sync::{AtomicUsize, Ordering};

/// Linux's default of `vm.max_map_count`.
const USUAL_LIMIT: u64 = 65_530;

/// VMAs that may be made, and those that were. Shared by all that map for one mapper.
#[derive(Debug)]
pub struct VmaBudget {
    limit: usize,
    used: AtomicUsize,
}

impl VmaBudget {
    /// Half of what the system allows, less what the process has.
    pub fn of_process() -> VmaBudget {
        let limits = aquifer_sys::features::limits();
        let half = limits.max_mappings.unwrap_or(USUAL_LIMIT) / 2;
        let left = half.saturating_sub(limits.mappings.unwrap_or(0));
        VmaBudget::new(usize::try_from(left).unwrap_or(usize::MAX))
    }

    /// So many.
    pub fn new(limit: usize) -> VmaBudget {
        VmaBudget { limit, used: AtomicUsize::new(0) }
    }

    /// How many may be used.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// How many are used.
    pub fn used(&self) -> usize {
        // Relaxed: a number, which guards nothing.
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `count` if so many are left.
    pub fn try_take(&self, count: usize) -> bool {
        // Relaxed: a number, which guards nothing; what it counts is made afterwards by the same thread.
        let (set, read) = (Ordering::Relaxed, Ordering::Relaxed);
        self.used
            .fetch_update(set, read, |used| {
                used.checked_add(count).filter(|&after| after <= self.limit)
            })
            .is_ok()
    }

    /// Gives back `count` that were taken.
    pub fn give_back(&self, count: usize) {
        let before = self.used.fetch_sub(count, Ordering::Relaxed);
        debug_assert!(before >= count, "more VMAs given back than taken");
    }
}
