//! The free space of a pool, as this handle takes it: [reservations](crate::metadata::reservation), the
//! [turn](crate::metadata::turn) and [zeroing](crate::metadata::zero).
//!
//! Which pages are free lies in the segment, for all processes ([`alloc`](crate::metadata::alloc),
//! [`freed`](crate::metadata::freed)), and changes with the metadata mutex.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};

use crate::background::Worker;
use crate::error::Result;
use crate::format::PAGE_BYTES;
use crate::log::locks::Log;
use crate::metadata::alloc::{self, PageMaps, Wanted};
use crate::metadata::freed;
use crate::pins::PinPlaces;
use crate::shared::handle::Handle;
use crate::shared::segment::{Control, SlotSet};

/// The free space of a pool, as this handle takes it.
pub(crate) struct Space {
    pub handle: Arc<Handle>,
    /// Has the metadata mutex.
    pub log: Arc<Log>,
    /// What keeps freed pages from being free.
    pub pins: Arc<PinPlaces>,
    /// Held while this process has pages reserved only to zero them.
    pub zeroing: Mutex<()>,
    /// Held by the call of this process that has the turn, or waits for it behind other processes.
    pub reserving: Mutex<()>,
    /// Called when there may be pages to zero; none if this handle zeroes none in the background.
    pub zeroer: OnceLock<Zeroer>,
}

impl std::fmt::Debug for Space {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Space").field("uuid", &self.handle.uuid).finish_non_exhaustive()
    }
}

/// The thread that zeroes free pages, at a limited rate, until there are enough.
#[derive(Debug)]
pub(crate) struct Zeroer {
    pub worker: Worker,
    pub stock_bytes: u64,
}

/// The free space of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Free pages, including those that are being zeroed.
    pub free_pages: u64,
    /// Pages that were freed, wait only for the log to move on, and that no view keeps: a reservation
    /// that does not find enough free ones makes a checkpoint, and has these as well. 0 in a pool that
    /// was opened read-only, where no call takes pages.
    pub freed_pages: u64,
    /// Pages of the longest free range.
    pub largest_free_pages: u64,
    /// Empty slots.
    pub free_slots: u64,
}

impl Space {
    pub fn control(&self) -> &Control {
        self.handle.control()
    }

    /// Requests zeroing of free pages in the background, if this handle has a background thread for
    /// it.
    pub fn zero_soon(&self) {
        if let Some(zeroer) = self.zeroer.get()
            && self.lacks_zeros(zeroer.stock_bytes)
        {
            zeroer.worker.call();
        }
    }

    /// The longest range of pages that are free now.
    pub fn largest_free_pages(&self) -> u64 {
        PageMaps::of(&self.handle).all(Wanted::Any).map(|run| run.pages).max().unwrap_or(0)
    }

    /// The current free space.
    pub fn room(&self) -> Result<Room> {
        let (free_pages, freed_pages) = if self.handle.members.is_writable {
            // Under the lock, for a consistent count: pages that are being zeroed are reserved and
            // then freed.
            let locked = self.log.lock()?;
            (alloc::free_count(&self.handle.segment), freed::freeable_pages(&locked, &self.pins))
        } else {
            (alloc::free_count(&self.handle.segment), 0)
        };
        let segment = &self.handle.segment;
        let occupied = segment.slot_set(SlotSet::Occupied).iter();
        let occupied: u32 = occupied.map(|word| word.load(Relaxed).count_ones()).sum();
        Ok(Room {
            free_pages,
            freed_pages,
            largest_free_pages: self.largest_free_pages(),
            free_slots: segment.slots() - u64::from(occupied),
        })
    }

    /// Bytes of free pages known to be zero, approximately.
    pub fn zeroed_bytes(&self) -> u64 {
        let control = self.control();
        let fresh = self.handle.layout.page_count - control.fresh_from_page.load(Relaxed);
        (fresh + control.zeroed_count.load(Relaxed)) * PAGE_BYTES
    }

    /// Whether fewer bytes are known to be zero than there should be, and others are free.
    /// Approximately: the pages are counted without a lock.
    pub fn lacks_zeros(&self, stock_bytes: u64) -> bool {
        let free_bytes = self.control().free_count.load(Relaxed) * PAGE_BYTES;
        self.zeroed_bytes() < stock_bytes.min(free_bytes)
    }
}
