//! Addresses taken from the heap.

use std::sync::Arc;

use super::own::Own;
use super::owners::Owners;
use super::pool::{Pool, Slot};
use super::runs::{Run, Runs};
use super::unmapping::{Kernel, Unmapper};
use crate::FaultOwner;

/// Addresses for one mapping. The caller must map the whole extent, and retire it; an extent that
/// is dropped instead is unmapped at once.
pub struct Extent {
    address: usize,
    capacity_bytes: usize,
    owners: *const Owners,
    /// `None` once the extent is given up.
    home: Option<Home>,
}

/// Where an extent was taken from, and is returned to.
pub(super) enum Home {
    Slot(Arc<Pool<Kernel>>, Slot),
    Run(Arc<Runs<Kernel>>, Run),
    Own(Own),
}

// SAFETY: `owners` belongs to a region that `home` keeps alive, and is `Sync`.
unsafe impl Send for Extent {}
// SAFETY: as above.
unsafe impl Sync for Extent {}

impl Extent {
    /// # Safety
    /// `owners` covers the addresses, and stays valid as long as `home` is kept.
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

    /// Length in bytes; all of it must be mapped.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// Sets the owner that serves faults in the extent, until it is retired.
    ///
    /// # Safety
    /// `owner` stays valid until the extent is retired or dropped.
    pub unsafe fn set_owner(&self, owner: *const dyn FaultOwner) {
        // SAFETY: the caller keeps `owner` valid until the extent is given up, and `leave` clears
        // it before that.
        unsafe { self.owners().set(self.address, self.capacity_bytes, owner) };
    }

    fn owners(&self) -> &Owners {
        // SAFETY: valid as long as `home`, which is kept until the extent is given up (contract of
        // `new`).
        unsafe { &*self.owners }
    }

    /// Clears the owner and returns the home; `None` in a forked child.
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

    /// Unmaps the addresses at once.
    pub fn release(self) {
        match self {
            Home::Slot(pool, slot) => pool.release(slot),
            Home::Run(runs, run) => runs.release(run),
            Home::Own(own) => own.release(),
        }
    }
}
