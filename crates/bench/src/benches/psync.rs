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
use serde_json::json;

use super::stage::Stage;
use crate::contender::regions::Domain;
use crate::contender::{Source, System};
use crate::harness::{Cell, CommitWork, Job, LaneAnswer, Schedule, Work};
use crate::options::PsyncOptions;
use crate::raw::{PAGE_BYTES, sync_file_system};
use crate::report::{Ratio, Report, ratios};
use crate::scratch::{Scratch, empty, scratch_directory};
use aquifer_host::place::{Place, free_bytes};

const SYSTEMS: &[System] = &[
    System::Object,
    System::Lmdb,
    System::Sqlite,
    System::Redb,
    System::Libpmemobj,
    System::Msync,
    System::LogAlone,
];
/// Contenders that can share a file with other data, or commit from several threads.
const SHARING: &[System] = &[System::Object, System::Msync];
const DAX: &[System] = &[System::Object, System::Libpmemobj, System::LibpmemobjRecords];

/// Unrelated dirty pages of a busy file.
const BUSY_PAGES: u32 = 1000;
/// The commit of many stores: this many on each of this many pages.
const MANY_STORES: (u32, u32) = (100, 100);
/// The time limit for the commits of a measurement.
const PATIENCE_MS: u64 = 8_000;
/// The time limit for the warm-up commits.
const WARM_PATIENCE_MS: u64 = 4_000;

/// Runs the bench.
pub fn run(options: &PsyncOptions) -> Result<Report> {
    let quick = options.common.quick;
    let default_bytes = if quick { 2 << 20 } else { 64 << 20 };
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
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS, SHARING, DAX], room_bytes, false)?;
    let disk = scratch_directory(stage.place.path())?;
    let memory = memory_directory(&mut stage, size_bytes)?;
    let plan = Plan { options, stage: &stage, pages, disk: disk.path() };
    let cells = plan.cells(memory.as_ref().map(Scratch::path));
    let mut notes = std::mem::take(&mut stage.notes);
    if cells.iter().any(|cell| cell.job.system == System::Msync) {
        notes.push(
            "msync is not atomic: a crash during a commit leaves some of its stores and not others"
                .to_owned(),
        );
    }
    let answers = RefCell::new(HashMap::<(Work, u32, u64), Vec<LaneAnswer>>::new());
    let schedule = Schedule {
        limiter: None,
        rounds: stage.rounds,
        before: Box::new(|| {
            empty(disk.path())?;
            memory.iter().try_for_each(|memory| empty(memory.path()))?;
            Ok(sync_file_system(disk.path())?)
        }),
        check: Box::new(|job, measured| {
            let Some(first) = measured.lanes.first() else { return Ok(()) };
            let mut answers = answers.borrow_mut();
            let same_work = (job.work.clone(), job.round, first.accesses);
            let known = answers.entry(same_work).or_insert_with(|| measured.lanes.clone());
            // Threads that ran out of time stopped early.
            let same = known.iter().zip(&measured.lanes).all(|(one, other)| {
                one.accesses != other.accesses || one.checksum == other.checksum
            });
            ensure!(same, "its cells hold something else than those of the contender before it");
            Ok(())
        }),
    };
    let rows = schedule.run(cells, &mut notes)?;
    drop(schedule);
    stage.notes = notes;
    let found = ratios(&definitions(options), &rows);
    let config = [
        ("size_bytes", json!(size_bytes)),
        ("pages", json!(options.pages)),
        ("stores_a_page", json!(options.stores)),
        ("seconds", json!(options.commits.is_none().then_some(options.seconds))),
        ("commits", json!(options.commits)),
        ("threads", json!(options.threads)),
    ];
    Ok(stage.report("psync", rows, found, config))
}

