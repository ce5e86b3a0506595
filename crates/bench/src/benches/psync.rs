//! `psync`: the cost of making a few random stores durable, beside the stores that programs use for
//! that.
//!
//! | metric | contenders | what |
//! |---|---|---|
//! | `commit_1p`, `_10p`, `_100p` | all, and `log_alone` as a reference | stores on that many distinct pages, then a commit |
//! | `commit_1p_busy` | `object`, `msync` | the same with 1,000 unrelated dirty pages in the same file |
//! | `commit_together_1t`, `_2t`, … | `object`, `msync` | threads that commit at once, each to its own object |
//! | `dax_1p`, `dax_10k_stores` | `object`, `libpmemobj` | on a tmpfs, both forced to treat flushed cache lines as durable |
//!
//! All files are on the same file system, and each commit is durable in the same sense. `cells`
//! defines how stores map to each contender's data, `stores` how each is configured.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::declaration::{Bench, Contenders};
use super::ratio::{Ratio, ratios};
use super::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{
    LIBPMEMOBJ, LIBPMEMOBJ_RECORDS, LMDB, LOG_ALONE, MSYNC, OBJECT, OBJECT_HEAP, OBJECT_RANGES,
    REDB, SQLITE,
};
use crate::harness::Cell;
use crate::job::{CommitWork, Domain, Job, LaneAnswer, Measured, Work};
use crate::options::{Common, count};
use crate::place::Place;
use crate::raw::PAGE_BYTES;
use crate::report::Report;
use crate::scratch::{Scratch, scratch_directory};
use aquifer_sys::machine::free_bytes;
use aquifer_sys::units::Bytes;

const SYSTEMS: &[&Contender] =
    &[OBJECT, OBJECT_RANGES, OBJECT_HEAP, LMDB, SQLITE, REDB, LIBPMEMOBJ, MSYNC, LOG_ALONE];
/// Contenders that can share a file with other data, or commit from several threads.
const SHARING: &[&Contender] = &[OBJECT, MSYNC];
const DAX: &[&Contender] = &[OBJECT, LIBPMEMOBJ, LIBPMEMOBJ_RECORDS];

/// Unrelated dirty pages of a busy file.
const BUSY_PAGES: u32 = 1000;
/// The commit of many stores: this many on each of this many pages.
const MANY_STORES: (u32, u32) = (100, 100);
/// The time limit for the commits of a measurement.
const PATIENCE_MS: u64 = 8_000;
/// The time limit for the warm-up commits.
const WARM_PATIENCE_MS: u64 = 4_000;

/// The options of `bench psync`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench psync --dir /mnt/nvme             all contenders on another disk
  aquifer bench psync --only object,lmdb --json   these two, as one JSON object
  aquifer bench psync --pages 1000 --stores 8     larger commits

libpmemobj takes part where it is installed (Debian: libpmemobj1).")]
pub struct Options {
    /// Length of the array that is stored to [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,

    /// Distinct pages a commit stores to, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 10, 100],
          value_parser = count())]
    pages: Vec<u32>,

    /// Stores on each of these pages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count())]
    stores: u32,

    /// Length of each measurement, in seconds: long enough for several checkpoints
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = count(), conflicts_with = "commits")]
    seconds: u32,

    /// Commits of each measurement, instead of a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    commits: Option<u64>,

    /// Numbers of threads that commit at once, each to an object of its own, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4],
          value_parser = count())]
    threads: Vec<u32>,
}

/// The declaration of the bench.
pub struct Psync;

