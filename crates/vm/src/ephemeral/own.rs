//! Mappings larger than a region: each has a reservation of its own, which goes when it goes.
//!
//! They are unmapped at once: they are larger than what would be gathered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::VmaBudget;
use super::region::{Region, RegionError};
use super::unmapping::{Kernel, Left, Span, Unmapper};

/// All of them.
pub(super) struct Owns {
    kernel: Kernel,
    vmas: Arc<VmaBudget>,
    live: AtomicU64,
    live_bytes: AtomicU64,
}

/// One of them.
pub(super) struct Own {
    all: Arc<Owns>,
    region: Arc<Region>,
    len_bytes: usize,
    /// VMAs, besides those of its region.
    vmas: usize,
}

impl Owns {
    pub fn new(vmas: Arc<VmaBudget>, kernel: Kernel) -> Owns {
        Owns { kernel, vmas, live: AtomicU64::new(0), live_bytes: AtomicU64::new(0) }
    }

    /// A reservation for so many bytes, to be mapped in so many pieces.
    pub fn take(self: &Arc<Self>, len_bytes: usize, pieces: usize) -> Result<Own, RegionError> {
        let vmas = pieces;
        if !self.vmas.try_take(vmas) {
            return Err(RegionError::Vmas);
        }
        let region =
            Region::new(len_bytes, &self.vmas).inspect_err(|_| self.vmas.give_back(vmas))?;
        // Relaxed here and below: statistics.
        self.live.fetch_add(1, Ordering::Relaxed);
        self.live_bytes.fetch_add(len_bytes as u64, Ordering::Relaxed);
        Ok(Own { all: self.clone(), region, len_bytes, vmas })
    }

    /// How it takes mappings away.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// How many there are, and their bytes.
    pub fn live(&self) -> (u64, u64) {
        (self.live.load(Ordering::Relaxed), self.live_bytes.load(Ordering::Relaxed))
    }
}

impl Own {
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub fn kernel(&self) -> &Kernel {
        &self.all.kernel
    }

    /// Nobody uses it any more: unmaps it, and gives up the addresses.
    pub fn release(self) {
        let Own { all, region, len_bytes, vmas } = self;
        let span = Span { address: region.base(), len_bytes: region.len_bytes() };
        // SAFETY: nobody uses it, and it is never given out again.
        if unsafe { all.kernel.vacate(span) } == Left::Reserved {
            all.vmas.give_back(vmas);
        } else {
            region.abandon();
        }
        all.live.fetch_sub(1, Ordering::Relaxed);
        all.live_bytes.fetch_sub(len_bytes as u64, Ordering::Relaxed);
    }
}
