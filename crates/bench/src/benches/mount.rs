//! `mount`: a pool as a file system of the kernel, used by programs that know nothing of it.
//!
//! | metric | what is timed |
//! |---|---|
//! | `stat`, `open_read_close`; `_of_300` | one of 12 KiB, and 300 in turn |
//! | `pread_4k`, `pwrite_4k`, `_1m` | parts of an open file of 16 MiB |
//! | `create_unlink` | an empty file |
//! | `readdir_10000` | a whole listing |
//! | `fsync_4k`, `fdatasync_4k` | `pwrite` of 4 KiB and making it durable |
//! | `git_status`, `rg` | a tree of source files, which are 50,000 |
//! | `cp_r`, `untar` | a part of it |
//! | `sqlite_wal`, `sqlite_rollback` | a transaction of ten inserts |
//! | `rocksdb_fillrandom`, `rocksdb_readrandom` | a key, by `db_bench` if it is installed |
//!
//! Ratios are times of another contender over ours.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::json;

use super::declaration::{Bench, Contenders};
use super::ratio::{Ratio, ratios};
use super::stage::{Answers, Stage};
use crate::contender::Contender;
use crate::contender::mounted::{Ground, Housed, enter_namespace};
use crate::contenders::{DISK, MOUNT, MOUNT_SHARED, MOUNT_WRITE_THROUGH, PASS_THROUGH, TMPFS};
use crate::harness::{Cell, progress_bar};
use crate::job::{Job, MountedWork, ProgramWork, SingleWork, Unavailable};
use crate::options::{Common, Memory, count};
use crate::report::{Report, Row};
use crate::scratch::{Scratch, scratch_directory};
use crate::source_tree::{SourceTree, usual_roots};
use crate::workload::mounted::{programs, single};

const SYSTEMS: &[&Contender] =
    &[DISK, TMPFS, PASS_THROUGH, MOUNT, MOUNT_WRITE_THROUGH, MOUNT_SHARED];
/// Our mounts, and the ends of their ratios' names.
const OURS: [(&Contender, &str); 3] =
    [(MOUNT, ""), (MOUNT_WRITE_THROUGH, "_write_through"), (MOUNT_SHARED, "_shared")];

/// Files that are copied and unpacked, of those of the tree.
const PART_FILES: u32 = 5000;
/// Files and names in the quick form.
const QUICK: u32 = 200;

/// The options of `bench mount`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench mount                             operations, and programs on 50,000 files
  aquifer bench mount --metrics stat,fsync_4k     only these
  aquifer bench mount --only disk,mount --files 5000

It mounts in a namespace of its own, which takes /dev/fuse and the right to mount, or user namespaces. What cannot be mounted is left \
out. `rg` is searched by grep where there is no rg.")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Only these metrics, separated by commas
    #[arg(long, value_name = "METRIC,…", value_delimiter = ',')]
    metrics: Vec<String>,

    /// Source files in the tree
    #[arg(long, value_name = "N", default_value_t = 50_000,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    files: u32,

    /// Directories with the source files; by default those of this machine
    #[arg(long, value_name = "DIR,…", value_delimiter = ',')]
    tree: Vec<PathBuf>,

    /// How often each round runs a program; the faster half counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count())]
    times: u32,
}

/// The declaration of the bench.
pub struct Mount;

/// What is measured: its name, its unit, and how often, normally and in the quick form.
type Metric = (&'static str, (&'static str, f64), MountedWork, [u64; 2]);

const MICROSECONDS: (&str, f64) = ("µs", 1e3);
const MILLISECONDS: (&str, f64) = ("ms", 1e6);

const fn of(name: &'static str, work: SingleWork, often: u64) -> Metric {
    (name, MICROSECONDS, MountedWork::Single(work), [often, 32])
}

const fn by(name: &'static str, work: ProgramWork) -> Metric {
    // The option says how often.
    (name, MILLISECONDS, MountedWork::Program(work), [0, 0])
}

