//! Text search: counts the occurrences of a text in the files of a tree.
//!
//! Listing the files and printing are excluded: opening, accessing the bytes and searching them is
//! measured, by several threads that take files in runs. The first pass represents a program that
//! searches once and exits; the later passes represent a long-running program, such as an editor.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use memchr::memmem::Finder;

use crate::contender::files::plain::ReadLoop;
use crate::contender::files::{Files, WholeFile};
use crate::file_set::warm;
use crate::job::{FilesWork, Job, LaneAnswer, Measured, Work};
use crate::raw::{open_directory, raise_file_limit};
use crate::scratch::POOL;
use crate::source_tree::{Folder, folders_below};
use crate::stats::median;
use crate::threads::join_all;
use aquifer_sys::interrupt;

/// Files a thread takes at a time.
const RUN: usize = 32;

/// A file of the tree, with both ways to open it.
struct Target<'a> {
    directory: &'a OwnedFd,
    name: CString,
    path: PathBuf,
}

/// Searches whole files.
pub fn run<F: Files>(job: &Job, open: impl FnOnce() -> Result<F>) -> Result<Measured> {
    prepare(job, |plan| plan.search_files(&open()?))
}

/// Searches with [`ReadLoop`].
pub fn read_loop(job: &Job) -> Result<Measured> {
    prepare(job, |plan| {
        plan.search(|| {
            let mut reader = ReadLoop::new();
            let finder = &plan.finder;
            Ok(move |target: &Target<'_>| reader.count(target.directory, &target.name, finder))
        })
    })
}

/// Opens the directories of the tree, brings its files into the page cache, and searches.
fn prepare(job: &Job, search: impl FnOnce(&Plan<'_>) -> Result<Measured>) -> Result<Measured> {
    let Work::Files(FilesWork::Search { ref needle, threads, repeats }) = job.work else {
        bail!("this is no search");
    };
    // Like a user searching below the current directory: relative paths are shorter.
    std::env::set_current_dir(&job.source.path)
        .with_context(|| format!("cannot go to {}", job.source.path.display()))?;
    raise_file_limit()?;
    let folders = folders_below(Path::new("."), usize::MAX)?;
    let opened = folders.iter().map(open).collect::<Result<Vec<_>>>()?;
    let mut targets = Vec::new();
    for (folder, directory) in folders.iter().zip(&opened) {
        for name in &folder.names {
            let path = folder.path.join(name);
            targets.push(Target { directory, name: CString::new(name.as_bytes())?, path });
        }
    }
    let pool = Some(Path::new(POOL)).filter(|pool| pool.exists());
    warm(targets.iter().map(|target| target.path.as_path()).chain(pool))?;
    search(&Plan { targets: &targets, finder: Finder::new(needle), threads, repeats })
}

fn open(folder: &Folder) -> Result<OwnedFd> {
    open_directory(&folder.path).with_context(|| format!("cannot open {}", folder.path.display()))
}

struct Plan<'a> {
    targets: &'a [Target<'a>],
    finder: Finder<'a>,
    threads: u32,
    repeats: u32,
}

impl Plan<'_> {
    fn search_files<F: Files>(&self, files: &F) -> Result<Measured> {
        let mut measured = self.search(|| {
            let mut lane = files.lane()?;
            Ok(move |target: &Target<'_>| {
                let count = |bytes: &[u8]| self.finder.find_iter(bytes).count() as u64;
                lane.in_directory(target.directory, &target.name, &target.path, count)
            })
        })?;
        measured.details.extend(files.details());
        // A contender that keeps mappings must unmap them at exit, which the passes do not include.
        let start = Instant::now();
        files.settle()?;
        measured.details.insert("end_ms".to_owned(), start.elapsed().as_secs_f64() * 1e3);
        Ok(measured)
    }

    /// Runs all passes; each thread counts with the result of `lane`.
    fn search<C: FnMut(&Target<'_>) -> Result<u64>>(
        &self,
        lane: impl Fn() -> Result<C> + Sync,
    ) -> Result<Measured> {
        let passes = 1 + self.repeats as usize;
        // One counter per pass, so that none has to be reset.
        let next: Vec<_> = (0..passes).map(|_| AtomicUsize::new(0)).collect();
        let barrier = Barrier::new(self.threads as usize);
        let work = |number: u32| -> Result<(Vec<Duration>, Vec<u64>)> {
            let mut lane = lane();
            let (mut took, mut counts) = (Vec::new(), Vec::new());
            let mut failure = None;
            for next in &next {
                barrier.wait();
                let start = Instant::now();
                let count = match &mut lane {
                    Ok(count) if failure.is_none() => self.pass(next, count),
                    _ => Ok(0),
                };
                // The other threads wait at the barrier, so reach it even after an error.
                barrier.wait();
                if number == 0 {
                    took.push(start.elapsed());
                }
                match count {
                    Ok(count) => counts.push(count),
                    Err(error) => failure = Some(error),
                }
            }
            lane?;
            failure.map_or(Ok((took, counts)), Err)
        };
        let results = std::thread::scope(|scope| {
            let work = &work;
            let threads = (0..self.threads).map(|number| scope.spawn(move || work(number)));
            let started: Vec<_> = threads.collect();
            join_all(started)
        })?;
        let found = |pass: usize| results.iter().map(|(_, counts)| counts[pass]).sum::<u64>();
        let first = found(0);
        ensure!(
            (1..passes).all(|pass| found(pass) == first),
            "a repeated search found something else"
        );
        self.measured(&results[0].0, first)
    }

    /// One thread's share of one pass.
    fn pass(
        &self,
        next: &AtomicUsize,
        count: &mut impl FnMut(&Target<'_>) -> Result<u64>,
    ) -> Result<u64> {
        let mut found = 0;
        loop {
            interrupt::check()?;
            // Relaxed: the counter only distributes the files among threads.
            let from = next.fetch_add(RUN, Ordering::Relaxed);
            let Some(rest) = self.targets.get(from..).filter(|rest| !rest.is_empty()) else {
                return Ok(found);
            };
            for target in &rest[..rest.len().min(RUN)] {
                found += count(target)?;
            }
        }
    }

    fn measured(&self, took: &[Duration], found: u64) -> Result<Measured> {
        let milliseconds: Vec<f64> = took.iter().map(|took| took.as_secs_f64() * 1e3).collect();
        let (first, repeated) = milliseconds.split_first().context("there was no pass")?;
        let mut measured = Measured {
            mean_ns: first * 1e6,
            lanes: vec![LaneAnswer { accesses: self.targets.len() as u64, checksum: found }],
            ..Measured::default()
        };
        measured.details.insert("found".to_owned(), found as f64);
        if let Some(repeated) = median(repeated) {
            measured.details.insert("repeated_ms".to_owned(), repeated);
        }
        Ok(measured)
    }
}
