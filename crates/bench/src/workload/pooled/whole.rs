//! Whole files, by path: opened, summed and closed; each thread has its own share of them, in random
//! order.
//!
//! The first pass of the process is timed separately: it includes building page tables, file tables
//! and other cached state. The figure is the mean over the later passes; the detail `first_us` is
//! the first pass.

use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{file_names, measured, warm_set};
use crate::contender::files::{Files, WholeFile};
use crate::job::{Job, LaneAnswer, Measured};
use crate::rng::Rng;
use crate::sum::sum_words;
use crate::threads::join_all;
use aquifer_sys::interrupt;

/// Sums all files.
pub fn sum<F: Files>(
    job: &Job,
    open: impl FnOnce() -> Result<F>,
    files: u32,
    threads: u32,
    passes: u32,
) -> Result<Measured> {
    ensure!(files >= threads, "{files} files are too few for {threads} threads");
    let names = file_names(files);
    warm_set(&names)?;
    let order = Rng::for_lane(job.seed, job.round, 0).shuffled(files);
    let ordered: Vec<_> = order.iter().map(|&number| names[number as usize].clone()).collect();
    Sum { names: &ordered, threads: threads as usize, passes }.run(&open()?)
}

struct Sum<'a> {
    names: &'a [PathBuf],
    threads: usize,
    passes: u32,
}

/// The result of a thread.
struct Share {
    first: Duration,
    others: Duration,
    answer: LaneAnswer,
}

impl Sum<'_> {
    fn pass(lane: &mut impl WholeFile, names: &[PathBuf]) -> Result<(Duration, u64)> {
        interrupt::check()?;
        let start = Instant::now();
        let mut sum = 0_u64;
        for name in names {
            sum = sum.wrapping_add(lane.by_path(name, sum_words)?);
        }
        Ok((start.elapsed(), sum))
    }

    fn share(&self, mut lane: impl WholeFile, names: &[PathBuf]) -> Result<Share> {
        let (first, sum) = Self::pass(&mut lane, names)?;
        let answer = LaneAnswer { accesses: names.len() as u64, checksum: sum };
        let mut share = Share { first, others: Duration::ZERO, answer };
        for _ in 0..self.passes {
            let (elapsed, sum) = Self::pass(&mut lane, names)?;
            share.others += elapsed;
            share.answer.accesses += names.len() as u64;
            share.answer.checksum = share.answer.checksum.wrapping_add(sum);
        }
        Ok(share)
    }

    fn run<F: Files>(&self, files: &F) -> Result<Measured> {
        let each = self.names.len().div_ceil(self.threads);
        let barrier = Barrier::new(self.names.chunks(each).len());
        let shares = std::thread::scope(|scope| {
            let started: Vec<_> = (self.names.chunks(each))
                .map(|names| {
                    let (barrier, work) = (&barrier, self);
                    scope.spawn(move || {
                        let lane = files.lane();
                        // The other threads wait at the barrier, so reach it even after an error.
                        barrier.wait();
                        work.share(lane?, names)
                    })
                })
                .collect();
            join_all(started)
        })?;
        let files = self.names.len() as f64;
        let first: Duration = shares.iter().map(|share| share.first).sum();
        let others: Duration = shares.iter().map(|share| share.others).sum();
        let mut measured = Measured {
            mean_ns: others.as_nanos() as f64 / (files * f64::from(self.passes)),
            lanes: shares.into_iter().map(|share| share.answer).collect(),
            ..Measured::default()
        };
        let first_us = first.as_nanos() as f64 / files / 1e3;
        measured.details.insert("first_us".to_owned(), first_us);
        Ok(measured)
    }
}

/// Opens one file repeatedly, and reads its first word.
pub fn open<F: Files>(job: &Job, open: impl FnOnce() -> Result<F>, file: u32) -> Result<Measured> {
    let names = file_names(file + 1);
    warm_set(&names)?;
    let name = &names[file as usize];
    let files = open()?;
    let mut lane = files.lane()?;
    for _ in 0..job.warm_accesses {
        lane.by_path(name, first_word)?;
    }
    let start = Instant::now();
    let mut sum = 0_u64;
    for _ in 0..job.accesses {
        sum = sum.wrapping_add(lane.by_path(name, first_word)?);
    }
    Ok(measured(start.elapsed(), job.accesses, sum))
}

fn first_word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word))
}