const SINGLE: &[Metric] = &[
    of("stat", SingleWork::Stat { files: 1 }, 64_000),
    of("stat_of_300", SingleWork::Stat { files: single::FILES }, 64_000),
    of("open_read_close", SingleWork::OpenReadClose { files: 1 }, 16_000),
    of("open_read_close_of_300", SingleWork::OpenReadClose { files: single::FILES }, 16_000),
    of("pread_4k", SingleWork::Read { len_bytes: 4 << 10 }, 64_000),
    of("pread_1m", SingleWork::Read { len_bytes: 1 << 20 }, 400),
    of("pwrite_4k", SingleWork::Write { len_bytes: 4 << 10 }, 32_000),
    of("pwrite_1m", SingleWork::Write { len_bytes: 1 << 20 }, 200),
    of("create_unlink", SingleWork::CreateRemove, 3200),
    of("readdir_10000", SingleWork::List, 16),
    of("fsync_4k", SingleWork::WriteAndSync { data_only: false }, 480),
    of("fdatasync_4k", SingleWork::WriteAndSync { data_only: true }, 480),
];

const PROGRAMS: &[Metric] = &[
    by("git_status", ProgramWork::GitStatus),
    by("rg", ProgramWork::Search),
    by("cp_r", ProgramWork::Copy),
    by("untar", ProgramWork::Unpack),
];

const DATABASES: &[Metric] = &[
    (
        "sqlite_wal",
        MICROSECONDS,
        MountedWork::Program(ProgramWork::Sqlite { has_log: true }),
        [400, 16],
    ),
    (
        "sqlite_rollback",
        MICROSECONDS,
        MountedWork::Program(ProgramWork::Sqlite { has_log: false }),
        [160, 16],
    ),
    (
        "rocksdb_fillrandom",
        MICROSECONDS,
        MountedWork::Program(ProgramWork::Rocks { reads: false }),
        [2000, 16],
    ),
    (
        "rocksdb_readrandom",
        MICROSECONDS,
        MountedWork::Program(ProgramWork::Rocks { reads: true }),
        [2000, 16],
    ),
];

impl Bench for Mount {
    type Options = Options;
    const NAME: &'static str = "mount";
    const ABOUT: &'static str = "A mounted pool, used by system calls and by whole programs";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        check_names(&options.metrics)?;
        // Before there are threads: user namespaces take none.
        let hidden = enter_namespace();
        let files = if common.quick { options.files.min(QUICK) } else { options.files };
        let pool_bytes = match common.quick {
            true => 256 << 20,
            // For the databases and the names; and twice the source files that a machine has.
            false => (1 << 30) + u64::from(files) * (32 << 10),
        };
        let stage = Stage::of::<Self>(common, OURS.len() as u64 * pool_bytes + (1 << 30), false)?;
        let memory = memory(&stage, options);
        let wanted = |metrics: &'static [Metric]| -> Vec<Metric> {
            let is_wanted = |metric: &&Metric| {
                options.metrics.is_empty() || options.metrics.iter().any(|name| name == metric.0)
            };
            metrics.iter().filter(is_wanted).copied().collect()
        };
        let (operations, commands) = (wanted(SINGLE), wanted(PROGRAMS));
        let ground = Ground {
            disk: stage.place.path(),
            memory: memory.as_deref(),
            pool_bytes,
            files: u64::from(files) * 3 + 50_000,
        };
        let mut homes = Vec::new();
        for contender in stage.wanted(SYSTEMS) {
            let home = contender.role(contender.roles.home)?;
            let made = match &hidden {
                Err(reason) if home.is_mounted() => Err(Unavailable(format!("{reason:#}")).into()),
                _ => home.make(contender.name, ground),
            };
            match made {
                Ok(housed) => homes.push((contender, housed)),
                Err(error) => match error.downcast::<Unavailable>() {
                    Ok(reason) => stage.note(format!("{} is left out: {reason}", contender.name)),
                    Err(error) => return Err(error.context(contender.name)),
                },
            }
        }
        let mut rows = Vec::new();
        if !operations.is_empty() {
            let names = if common.quick { u64::from(QUICK) } else { single::NAMES };
            let works: Vec<_> =
                operations.iter().filter_map(|metric| single_work(metric.2)).collect();
            let write = |housed: &Housed| single::prepare(housed.path(), names, &works);
            each(&homes, "writing files", write)?;
            rows.extend(measure(&stage, &homes, &operations, 0)?);
        }
        if !commands.is_empty() {
            let works: Vec<_> =
                commands.iter().filter_map(|metric| program_work(metric.2)).collect();
            let template = template(&stage, options, files, &works)?;
            let copy = |housed: &Housed| programs::prepare(template.path(), housed.path());
            each(&homes, "copying trees", copy)?;
            let times = if common.quick { 1 } else { options.times };
            rows.extend(measure(&stage, &homes, &commands, u64::from(times))?);
            if commands.iter().any(|metric| metric.0 == "rg") {
                stage.note(format!("the tree is searched by {}", programs::searcher()));
            }
        }
        rows.extend(measure(&stage, &homes, &wanted(DATABASES), 0)?);
        let definitions = definitions(stage.place.file_system());
        let config = [("files", json!(files)), ("times", json!(options.times))];
        Ok(stage.report(rows, move |rows| ratios(&definitions, rows), config))
    }
}

