//! Rows of a file, in batches that are known in advance, by chance or by Zipf's law.
//!
//! Before the clock starts the contender reads other batches, to fill its memory. Drawing rows is
//! not timed; each row counts with the mean of its batch.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::access::check_limited;
use crate::contender::rows::RowReader;
use crate::file_set::expect_cold;
use crate::job::{Draw, Job, LaneAnswer, Measured, RowsWork, Work};
use crate::raw::PAGE_BYTES;
use crate::rng::{Rng, mix};
use crate::row_file::{expected_sum, sum_of};
use crate::stats::Histogram;
use crate::zipf::{EXPONENT, Ranks};

/// Makes the warm-up's rows differ from the measured ones.
const WARM_SEED: u64 = 0x7761_726d;

/// The rows that are asked for, in order.
pub fn drawn_rows(job: &Job, work: RowsWork, seed: u64) -> impl Iterator<Item = u64> + use<> {
    let rows = job.source.pages * PAGE_BYTES as u64 / work.row_bytes;
    let ranks = (work.draw == Draw::Zipf).then(|| Ranks::new(rows, EXPONENT));
    let scatter = job.seed;
    let mut rng = Rng::for_lane(seed, job.round, 0);
    std::iter::repeat_with(move || match &ranks {
        None => rng.below(rows),
        // Popular rows are not neighbours. Two ranks may name one row, as in YCSB.
        Some(ranks) => mix(scatter ^ mix(ranks.draw(&mut rng))) % rows,
    })
}

/// The sum over the first `accesses` rows of a job.
pub fn expected_answer(job: &Job, work: RowsWork, accesses: u64) -> u64 {
    let rows = drawn_rows(job, work, job.seed).take(accesses as usize);
    rows.map(|row| expected_sum(job.seed, row, work.row_bytes)).fold(0, u64::wrapping_add)
}

/// Runs the job with this contender.
pub fn row_batches<R: RowReader>(
    job: &Job,
    open: impl FnOnce(usize) -> Result<R>,
) -> Result<Measured> {
    let Work::Rows(work) = job.work else { bail!("not a job on rows") };
    let file = File::open(&job.source.path)?;
    expect_cold(&file)?;
    let mut reader = open(usize::try_from(work.row_bytes)?)?;
    let mut batch = Vec::with_capacity(work.batch_rows);

    let mut warm = drawn_rows(job, work, job.seed ^ WARM_SEED);
    let start = Instant::now();
    let mut warmed = 0;
    while warmed < job.warm_accesses
        && start.elapsed() < Duration::from_millis(job.warm_deadline_ms)
    {
        warmed += work.batch_rows as u64;
        read_batch(&mut reader, &mut warm, &mut batch, work)?;
    }

    let mut rows = drawn_rows(job, work, job.seed);
    let mut latencies = Histogram::default();
    let mut answer = LaneAnswer::default();
    let mut elapsed = Duration::ZERO;
    while answer.accesses < job.accesses && elapsed < Duration::from_millis(job.deadline_ms) {
        let (sum, spent) = read_batch(&mut reader, &mut rows, &mut batch, work)?;
        elapsed += spent;
        answer.accesses += work.batch_rows as u64;
        answer.checksum = answer.checksum.wrapping_add(sum);
        latencies.record(spent.as_nanos() as u64 / work.batch_rows as u64, work.batch_rows as u64);
    }
    ensure!(answer.accesses > 0, "no row was read before the deadline");
    check_limited(job, &file)?;
    let mut details = reader.details()?;
    details.insert("accesses".to_owned(), answer.accesses as f64);
    details.insert("warmed".to_owned(), warmed as f64);
    Ok(Measured {
        mean_ns: elapsed.as_nanos() as f64 / answer.accesses as f64,
        p99_ns: latencies.quantile_ns(0.99),
        p999_ns: latencies.quantile_ns(0.999),
        lanes: vec![answer],
        details,
    })
}

/// Draws and reads one batch; returns the sum over it and the time of the reading.
fn read_batch<R: RowReader>(
    reader: &mut R,
    rows: &mut impl Iterator<Item = u64>,
    batch: &mut Vec<u64>,
    work: RowsWork,
) -> Result<(u64, Duration)> {
    batch.clear();
    batch.extend(rows.take(work.batch_rows));
    let mut sum = 0_u64;
    let mut seen = 0;
    let start = Instant::now();
    reader.batch(batch, |_row, bytes| {
        seen += 1;
        sum = sum.wrapping_add(sum_of(bytes));
    })?;
    let spent = start.elapsed();
    ensure!(seen == batch.len(), "a batch of {} rows handed out {seen}", batch.len());
    Ok((sum, spent))
}
