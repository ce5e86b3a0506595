//! Memory that grows at its addresses: as long as the largest budget, allowed to be used as far as the present one.
//!
//! A system that promises no more memory than it has (`vm.overcommit_memory=2`, `RLIMIT_DATA`) charges memory when it becomes
//! writable, not when it is touched. The largest budget is all of the machine's memory, and would be refused there; so
//! the addresses are a reservation, and what the budget needs is made writable when the budget is set.
//!
//! # Invariants
//! * The first `writable_bytes` can be loaded and stored, what is behind them cannot.
//! * What was made writable stays so, also when the budget shrinks: a thread may still look at it. Its pages are
//!   given back, its charge is when the memory is dropped.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use aquifer_sys::memory::{self, Advice, Protection};
use aquifer_vm::ProcessMark;

/// See the module documentation. Kept out of children and core dumps.
pub(crate) struct MemoryOnDemand {
    mark: ProcessMark,
    reservation: *mut u8,
    reserved_bytes: usize,
    base: *mut u8,
    len_bytes: usize,
    unit_bytes: usize,
    writable_bytes: AtomicUsize,
}

// SAFETY: addresses; who uses which part of the memory is up to its owner.
unsafe impl Send for MemoryOnDemand {}
// SAFETY: as above.
unsafe impl Sync for MemoryOnDemand {}

impl MemoryOnDemand {
    /// Reserves addresses for at least `len_bytes`, from a multiple of `unit_bytes` on. Memory becomes writable in
    /// such units, a power of two.
    pub fn new(len_bytes: usize, unit_bytes: usize) -> io::Result<MemoryOnDemand> {
        let len_bytes = len_bytes.max(1).next_multiple_of(unit_bytes);
        let reserved_bytes = len_bytes + unit_bytes;
        let reservation = memory::reserve(reserved_bytes)?;
        let base = reservation.wrapping_add(reservation.align_offset(unit_bytes));
        let memory = MemoryOnDemand {
            mark: ProcessMark::new(),
            reservation,
            reserved_bytes,
            base,
            len_bytes,
            unit_bytes,
            writable_bytes: AtomicUsize::new(0),
        };
        for advice in [Advice::DontFork, Advice::DontDump] {
            memory.advise(advice)?;
        }
        Ok(memory)
    }

    /// The first byte.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// How many bytes there can be.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Advises about all of it, also what is not writable yet.
    pub fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: our own range; callers give advice that keeps contents.
        unsafe { memory::advise(self.base, self.len_bytes, advice) }
    }

    /// Makes the first `len_bytes` writable. One thread at a time calls this.
    ///
    /// # Errors
    /// The kernel's, if it does not promise that much memory: what was writable still is.
    pub fn provide(&self, len_bytes: usize) -> io::Result<()> {
        let wanted_bytes = len_bytes.min(self.len_bytes).next_multiple_of(self.unit_bytes);
        // Relaxed, here and below: written by the caller's thread, or by one that it followed.
        let writable_bytes = self.writable_bytes.load(Ordering::Relaxed);
        if wanted_bytes <= writable_bytes {
            return Ok(());
        }
        let start = self.base.wrapping_add(writable_bytes);
        // SAFETY: a part of our own reservation, of which nothing was used before.
        unsafe { memory::protect(start, wanted_bytes - writable_bytes, Protection::ReadWrite) }?;
        self.writable_bytes.store(wanted_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// How many bytes are writable.
    pub fn writable_bytes(&self) -> usize {
        self.writable_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for MemoryOnDemand {
    fn drop(&mut self) {
        if !self.mark.is_current() {
            return; // a hole in a child of a fork, where something else may be by now
        }
        // SAFETY: reserved by `new` with this length; the owner is going away, and its users with it.
        let _ = unsafe { memory::unmap(self.reservation, self.reserved_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_provided_is_writable_and_stays() {
        let memory = MemoryOnDemand::new(5 << 20, 2 << 20).unwrap();
        assert_eq!((memory.len_bytes(), memory.writable_bytes()), (6 << 20, 0));
        assert!(memory.base().addr().is_multiple_of(2 << 20));
        memory.provide(1).unwrap();
        // SAFETY: just made writable, and this thread's own.
        unsafe { memory.base().add((2 << 20) - 1).write_volatile(7) };
        memory.provide(usize::MAX).unwrap();
        memory.provide(0).unwrap();
        assert_eq!(memory.writable_bytes(), 6 << 20);
        // SAFETY: as above.
        unsafe {
            memory.base().add((6 << 20) - 1).write_volatile(8);
            assert_eq!(memory.base().add((2 << 20) - 1).read_volatile(), 7);
        }
    }
}