fn check_names(names: &[String]) -> Result<()> {
    let all = || [SINGLE, PROGRAMS, DATABASES].into_iter().flatten().map(|metric| metric.0);
    for name in names {
        let known = || all().collect::<Vec<_>>().join(", ");
        ensure!(all().any(|one| one == name), "`{name}` is no metric: --metrics takes {}", known());
    }
    Ok(())
}

/// The directory in memory, if there is one.
fn memory(stage: &Stage, options: &Options) -> Option<PathBuf> {
    let place = crate::place::Place::directory(&options.memory.tmpfs_dir, false);
    let place = place.ok().filter(|place| place.file_system() == "tmpfs");
    if place.is_none() {
        stage.note("--tmpfs-dir is no tmpfs");
    }
    place.map(|place| place.path().to_owned())
}

fn each(
    homes: &[(&'static Contender, Housed)],
    what: &str,
    act: impl Fn(&Housed) -> Result<()>,
) -> Result<()> {
    let bar = progress_bar(homes.len() as u64, &format!("{{pos}}/{{len}} {what}"));
    for (contender, housed) in homes {
        act(housed).with_context(|| format!("{what} of {}", contender.name))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

const fn single_work(work: MountedWork) -> Option<SingleWork> {
    match work {
        MountedWork::Single(work) => Some(work),
        _ => None,
    }
}

const fn program_work(work: MountedWork) -> Option<ProgramWork> {
    match work {
        MountedWork::Program(work) => Some(work),
        _ => None,
    }
}

/// The tree, its part, and what is made of them: as much of it as these programs take.
fn template(
    stage: &Stage,
    options: &Options,
    files: u32,
    works: &[ProgramWork],
) -> Result<Scratch> {
    let template = scratch_directory(stage.place.path())?;
    let roots = if options.tree.is_empty() { usual_roots() } else { options.tree.clone() };
    let bar = progress_bar(u64::from(files), "{pos}/{len} copying source files");
    let takes = |what: fn(ProgramWork) -> bool| works.iter().any(|work| what(*work));
    let trees = [
        (programs::TREE, files, takes(ProgramWork::takes_tree)),
        (programs::PART, files.min(PART_FILES), takes(ProgramWork::takes_part)),
    ];
    for (name, files, _) in trees.into_iter().filter(|(_, _, is_taken)| *is_taken) {
        let tree =
            SourceTree::copy(scratch_directory(stage.place.path())?, &roots, files, || bar.inc(1))?;
        std::fs::rename(tree.path(), template.path().join(name))?;
        // Its directory is removed, which must be there.
        std::fs::create_dir(tree.path())?;
    }
    bar.finish_and_clear();
    programs::prepare_template(template.path(), works)?;
    Ok(template)
}

fn measure(
    stage: &Stage,
    homes: &[(&'static Contender, Housed)],
    metrics: &[Metric],
    times: u64,
) -> Result<Vec<Row>> {
    let mut cells = Vec::new();
    for (name, unit, work, often) in metrics.iter().copied() {
        cells.extend(homes.iter().map(|(contender, housed)| {
            let mut job = Job::new(contender.name, housed.path().to_owned(), stage.seed, work);
            job.accesses = times.max(often[usize::from(stage.quick)]);
            Cell::new(name, unit, job)
        }));
    }
    let answers = Answers::new();
    let same = |job: &Job| (job.work.clone(), job.round);
    stage.measure(None, || Ok(()), cells, |job, measured| answers.check(same(job), measured))
}

/// All metrics, of each of our mounts over the disk's file system, and of the first one over the
/// pass-through server.
fn definitions(file_system: &str) -> Vec<Ratio> {
    let mut all = Vec::new();
    for metric in [SINGLE, PROGRAMS, DATABASES].into_iter().flatten().map(|metric| metric.0) {
        for (ours, suffix) in OURS {
            let name = format!("{metric}_vs_{file_system}{suffix}");
            all.push(Ratio::new(name, &[DISK], ours, metric));
        }
        let name = format!("{metric}_vs_passthrough_fuse");
        all.push(Ratio::new(name, &[PASS_THROUGH], MOUNT, metric));
    }
    all
}
