//! Whole files, accessed briefly: [`sum`] by name, as in programs that keep no files open, and
//! [`touch`] of open files, which leaves little but mapping and unmapping.
//!
//! Every file is accessed once before the clock starts, so the figures show the steady state and
//! not the first access of a cache of mappings to a file.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{Steps, together};
use crate::contender::files::{Files, WholeFile};
use crate::file_set::{file_path, warm};
use crate::job::{Job, Measured};
use crate::raw::{PAGE_BYTES, raise_file_limit};
use crate::rng::Rng;
use crate::sum::sum_words;
use crate::threads::join_all;
use crate::zipf::{EXPONENT, Zipf};
use aquifer_sys::interrupt;

/// Makes files other than the first ones popular.
const POPULARITY_SEED: u64 = 0x7a69_7066;

/// The files that a [`sum`] job reads, in order.
pub fn summed_files(job: &Job, files: u32) -> impl Iterator<Item = u32> + use<> {
    let zipf = Zipf::new(files, EXPONENT, job.seed ^ POPULARITY_SEED);
    let mut rng = Rng::for_lane(job.seed, job.round, 0);
    (0..job.accesses).map(move |_| zipf.draw(&mut rng))
}

/// Sums files chosen by Zipf's law.
pub fn sum<F: Files>(job: &Job, open: impl FnOnce() -> Result<F>, files: u32) -> Result<Measured> {
    let paths: Vec<_> = (0..files).map(|number| file_path(&job.source.path, number)).collect();
    warm(paths.iter().map(PathBuf::as_path))?;
    let order: Vec<u32> = summed_files(job, files).collect();
    let files = open()?;
    let mut lane = files.lane()?;
    for path in &paths {
        lane.by_path(path, sum_words)?;
    }
    let mut steps = Steps::start();
    for &number in &order {
        steps.step(lane.by_path(&paths[number as usize], sum_words)?);
    }
    drop(lane);
    let put_off = Instant::now();
    files.settle()?;
    let mut measured = together(vec![steps], put_off.elapsed());
    measured.details = files.details();
    Ok(measured)
}

/// Touches every page of open files; each thread has its own files, in turn.
pub fn touch<F: Files>(
    job: &Job,
    open: impl FnOnce() -> Result<F>,
    files: u32,
    file_bytes: usize,
    threads: u32,
) -> Result<Measured> {
    let paths: Vec<_> =
        (0..files * threads).map(|number| file_path(&job.source.path, number)).collect();
    warm(paths.iter().map(PathBuf::as_path))?;
    raise_file_limit()?;
    let open_file = |path: &PathBuf| {
        File::open(path).with_context(|| format!("cannot open {}", path.display()))
    };
    let opened = paths.iter().map(open_file).collect::<Result<Vec<_>>>()?;
    let work = Touch { files: &opened, each: files as usize, file_bytes, maps: job.accesses };
    work.run(&open()?)
}

struct Touch<'a> {
    files: &'a [File],
    /// Number of files per thread.
    each: usize,
    file_bytes: usize,
    maps: u64,
}

impl Touch<'_> {
    fn lane(&self, lane: &mut impl WholeFile, files: &[File]) -> Result<Steps> {
        let mut steps = Steps::start();
        for (number, file) in (0..self.maps).zip(files.iter().cycle()) {
            if number % 1024 == 0 {
                interrupt::check()?;
            }
            steps.step(lane.opened(file, self.file_bytes, first_words)?);
        }
        Ok(steps)
    }

    fn run<F: Files>(&self, files: &F) -> Result<Measured> {
        let threads = self.files.chunks_exact(self.each);
        ensure!(threads.len() > 0, "no thread has files");
        let barrier = Barrier::new(threads.len());
        let lanes = std::thread::scope(|scope| {
            let started: Vec<_> = threads
                .map(|own| {
                    let (barrier, work) = (&barrier, self);
                    scope.spawn(move || {
                        let lane = files.lane().and_then(|mut lane| {
                            for file in own {
                                lane.opened(file, work.file_bytes, first_words)?;
                            }
                            Ok(lane)
                        });
                        // The other threads wait at the barrier, so reach it even after an error.
                        barrier.wait();
                        work.lane(&mut lane?, own)
                    })
                })
                .collect();
            join_all(started)
        })?;
        let put_off = Instant::now();
        files.settle()?;
        let mut measured = together(lanes, put_off.elapsed());
        measured.details = files.details();
        Ok(measured)
    }
}

/// The sum of each page's first word: one load per page.
fn first_words(bytes: &[u8]) -> u64 {
    let pages = bytes.chunks(PAGE_BYTES).filter_map(|page| page.first_chunk());
    pages.map(|word| u64::from_ne_bytes(*word)).fold(0, u64::wrapping_add)
}
