//! A piece of the arena in which mappings come and go, and the owners of their faults.
//!
//! The reservation in it is one VMA: what the arena put there has other flags (it is kept out of children) and would not
//! merge with what is put back. A child of a fork gets the whole arena reserved anew instead, which takes away whatever
//! of this it inherited; so mappings here need no advice of their own.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_sys::memory::{self, Protection};

use super::VmaBudget;
use super::owners::Owners;
use crate::{Arena, Reservation, VmError};

/// VMAs of a region in which nothing is mapped: it, and what it cuts the arena's own into.
pub(super) const REGION_VMAS: usize = 2;

/// See the module documentation.
pub(super) struct Region {
    reservation: ManuallyDrop<Reservation>,
    owners: ManuallyDrop<Box<Owners>>,
    vmas: Arc<VmaBudget>,
    is_abandoned: AtomicBool,
}

impl Region {
    /// Reserves so many bytes.
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
        // SAFETY: in the box until the reservation is dropped.
        unsafe { reservation.set_owner(owner) }?;
        Ok((reservation, owners))
    }

    /// The first address.
    pub fn base(&self) -> usize {
        self.reservation.address() as usize
    }

    /// How many bytes there are.
    pub fn len_bytes(&self) -> usize {
        self.reservation.len_bytes()
    }

    /// Who serves faults.
    pub fn owners(&self) -> &Owners {
        &self.owners
    }

    /// Strangers may have mapped something in it: its addresses are never given out again.
    pub fn abandon(&self) {
        // Relaxed: whoever drops the region comes after.
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if *self.is_abandoned.get_mut() {
            return;
        }
        // SAFETY: dropped once, here; before the owners, which it leads to.
        unsafe { ManuallyDrop::drop(&mut self.reservation) };
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.owners) };
        self.vmas.give_back(REGION_VMAS);
    }
}

/// Why there is no region.
#[derive(Debug)]
pub(super) enum RegionError {
    /// The budget is used up.
    Vmas,
    /// There are no addresses.
    Addresses(VmError),
}

impl From<VmError> for RegionError {
    fn from(error: VmError) -> RegionError {
        RegionError::Addresses(error)
    }
}
