//! What a cache of rows has done.

use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_sys::cpu;

use super::table::Inserted;

/// Cache lines over which counts of every access are spread.
const STRIPES: usize = 16;

/// A count that many threads raise at once.
#[derive(Default)]
pub(super) struct Striped([Stripe; STRIPES]);

#[derive(Default)]
#[repr(align(128))]
struct Stripe(AtomicU64);

impl Striped {
    #[inline]
    pub fn add(&self, by: u64) {
        self.0[cpu::current() % STRIPES].0.fetch_add(by, Ordering::Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|stripe| stripe.0.load(Ordering::Relaxed)).sum()
    }
}

/// The counters; relaxed, because they are for display.
#[derive(Default)]
pub(super) struct Counters {
    pub hits: Striped,
    pub misses: Striped,
    pub reads: AtomicU64,
    pub read_bytes: AtomicU64,
    pub replaced: AtomicU64,
}

impl Counters {
    pub fn inserted(&self, inserted: Inserted) {
        if inserted == Inserted::Replaced {
            self.replaced.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The counts, with the state of the table.
    pub fn snapshot(&self, resident_rows: u64, capacity_rows: u64) -> RowsStats {
        RowsStats {
            hits: self.hits.sum(),
            misses: self.misses.sum(),
            reads: self.reads.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            evictions: self.replaced.load(Ordering::Relaxed),
            resident_rows,
            capacity_rows,
        }
    }
}

/// The state and activity of [`Rows`](crate::Rows) at one moment. Counts are since it was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowsStats {
    /// Rows that were asked for and were in memory.
    pub hits: u64,
    /// Rows that were asked for and were not. Several requests of one call for one row count once
    /// each, though it is read once.
    pub misses: u64,
    /// Transfers from the device, failed ones included.
    pub reads: u64,
    /// Bytes transferred.
    pub read_bytes: u64,
    /// Rows that gave their place to another one.
    pub evictions: u64,
    /// Rows in memory now.
    pub resident_rows: u64,
    /// Rows that fit into the budget, or as many as a small device can use.
    pub capacity_rows: u64,
}
