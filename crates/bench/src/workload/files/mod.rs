//! Ordinary files: many files accessed briefly, one large file read or stored to, a source tree.
//!
//! Before its clock starts, every child brings the page cache into the required state: warm files
//! are read unless cached, cold ones are dropped, and `cachestat` verifies the result. Then all
//! contenders process the same bytes in the same order.

pub mod flush;
pub mod prefetch;
pub mod search;
pub mod stream;
pub mod whole;

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::file_set::expect_cold;
use crate::job::{LaneAnswer, Measured};
use crate::raw::drop_cache;
use crate::stats::Histogram;

/// Drops the file from the page cache and checks that it was dropped.
fn chill(file: &File) -> Result<()> {
    drop_cache(file)?;
    expect_cold(file)
}

/// Times single steps of one thread.
struct Steps {
    start: Instant,
    last: Instant,
    latencies: Histogram,
    answer: LaneAnswer,
}

impl Steps {
    fn start() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            last: now,
            latencies: Histogram::default(),
            answer: LaneAnswer::default(),
        }
    }

    /// Counts a step that found `sum`.
    #[inline]
    fn step(&mut self, sum: u64) {
        let now = Instant::now();
        self.latencies.record(now.duration_since(self.last).as_nanos() as u64, 1);
        self.last = now;
        self.answer.accesses += 1;
        self.answer.checksum = self.answer.checksum.wrapping_add(sum);
    }
}

/// Combines the threads. `put_off` is deferred work at the end, spread over all steps.
fn together(lanes: Vec<Steps>, put_off: Duration) -> Measured {
    let mut latencies = Histogram::default();
    let mut elapsed = put_off * u32::try_from(lanes.len()).expect("few threads");
    for lane in &lanes {
        latencies.merge(&lane.latencies);
        elapsed += lane.last.duration_since(lane.start);
    }
    let steps: u64 = lanes.iter().map(|lane| lane.answer.accesses).sum();
    Measured {
        mean_ns: elapsed.as_nanos() as f64 / steps.max(1) as f64,
        p99_ns: latencies.quantile_ns(0.99),
        p999_ns: latencies.quantile_ns(0.999),
        lanes: lanes.into_iter().map(|lane| lane.answer).collect(),
        ..Measured::default()
    }
}
