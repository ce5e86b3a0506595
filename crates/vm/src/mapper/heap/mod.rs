//! The ephemeral heap: addresses for mappings that come and go.

mod vma_budget;

use std::path::Path;
use std::sync::Arc;

pub(crate) use vma_budget::VmaBudget;

use super::{MapError, Unmap};
use crate::{Arena, FaultOwner, Reservation};

/// Addresses and mappings of a heap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapStats {}

pub(crate) struct Heap {
    vmas: Arc<VmaBudget>,
}

impl Heap {
    pub fn new(_unmap: Unmap, vmas: Arc<VmaBudget>) -> Arc<Heap> {
        Arc::new(Heap { vmas })
    }

    /// Room for a mapping of so many bytes of the file at `path`.
    pub fn take(&self, len_bytes: usize, path: &Path) -> Result<Extent, MapError> {
        let reservation = Arena::global()?.allocate(len_bytes)?;
        if !self.vmas.try_take(3) {
            let path = path.to_owned();
            return Err(MapError::TooManyMappings {
                path,
                used: self.vmas.used(),
                limit: self.vmas.limit(),
            });
        }
        let capacity = len_bytes.next_multiple_of(32 << 10);
        Ok(Extent {
            reservation: aquifer_sys::futex::Mutex::new(reservation),
            capacity,
            vmas: self.vmas.clone(),
        })
    }

    /// The mapping in `extent` is not used any more.
    pub fn retire(&self, extent: Extent) {
        drop(extent);
    }

    /// Unmaps everything retired, before it returns.
    pub fn unmap_now(&self) {}

    /// What it has.
    pub fn stats(&self) -> HeapStats {
        HeapStats::default()
    }
}

pub(crate) struct Extent {
    reservation: aquifer_sys::futex::Mutex<Reservation>,
    capacity: usize,
    vmas: Arc<VmaBudget>,
}

impl Extent {
    pub fn address(&self) -> *mut u8 {
        self.reservation.lock().address()
    }

    pub fn capacity_bytes(&self) -> usize {
        self.capacity
    }

    /// Who serves faults in it, until it is retired.
    ///
    /// # Safety
    /// `owner` stays valid until the extent is retired or dropped.
    pub unsafe fn set_owner(&self, owner: *const dyn FaultOwner) {
        // SAFETY: forwarded to the caller.
        let _ = unsafe { self.reservation.lock().set_owner(owner) };
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.vmas.give_back(3);
    }
}
