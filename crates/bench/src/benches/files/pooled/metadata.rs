//! `metadata`: creating, looking up and removing an empty file, by one process or by several in
//! separate directories; and looking up names in an open directory, or listing it, with the metadata
//! of the files (`fstatat`, `getdents`; nodes of a pool).

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::{make_set, on_some};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::files::{Ground, Lowest, file_systems, grounds, job, lowest_ratios, run_block};
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{POOL, SYSCALLS};
use crate::harness::Cell;
use crate::job::{PooledWork, TeamWork};
use crate::options::{Common, Memory};
use crate::pooled_set::Age;
use crate::report::{Report, Row};

const SYSTEMS: &[&Contender] = &[SYSCALLS, POOL];
/// Lookups without paths, by name and of a whole directory.
const LOOK_UPS: [(&str, bool); 2] = [("node_lookup_stat", false), ("node_list_stat", true)];
/// Files of the quick form.
const QUICK_FILES: u64 = 200;
/// Files that the set contains anyway, so that the parent directory is not empty.
const OTHER_FILES: u32 = 16;

/// The options of `bench metadata`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench metadata                          one process and four
  aquifer bench metadata --processes 1,2,8 --json")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Numbers of processes, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 4],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    processes: Vec<u32>,

    /// Files that each process makes in each measurement
    #[arg(long, value_name = "N", default_value_t = 20_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    files: u64,
}

/// The declaration of the bench.
pub struct Metadata;

impl Bench for Metadata {
    type Options = Options;
    const NAME: &'static str = "metadata";
    const ABOUT: &'static str = "Files of a pool that are made, looked up and removed";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let files = if common.quick { options.files.min(QUICK_FILES) } else { options.files };
        let stage = Stage::of::<Self>(common, 0, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for ground in &grounds {
            rows.extend(block(options, &stage, ground, files)?);
        }
        let definitions = definitions(options, &grounds);
        let config = [
            ("files_a_process", json!(files)),
            ("processes", json!(options.processes)),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, move |rows| lowest_ratios(&definitions, rows), config))
    }
}

fn block(options: &Options, stage: &Stage, ground: &Ground, files: u64) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, OTHER_FILES, 4096, Age::New)?;
    let mut cells = Vec::new();
    for &processes in &options.processes {
        let metric = format!("create_stat_unlink_{processes}p_{}", ground.file_system);
        let work = PooledWork::Names(TeamWork { processes, member: None });
        cells.extend(stage.wanted(SYSTEMS).map(|contender| {
            let mut job = job(stage, contender, set.path(), work);
            job.accesses = files;
            job.warm_accesses = files / 8;
            Cell::new(metric.clone(), ("µs", 1e3), job)
        }));
    }
    for (metric, lists) in LOOK_UPS {
        let team = TeamWork { processes: 1, member: None };
        cells.extend(stage.wanted(SYSTEMS).map(|contender| {
            let work = PooledWork::LookUps { lists, team };
            let mut job = job(stage, contender, set.path(), work);
            job.accesses = 16 * files;
            Cell::new(format!("{metric}_{}", ground.file_system), ("ns", 1.0), job)
        }));
    }
    run_block(stage, cells, |_, _| Ok(()))
}

fn definitions(options: &Options, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for (metric, _) in LOOK_UPS {
        let metrics = [metric.to_owned()];
        let name = format!("{metric}_vs_tmpfs");
        all.push(on_some(&name, &[SYSCALLS], POOL, &metrics, grounds, true));
    }
    for processes in &options.processes {
        let metrics = [format!("create_stat_unlink_{processes}p")];
        for (other, in_memory) in [("tmpfs", true), ("disk", false)] {
            let name = format!("create_stat_unlink_vs_{other}_{processes}p");
            all.push(on_some(&name, &[SYSCALLS], POOL, &metrics, grounds, in_memory));
        }
    }
    all
}
