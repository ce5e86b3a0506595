//! Slots in memory, with the pool's errors.

#[path = "../../../format/tests/common/mod.rs"]
mod slots;

use aquifer_pool::PoolError;

/// The errors of a transaction.
#[derive(Debug, Clone, Copy, Default)]
pub struct OfPool;

impl slots::Errors for OfPool {
    type Error = PoolError;

    fn full(slots: u64) -> PoolError {
        PoolError::NoFreeInode { slots }
    }
}

pub type SlotMap = slots::SlotMap<OfPool>;
