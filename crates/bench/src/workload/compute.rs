//! A kernel in memory whose results are made durable a few times a second.
//!
//! At the end of a step, if the period has passed since the last sync, the matrices that steps
//! change are made durable one after the other, while all threads wait. The period starts at the
//! end of the last sync, so a contender with slow syncs does not sync more often for the same
//! computation. The result is made durable once more at the end. All of that counts as run
//! time; filling the matrices is not.
//!
//! Afterwards the contender is closed and opened again, and its content must be the result.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::contender::regions::{Home, Region, Regions, Written};
use crate::job::{ComputeWork, Domain, Job, LaneAnswer, Measured};
use crate::kernels::{self, Kernel, team};
use crate::raw::PAGE_BYTES;
use aquifer_sys::interrupt;

/// Runs the job.
pub fn run(job: &Job, work: &ComputeWork, contender: Regions) -> Result<Measured> {
    // On an interruption, drop what a contender holds.
    let _signals = interrupt::Guard::install();
    let kernel = kernels::find(work.kernel, work.scale);
    let shapes = kernel.matrices();
    let lens_bytes: Vec<usize> =
        shapes.iter().map(|shape| shape.len_bytes.next_multiple_of(PAGE_BYTES)).collect();
    let home = Home { directory: job.source.path.clone(), domain: Domain::PageCache };
    let mut regions = (contender.create)(&home, &lens_bytes)?;
    let memory = Memory(regions.iter().map(|region| region.base()).collect());
    // SAFETY: regions are writable, page-aligned, as long as the matrices, and not yet shared with
    // threads.
    unsafe { kernel.initialise(memory.bases()) };
    for region in &mut regions {
        region.sync()?;
    }

    let mut pace = Pace::start(work.rate_hz);
    compute(&*kernel, &memory, work, &mut regions, &mut pace)?;
    let elapsed = pace.started.elapsed();

    let result = shapes.len() - 1;
    let len_bytes = shapes[result].len_bytes;
    // SAFETY: as long as the matrix; the threads have ended.
    let checksum = unsafe { kernels::checksum(regions[result].base(), len_bytes) };
    regions.into_iter().try_for_each(Region::close)?;
    if work.rate_hz > 0
        && let Some(open) = contender.open
    {
        let regions = open(&home, &lens_bytes)?;
        // SAFETY: as long as the matrix; no other code accesses it.
        let found = unsafe { kernels::checksum(regions[result].base(), len_bytes) };
        ensure!(found == checksum, "what was made durable is not the result");
        regions.into_iter().try_for_each(Region::close)?;
    }
    Ok(Measured {
        mean_ns: elapsed.as_nanos() as f64,
        lanes: vec![LaneAnswer { accesses: 1, checksum }],
        details: pace.details(elapsed),
        ..Measured::default()
    })
}

fn compute(
    kernel: &dyn Kernel,
    memory: &Memory,
    work: &ComputeWork,
    regions: &mut [Box<dyn Region>],
    pace: &mut Pace,
) -> Result<()> {
    let changes: Vec<bool> = kernel.matrices().iter().map(|shape| shape.changes).collect();
    let threads = work.threads as usize;
    let steps = kernel.steps(threads);
    team::run(
        threads,
        steps,
        // SAFETY: initialised matrices; the team does every share once and steps one after the
        // other.
        |step, thread| unsafe { kernel.step(memory.bases(), step, thread, threads) },
        |step| {
            interrupt::check()?;
            if pace.is_due(step + 1 == steps) {
                let all = regions.iter_mut().zip(&changes);
                pace.sync(all.filter(|(_, changes)| **changes).map(|(region, _)| region))?;
            }
            Ok(())
        },
    )
}

/// The start addresses of the matrices, for all threads.
struct Memory(Vec<*mut u8>);

// SAFETY: only addresses; access through them is governed by the contract of `Kernel::step`.
unsafe impl Sync for Memory {}

impl Memory {
    fn bases(&self) -> &[*mut u8] {
        &self.0
    }
}

/// Decides when to make the result durable, and measures it.
struct Pace {
    period: Option<Duration>,
    started: Instant,
    last: Instant,
    syncs: u32,
    in_syncs: Duration,
    longest: Duration,
    written: Written,
}

impl Pace {
    fn start(rate_hz: u32) -> Self {
        let now = Instant::now();
        Self {
            period: (rate_hz > 0).then(|| Duration::from_secs(1) / rate_hz.max(1)),
            started: now,
            last: now,
            syncs: 0,
            in_syncs: Duration::ZERO,
            longest: Duration::ZERO,
            written: Written::default(),
        }
    }

    fn is_due(&self, finished: bool) -> bool {
        self.period.is_some_and(|period| finished || self.last.elapsed() >= period)
    }

    fn sync<'a>(&mut self, regions: impl Iterator<Item = &'a mut Box<dyn Region>>) -> Result<()> {
        let start = Instant::now();
        for region in regions {
            let written = region.sync_counted()?;
            self.written.pages += written.pages;
            self.written.bytes += written.bytes;
        }
        self.last = Instant::now();
        let took = self.last - start;
        self.syncs += 1;
        self.in_syncs += took;
        self.longest = self.longest.max(took);
        Ok(())
    }

    fn details(&self, elapsed: Duration) -> BTreeMap<String, f64> {
        if self.syncs == 0 {
            return BTreeMap::new();
        }
        let syncs = f64::from(self.syncs);
        [
            ("syncs", syncs),
            ("syncs_a_second", syncs / elapsed.as_secs_f64()),
            ("sync_mean_ms", self.in_syncs.as_secs_f64() * 1e3 / syncs),
            ("sync_longest_ms", self.longest.as_secs_f64() * 1e3),
            ("pages_a_sync", self.written.pages as f64 / syncs),
            ("bytes_a_sync", self.written.bytes as f64 / syncs),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}
