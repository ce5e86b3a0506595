//! Mappings larger than a region: each has a dedicated reservation, which is released with it.
//!
//! They are unmapped at once: they exceed any threshold.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::VmaBudget;
use super::region::{Region, RegionError};
use super::unmapping::{Kernel, Left, Span, Unmapper};

/// The state common to all such mappings.
pub(super) struct Owns {
    kernel: Kernel,
    vmas: Arc<VmaBudget>,
    live: AtomicU64,
    live_bytes: AtomicU64,
}

/// One such mapping.
pub(super) struct Own {
    all: Arc<Owns>,
    region: Arc<Region>,
    len_bytes: usize,
    /// VMAs in addition to those of its region.
    vmas: usize,
}

impl Owns {
    pub fn new(vmas: Arc<VmaBudget>, kernel: Kernel) -> Owns {
        Owns { kernel, vmas, live: AtomicU64::new(0), live_bytes: AtomicU64::new(0) }
    }

    /// Takes a reservation of `len_bytes`, to be mapped in `pieces` pieces.
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

    /// The unmapper of these mappings.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Number of mappings, and their bytes.
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

    /// Releases a mapping that is no longer used: unmaps it, and releases the addresses.
    pub fn release(self) {
        let Own { all, region, len_bytes, vmas } = self;
        let span = Span { address: region.base(), len_bytes: region.len_bytes() };
        // SAFETY: the mapping is no longer used, and its addresses are not given out again before
        // the region is dropped.
        if unsafe { all.kernel.vacate(span) } == Left::Reserved {
            all.vmas.give_back(vmas);
        } else {
            region.abandon();
        }
        all.live.fetch_sub(1, Ordering::Relaxed);
        all.live_bytes.fetch_sub(len_bytes as u64, Ordering::Relaxed);
    }
}
