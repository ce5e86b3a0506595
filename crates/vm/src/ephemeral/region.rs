//! A part of the arena for short-lived mappings, and the owners of their faults.
//!
//! The region's reservation is one separate VMA: the arena's own has other flags (`MADV_DONTFORK`)
//! and would not merge with restored parts. In a forked child the whole arena is reserved anew,
//! which removes whatever the child inherited of this; so mappings here need no advice of their
//! own.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_sys::memory::{self, Protection};

use super::VmaBudget;
use super::owners::Owners;
use crate::{Arena, Reservation, VmError};

/// VMAs of an empty region: its own, and one that it splits off the arena's.
pub(super) const REGION_VMAS: usize = 2;

/// See the module documentation.
pub(super) struct Region {
    reservation: ManuallyDrop<Reservation>,
    owners: ManuallyDrop<Box<Owners>>,
    vmas: Arc<VmaBudget>,
    is_abandoned: AtomicBool,
}

impl Region {
    /// Reserves `len_bytes`.
    pub fn new(len_bytes: usize, vmas: &Arc<VmaBudget>) -> Result<Arc<Region>, RegionError> {
        if !vmas.try_take(REGION_VMAS) {
            return Err(RegionError::Vmas);
        }
        let made = Region::reserve(len_bytes);
        let (reservation, owners) = made.inspect_err(|_| vmas.give_back(REGION_VMAS))?;
        Ok(Arc::new(Region {
            reservation: ManuallyDrop::new(reservation),
            owners: ManuallyDrop::new(owners),
            vmas: vmas.clone(),
            is_abandoned: AtomicBool::new(false),
        }))
    }

    fn reserve(len_bytes: usize) -> Result<(Reservation, Box<Owners>), VmError> {
        let mut reservation = Arena::global()?.allocate(len_bytes)?;
        let (address, len) = (reservation.address(), reservation.len_bytes());
        // SAFETY: the reservation is fresh.
        unsafe { memory::map_anonymous_at(address, len, Protection::None) }
            .map_err(|source| VmError::Map { len_bytes: len as u64, source })?;
        let owners = Box::new(Owners::new(address as usize, len));
        let owner: &Owners = &owners;
        // SAFETY: the box keeps the address stable, and is dropped after the reservation.
        unsafe { reservation.set_owner(owner) }?;
        Ok((reservation, owners))
    }

    /// The first address.
    pub fn base(&self) -> usize {
        self.reservation.address() as usize
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.reservation.len_bytes()
    }

    /// The owners of faults in the region.
    pub fn owners(&self) -> &Owners {
        &self.owners
    }

    /// Abandons the region, in which foreign code may have mapped something: its addresses are
    /// never given out again.
    pub fn abandon(&self) {
        // Relaxed: dropping the region is ordered after this.
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if *self.is_abandoned.get_mut() {
            return;
        }
        // SAFETY: dropped once, here; before the owners, to which it refers.
        unsafe { ManuallyDrop::drop(&mut self.reservation) };
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.owners) };
        self.vmas.give_back(REGION_VMAS);
    }
}

/// Why no region could be made.
#[derive(Debug)]
pub(super) enum RegionError {
    /// The budget is used up.
    Vmas,
    /// No addresses are free.
    Addresses(VmError),
}

impl From<VmError> for RegionError {
    fn from(error: VmError) -> RegionError {
        RegionError::Addresses(error)
    }
}
