//! Random accesses: loads from warm memory, pages out of core, batches, stores.
//!
//! Each thread draws its pages from a generator seeded with the job's seed, the round and the
//! thread's number, so all contenders make the same accesses and their answers can be compared, or
//! computed. A thread stops at the deadline even if accesses are left; its answer includes how many
//! it made.
//!
//! **Warm-up.** Before the clock starts, the contender makes enough other random accesses, from
//! several threads, to fill its cache. So the steady state is measured: every miss finds a full
//! cache and must evict.
//!
//! **Stores.** The stores of the warm-up are flushed before the clock starts. The final flush is
//! inside the measured time and spread over the accesses. So each contender pays for making exactly
//! its own stores durable, however it divides that work between the stores and the flush.
//!
//! **Single accesses** are timed with one clock reading each, which costs all contenders the same
//! 30 ns or so. In a batch every access counts with the mean of its batch. Loads of warm memory are
//! not timed singly.

use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::contender::{Lane, PageFile};
use crate::data::{STORE_OFFSET_BYTES, sample};
use crate::file_set::{expect_cold, expect_warm};
use crate::job::{Job, LaneAnswer, Measured, Work};
use crate::raw::{PAGE_BYTES, Usage, cached_bytes, fill_cache, load_word, storage_reads};
use crate::rng::{Rng, mix};
use crate::stats::Histogram;
use crate::threads::join_all;
use crate::zipf::{EXPONENT, Zipf};

/// Threads that warm up: enough for a device's queue, few enough for their stacks not to matter.
const WARM_THREADS: u32 = 8;
/// Accesses between two clock readings during the warm-up.
const WARM_STEP: usize = 64;
/// Makes the warm-up accesses differ from the measured ones.
const WARM_SEED: u64 = 0x7761_726d;

/// Chooses which pages are popular.
const POPULARITY_SEED: u64 = 0x7a69_7066;
/// The detail that tells what a pass reads from the device.
pub const READ_BYTES: &str = "read_bytes";

/// The pages one thread accesses, in order.
pub fn lane_pages(job: &Job, lane: u32) -> Box<dyn Iterator<Item = u64>> {
    let mut rng = Rng::for_lane(job.seed, job.round, lane);
    let pages = job.source.pages;
    match job.work {
        Work::Zipf => {
            let items = u32::try_from(pages).expect("at most 16 TiB");
            let zipf = Zipf::new(items, EXPONENT, job.seed ^ POPULARITY_SEED);
            Box::new(std::iter::repeat_with(move || u64::from(zipf.draw(&mut rng))))
        }
        Work::Cycle { .. } => Box::new((0..pages).cycle()),
        _ => Box::new(std::iter::repeat_with(move || rng.below(pages))),
    }
}

/// The byte stored into a page: the same from every thread, so that the order of stores does not
/// matter.
pub fn stored_byte(salt: u64, page: u64) -> u8 {
    mix(salt ^ mix(page)) as u8
}

/// Runs the random-access jobs.
pub fn run<F: PageFile>(job: &Job, contender: &F) -> Result<Measured> {
    let file = File::open(&job.source.path)?;
    if job.work == Work::Load {
        return warm_loads(contender, job, &file);
    }
    expect_cold(&file)?;
    let mut measured = match job.work {
        Work::Miss => {
            let order = miss_order(job);
            let warm = order.len().min(usize::try_from(job.warm_accesses)?);
            let (warm, fresh) = order.split_at(warm);
            touch_all(contender, job, warm)?;
            let fresh = &fresh[..fresh.len().min(usize::try_from(job.accesses)?)];
            run_lanes(contender, job, 1, |lane, _| timed_reads(lane, job, fresh.iter().copied()))?
        }
        Work::Read { threads } => {
            warm_up(contender, job)?;
            run_lanes(contender, job, threads, |lane, number| {
                let count = usize::try_from(job.accesses)?;
                timed_reads(lane, job, lane_pages(job, number).take(count))
            })?
        }
        Work::Zipf => {
            let drawn = |job: &Job, count: u64| -> Result<Vec<u64>> {
                Ok(lane_pages(job, 0).take(usize::try_from(count)?).collect())
            };
            let before = Job { round: !job.round, ..job.clone() };
            touch_all(contender, job, &drawn(&before, job.warm_accesses)?)?;
            // Drawn before the clock starts: it takes a good part of a microsecond.
            let pages = drawn(job, job.accesses)?;
            run_lanes(contender, job, 1, |lane, _| timed_reads(lane, job, pages.iter().copied()))?
        }
        Work::Cycle { warm_passes, passes } => cycle(contender, job, warm_passes, passes)?,
        Work::Batch { pages } => {
            warm_up(contender, job)?;
            run_lanes(contender, job, 1, |lane, number| timed_batches(lane, job, number, pages))?
        }
        Work::Write { threads, salt } => {
            warm_up(contender, job)?;
            contender.flush()?;
            run_lanes(contender, job, threads, |lane, number| {
                timed_stores(lane, job, number, salt)
            })?
        }
        _ => unreachable!("handled by the caller or above"),
    };
    check_limited(job, &file)?;
    measured.details.extend(contender.details()?);
    Ok(measured)
}

