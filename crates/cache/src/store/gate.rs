//! A region's gate: many threads may install or unprotect single pages, or one may change the
//! region.
//!
//! Cleaning and dirty eviction change the page table of 2 MiB at once, because every change costs a
//! TLB shootdown. That is correct only while no page of the region is installed or unprotected. So
//! loaders and unprotecters hold the gate *shared*, from the call that changes the page table to
//! the page-word transition that records it. The evictor holds it *exclusive*, around its own calls
//! and transitions: while it does, words and page table agree. No I/O happens under the gate.

use crate::lazy::{LazyArray, ZeroInit};
use crate::sync::{self, AtomicU32, Ordering};

const EXCLUSIVE: u32 = 1 << 31;
const WAITERS: u32 = 1 << 30;
/// Spins before yielding the core.
const SPINS: u32 = 128;

/// The gates of a device's regions.
pub struct Gates(LazyArray<Gate>);

impl Gates {
    /// Open gates for `regions` regions.
    pub fn new(regions: usize) -> std::io::Result<Gates> {
        Ok(Gates(LazyArray::new(regions)?))
    }

    /// Enters a region's gate shared.
    #[inline]
    pub fn shared(&self, region: usize) -> Shared<'_> {
        self.0[region].shared()
    }

    /// Takes a region's gate exclusively.
    pub fn exclusive(&self, region: usize) -> Exclusive<'_> {
        self.0[region].exclusive()
    }
}

/// One gate. All zeros is an open gate.
#[derive(Debug)]
#[repr(transparent)]
pub struct Gate(AtomicU32);

// SAFETY: a transparent wrapper of an `AtomicU32`, for which zero is an open gate.
unsafe impl ZeroInit for Gate {}

impl Gate {
    #[cfg(loom)]
    pub fn new() -> Gate {
        Gate(AtomicU32::new(0))
    }

    #[inline]
    pub fn shared(&self) -> Shared<'_> {
        let word = &self.0;
        loop {
            // Acquire pairs with the release of the exclusive holder.
            let seen = word.fetch_add(1, Ordering::Acquire);
            if seen & EXCLUSIVE == 0 {
                return Shared(word);
            }
            drop(Shared(word));
            wait_while(word, EXCLUSIVE);
        }
    }

    pub fn exclusive(&self) -> Exclusive<'_> {
        let word = &self.0;
        // Acquire pairs with the releases of all holders.
        while word.fetch_or(EXCLUSIVE, Ordering::Acquire) & EXCLUSIVE != 0 {
            wait_while(word, EXCLUSIVE);
        }
        // Shared holders are inside one short system call each. But one may be preempted there and
        // need the core that this spins on.
        let mut spins = 0;
        while word.load(Ordering::Acquire) & !(EXCLUSIVE | WAITERS) != 0 {
            spins += 1;
            if spins % SPINS == 0 {
                sync::yield_now();
            }
            sync::spin();
        }
        Exclusive(word)
    }
}

#[cold]
fn wait_while(word: &AtomicU32, bit: u32) {
    let seen = word.fetch_or(WAITERS, Ordering::Relaxed) | WAITERS;
    if seen & bit != 0 {
        // The time-out covers threads that change the count between the two calls above.
        sync::wait_u32(word, seen, Some(std::time::Duration::from_millis(1)));
    }
}

/// A shared hold of a gate.
pub struct Shared<'a>(&'a AtomicU32);

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        // Release pairs with the acquire in `exclusive`.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// An exclusive hold of a gate.
pub struct Exclusive<'a>(&'a AtomicU32);

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        // Release pairs with the acquires of the next holders.
        let seen = self.0.fetch_and(!(EXCLUSIVE | WAITERS), Ordering::Release);
        if seen & WAITERS != 0 {
            sync::wake_u32(self.0, u32::MAX);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn exclusive_means_alone() {
        let gates = Gates::new(1).unwrap();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let _shared = gates.shared(0);
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < 1000);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let _alone = gates.exclusive(0);
                        assert_eq!(inside.fetch_add(1000, Ordering::SeqCst), 0);
                        inside.fetch_sub(1000, Ordering::SeqCst);
                    }
                });
            }
        });
    }
}
