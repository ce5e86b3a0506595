//! How mappings are removed: the system calls.
//!
//! * *Drained*: `MADV_DONTNEED`, one call and one TLB flush for many mappings, without a lock that
//!   faults and other mapping calls wait for. The mapping stays, without page-table entries: an
//!   access faults its pages in again, and its file stays in use. A new mapping over exactly the
//!   same addresses splits and merges nothing, so this is the fastest way where addresses are soon
//!   reused.
//! * *Vacated*: a reservation is mapped over them. Accesses raise SIGSEGV, and the files are
//!   closed.
//!
//! # At the limit of VMAs
//! A process with 65,530 mappings can make no further one, not even the reservation that would
//! replace a thousand. Only `munmap` of whole mappings works then. It leaves a hole, in which
//! another thread's `mmap` may be placed before the reservation is restored. So the reservation is
//! restored only at free addresses; a hole that cannot be closed at once is never given out, and
//! closing it is retried.
//!
//! # Older kernels
//! Since Linux 6.16 one `MADV_DONTNEED` over many mappings flushes the TLB once; before, once for
//! each of them. On those kernels runs are vacated, which flushes once, though under the lock.

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
    /// The old mapping: the system has no room for the call.
    Stuck,
    /// Nothing of ours; possibly another thread's mapping.
    Hole,
}

/// Removes mappings.
pub(super) trait Unmapper {
    /// The owner of reserved addresses.
    type Place;

    /// Empties the page tables of all spans, and appends the result for each to `left`.
    ///
    /// # Safety
    /// No thread uses the mappings in the spans, or gives out their addresses before this returns.
    unsafe fn drain(&self, spans: &[Span], left: &mut Vec<Left>);

    /// Replaces the mappings in the span by the reservation.
    ///
    /// # Safety
    /// As for [`Unmapper::drain`].
    unsafe fn vacate(&self, span: Span) -> Left;

    /// Maps the reservation if the span is free, and returns whether it was.
    fn close_hole(&self, span: Span) -> bool;

    /// Marks a place with holes that could not be closed: it is never used again.
    fn abandon(&self, place: &Self::Place);

    /// Whether this process made the mappings: a forked child must not touch them.
    fn is_current(&self) -> bool;
}

/// The unmapper that makes system calls.
#[derive(Debug)]
pub(super) struct Kernel {
    drains: bool,
    calls: AtomicU64,
    mark: ProcessMark,
}

impl Kernel {
    /// Uses the fastest calls for this kernel.
    pub fn new() -> Kernel {
        Kernel::draining(features::range_dontneed_flushes_once())
    }

    /// With or without `MADV_DONTNEED`.
    pub fn draining(drains: bool) -> Kernel {
        Kernel { drains, calls: AtomicU64::new(0), mark: ProcessMark::new() }
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn count_call(&self) {
        // Relaxed: statistics.
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Drains all spans in one call. Returns whether that succeeded.
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
        // SAFETY: forwarded to the caller.
        unsafe { memory::advise_many(&ranges, Advice::DontNeed) }.is_ok_and(|done| done == asked)
    }

    /// Drains one span, or vacates it if the kernel refuses: memory may be locked (`mlockall`).
    ///
    /// # Safety
    /// As for [`Unmapper::drain`].
    unsafe fn drain_or_vacate(&self, span: Span) -> Left {
        self.count_call();
        // SAFETY: forwarded to the caller.
        let drained =
            unsafe { memory::advise(span.address as *mut u8, span.len_bytes, Advice::DontNeed) };
        match drained {
            Ok(()) => Left::Drained,
            // SAFETY: forwarded to the caller.
            Err(_) => unsafe { self.vacate(span) },
        }
    }
}

impl Unmapper for Kernel {
    type Place = std::sync::Arc<super::region::Region>;

    unsafe fn drain(&self, spans: &[Span], left: &mut Vec<Left>) {
        if !self.drains {
            // SAFETY: forwarded to the caller.
            left.extend(spans.iter().map(|&span| unsafe { self.vacate(span) }));
            return;
        }
        for some in spans.chunks(MOST_RANGES) {
            // SAFETY: forwarded to the caller.
            if some.len() > 1 && unsafe { self.drain_together(some) } {
                left.extend(some.iter().map(|_| Left::Drained));
            } else {
                // SAFETY: forwarded to the caller.
                left.extend(some.iter().map(|&span| unsafe { self.drain_or_vacate(span) }));
            }
        }
    }

    unsafe fn vacate(&self, span: Span) -> Left {
        self.count_call();
        let start = span.address as *mut u8;
        // SAFETY: forwarded to the caller.
        match unsafe { memory::map_anonymous_at(start, span.len_bytes, Protection::None) } {
            Ok(()) => Left::Reserved,
            // SAFETY: forwarded to the caller.
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