/// Passes over the whole file. The mean is that of a pass.
fn cycle<F: PageFile>(contender: &F, job: &Job, warm_passes: u32, passes: u32) -> Result<Measured> {
    let mut lane = contender.lane()?;
    let mut pass = || {
        (0..job.source.pages)
            .try_fold(0_u64, |sum, page| anyhow::Ok(sum.wrapping_add(read_one(&mut lane, page)?)))
    };
    for _ in 0..warm_passes {
        pass()?;
    }
    let (start, before) = (Instant::now(), storage_reads()?);
    let mut checksum = 0_u64;
    for _ in 0..passes {
        checksum = checksum.wrapping_add(pass()?);
    }
    let elapsed = start.elapsed();
    let read_bytes = (storage_reads()? - before) as f64 / f64::from(passes);
    let accesses = u64::from(passes) * job.source.pages;
    Ok(Measured {
        mean_ns: elapsed.as_nanos() as f64 / f64::from(passes),
        lanes: vec![LaneAnswer { accesses, checksum }],
        details: [(READ_BYTES.to_owned(), read_bytes)].into(),
        ..Measured::default()
    })
}

/// Fails if more of the file is cached afterwards than the limit allows: another control group
/// would pay for it.
pub(super) fn check_limited(job: &Job, file: &File) -> Result<()> {
    let (Some(cached), Some(limit)) = (cached_bytes(file)?, job.limit_bytes) else {
        return Ok(());
    };
    ensure!(
        cached <= limit + limit / 8,
        "{cached} bytes of the data file are cached under a limit of {limit}: the limit does not work"
    );
    Ok(())
}

/// The result of one thread.
#[derive(Default)]
struct LaneResult {
    answer: LaneAnswer,
    latencies: Histogram,
    elapsed: Duration,
}

/// Runs `work` on `threads` lanes that start together, flushes, and combines the results.
fn run_lanes<F: PageFile>(
    contender: &F,
    job: &Job,
    threads: u32,
    work: impl for<'a> Fn(&mut F::Lane<'a>, u32) -> Result<LaneResult> + Sync,
) -> Result<Measured> {
    let barrier = Barrier::new(threads as usize);
    let results = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..threads)
            .map(|number| {
                let (barrier, work) = (&barrier, &work);
                scope.spawn(move || {
                    let lane = contender.lane();
                    barrier.wait();
                    work(&mut lane?, number)
                })
            })
            .collect();
        join_all(lanes)
    })?;
    let mut measured = Measured::default();
    let mut elapsed: Duration = results.iter().map(|lane| lane.elapsed).sum();
    if matches!(job.work, Work::Write { .. }) {
        let start = Instant::now();
        contender.flush()?;
        let flush = start.elapsed();
        // Every thread waits for the flush.
        elapsed += flush * threads;
        measured.details.insert("flush_ms".to_owned(), flush.as_secs_f64() * 1e3);
    }
    let mut latencies = Histogram::default();
    results.iter().for_each(|lane| latencies.merge(&lane.latencies));
    measured.lanes = results.iter().map(|lane| lane.answer).collect();
    let accesses: u64 = measured.lanes.iter().map(|lane| lane.accesses).sum();
    ensure!(accesses > 0, "no access was made before the deadline");
    measured.details.insert("accesses".to_owned(), accesses as f64);
    measured.mean_ns = elapsed.as_nanos() as f64 / accesses as f64;
    measured.p99_ns = latencies.quantile_ns(0.99);
    measured.p999_ns = latencies.quantile_ns(0.999);
    Ok(measured)
}

