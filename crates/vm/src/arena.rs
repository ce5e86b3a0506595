//! One reserved range of addresses for every mapping Aquifer makes.
//!
//! The range is reserved once, without access, memory or commit charge, and cut into slots. A
//! mapping takes a run of whole slots and replaces the reservation there with `MAP_FIXED`;
//! releasing it puts the reservation back. A table with one pointer a slot tells the fault router
//! the owner of an address: two loads, no lock, async-signal-safe.
//!
//! # Invariants
//! * A slot's owner is set after its range is mapped and cleared before it is released.
//! * Addresses of a released reservation are reused only by a later reservation, never by foreign
//!   code.
//!
//! Lock order: the slot bitmap's mutex is a leaf; the fault router never takes it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{self, Advice, Protection};
use once_cell::race::OnceBox;

use crate::VmError;
use crate::fault_owner::FaultOwner;
use crate::fork::{self, ProcessMark};

/// Size of a slot: a mapping takes a whole number of them.
pub const SLOT_BYTES: usize = 256 << 20;
const LARGEST_ARENA_BYTES: usize = 16 << 40;
const SMALLEST_ARENA_BYTES: usize = 4 << 30;

/// The owner of a slot, behind another pointer because a `dyn` reference has two words; and the
/// process whose faults it serves.
struct OwnerCell {
    owner: &'static dyn FaultOwner,
    mark: ProcessMark,
}

/// The reserved range. There is one per process.
pub struct Arena {
    base: *mut u8,
    slots: usize,
    owners: Box<[AtomicPtr<OwnerCell>]>,
    taken: Mutex<Slots>,
    /// Slots whose mapping a forked child keeps.
    inherited: Box<[AtomicBool]>,
}

/// The slots that are taken, a bit each. Every change leaves what a child of a fork can use: slots of a reservation that its
/// parent was making may stay taken there.
struct Slots {
    words: Box<[u64]>,
    slots: usize,
    /// No slot below it is free.
    first_free: usize,
}

impl Slots {
    fn new(slots: usize) -> Slots {
        Slots { words: vec![0; slots.div_ceil(64)].into(), slots, first_free: 0 }
    }

    /// The first slot from `from` on that is taken, or that is not; `end` if there is none before it.
    fn next(&self, from: usize, end: usize, taken: bool) -> usize {
        let mut slot = from;
        while slot < end {
            let word = if taken { self.words[slot / 64] } else { !self.words[slot / 64] };
            let rest = word >> (slot % 64);
            if rest != 0 {
                return end.min(slot + rest.trailing_zeros() as usize);
            }
            slot = (slot / 64 + 1) * 64;
        }
        end
    }

    /// Takes the first run of free slots.
    fn take(&mut self, count: usize) -> Option<usize> {
        let mut start = self.next(self.first_free, self.slots, false);
        self.first_free = start;
        while self.slots - start >= count {
            let end = self.next(start, start + count, true);
            if end == start + count {
                for slot in start..end {
                    self.words[slot / 64] |= 1 << (slot % 64);
                }
                return Some(start);
            }
            start = self.next(end, self.slots, false);
        }
        None
    }

    fn free(&mut self, run: std::ops::Range<usize>) {
        self.first_free = self.first_free.min(run.start);
        for slot in run {
            self.words[slot / 64] &= !(1 << (slot % 64));
        }
    }
}

// SAFETY: `base` is only an address; reservations manage the mappings there.
unsafe impl Send for Arena {}
// SAFETY: the table is atomic and the bitmap is behind its mutex.
unsafe impl Sync for Arena {}

static ARENA: OnceBox<Arena> = OnceBox::new();

/// Called in a forked child, where the arena is a hole but for the mappings that children keep:
/// reserves it again, so that no foreign mapping is ever placed at addresses that stale pointers may
/// use.
///
/// # Safety
/// The calling thread is the only thread of a process just forked.
unsafe extern "C" fn reserve_again_in_child() {
    if let Some(arena) = ARENA.get() {
        // A thread of the parent may have been taking slots: they stay taken, or are still free.
        // SAFETY: forwarded to the caller; `fork` is not called under this lock.
        unsafe { arena.taken.reset_in_child() };
        for owner in &arena.owners {
            owner.store(std::ptr::null_mut(), Ordering::Relaxed);
        }
        // Relaxed: this is the only thread, and `fork` has ordered what the parent stored.
        let is_kept = |slot: usize| arena.inherited[slot].load(Ordering::Relaxed);
        let mut from = 0;
        while from < arena.slots {
            let end = (from..arena.slots).find(|&slot| is_kept(slot)).unwrap_or(arena.slots);
            if end > from {
                let start = arena.base.wrapping_add(from * SLOT_BYTES);
                let len = (end - from) * SLOT_BYTES;
                // SAFETY: the range belongs to the arena and is a hole in this process.
                let _ = unsafe { memory::map_anonymous_at(start, len, Protection::None) };
            }
            from = end + 1;
        }
    }
}

