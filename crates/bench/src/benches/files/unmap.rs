//! `unmap`: short-lived mappings of warm, open files.
//!
//! Every thread maps its own files in turn, touches each of their pages, and drops the mapping.
//! Caches of mappings are off, since otherwise they would be measured.

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::{
    Ground, Lowest, file_set, file_systems, grounds, job, lowest_ratios, run_block, warm_bytes,
};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MAPPER_ASYNC, MAPPER_SYNC, MMAP, MMAP_POPULATE, READ};
use crate::harness::Cell;
use crate::job::FilesWork;
use crate::options::{Common, Memory, count};
use crate::report::{Report, Row};
use aquifer_sys::units::Bytes;

const SYSTEMS: &[&Contender] = &[MMAP, MMAP_POPULATE, READ, MAPPER_SYNC, MAPPER_ASYNC];
const ANY_MMAP: &[&Contender] = &[MMAP, MMAP_POPULATE];

/// Maps of each thread in the quick form.
const QUICK_MAPS: u64 = 1000;

/// The options of `bench unmap`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench unmap                             one thread and two, on disk and in /dev/shm
  aquifer bench unmap --threads 1,2,4,8           how it scales
  aquifer bench unmap --file-size 64K --json")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Length of each file, and so of each mapping
    #[arg(long, value_name = "BYTES", default_value = "32K")]
    file_size: Bytes,

    /// Files of each thread
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count())]
    files: u32,

    /// Numbers of threads, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2],
          value_parser = count())]
    threads: Vec<u32>,

    /// Mappings each thread makes in each measurement
    #[arg(long, value_name = "N", default_value_t = 200_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    maps: u64,
}

/// The declaration of the bench.
pub struct Unmap;

impl Bench for Unmap {
    type Options = Options;
    const NAME: &'static str = "unmap";
    const ABOUT: &'static str = "Mappings that are used for a moment only";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let most = options.threads.iter().copied().max().unwrap_or(1);
        let all_bytes = u64::from(options.files * most).saturating_mul(options.file_size.0);
        let room_bytes = warm_bytes();
        ensure!(
            all_bytes <= room_bytes,
            "{} of files do not stay in memory, of which a quarter is {}: choose fewer --files, or a \
             smaller --file-size",
            Bytes(all_bytes),
            Bytes(room_bytes)
        );
        let stage = Stage::of::<Self>(common, all_bytes, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for ground in &grounds {
            rows.extend(block(options, &stage, ground, options.files * most)?);
        }
        let definitions = definitions(options, &grounds);
        let config = [
            ("file_bytes", json!(options.file_size.0)),
            ("files_a_thread", json!(options.files)),
            ("threads", json!(options.threads)),
            ("maps_a_thread", json!(maps(&stage, options))),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, move |rows| lowest_ratios(&definitions, rows), config))
    }
}

fn maps(stage: &Stage, options: &Options) -> u64 {
    if stage.quick { options.maps.min(QUICK_MAPS) } else { options.maps }
}

/// The measurements on one file system.
fn block(options: &Options, stage: &Stage, ground: &Ground, files: u32) -> Result<Vec<Row>> {
    let file_bytes = options.file_size.0;
    let set = file_set(stage, ground, files, file_bytes)?;
    let mut cells = Vec::new();
    for &threads in &options.threads {
        let metric = format!("map_{threads}t_{}", ground.file_system);
        let work = FilesWork::Touch { files: options.files, file_bytes, threads };
        cells.extend(stage.wanted(SYSTEMS).map(|contender| {
            let mut job = job(stage, contender, set.path(), work.clone());
            job.accesses = maps(stage, options);
            Cell::new(metric.clone(), ("µs", 1e3), job)
        }));
    }
    run_block(stage, cells, |_, _| Ok(()))
}

fn definitions(options: &Options, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for threads in &options.threads {
        let metric = format!("map_{threads}t");
        for (name, others, ours) in [
            ("async_unmap_vs_sync", ANY_MMAP, MAPPER_ASYNC),
            ("async_unmap_vs_own_sync", &[MAPPER_SYNC], MAPPER_ASYNC),
            ("async_unmap_vs_read", &[READ], MAPPER_ASYNC),
            ("sync_unmap_vs_mmap", ANY_MMAP, MAPPER_SYNC),
        ] {
            let name = format!("{name}_{threads}t");
            all.push(Lowest::everywhere(name, others, ours, &metric, grounds));
        }
    }
    all
}