/// Times single steps, and detects the deadline.
struct StepClock {
    start: Instant,
    last: Instant,
    deadline: Duration,
    result: LaneResult,
}

impl StepClock {
    fn start(job: &Job) -> Self {
        let start = Instant::now();
        let deadline = Duration::from_millis(job.deadline_ms);
        Self { start, last: start, deadline, result: LaneResult::default() }
    }

    /// Counts a step of `accesses` accesses that found `checksum`; returns false after the
    /// deadline.
    #[inline(always)]
    fn step(&mut self, accesses: u64, checksum: u64) -> bool {
        let now = Instant::now();
        let step_ns = now.duration_since(self.last).as_nanos() as u64;
        self.last = now;
        self.result.latencies.record(step_ns / accesses, accesses);
        self.result.answer.accesses += accesses;
        self.result.answer.checksum = self.result.answer.checksum.wrapping_add(checksum);
        now.duration_since(self.start) < self.deadline
    }

    fn finish(mut self) -> LaneResult {
        self.result.elapsed = self.last.duration_since(self.start);
        self.result
    }
}

#[inline(always)]
fn read_one<L: Lane>(lane: &mut L, page: u64) -> Result<u64> {
    // SAFETY: `Lane::page` hands out whole readable pages.
    let found = lane.page(page, |memory| unsafe { sample(memory, page) })?;
    found.with_context(|| format!("page {page} holds something else"))
}

fn timed_reads<L: Lane>(
    lane: &mut L,
    job: &Job,
    pages: impl Iterator<Item = u64>,
) -> Result<LaneResult> {
    let mut clock = StepClock::start(job);
    for page in pages {
        let checksum = read_one(lane, page)?;
        if !clock.step(1, checksum) {
            break;
        }
    }
    Ok(clock.finish())
}

/// Reads one batch and returns the sum over it.
fn read_batch<L: Lane>(lane: &mut L, pages: &[u64]) -> Result<u64> {
    let mut checksum = 0_u64;
    let mut wrong = None;
    let mut seen = 0;
    lane.batch(pages, |page, memory| {
        seen += 1;
        // SAFETY: `Lane::batch` hands out whole readable pages.
        match unsafe { sample(memory, page) } {
            Some(found) => checksum = checksum.wrapping_add(found),
            None => wrong = Some(page),
        }
    })?;
    ensure!(seen == pages.len(), "a batch of {} pages handed out {seen}", pages.len());
    ensure!(wrong.is_none(), "page {wrong:?} holds something else");
    Ok(checksum)
}

fn timed_batches<L: Lane>(
    lane: &mut L,
    job: &Job,
    number: u32,
    batch_pages: usize,
) -> Result<LaneResult> {
    let mut pages = lane_pages(job, number);
    let mut batch = Vec::with_capacity(batch_pages);
    let mut clock = StepClock::start(job);
    for _ in 0..job.accesses.div_ceil(batch_pages as u64) {
        batch.clear();
        batch.extend(pages.by_ref().take(batch_pages));
        let checksum = read_batch(lane, &batch)?;
        if !clock.step(batch_pages as u64, checksum) {
            break;
        }
    }
    Ok(clock.finish())
}

/// Checks that the page is the right one and stores a byte into it.
fn store_one<L: Lane>(lane: &mut L, page: u64, salt: u64) -> Result<u64> {
    let checksum = read_one(lane, page)?;
    lane.store(page, STORE_OFFSET_BYTES, stored_byte(salt, page))?;
    Ok(checksum)
}

fn timed_stores<L: Lane>(lane: &mut L, job: &Job, number: u32, salt: u64) -> Result<LaneResult> {
    let mut clock = StepClock::start(job);
    for page in lane_pages(job, number).take(usize::try_from(job.accesses)?) {
        let checksum = store_one(lane, page, salt)?;
        if !clock.step(1, checksum) {
            break;
        }
    }
    Ok(clock.finish())
}

/// Makes random accesses of the measured kind, until the cache is full or the time is up.
fn warm_up<F: PageFile>(contender: &F, job: &Job) -> Result<()> {
    let mut rng = Rng::for_lane(job.seed ^ WARM_SEED, job.round, 0);
    let pages: Vec<u64> = (0..job.warm_accesses).map(|_| rng.below(job.source.pages)).collect();
    touch_all(contender, job, &pages)
}

