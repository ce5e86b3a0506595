//! Counters and the latency histogram of fault service.
//!
//! Counters are relaxed: they are for display and for `Stats::is_consistent`, never for decisions
//! that must be exact. Everything here may be called from the fault path.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets per power of two: a bucket's width is at most 1/8 of its value.
const STEPS: usize = 8;
const BUCKETS: usize = 64 * STEPS;

/// A histogram with logarithmic buckets, exact to 12.5 %, updated without a lock.
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl Histogram {
    /// Adds one value.
    #[inline]
    pub fn record(&self, value: u64) {
        self.buckets[bucket_of(value)].fetch_add(1, Ordering::Relaxed);
    }

    /// The values recorded so far.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            counts: self.buckets.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
        }
    }
}

fn bucket_of(value: u64) -> usize {
    if value < STEPS as u64 {
        return value as usize;
    }
    let power = 63 - value.leading_zeros() as usize;
    let step = (value >> (power - 3)) as usize & (STEPS - 1);
    (power - 2) * STEPS + step
}

/// The largest value that falls into a bucket.
fn upper_bound(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let (power, step) = (bucket / STEPS + 2, bucket % STEPS);
    let base = ((STEPS + step) as u128) << (power - 3);
    let width = 1u128 << (power - 3);
    u64::try_from(base + width - 1).unwrap_or(u64::MAX)
}

/// A copy of a [`Histogram`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    counts: Vec<u64>,
}

impl HistogramSnapshot {
    /// The number of recorded values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The smallest value that a share of `quantile` (0 to 1) of the values does not exceed, to
    /// 12.5 %. Zero if nothing was recorded.
    pub fn quantile(&self, quantile: f64) -> u64 {
        let wanted = (self.count() as f64 * quantile).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return upper_bound(bucket);
            }
        }
        0
    }

    /// Adds another snapshot's counts.
    pub fn merge(&mut self, other: &HistogramSnapshot) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),* $(,)?) => {
        /// The engine's internal counters.
        #[derive(Default)]
        pub(crate) struct Counters {
            $(pub $name: AtomicU64,)*
            pub fault_service_ns: Histogram,
            pub write_back_bytes: Histogram,
        }

        /// A cache's state and activity at one moment. Counts are since its creation.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: u64,)*
            /// DRAM that the cache may use.
            pub budget_bytes: u64,
            /// Size of a page.
            pub page_bytes: u64,
            /// Pages that occupy budget now.
            pub resident_pages: u64,
            /// Pages not yet written back.
            pub dirty_pages: u64,
            /// Pages kept resident by kernel-backed mappings, as last measured.
            pub kernel_resident_pages: u64,
            /// Name of the eviction policy.
            pub policy: &'static str,
            /// Time from a miss to its page being usable, in nanoseconds.
            pub fault_service_ns: HistogramSnapshot,
            /// Sizes of write-back transfers, in bytes.
            pub write_back_bytes: HistogramSnapshot,
        }

        impl Stats {
            /// The counts with their names.
            pub fn counters(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            /// What a count means, in one sentence; `None` if there is no such count.
            pub fn meaning_of(counter: &str) -> Option<&'static str> {
                match counter {
                    $(stringify!($name) => Some(concat!($($doc),+).trim()),)*
                    _ => None,
                }
            }
        }

        impl Counters {
            pub(crate) fn fill(&self, stats: &mut Stats) {
                $(stats.$name = self.$name.load(Ordering::Relaxed);)*
                stats.fault_service_ns = self.fault_service_ns.snapshot();
                stats.write_back_bytes = self.write_back_bytes.snapshot();
            }
        }
    };
}

counters! {
    /// Accesses that found their page absent and started to load it.
    misses,
    /// Pages loaded by read-ahead and prefetch, not by a miss.
    prefetched,
    /// Faults that found the page already present, because another thread had loaded it.
    late_faults,
    /// Faults that made a clean page dirty.
    write_faults,
    /// Loads that failed.
    load_errors,
    /// Pages evicted.
    evictions,
    /// Pages dropped when a device was detached.
    dropped,
    /// Write-back transfers that succeeded.
    write_backs,
    /// Pages written back.
    written_pages,
    /// Write-back transfers that failed.
    write_errors,
    /// Syncs of devices.
    syncs,
    /// Misses that had to wait for a free frame.
    stalls,
    /// Faults served in a signal handler or by the serving thread, not in a call.
    signals,
}

impl Stats {
    /// Whether the counts account for all resident pages: every loaded page is resident, was
    /// evicted, or was dropped. Exact while no load or eviction is in progress.
    pub fn is_consistent(&self) -> bool {
        let loaded = self.misses + self.prefetched;
        loaded == self.resident_pages + self.evictions + self.dropped + self.load_errors
    }

    /// The fault service time at p50, p99 and p99.9.
    pub fn fault_latency(&self) -> [Duration; 3] {
        [0.5, 0.99, 0.999].map(|q| Duration::from_nanos(self.fault_service_ns.quantile(q)))
    }
}

#[inline]
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_their_bounds() {
        for value in (0..10_000).chain([u64::MAX, 1 << 40, (1 << 40) - 1]) {
            let bound = upper_bound(bucket_of(value));
            assert!(bound >= value, "{value} in a bucket up to {bound}");
            assert!(
                bound as f64 <= value as f64 * 1.125 + 1.0,
                "{value} in a bucket up to {bound}"
            );
        }
    }

    #[test]
    fn quantiles() {
        let histogram = Histogram::default();
        for value in 1..=1000 {
            histogram.record(value);
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count(), 1000);
        let median = snapshot.quantile(0.5);
        assert!((500..=563).contains(&median), "{median}");
        assert!(snapshot.quantile(1.0) >= 1000);
        assert_eq!(HistogramSnapshot::default().quantile(0.5), 0);
    }
}
