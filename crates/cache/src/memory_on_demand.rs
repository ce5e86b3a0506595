//! Memory that grows in place: addresses for the largest budget, of which the current budget is
//! writable.
//!
//! A system that limits committed memory (`vm.overcommit_memory=2`, `RLIMIT_DATA`) charges memory
//! when it becomes writable, not when it is touched. The largest budget is all of the machine's
//! memory, and would be refused there. So the addresses are a reservation, and the part that a
//! budget needs is made writable when the budget is set.
//!
//! # Invariants
//! * The first `writable_bytes` bytes can be loaded and stored, the bytes after them cannot.
//! * Memory that was made writable stays writable, even if the budget shrinks: a thread may still
//!   access it. Its pages can be given back; the kernel's charge for it remains until the memory is
//!   dropped.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use aquifer_sys::memory::{self, Advice, Protection};
use aquifer_vm::ProcessMark;

/// A growing range of memory. See the module documentation. Excluded from children and core dumps.
pub(crate) struct MemoryOnDemand {
    mark: ProcessMark,
    reservation: *mut u8,
    reserved_bytes: usize,
    base: *mut u8,
    len_bytes: usize,
    unit_bytes: usize,
    writable_bytes: AtomicUsize,
}

// SAFETY: only addresses; the owner decides which thread uses which part of the memory.
unsafe impl Send for MemoryOnDemand {}
// SAFETY: as above.
unsafe impl Sync for MemoryOnDemand {}

impl MemoryOnDemand {
    /// Reserves addresses for at least `len_bytes`, starting at a multiple of `unit_bytes`.
    ///
    /// Memory becomes writable in units of `unit_bytes`, a power of two.
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

    /// The largest number of bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Advises about the whole range, including the part that is not writable yet.
    pub fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: our own range; callers give advice that keeps contents.
        unsafe { memory::advise(self.base, self.len_bytes, advice) }
    }

    /// Makes the first `len_bytes` writable. One thread at a time calls this.
    ///
    /// # Errors
    /// The kernel's, if it refuses to commit that much memory: what was writable still is.
    pub fn provide(&self, len_bytes: usize) -> io::Result<()> {
        let wanted_bytes = len_bytes.min(self.len_bytes).next_multiple_of(self.unit_bytes);
        // Relaxed, here and below: written by the calling thread, or by one that happens before it.
        let writable_bytes = self.writable_bytes.load(Ordering::Relaxed);
        if wanted_bytes <= writable_bytes {
            return Ok(());
        }
        let start = self.base.wrapping_add(writable_bytes);
        // SAFETY: a part of our own reservation that was never used before.
        unsafe { memory::protect(start, wanted_bytes - writable_bytes, Protection::ReadWrite) }?;
        self.writable_bytes.store(wanted_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// The number of writable bytes.
    pub fn writable_bytes(&self) -> usize {
        self.writable_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for MemoryOnDemand {
    fn drop(&mut self) {
        if !self.mark.is_current() {
            return; // not inherited by a child of a fork: another mapping may be there
        }
        // SAFETY: reserved by `new` with this length; the owner is being dropped, and no user of it
        // is left.
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
        // SAFETY: just made writable, and used only by this thread.
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
