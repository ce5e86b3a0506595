//! Commits: the cost of making a few random stores durable.
//!
//! A commit is timed from its first store until all of its stores would survive a power cut.
//! Choosing the stores is not included. Warm-up commits bring a contender to its steady state;
//! after them, and again at the end, it does its deferred work. The second time is included in the
//! measurement, so that no contender benefits from a log that other processes would have to read.
//!
//! The mean of a round is over all its commits, including rare expensive ones; the median is
//! reported as `p50_us`. Afterwards the contender is closed and opened again, and every cell is
//! compared.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::cells::{CellArray, Reference, Transaction, Transactions};
use crate::contender::regions::Home;
use crate::contender::stores::{CellStore, Commits};
use crate::job::{CommitWork, Job, LaneAnswer, Measured};
use crate::rng::Rng;
use crate::stats::Histogram;
use crate::threads::join_all;
use aquifer_sys::interrupt;

/// The array of one job.
pub fn array_of(job: &Job) -> Result<CellArray> {
    Ok(CellArray { pages: u32::try_from(job.source.pages)?, seed: job.seed })
}

/// The home of the job's contender.
pub fn home_of(job: &Job, work: &CommitWork) -> Home {
    Home { directory: job.source.path.clone(), domain: work.domain }
}

/// The transactions of one thread in one round.
pub fn transactions_of(job: &Job, work: &CommitWork, lane: u32) -> Result<Transactions> {
    let rng = Rng::for_lane(job.seed, job.round, lane);
    Transactions::new(array_of(job)?, work.pages, work.stores_a_page, rng)
}

/// One thread commits.
pub fn alone(job: &Job, work: &CommitWork, contender: Commits) -> Result<Measured> {
    let mut lanes = Lanes::create(job, work, contender, 1)?;
    let result = lanes.run(job, work)?.remove(0);
    lanes.verify(job, work)?;
    let busy = result.busy;
    Ok(measured(&[result], busy))
}

/// Several threads commit at once. The mean is the machine's time per commit: a thread's time
/// divided by the number of concurrent commits.
pub fn together(
    job: &Job,
    work: &CommitWork,
    contender: Commits,
    threads: u32,
) -> Result<Measured> {
    let mut lanes = Lanes::create(job, work, contender, threads)?;
    let results = lanes.run(job, work)?;
    lanes.verify(job, work)?;
    let longest = results.iter().map(|result| result.elapsed).max().unwrap_or_default();
    Ok(measured(&results, longest))
}

/// The result of one thread.
struct LaneResult {
    /// Includes the warm-up commits, whose stores are in the cells.
    answer: LaneAnswer,
    latencies: Histogram,
    measured_commits: u64,
    /// Time spent in commits.
    busy: Duration,
    /// From the first commit to the end of the last.
    elapsed: Duration,
}

/// A contender's arrays, and their expected content.
struct Lanes {
    contender: Commits,
    stores: Vec<Box<dyn CellStore>>,
    references: Vec<Reference>,
    /// Contenders may hold more than memory and files; on an interruption they are dropped in
    /// order.
    _signals: interrupt::Guard,
}

impl Lanes {
    fn create(job: &Job, work: &CommitWork, contender: Commits, count: u32) -> Result<Self> {
        let signals = interrupt::Guard::install();
        let array = array_of(job)?;
        let stores = (contender.create)(&home_of(job, work), &array, count)?;
        let references = vec![Reference::new(&array); stores.len()];
        Ok(Self { contender, stores, references, _signals: signals })
    }

    fn run(&mut self, job: &Job, work: &CommitWork) -> Result<Vec<LaneResult>> {
        let barrier = Barrier::new(self.stores.len());
        let lanes = self.stores.iter_mut().zip(&mut self.references).zip(0..);
        let mut results = std::thread::scope(|scope| {
            let threads: Vec<_> = lanes
                .map(|((store, reference), lane)| {
                    let barrier = &barrier;
                    scope.spawn(move || commits(&mut **store, reference, job, work, lane, barrier))
                })
                .collect();
            join_all(threads)
        })?;
        for (result, reference) in results.iter_mut().zip(&self.references) {
            result.answer.checksum = reference.checksum();
        }
        Ok(results)
    }

