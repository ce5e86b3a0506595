//! Whole files, by path: opened, summed and closed; each thread has its own part of them, in random
//! order.
//!
//! The first pass of the process is timed separately: it includes building page tables, file tables
//! and other cached state. The figure is the mean over the later passes; the detail `first_us` is
//! the first pass.

use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use super::{file_names, measured, warm_set};
use crate::contender::files::{Files, VisitFiles, WholeFile};
use crate::contender::pooled::with_whole_files;
use crate::harness::{Job, LaneAnswer, Measured};
use crate::rng::Rng;
use crate::sum::sum_words;
use aquifer_host::interrupt;

/// Sums all files.
pub fn sum(job: &Job, files: u32, threads: u32, passes: u32) -> Result<Measured> {
    ensure!(files >= threads, "{files} files are too few for {threads} threads");
    let names = file_names(files);
    warm_set(&names)?;
    let order = Rng::for_lane(job.seed, job.round, 0).shuffled(files);
    let ordered: Vec<_> = order.iter().map(|&number| names[number as usize].clone()).collect();
    with_whole_files(job.system, Sum { names: &ordered, threads: threads as usize, passes })
}

struct Sum<'a> {
    names: &'a [PathBuf],
    threads: usize,
    passes: u32,
}

/// The result of a thread.
struct Part {
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

    fn part(&self, mut lane: impl WholeFile, names: &[PathBuf]) -> Result<Part> {
        let (first, sum) = Self::pass(&mut lane, names)?;
        let answer = LaneAnswer { accesses: names.len() as u64, checksum: sum };
        let mut part = Part { first, others: Duration::ZERO, answer };
        for _ in 0..self.passes {
            let (elapsed, sum) = Self::pass(&mut lane, names)?;
            part.others += elapsed;
            part.answer.accesses += names.len() as u64;
            part.answer.checksum = part.answer.checksum.wrapping_add(sum);
        }
        Ok(part)
    }
}

impl VisitFiles for Sum<'_> {
    type Output = Measured;

    fn visit<F: Files>(self, files: &F) -> Result<Measured> {
        let each = self.names.len().div_ceil(self.threads);
        let barrier = Barrier::new(self.names.chunks(each).len());
        let parts = std::thread::scope(|scope| {
            let started: Vec<_> = (self.names.chunks(each))
                .map(|names| {
                    let (barrier, work) = (&barrier, &self);
                    scope.spawn(move || {
                        let lane = files.lane();
                        // The other threads wait at the barrier, so reach it even after an error.
                        barrier.wait();
                        work.part(lane?, names)
                    })
                })
                .collect();
            let joined = started.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| Err(anyhow!("a summing thread panicked")))
            });
            joined.collect::<Result<Vec<_>>>()
        })?;
        let files = self.names.len() as f64;
        let first: Duration = parts.iter().map(|part| part.first).sum();
        let others: Duration = parts.iter().map(|part| part.others).sum();
        let mut measured = Measured {
            mean_ns: others.as_nanos() as f64 / (files * f64::from(self.passes)),
            lanes: parts.into_iter().map(|part| part.answer).collect(),
            ..Measured::default()
        };
        let first_us = first.as_nanos() as f64 / files / 1e3;
        measured.details.insert("first_us".to_owned(), first_us);
        Ok(measured)
    }
}

/// Opens one file repeatedly, and reads its first word.
pub fn open(job: &Job, file: u32) -> Result<Measured> {
    let names = file_names(file + 1);
    warm_set(&names)?;
    let work = Open { name: &names[file as usize], warm: job.warm_accesses, times: job.accesses };
    with_whole_files(job.system, work)
}

struct Open<'a> {
    name: &'a PathBuf,
    warm: u64,
    times: u64,
}

fn first_word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word))
}

impl VisitFiles for Open<'_> {
    type Output = Measured;

    fn visit<F: Files>(self, files: &F) -> Result<Measured> {
        let mut lane = files.lane()?;
        for _ in 0..self.warm {
            lane.by_path(self.name, first_word)?;
        }
        let start = Instant::now();
        let mut sum = 0_u64;
        for _ in 0..self.times {
            sum = sum.wrapping_add(lane.by_path(self.name, first_word)?);
        }
        Ok(measured(start.elapsed(), self.times, sum))
    }
}