impl Arena {
    /// Returns the process's arena, which the first call reserves.
    pub fn global() -> Result<&'static Arena, VmError> {
        if let Some(arena) = ARENA.get() {
            return Ok(arena);
        }
        let arena = Box::new(Arena::reserve()?);
        if let Err(second) = ARENA.set(arena) {
            // SAFETY: another thread was first; this range was never published.
            let _ = unsafe { memory::unmap(second.base, second.slots * SLOT_BYTES) };
        }
        Ok(ARENA.get().expect("set above"))
    }

    fn reserve() -> Result<Arena, VmError> {
        let mut len = LARGEST_ARENA_BYTES;
        let base = loop {
            // One more slot, so that the base can be rounded up to a slot boundary.
            match memory::reserve(len + SLOT_BYTES) {
                Ok(base) => break base,
                Err(_) if len > SMALLEST_ARENA_BYTES => len /= 2,
                Err(source) => {
                    return Err(VmError::Reserve { len_bytes: len as u64, source });
                }
            }
        };
        let aligned = (base as usize).next_multiple_of(SLOT_BYTES);
        // SAFETY: the reservation is fresh: nothing uses the cut-off ends.
        unsafe {
            let head = aligned - base as usize;
            if head > 0 {
                let _ = memory::unmap(base, head);
            }
            let _ = memory::unmap((aligned + len) as *mut u8, SLOT_BYTES - head);
        }
        let slots = len / SLOT_BYTES;
        let base = aligned as *mut u8;
        // SAFETY: reserved above.
        let _ = unsafe { memory::advise(base, len, Advice::DontFork) };
        // Before the arena is published. Of two threads that reserve one, both do this: a second call changes nothing.
        // SAFETY: it makes stores and system calls, which are async-signal-safe.
        unsafe { fork::in_each_child(reserve_again_in_child) };
        Ok(Arena {
            base,
            slots,
            owners: (0..slots).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect(),
            taken: Mutex::new(Slots::new(slots)),
            inherited: (0..slots).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    #[cfg(test)]
    pub(crate) fn lock_for_test(&self) -> impl Sized + '_ {
        self.taken.lock()
    }

    /// Takes a run of slots for at least `len_bytes`. Nothing is mapped yet.
    pub fn allocate(&'static self, len_bytes: usize) -> Result<Reservation, VmError> {
        let count = len_bytes.max(1).div_ceil(SLOT_BYTES);
        let first = self.taken.lock().take(count).ok_or(VmError::ArenaFull {
            len_bytes: len_bytes as u64,
            arena_bytes: (self.slots * SLOT_BYTES) as u64,
        })?;
        let (mark, owner) = (ProcessMark::new(), std::ptr::null_mut());
        Ok(Reservation { arena: self, first, count, mark, owner })
    }

    /// Returns the owner that serves faults at `address`, if this process made the reservation: a
    /// forked child shares the parent's userfaultfd and must not serve anything with it.
    /// Async-signal-safe.
    ///
    /// # Safety
    /// While the owner is used, the reservation of the address is not dropped: the caller is the thread that faults there, or
    /// owns the mapping.
    #[inline]
    pub(crate) unsafe fn owner_of(address: usize) -> Option<&'static dyn FaultOwner> {
        let arena = ARENA.get()?;
        let slot = address.checked_sub(arena.base as usize)? / SLOT_BYTES;
        // Acquire pairs with the release in `put_owner`.
        let owner = arena.owners.get(slot)?.load(Ordering::Acquire);
        // SAFETY: an owner outlives its reservation (contract of `Reservation::put_owner`), which the caller keeps alive.
        let cell = unsafe { owner.as_ref() }?;
        cell.mark.is_current().then_some(cell.owner)
    }
}

/// A run of slots, returned to the arena when dropped.
pub struct Reservation {
    arena: &'static Arena,
    first: usize,
    count: usize,
    mark: ProcessMark,
    owner: *mut OwnerCell,
}

