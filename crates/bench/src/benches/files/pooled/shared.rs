//! `shared`: processes that read and overwrite records of one shared file, or of one file each.
//!
//! Contenders are those of `repetitive`; records are of 4 KiB, in random order. The figure is a
//! process's mean time for a record: with more processes than processors it includes waiting for a
//! processor, for all contenders alike.
//!
//! `second_process_faults_2g` is a count: page faults of a process that reads a file on hugetlbfs
//! after another process has read it.

use anyhow::Result;
use aquifer_pool::Pool;
use clap::Args;
use serde_json::json;

use super::huge_pages::HugePages;
use super::repetitive::{ACTIONS, QUICK, SYSTEMS};
use super::{make_set, on_some};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::files::{Ground, Lowest, file_systems, grounds, job, lowest_ratios, run_block};
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{POOL, SYSCALLS};
use crate::harness::Cell;
use crate::job::{PooledWork, RecordWork, TeamWork};
use crate::options::{Common, Memory};
use crate::pooled_set::{self, Age};
use crate::report::{Report, Row};
use crate::scratch;
use crate::workload::record_files;
use aquifer_sys::units::Bytes;

const RECORD_BYTES: u32 = 4 << 10;
const FILES: [(&str, bool); 2] = [("same", false), ("own", true)];

/// The options of `bench shared`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench shared                            1, 2 and 4 processes, the same file or one each
  aquifer bench shared --processes 8 --only syscalls,pool --json

Page faults of a second process are counted on a hugetlbfs, which is mounted for that and gets its pages for
that: only root can do so.")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Numbers of processes, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    processes: Vec<u32>,

    /// Length of each file [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,

    /// Records of 4 KiB of each process in each measurement
    #[arg(long, value_name = "N", default_value_t = 100_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    records: u64,

    /// Length of the file on the hugetlbfs [default: 2 GiB]
    #[arg(long, value_name = "BYTES")]
    huge: Option<Bytes>,
}

/// The declaration of the bench.
pub struct Shared;

impl Bench for Shared {
    type Options = Options;
    const NAME: &'static str = "shared";
    const ABOUT: &'static str = "Several processes with the same file of a pool, or one each";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let quick = common.quick;
        let or = |asked: Option<Bytes>, quickly: u64, usual: u64| {
            asked.map_or(if quick { quickly } else { usual }, |size| size.0)
        };
        let size_bytes = or(options.size, QUICK.1, 64 << 20).next_multiple_of(4096);
        let huge_bytes = or(options.huge, 16 << 20, 2 << 30).next_multiple_of(4096);
        let records = if quick { options.records.min(QUICK.0) } else { options.records };
        let stage = Stage::of::<Self>(common, 0, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for ground in &grounds {
            rows.extend(block(options, &stage, ground, (size_bytes, records))?);
        }
        if stage.wanted(&[POOL]).next().is_some() {
            rows.extend(second_process(&stage, huge_bytes)?);
        }
        let definitions = definitions(options, &grounds);
        let compare = move |rows: &[Row]| {
            let mut found = lowest_ratios(&definitions, rows);
            let counts = rows.iter().filter(|row| row.metric.starts_with(SECOND_PROCESS));
            found.extend(counts.map(|row| (row.metric.clone(), row.median)));
            found
        };
        let config = [
            ("size_bytes", json!(size_bytes)),
            ("records", json!(records)),
            ("processes", json!(options.processes)),
            ("huge_bytes", json!(huge_bytes)),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, compare, config))
    }
}

fn metric(action: &str, processes: u32, files: &str) -> String {
    format!("{action}_4k_{processes}p_{files}")
}

fn block(
    options: &Options,
    stage: &Stage,
    ground: &Ground,
    (file_bytes, records): (u64, u64),
) -> Result<Vec<Row>> {
    let most = options.processes.iter().copied().max().unwrap_or(1);
    let set = make_set(stage, ground, record_files(most), file_bytes, Age::New)?;
    let mut cells = Vec::new();
    for (action, writes) in ACTIONS {
        for &processes in &options.processes {
            for (files, own_files) in FILES {
                let metric = metric(action, processes, files);
                let metric = format!("{metric}_{}", ground.file_system);
                let work = PooledWork::Records(RecordWork {
                    record_bytes: RECORD_BYTES,
                    file_bytes,
                    writes,
                    is_random: true,
                    own_files,
                    team: TeamWork { processes, member: None },
                });
                cells.extend(stage.wanted(SYSTEMS).map(|contender| {
                    let mut job = job(stage, contender, set.path(), work);
                    job.accesses = records;
                    Cell::new(metric.clone(), ("ns", 1.0), job)
                }));
            }
        }
    }
    run_block(stage, cells, |_, _| Ok(()))
}

/// The unit in which processes share page tables on hugetlbfs.
const SHARED_TABLES_BYTES: u64 = 1 << 30;

/// The metric of [`second_process`], which ends with the length of the file.
const SECOND_PROCESS: &str = "second_process_faults_";

/// Page faults of a second process on hugetlbfs.
fn second_process(stage: &Stage, file_bytes: u64) -> Result<Option<Row>> {
    let metric = format!("{SECOND_PROCESS}{}", Bytes(file_bytes).suffix());
    let pool_bytes = pooled_set::pool_bytes(file_bytes, 1);
    // Page tables are shared in whole ranges of this length, so a large pool is a multiple of it,
    // as its documentation says.
    let pool_bytes = if pool_bytes >= SHARED_TABLES_BYTES {
        pool_bytes.next_multiple_of(SHARED_TABLES_BYTES)
    } else {
        pool_bytes
    };
    let place = match HugePages::take(pool_bytes) {
        Ok(place) => place,
        Err(reason) => {
            stage.note(format!("{metric} is left out: {reason}"));
            return Ok(None);
        }
    };
    pooled_set::create_pool(place.path(), 1, file_bytes, stage.seed, Age::New, || ())?;
    let pool = place.path().join(scratch::POOL);
    if std::fs::metadata(&pool)?.len() < pool_bytes {
        Pool::grow(&pool, pool_bytes, &Pool::options(), &mut |_, _| {})?;
    }
    let work = PooledWork::SecondProcess { file_bytes, member: None };
    let job = job(stage, POOL, place.path(), work);
    let cells = vec![Cell::new(metric, ("faults", 1.0), job)];
    Ok(run_block(stage, cells, |_, _| Ok(()))?.pop())
}

fn definitions(options: &Options, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    let calls: &[&Contender] = &[SYSCALLS];
    let mut add = |name: String, metrics: &[String]| {
        all.push(on_some(&name, calls, POOL, metrics, grounds, true));
        let name = name.replace("tmpfs", "disk");
        all.push(on_some(&name, calls, POOL, metrics, grounds, false));
    };
    for &processes in &options.processes {
        let of = |action: &str| FILES.map(|(files, _)| metric(action, processes, files));
        let (reads, [same_writes, own_writes]) = (of("read"), of("write"));
        add(format!("read_4k_vs_tmpfs_{processes}p"), &reads);
        add(format!("write_4k_vs_tmpfs_{processes}p"), &[own_writes]);
        add(format!("write_same_4k_vs_tmpfs_{processes}p"), &[same_writes]);
    }
    all
}
