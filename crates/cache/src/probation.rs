//! The probation area: a second chance for evicted pages of mappings, where hits are invisible.
//!
//! Hits on a mapping cost nothing and are not recorded, so every policy behind it sees arrivals
//! only. The probation area makes the reload of wrongly evicted pages cheap: a victim's bytes are
//! copied into a ring of slots, and a fault on the page copies them from there instead of reading
//! the device. The ring is FIFO; a page that is accessed again within one turn of the ring is
//! reloaded without I/O.
//!
//! # Invariants
//! * A slot's version is odd while its bytes change. A reader checks the version before and after
//!   copying, and falls back to the device if it changed: the device has the same bytes, because
//!   only clean pages are kept here.
//! * A page word in state Probation names a slot whose key is that page, or a slot that was reused
//!   since; the key tells which.

use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use aquifer_sys::memory::{self, Advice, SMALL_PAGE_BYTES};

use crate::ids::{FrameId, PageKey};
use crate::lazy::LazyArray;
use crate::memory_on_demand::MemoryOnDemand;
use crate::version::Version;

/// The ring. See the module documentation.
pub(crate) struct Probation {
    memory: MemoryOnDemand,
    page_bytes: usize,
    max_slots: usize,
    slots: AtomicUsize,
    next: AtomicUsize,
    versions: LazyArray<Version>,
    keys: LazyArray<AtomicU64>,
}

impl Probation {
    /// A ring with room for up to `max_slots` slots, and none yet.
    pub fn new(page_bytes: usize, max_slots: usize) -> io::Result<Probation> {
        Ok(Probation {
            memory: MemoryOnDemand::new(page_bytes * max_slots, SMALL_PAGE_BYTES)?,
            page_bytes,
            max_slots,
            slots: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            versions: LazyArray::new(max_slots)?,
            keys: LazyArray::new(max_slots)?,
        })
    }

    fn bytes(&self, slot: usize) -> *mut u8 {
        self.memory.base().wrapping_add(slot * self.page_bytes)
    }

    /// Sets the number of slots in use and gives the memory of the others back. Uses fewer if
    /// memory for them is short. One thread at a time calls this.
    pub fn set_slots(&self, slots: usize) {
        let slots = slots.min(self.max_slots);
        // The ring only saves I/O: a shorter one, or none, is also correct.
        let _ = self.memory.provide(slots * self.page_bytes);
        let slots = slots.min(self.memory.writable_bytes() / self.page_bytes);
        let old = self.slots.swap(slots, Ordering::SeqCst);
        // Slots at or above `next` were never used: slots are used in order, from the first.
        for slot in slots..old.min(self.next.load(Ordering::SeqCst)) {
            if self.versions[slot].try_begin_change() {
                self.keys[slot].store(0, Ordering::Relaxed);
                // SAFETY: the slot's version is odd, so no thread trusts its bytes.
                let _ =
                    unsafe { memory::advise(self.bytes(slot), self.page_bytes, Advice::DontNeed) };
                self.versions[slot].end_change();
            }
        }
    }

    /// Keeps a copy of a clean page; calls `forget` with the page that loses its slot.
    ///
    /// `None` if there is no ring, or the next slot is busy.
    ///
    /// # Safety
    /// `source` must be readable for a page and must not change.
    pub unsafe fn keep(
        &self,
        key: PageKey,
        source: *const u8,
        forget: impl FnOnce(PageKey, FrameId),
    ) -> Option<FrameId> {
        let slots = self.slots.load(Ordering::SeqCst);
        if slots == 0 {
            return None;
        }
        let slot = self.next.fetch_add(1, Ordering::Relaxed) % slots;
        if !self.versions[slot].try_begin_change() {
            return None;
        }
        let old = self.keys[slot].swap(key.pack(), Ordering::Relaxed);
        // SAFETY: the caller guarantees the source. This thread made the slot's version odd, so
        // only it writes the slot.
        unsafe { std::ptr::copy_nonoverlapping(source, self.bytes(slot), self.page_bytes) };
        self.versions[slot].end_change();
        if let Some(old) = PageKey::unpack(old) {
            forget(old, FrameId(slot as u32));
        }
        Some(FrameId(slot as u32))
    }

    /// Copies a page out of a slot. False if the slot was reused: the caller then loads from the
    /// device.
    ///
    /// # Safety
    /// `target` must be writable for a page and owned by the caller.
    pub unsafe fn copy_out(&self, slot: FrameId, key: PageKey, target: *mut u8) -> bool {
        let slot = slot.0 as usize;
        if slot >= self.slots.load(Ordering::SeqCst) {
            return false;
        }
        let Some(version) = self.versions[slot].at_rest() else {
            return false;
        };
        if self.keys[slot].load(Ordering::Relaxed) != key.pack() {
            return false;
        }
        // SAFETY: both are valid for a page. If the bytes change during the copy, the copy is
        // discarded.
        unsafe { memory::copy_racy(self.bytes(slot), target, self.page_bytes) };
        self.versions[slot].is_still(version)
    }
}