// SAFETY: an address range, and an owner cell that is freed only in `drop`.
unsafe impl Send for Reservation {}
// SAFETY: shared access only reads plain fields.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// First address: a multiple of [`SLOT_BYTES`].
    pub fn address(&self) -> *mut u8 {
        self.arena.base.wrapping_add(self.first * SLOT_BYTES)
    }

    /// Bytes reserved.
    pub fn len_bytes(&self) -> usize {
        self.count * SLOT_BYTES
    }

    /// Replaces the first `len_bytes` of the reservation by fresh anonymous memory, excluded from
    /// children and core dumps.
    pub fn map_anonymous(&self, len_bytes: usize, protection: Protection) -> Result<(), VmError> {
        assert!(len_bytes <= self.len_bytes(), "mapping exceeds its reservation");
        // SAFETY: the range belongs to this reservation.
        unsafe { memory::map_anonymous_at(self.address(), len_bytes, protection) }
            .and_then(|()| self.keep_private(len_bytes))
            .map_err(|source| VmError::Map { len_bytes: len_bytes as u64, source })
    }

    /// Replaces the first `len_bytes` of the reservation by a shared mapping of a file.
    pub fn map_file(
        &self,
        len_bytes: usize,
        protection: Protection,
        file: std::os::fd::BorrowedFd<'_>,
    ) -> Result<(), VmError> {
        assert!(len_bytes <= self.len_bytes(), "mapping exceeds its reservation");
        // SAFETY: the range belongs to this reservation.
        unsafe { memory::map_file_at(self.address(), len_bytes, protection, file, 0) }
            .and_then(|()| self.keep_private(len_bytes))
            .map_err(|source| VmError::Map { len_bytes: len_bytes as u64, source })
    }

    fn keep_private(&self, len_bytes: usize) -> io::Result<()> {
        // SAFETY: the range belongs to this reservation; both kinds of advice keep its contents.
        unsafe {
            memory::advise(self.address(), len_bytes, Advice::DontFork)?;
            memory::advise(self.address(), len_bytes, Advice::DontDump)
        }
    }

    /// From now on, a forked child keeps what is mapped here, all of it, by a mapping without
    /// `MADV_DONTFORK`. Its faults there are not served: they go to the handler that was installed
    /// before.
    pub fn keep_in_children(&self) {
        self.set_inherited(true);
    }

    fn set_inherited(&self, is_kept: bool) {
        for slot in &self.arena.inherited[self.first..self.first + self.count] {
            // Relaxed: read in a child, whose only thread is the one that called `fork`. A mapping
            // that another thread is just making or dropping is in use by none in the child.
            slot.store(is_kept, Ordering::Relaxed);
        }
    }

    /// Sets the owner that serves the faults of this reservation, for the fault router.
    ///
    /// # Safety
    /// `owner` stays valid until this reservation is dropped.
    pub(crate) unsafe fn put_owner(&mut self, owner: *const dyn FaultOwner) {
        // SAFETY: the caller keeps the owner alive as long as the cell is reachable.
        let owner: &'static dyn FaultOwner = unsafe { &*owner };
        assert!(self.owner.is_null(), "a reservation has one owner");
        self.owner = Box::into_raw(Box::new(OwnerCell { owner, mark: self.mark }));
        for slot in &self.arena.owners[self.first..self.first + self.count] {
            // Release pairs with the acquire in `owner_of`.
            slot.store(self.owner, Ordering::Release);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.mark.is_current() {
            return;
        }
        for slot in &self.arena.owners[self.first..self.first + self.count] {
            slot.store(std::ptr::null_mut(), Ordering::Release);
        }
        if !self.owner.is_null() {
            // SAFETY: made by `Box::into_raw`, and the table no longer refers to it.
            drop(unsafe { Box::from_raw(self.owner) });
        }
        // SAFETY: the reservation owns the range, which is no longer used.
        let restored =
            unsafe { memory::map_anonymous_at(self.address(), self.len_bytes(), Protection::None) };
        if restored.is_ok() {
            // SAFETY: as above.
            let _ = unsafe { memory::advise(self.address(), self.len_bytes(), Advice::DontFork) };
            self.set_inherited(false);
            self.arena.taken.lock().free(self.first..self.first + self.count);
        }
        // Otherwise the slots stay taken: addresses are never given out with something mapped
        // there.
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_do_not_overlap_and_are_reused() {
        let arena = Arena::global().unwrap();
        let first = arena.allocate(SLOT_BYTES + 1).unwrap();
        let second = arena.allocate(1).unwrap();
        assert_eq!(first.len_bytes(), 2 * SLOT_BYTES);
        let end = first.address() as usize + first.len_bytes();
        let distinct = second.address() as usize >= end
            || second.address() as usize + second.len_bytes() <= first.address() as usize;
        assert!(distinct);
    }

    /// As a list of slots that is searched from the front.
    #[test]
    fn runs_of_slots_are_the_first_that_are_free() {
        let mut random = 1u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize % below
        };
        for count in [1, 16, 64, 200] {
            let (mut slots, mut model) = (Slots::new(count), vec![false; count]);
            let mut runs = vec![];
            for _ in 0..5000 {
                if next(2) == 0 && !runs.is_empty() {
                    let run: std::ops::Range<usize> = runs.swap_remove(next(runs.len()));
                    model[run.clone()].fill(false);
                    slots.free(run);
                    continue;
                }
                let wanted = if next(4) == 0 { 1 + next(2 * count) } else { 1 + next(3) };
                let expected = model.windows(wanted).position(|run| run.iter().all(|taken| !taken));
                assert_eq!(slots.take(wanted), expected, "{wanted} of {model:?}");
                if let Some(first) = expected {
                    model[first..first + wanted].fill(true);
                    runs.push(first..first + wanted);
                }
            }
        }
    }

    #[test]
    fn a_reservation_too_large_is_refused() {
        let arena = Arena::global().unwrap();
        let result = arena.allocate(LARGEST_ARENA_BYTES * 2);
        assert!(matches!(result, Err(VmError::ArenaFull { .. })));
    }
}
