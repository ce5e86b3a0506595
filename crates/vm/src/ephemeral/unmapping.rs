//! How mappings are taken away: the system calls.
//!
//! * *Drained*: `MADV_DONTNEED`, one call and one TLB flush for many mappings, and no lock that faults and other
//!   mapping calls wait for. What is left is a mapping without page-table entries: an access faults its pages in again, and
//!   its file stays in use. Mapping something else over exactly the same addresses splits and merges nothing, which is
//!   why this is the fastest way where addresses are soon used again.
//! * *Vacated*: a reservation is mapped over them. Accesses raise SIGSEGV, and the files are let go.
//!
//! # At the limit of VMAs
//! A process that has 65,530 mappings can make no further one, not even the reservation that would replace a thousand.
//! Only `munmap` of whole mappings works then. It leaves a hole, which another thread's `mmap` may take before the
//! reservation is back; so that is only put where nothing is, and what cannot be closed at once stays a hole, never
//! given out, and is tried again.
//!
//! # Older kernels
//! Since Linux 6.16 one `MADV_DONTNEED` over many mappings flushes the TLB once; before, once for each of them. There
//! runs are vacated, which flushes once, though under the lock.

use std::io;

use aquifer_sys::features;
use aquifer_sys::memory::{self, Advice, Protection};

use crate::ProcessMark;
use crate::sync::{AtomicU64, Ordering};

/// Most ranges of one call (`UIO_MAXIOV`).
const MOST_RANGES: usize = 1024;

/// A range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub address: usize,
    pub len_bytes: usize,
}

/// What is at the addresses afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// Mappings without page-table entries.
    Drained,
    /// The reservation.
    Reserved,
    /// What was there: the system has no room for the call.
    Stuck,
    /// Nothing of ours: perhaps what another thread mapped.
    Hole,
}

/// Who takes mappings away.
pub(super) trait Unmapper {
    /// What keeps the addresses reserved.
    type Place;

    /// Empties the page tables of all of them, and says for each what is left.
    ///
    /// # Safety
    /// Nobody uses the mappings in the spans, or gives out their addresses before this returns.
    unsafe fn drain(&self, spans: &[Span], left: &mut Vec<Left>);

    /// Puts the reservation in the place of what is mapped.
    ///
    /// # Safety
    /// As for [`Unmapper::drain`].
    unsafe fn vacate(&self, span: Span) -> Left;

    /// Puts the reservation where nothing is, and says whether nothing was.
    fn close_hole(&self, span: Span) -> bool;

    /// There are holes that could not be closed: the place is never used again, for anything.
    fn abandon(&self, place: &Self::Place);

    /// Whether this is the process that made the mappings: in a fork of it nothing may be touched.
    fn is_current(&self) -> bool;
}

/// The kernel.
#[derive(Debug)]
pub(super) struct Kernel {
    drains: bool,
    calls: AtomicU64,
    mark: ProcessMark,
}

impl Kernel {
    /// With the calls that are the fastest here.
    pub fn new() -> Kernel {
        Kernel::draining(features::range_dontneed_flushes_once())
    }

    /// With or without `MADV_DONTNEED`.
    pub fn draining(drains: bool) -> Kernel {
        Kernel { drains, calls: AtomicU64::new(0), mark: ProcessMark::new() }
    }

    /// Calls made so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn count_call(&self) {
        // Relaxed: statistics.
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// All in one call, if the system can.
    ///
    /// # Safety
    /// As for [`Unmapper::drain`].
    unsafe fn drain_together(&self, spans: &[Span]) -> bool {
        let range = |span: &Span| memory::Range {
            address: span.address as *mut u8,
            len_bytes: span.len_bytes,
        };
        let ranges: Vec<memory::Range> = spans.iter().map(range).collect();
        let asked: usize = spans.iter().map(|span| span.len_bytes).sum();
        self.count_call();
        // SAFETY: the caller's promise.
        unsafe { memory::advise_many(&ranges, Advice::DontNeed) }.is_ok_and(|done| done == asked)
    }

    /// One of them. It may be locked in memory (`mlockall`), which refuses this.
    ///
    /// # Safety
    /// As for [`Unmapper::drain`].
    unsafe fn drain_or_vacate(&self, span: Span) -> Left {
        self.count_call();
        // SAFETY: the caller's promise.
        let drained =
            unsafe { memory::advise(span.address as *mut u8, span.len_bytes, Advice::DontNeed) };
        match drained {
            Ok(()) => Left::Drained,
            // SAFETY: the caller's promise.
            Err(_) => unsafe { self.vacate(span) },
        }
    }
}

impl Unmapper for Kernel {
    type Place = std::sync::Arc<super::region::Region>;

    unsafe fn drain(&self, spans: &[Span], left: &mut Vec<Left>) {
        if !self.drains {
            // SAFETY: the caller's promise.
            left.extend(spans.iter().map(|&span| unsafe { self.vacate(span) }));
            return;
        }
        for some in spans.chunks(MOST_RANGES) {
            // SAFETY: the caller's promise.
            if some.len() > 1 && unsafe { self.drain_together(some) } {
                left.extend(some.iter().map(|_| Left::Drained));
            } else {
                // SAFETY: the caller's promise.
                left.extend(some.iter().map(|&span| unsafe { self.drain_or_vacate(span) }));
            }
        }
    }

    unsafe fn vacate(&self, span: Span) -> Left {
        self.count_call();
        let start = span.address as *mut u8;
        // SAFETY: the caller's promise.
        match unsafe { memory::map_anonymous_at(start, span.len_bytes, Protection::None) } {
            Ok(()) => Left::Reserved,
            // SAFETY: the caller's promise.
            Err(_) if unsafe { memory::unmap(start, span.len_bytes) }.is_err() => Left::Stuck,
            Err(_) if self.close_hole(span) => Left::Reserved,
            Err(_) => Left::Hole,
        }
    }

    fn close_hole(&self, span: Span) -> bool {
        let start = span.address as *mut u8;
        let closed: io::Result<()> =
            memory::map_private_at_free(start, span.len_bytes, Protection::None, None);
        closed.is_ok()
    }

    fn abandon(&self, place: &Self::Place) {
        place.abandon();
    }

    fn is_current(&self) -> bool {
        self.mark.is_current()
    }
}