impl Bench for Psync {
    type Options = Options;
    const NAME: &'static str = "psync";
    const ABOUT: &'static str = "Random stores on a few pages, then a durable commit";
    const CONTENDERS: Contenders = &[SYSTEMS, SHARING, DAX];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let default_bytes = if common.quick { 2 << 20 } else { 64 << 20 };
        let size_bytes = options.size.map_or(default_bytes, |size| size.0);
        let pages = size_bytes / PAGE_BYTES as u64;
        let most = options.pages.iter().copied().max().unwrap_or(1);
        ensure!(
            u64::from(most) * 2 <= pages,
            "commits of {most} distinct pages need an array of at least twice as many: choose a larger --size"
        );
        let lanes = options.threads.iter().copied().max().unwrap_or(1);
        // Contenders keep logs, copies and free pages beside the array.
        let room_bytes = size_bytes * u64::from(lanes.max(4)) + (512 << 20);
        let stage = Stage::of::<Self>(common, room_bytes, false)?;
        let disk = scratch_directory(stage.place.path())?;
        let memory = memory_directory(&stage, size_bytes)?;
        let plan = Plan { options, stage: &stage, pages, disk: disk.path() };
        let cells = plan.cells(memory.as_ref().map(Scratch::path));
        if cells.iter().any(|cell| cell.job.contender == MSYNC.name) {
            stage.note(
                "msync is not atomic: a crash during a commit leaves some of its stores and not others",
            );
        }
        let before = || {
            memory.iter().try_for_each(Scratch::empty)?;
            disk.empty_and_sync()
        };
        let answers = Answers::default();
        let rows = stage.measure(None, before, cells, |job, found| answers.check(job, found))?;
        let definitions = definitions(options);
        let config = [
            ("size_bytes", json!(size_bytes)),
            ("pages", json!(options.pages)),
            ("stores_a_page", json!(options.stores)),
            ("seconds", json!(options.commits.is_none().then_some(options.seconds))),
            ("commits", json!(options.commits)),
            ("threads", json!(options.threads)),
        ];
        Ok(stage.report(rows, move |rows| ratios(&definitions, rows), config))
    }
}

/// The answers to each kind of work, by the number of commits of the first thread.
#[derive(Default)]
struct Answers(RefCell<HashMap<(Work, u32, u64), Vec<LaneAnswer>>>);

impl Answers {
    fn check(&self, job: &Job, measured: &Measured) -> Result<()> {
        let Some(first) = measured.lanes.first() else { return Ok(()) };
        let mut answers = self.0.borrow_mut();
        let same_work = (job.work.clone(), job.round, first.accesses);
        let known = answers.entry(same_work).or_insert_with(|| measured.lanes.clone());
        // Threads that ran out of time stopped early.
        let same = known
            .iter()
            .zip(&measured.lanes)
            .all(|(one, other)| one.accesses != other.accesses || one.checksum == other.checksum);
        ensure!(same, "its cells hold something else than those of the contender before it");
        Ok(())
    }
}

/// A directory in memory for the forced `Dax` domain: the place itself if it is in memory, or
/// `/dev/shm`.
fn memory_directory(stage: &Stage, size_bytes: u64) -> Result<Option<Scratch>> {
    if stage.place.file_system() == "tmpfs" {
        return scratch_directory(stage.place.path()).map(Some);
    }
    let needed_bytes = 2 * size_bytes + (128 << 20);
    let place = Place::directory(Path::new("/dev/shm"), false).ok();
    let place = place.filter(|place| {
        place.file_system() == "tmpfs"
            && free_bytes(place.path()).is_ok_and(|free_bytes| free_bytes >= needed_bytes)
    });
    if let Some(found) = place.and_then(|place| scratch_directory(place.path()).ok()) {
        return Ok(Some(found));
    }
    stage.note(
        "the Dax domain is left out: /dev/shm is no tmpfs with enough room; a --dir that is one would do"
            .to_owned(),
    );
    Ok(None)
}

/// The measurements to make.
struct Plan<'a> {
    options: &'a Options,
    stage: &'a Stage,
    pages: u64,
    disk: &'a Path,
}

