//! `open`: opening a pool, and whole commands that do.
//!
//! | metric | what is timed |
//! |---|---|
//! | `open_joined`, `_rw` | the first open of a process, for reading or for writing, to the attributes of the root, while another process has the pool of 64 MiB open |
//! | `open_alone_clean_…`, `_rw`, `_cold` | the same of a pool with so many files that was closed cleanly and that no other process has open |
//! | `command_cat_alone`, `_joined` | `aquifer cat` of a short file, from its start to its end |
//! | `command_mkdir_alone`, `_joined` | `aquifer mkdir` |
//!
//! Beside them: the same with a database of SQLite, opened up to its first query; `cat` and `mkdir`
//! of files of the kernel.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::declaration::{Bench, Contenders};
use super::stage::{Answers, Stage};
use crate::contender::Contender;
use crate::contender::open::program;
use crate::contenders::{COREUTILS, POOL, SQLITE};
use crate::harness::{Cell, progress_bar};
use crate::job::{Job, OpenWork};
use crate::options::Common;
use crate::report::{Report, Row};
use crate::scratch::{Scratch, scratch_directory};

/// What is opened in a process.
const LIBRARIES: &[&Contender] = &[SQLITE, POOL];
/// What is run as a command.
const COMMANDS: &[&Contender] = &[COREUTILS, SQLITE, POOL];

/// Names in the pool of 64 MiB.
const FEW: u64 = 1000;
/// Names in the quick form.
const QUICK: u64 = 2000;

/// The options of `bench open`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench open                              pools of 64 MiB, and of a million files
  aquifer bench open --files 100000 --json
  aquifer bench open --only pool --rounds 9       without SQLite, cat and mkdir

AQUIFER_PROGRAM names the `aquifer` whose commands are timed, by default the one beside this program.")]
pub struct Options {
    /// Files in the large pool
    #[arg(long, value_name = "N", default_value_t = 1_000_000,
          value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    files: u64,

    /// How often each round opens or runs; the faster half counts
    #[arg(long, value_name = "N", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(1..))]
    times: u64,
}

/// The declaration of the bench.
pub struct Open;

impl Bench for Open {
    type Options = Options;
    const NAME: &'static str = "open";
    const ABOUT: &'static str = "Opening a pool, and commands that do";
    const CONTENDERS: Contenders = &[COMMANDS, LIBRARIES];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let files = if common.quick { options.files.min(QUICK) } else { options.files };
        let times = if common.quick { 2 } else { options.times };
        // Twice: in a pool, and in a database.
        let stage = Stage::of::<Self>(common, 2 * (files * 640 + (640 << 20)), false)?;
        let small = store(&stage, COMMANDS, FEW)?;
        let large = store(&stage, LIBRARIES, files)?;

        let mut cells = Vec::new();
        let mut add = |metric: String, contenders, directory: &Scratch, work: OpenWork| {
            cells.extend(stage.wanted(contenders).map(|contender| {
                let path = directory.path().to_owned();
                let mut job = Job::new(contender.name, path, stage.seed, work);
                job.accesses = times;
                job.deadline_ms = 2000;
                Cell::new(metric.clone(), ("ms", 1e6), job)
            }));
        };
        let read = OpenWork {
            by_command: false,
            writes: false,
            is_joined: false,
            is_cold: false,
            part: None,
        };
        let write = OpenWork { writes: true, ..read };
        let joined = |work| OpenWork { is_joined: true, ..work };
        let command = |work| OpenWork { by_command: true, ..work };
        add("open_joined".to_owned(), LIBRARIES, &small, joined(read));
        add("open_joined_rw".to_owned(), LIBRARIES, &small, joined(write));
        add("command_cat_alone".to_owned(), COMMANDS, &small, command(read));
        add("command_cat_joined".to_owned(), COMMANDS, &small, joined(command(read)));
        add("command_mkdir_alone".to_owned(), COMMANDS, &small, command(write));
        add("command_mkdir_joined".to_owned(), COMMANDS, &small, joined(command(write)));
        let of = [(FEW, &small), (files, &large)];
        for (files, directory) in of {
            let metric = alone(files);
            add(metric.clone(), LIBRARIES, directory, read);
            add(format!("{metric}_rw"), LIBRARIES, directory, write);
            let cold = OpenWork { is_cold: true, ..read };
            add(format!("{metric}_cold"), LIBRARIES, directory, cold);
        }

        let answers = Answers::new();
        let rows = stage.measure(
            None,
            || Ok(()),
            cells,
            |job, measured| answers.check((job.source.path.clone(), job.work.clone()), measured),
        )?;
        // An `aquifer` that was not built with this program may be another version.
        let built = |path: PathBuf| {
            let age = path.metadata().and_then(|found| found.modified()).ok()?.elapsed().ok()?;
            Some(json!({ "path": path, "age_s": age.as_secs() }))
        };
        let config = [
            ("files", json!(files)),
            ("times", json!(times)),
            ("program", json!(program().ok().and_then(built))),
        ];
        Ok(stage.report(rows, move |rows| figures(files, rows), config))
    }
}

/// A directory with a store of each of these contenders.
fn store(stage: &Stage, contenders: &[&'static Contender], files: u64) -> Result<Scratch> {
    let directory = scratch_directory(stage.place.path())?;
    let wanted: Vec<_> = stage.wanted(contenders).collect();
    let bar =
        progress_bar(wanted.len() as u64, &format!("{{pos}}/{{len}} stores of {files} files"));
    for contender in wanted {
        (contender.role(contender.roles.open)?.create)(directory.path(), files)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(directory)
}

/// The metric of a pool that no other process has open.
fn alone(files: u64) -> String {
    let (number, unit) = match files {
        _ if files.is_multiple_of(1_000_000) => (files / 1_000_000, "m"),
        _ if files.is_multiple_of(1000) => (files / 1000, "k"),
        _ => (files, ""),
    };
    format!("open_alone_clean_{number}{unit}")
}

/// Milliseconds of the pool, under names that do not depend on the number of files.
fn figures(files: u64, rows: &[Row]) -> BTreeMap<String, f64> {
    let alone = alone(files);
    let named = [
        ("open_joined_ms", "open_joined"),
        ("open_joined_rw_ms", "open_joined_rw"),
        ("open_alone_clean_ms", &*alone),
        ("open_alone_clean_rw_ms", &*format!("{alone}_rw")),
        ("command_cat_alone_ms", "command_cat_alone"),
        ("command_cat_joined_ms", "command_cat_joined"),
        ("command_mkdir_alone_ms", "command_mkdir_alone"),
        ("command_mkdir_joined_ms", "command_mkdir_joined"),
    ]
    .map(|(name, metric)| {
        let row = rows.iter().find(|row| row.system == POOL.name && row.metric == metric)?;
        Some((name.to_owned(), row.median))
    });
    named.into_iter().flatten().collect()
}