/// A directory in memory for the forced `Dax` domain: the place itself if it is in memory, or
/// `/dev/shm`.
fn memory_directory(stage: &mut Stage, size_bytes: u64) -> Result<Option<Scratch>> {
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
    stage.notes.push(
        "the Dax domain is left out: /dev/shm is no tmpfs with enough room; a --dir that is one would do"
            .to_owned(),
    );
    Ok(None)
}

/// The measurements to make.
struct Plan<'a> {
    options: &'a PsyncOptions,
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
            for system in self.stage.wanted(SYSTEMS) {
                let work = Work::Commit(CommitWork { pages, ..on_disk });
                cells.push(self.cell(format!("commit_{pages}p"), system, work, self.disk));
            }
        }
        let busy = Work::Commit(CommitWork { dirty_pages: BUSY_PAGES, ..on_disk });
        for system in self.stage.wanted(SHARING) {
            cells.push(self.cell("commit_1p_busy".to_owned(), system, busy.clone(), self.disk));
        }
        for &threads in &options.threads {
            for system in self.stage.wanted(SHARING) {
                let work = Work::CommitTogether { threads, commit: on_disk };
                let metric = format!("commit_together_{threads}t");
                cells.push(self.cell(metric, system, work, self.disk));
            }
        }
        if let Some(memory) = memory {
            let (pages, stores_a_page) = MANY_STORES;
            let one = CommitWork { domain: Domain::Dax, stores_a_page: 1, ..on_disk };
            let many = CommitWork { pages, stores_a_page, ..one };
            for (metric, work) in [("dax_1p", one), ("dax_10k_stores", many)] {
                for system in self.stage.wanted(DAX) {
                    let work = Work::Commit(work);
                    cells.push(self.cell(metric.to_owned(), system, work, memory));
                }
            }
        }
        cells
    }

    fn cell(&self, metric: String, system: System, work: Work, directory: &Path) -> Cell {
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
        let job = Job {
            system,
            source: Source {
                path: directory.to_owned(),
                pages: self.pages,
                writable: true,
                cache_bytes: 0,
                base_pages: false,
            },
            work,
            seed: self.stage.seed,
            round: 0,
            accesses: commits,
            deadline_ms,
            warm_accesses: warm,
            warm_deadline_ms: WARM_PATIENCE_MS,
            limit_bytes: None,
        };
        Cell { metric, unit: ("µs", 1e3), job, limit_bytes: None }
    }
}

fn definitions(options: &PsyncOptions) -> Vec<Ratio> {
    let others: &[(&str, &[&str])] = &[
        ("lmdb", &["lmdb"]),
        ("sqlite", &["sqlite"]),
        ("redb", &["redb"]),
        ("libpmemobj", &["libpmemobj"]),
        ("msync", &["msync"]),
        ("log_alone", &["log_alone"]),
    ];
    let mut all = Vec::new();
    for pages in &options.pages {
        for (name, systems) in others {
            let name = format!("psync_vs_{name}_{pages}p");
            all.push(Ratio::new(name, systems, "object", format!("commit_{pages}p")));
        }
    }
    // The time with unrelated dirty pages over the time without: smaller is better.
    all.push(Ratio {
        other_metric: "commit_1p_busy".to_owned(),
        ..Ratio::new("psync_1p_quiet_vs_busy_pool", &["object"], "object", "commit_1p")
    });
    for threads in options.threads.iter().filter(|&&threads| threads > 1) {
        let name = format!("group_commit_{threads}t_vs_1t");
        let metric = format!("commit_together_{threads}t");
        all.push(Ratio {
            other_metric: "commit_together_1t".to_owned(),
            ..Ratio::new(name, &["object"], "object", metric)
        });
    }
    for metric in ["1p", "10k_stores"] {
        for (name, systems) in
            [("libpmemobj", &["libpmemobj"]), ("libpmemobj_records", &["libpmemobj_records"])]
        {
            let name = format!("psync_dax_vs_{name}_{metric}");
            all.push(Ratio::new(name, systems, "object", format!("dax_{metric}")));
        }
    }
    all
}