    /// Closes the arrays, opens them again, and compares every cell.
    fn verify(self, job: &Job, work: &CommitWork) -> Result<()> {
        let count = u32::try_from(self.stores.len())?;
        self.stores.into_iter().try_for_each(CellStore::close)?;
        let array = array_of(job)?;
        let stores = (self.contender.open)(&home_of(job, work), &array, count)?;
        for (mut store, reference) in stores.into_iter().zip(&self.references) {
            check(&mut *store, reference, &array)?;
            store.close()?;
        }
        Ok(())
    }
}

/// Compares every cell.
pub fn check(store: &mut dyn CellStore, reference: &Reference, array: &CellArray) -> Result<()> {
    let mut seen = 0;
    store.scan(&mut |record, found| {
        ensure!(record == seen, "record {record} comes where {seen} is expected");
        seen += 1;
        reference.check(record, found)
    })?;
    ensure!(seen == array.records(), "there are {seen} records of {}", array.records());
    Ok(())
}

fn commits(
    store: &mut dyn CellStore,
    reference: &mut Reference,
    job: &Job,
    work: &CommitWork,
    lane: u32,
    barrier: &Barrier,
) -> Result<LaneResult> {
    let mut transactions = transactions_of(job, work, lane)?;
    let mut transaction = Transaction::default();
    let dirty_pages = work.dirty_pages as usize;
    let mut commit = |store: &mut dyn CellStore| -> Result<Duration> {
        interrupt::check()?;
        transactions.next_into(&mut transaction);
        if dirty_pages > 0 {
            store.keep_dirty(dirty_pages)?;
        }
        let start = Instant::now();
        store.commit(&transaction)?;
        let took = start.elapsed();
        reference.apply(&transaction);
        Ok(took)
    };
    let warm = Instant::now();
    let mut warmed = Ok(());
    let mut warm_commits = 0;
    while warm_commits < job.warm_accesses
        && warm.elapsed() < Duration::from_millis(job.warm_deadline_ms)
    {
        warmed = commit(store).map(|_took| ());
        if warmed.is_err() {
            break;
        }
        warm_commits += 1;
    }
    let warmed = warmed.and_then(|()| store.settle());
    // The other threads wait at the barrier, so reach it even after an error.
    barrier.wait();
    warmed?;
    let mut result = LaneResult {
        answer: LaneAnswer { accesses: warm_commits, checksum: 0 },
        latencies: Histogram::default(),
        measured_commits: 0,
        busy: Duration::ZERO,
        elapsed: Duration::ZERO,
    };
    let start = Instant::now();
    let deadline = Duration::from_millis(job.deadline_ms);
    while result.measured_commits < job.accesses && result.elapsed < deadline {
        let took = commit(store)?;
        result.latencies.record(took.as_nanos() as u64, 1);
        result.busy += took;
        result.answer.accesses += 1;
        result.measured_commits += 1;
        result.elapsed = start.elapsed();
    }
    let put_off = Instant::now();
    store.settle()?;
    result.busy += put_off.elapsed();
    result.elapsed = start.elapsed();
    Ok(result)
}

fn measured(results: &[LaneResult], total: Duration) -> Measured {
    let mut latencies = Histogram::default();
    for result in results {
        latencies.merge(&result.latencies);
    }
    let count: u64 = results.iter().map(|result| result.measured_commits).sum();
    let p50_us = latencies.quantile_ns(0.5).unwrap_or(0.0) / 1e3;
    Measured {
        mean_ns: total.as_nanos() as f64 / count.max(1) as f64,
        p99_ns: latencies.quantile_ns(0.99),
        p999_ns: latencies.quantile_ns(0.999),
        lanes: results.iter().map(|result| result.answer).collect(),
        details: BTreeMap::from([
            ("p50_us".to_owned(), p50_us),
            ("commits".to_owned(), count as f64),
        ]),
    }
}