impl Plan<'_> {
    fn cells(&self, memory: Option<&Path>) -> Vec<Cell> {
        let mut cells = Vec::new();
        let options = self.options;
        let on_disk = CommitWork {
            domain: Domain::PageCache,
            pages: 1,
            stores_a_page: options.stores,
            dirty_pages: 0,
        };
        for &pages in &options.pages {
            for contender in self.stage.wanted(SYSTEMS) {
                let work = Work::Commit(CommitWork { pages, ..on_disk });
                cells.push(self.cell(format!("commit_{pages}p"), contender, work, self.disk));
            }
        }
        let busy = Work::Commit(CommitWork { dirty_pages: BUSY_PAGES, ..on_disk });
        for contender in self.stage.wanted(SHARING) {
            cells.push(self.cell("commit_1p_busy".to_owned(), contender, busy.clone(), self.disk));
        }
        for &threads in &options.threads {
            for contender in self.stage.wanted(SHARING) {
                let work = Work::CommitTogether { threads, commit: on_disk };
                let metric = format!("commit_together_{threads}t");
                cells.push(self.cell(metric, contender, work, self.disk));
            }
        }
        if let Some(memory) = memory {
            let (pages, stores_a_page) = MANY_STORES;
            let one = CommitWork { domain: Domain::Dax, stores_a_page: 1, ..on_disk };
            let many = CommitWork { pages, stores_a_page, ..one };
            for (metric, work) in [("dax_1p", one), ("dax_10k_stores", many)] {
                for contender in self.stage.wanted(DAX) {
                    let work = Work::Commit(work);
                    cells.push(self.cell(metric.to_owned(), contender, work, memory));
                }
            }
        }
        cells
    }

    fn cell(&self, metric: String, contender: &Contender, work: Work, directory: &Path) -> Cell {
        let pages = match work {
            Work::Commit(commit) | Work::CommitTogether { commit, .. } => commit.pages,
            _ => 1,
        };
        let (commits, deadline_ms) = match self.options.commits {
            Some(commits) => (commits, PATIENCE_MS),
            None if self.stage.quick => (10, PATIENCE_MS),
            None => (u64::MAX, u64::from(self.options.seconds) * 1000),
        };
        // SQLite's log wraps every 1,000 pages; all other contenders reach their steady state
        // sooner.
        let warm = if self.stage.quick { 3 } else { 1200 / u64::from(pages) + 50 };
        let path = directory.to_owned();
        let mut job = Job::new(contender.name, path, self.stage.seed, work);
        job.source.pages = self.pages;
        job.source.writable = true;
        job.accesses = commits;
        job.deadline_ms = deadline_ms;
        job.warm_accesses = warm;
        job.warm_deadline_ms = WARM_PATIENCE_MS;
        Cell::new(metric, ("µs", 1e3), job)
    }
}

fn definitions(options: &Options) -> Vec<Ratio> {
    let others: [&[&Contender]; 6] =
        [&[LMDB], &[SQLITE], &[REDB], &[LIBPMEMOBJ], &[MSYNC], &[LOG_ALONE]];
    let mut all = Vec::new();
    for pages in &options.pages {
        for other in others {
            let name = format!("psync_vs_{}_{pages}p", other[0].name);
            all.push(Ratio::new(name, other, OBJECT, format!("commit_{pages}p")));
        }
        for (ours, contender) in [("psync_ranges", OBJECT_RANGES), ("psync_heap", OBJECT_HEAP)] {
            for other in [&[LOG_ALONE], &[SQLITE]] {
                let name = format!("{ours}_vs_{}_{pages}p", other[0].name);
                all.push(Ratio::new(name, other, contender, format!("commit_{pages}p")));
            }
        }
    }
    // The time with unrelated dirty pages over the time without: smaller is better.
    all.push(Ratio {
        other_metric: "commit_1p_busy".to_owned(),
        ..Ratio::new("psync_1p_quiet_vs_busy_pool", &[OBJECT], OBJECT, "commit_1p")
    });
    for threads in options.threads.iter().filter(|&&threads| threads > 1) {
        let name = format!("group_commit_{threads}t_vs_1t");
        let metric = format!("commit_together_{threads}t");
        all.push(Ratio {
            other_metric: "commit_together_1t".to_owned(),
            ..Ratio::new(name, &[OBJECT], OBJECT, metric)
        });
    }
    for metric in ["1p", "10k_stores"] {
        for other in [&[LIBPMEMOBJ], &[LIBPMEMOBJ_RECORDS]] {
            let name = format!("psync_dax_vs_{}_{metric}", other[0].name);
            all.push(Ratio::new(name, other, OBJECT, format!("dax_{metric}")));
        }
    }
    all
}
