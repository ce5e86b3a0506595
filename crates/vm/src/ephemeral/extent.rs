//! Addresses that were taken from the heap.

use std::sync::Arc;

use super::own::Own;
use super::owners::Owners;
use super::pool::{Pool, Slot};
use super::runs::{Run, Runs};
use super::unmapping::{Kernel, Unmapper};
use crate::FaultOwner;

/// Addresses for one mapping. Who has it maps all of it, and retires it; if it is dropped instead, it is unmapped at
/// once.
pub struct Extent {
    address: usize,
    capacity_bytes: usize,
    owners: *const Owners,
    /// `None` once it is given up.
    home: Option<Home>,
}

/// Where it came from, and goes.
pub(super) enum Home {
    Slot(Arc<Pool<Kernel>>, Slot),
    Run(Arc<Runs<Kernel>>, Run),
    Own(Own),
}

// SAFETY: `owners` belongs to a region that `home` keeps, and may be used by any thread.
unsafe impl Send for Extent {}
// SAFETY: as above.
unsafe impl Sync for Extent {}

impl Extent {
    /// # Safety
    /// `owners` has the addresses, and stays valid as long as `home` is kept.
    pub(super) unsafe fn new(
        address: usize,
        capacity_bytes: usize,
        owners: *const Owners,
        home: Home,
    ) -> Extent {
        Extent { address, capacity_bytes, owners, home: Some(home) }
    }

    /// The first address: a multiple of 32 KiB, and of 2 MiB from 2 MiB on.
    pub fn address(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// How many bytes there are, and are to be mapped.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// Who serves faults in it, until it is retired.
    ///
    /// # Safety
    /// `owner` stays valid until the extent is retired or dropped.
    pub unsafe fn set_owner(&self, owner: *const dyn FaultOwner) {
        // SAFETY: the caller's promise; it is cleared before the extent is given up.
        unsafe { self.owners().set(self.address, self.capacity_bytes, owner) };
    }

    fn owners(&self) -> &Owners {
        // SAFETY: valid as long as `home`, which is kept until the extent is given up (contract of `new`).
        unsafe { &*self.owners }
    }

    /// Gives it up, in the process it was made in: nobody serves faults in it any more.
    pub(super) fn give_up(mut self) -> Option<Home> {
        self.leave()
    }

    fn leave(&mut self) -> Option<Home> {
        let home = self.home.as_ref()?;
        if home.kernel().is_current() {
            self.owners().clear(self.address, self.capacity_bytes);
            self.home.take()
        } else {
            self.home = None;
            None
        }
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        if let Some(home) = self.leave() {
            home.release();
        }
    }
}

impl Home {
    fn kernel(&self) -> &Kernel {
        match self {
            Home::Slot(pool, _) => pool.unmapper(),
            Home::Run(runs, _) => runs.unmapper(),
            Home::Own(own) => own.kernel(),
        }
    }

    /// Unmaps at once.
    pub fn release(self) {
        match self {
            Home::Slot(pool, slot) => pool.release(slot),
            Home::Run(runs, run) => runs.release(run),
            Home::Own(own) => own.release(),
        }
    }
}