fn touch_all<F: PageFile>(contender: &F, job: &Job, pages: &[u64]) -> Result<()> {
    let start = Instant::now();
    let deadline = Duration::from_millis(job.warm_deadline_ms);
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = || -> Result<()> {
        let mut lane = contender.lane()?;
        loop {
            // Relaxed: the counter only distributes the pages among threads.
            let from = next.fetch_add(WARM_STEP, Ordering::Relaxed);
            if from >= pages.len() || start.elapsed() > deadline {
                return Ok(());
            }
            let chunk = &pages[from..pages.len().min(from + WARM_STEP)];
            match job.work {
                Work::Write { salt, .. } => chunk
                    .iter()
                    .try_for_each(|&page| store_one(&mut lane, page, salt).map(|_checksum| ()))?,
                _ => read_batch(&mut lane, chunk).map(|_checksum| ())?,
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..WARM_THREADS {
            scope.spawn(|| {
                if let Err(error) = work() {
                    failure
                        .lock()
                        .expect("no thread panics while it holds the lock")
                        .get_or_insert(error);
                }
            });
        }
    });
    match failure.into_inner().expect("no thread panics while it holds the lock") {
        Some(error) => Err(error.context("while warming up")),
        None => Ok(()),
    }
}

/// Random 8-byte loads when everything is resident. The loads are independent, as in most programs,
/// so the processor overlaps them.
fn warm_loads<F: PageFile>(contender: &F, job: &Job, file: &File) -> Result<Measured> {
    let file_bytes = job.source.pages * PAGE_BYTES as u64;
    let uses_page_cache = contender.uses_page_cache();
    if uses_page_cache {
        fill_cache(file, file_bytes)?;
    }
    let mut lane = contender.lane()?;
    for _ in 0..2 {
        for page in 0..job.source.pages {
            read_one(&mut lane, page)?;
        }
    }
    if uses_page_cache && let Some(cached) = cached_bytes(file)? {
        expect_warm(cached, file_bytes)?;
    }
    drop(lane);
    let before = faults_and_misses(contender)?;
    let mut measured = run_lanes(contender, job, 1, |lane, number| {
        let mut rng = Rng::for_lane(job.seed, job.round, number);
        let words = job.source.pages * (PAGE_BYTES as u64 / 8);
        let mut checksum = 0_u64;
        let start = Instant::now();
        for _ in 0..job.accesses {
            let at = rng.below(words) * 8;
            let offset_bytes = at as usize % PAGE_BYTES;
            let word = lane.page(at / PAGE_BYTES as u64, |memory| {
                // SAFETY: `Lane::page` hands out a whole aligned page; the offset is a word in it.
                unsafe { load_word(memory, offset_bytes) }
            })?;
            checksum = checksum.wrapping_add(word);
        }
        let elapsed = start.elapsed();
        let answer = LaneAnswer { accesses: job.accesses, checksum };
        Ok(LaneResult { answer, elapsed, ..LaneResult::default() })
    })?;
    let missed = faults_and_misses(contender)? - before;
    ensure!(
        missed <= job.accesses as f64 / 1000.0,
        "{missed} of {} loads were page faults or misses: not everything was resident",
        job.accesses
    );
    measured.details.extend(contender.details()?);
    Ok(measured)
}

/// Page faults of the process, and misses that the contender counts.
fn faults_and_misses<F: PageFile>(contender: &F) -> Result<f64> {
    let misses = contender.details()?.get("misses").copied().unwrap_or(0.0);
    Ok(Usage::of_this_process()?.faults as f64 + misses)
}

/// All pages, each once, in random order (Fisher and Yates).
fn shuffled(pages: u64, seed: u64, round: u32) -> Vec<u64> {
    let mut rng = Rng::for_lane(seed, round, u32::MAX);
    let mut order: Vec<u64> = (0..pages).collect();
    for last in (1..order.len()).rev() {
        let other = usize::try_from(rng.below(last as u64 + 1)).expect("an index");
        order.swap(last, other);
    }
    order
}

/// The order in which [`Work::Miss`] and [`Work::Anatomy`] access pages.
pub fn miss_order(job: &Job) -> Vec<u64> {
    shuffled(job.source.pages, job.seed, job.round)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffling_keeps_every_page() {
        let mut order = shuffled(1000, 1, 2);
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
    }
}
