//! `mapping-cache`: files of a fixed length, chosen by Zipf's law, opened by name, summed, closed.
//!
//! | contender | each file |
//! |---|---|
//! | `mmap`, `mmap_populate` | `open`, `fstat`, `mmap`, sum, `munmap`, `close` |
//! | `read` | `open`, `fstat`, `pread` into a reused buffer, sum, `close` |
//! | `mapper` | a view by name, sum, view dropped: the mapping is parked, and reused the next time |
//! | `mapper_read_once` | [`read_once`](aquifer::Mapper::read_once) with the sum as its closure; no mapping is parked |

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::{
    Ground, Lowest, file_set, file_systems, grounds, job, lowest_ratios, run_block, warm_bytes,
};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MAPPER, MAPPER_READ_ONCE, MMAP, MMAP_POPULATE, READ};
use crate::harness::Cell;
use crate::job::FilesWork;
use crate::options::{Common, Memory};
use crate::report::{Report, Row};
use crate::workload::summed_files;
use aquifer_sys::units::Bytes;

const SYSTEMS: &[&Contender] = &[MMAP, MMAP_POPULATE, READ, MAPPER, MAPPER_READ_ONCE];
const ANY_MMAP: &[&Contender] = &[MMAP, MMAP_POPULATE];
const READ_OR_MMAP: &[&Contender] = &[READ, MMAP, MMAP_POPULATE];

/// Bytes summed in a measurement, normally and in the quick form, and the most files.
const SUMMED_BYTES: [u64; 2] = [8 << 30, 4 << 20];
const MAPS_MAX: u64 = 200_000;
/// Files of the quick form.
const QUICK_FILES: u32 = 16;

/// The options of `bench mapping-cache`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench mapping-cache                     on this directory's disk and in /dev/shm
  aquifer bench mapping-cache --sizes 4K,64K      other sizes
  aquifer bench mapping-cache --files 1000 --json

Files are opened, summed and closed again in an order drawn by Zipf's law. Of large files there are fewer, so
that all of them stay in memory; the report says how many.")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Number of files
    #[arg(long, value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    files: u32,

    /// Lengths of the files, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(32 << 10), Bytes(1 << 20)])]
    sizes: Vec<Bytes>,

    /// Files are mapped so often in each measurement [default: as many as sum to 8 GiB, at most
    /// 200,000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    maps: Option<u64>,

    /// What the mapping cache may keep [default: what it keeps by itself]
    #[arg(long, value_name = "BYTES")]
    mapping_cache: Option<Bytes>,
}

/// The declaration of the bench.
pub struct MappingCache;

impl Bench for MappingCache {
    type Options = Options;
    const NAME: &'static str = "mapping-cache";
    const ABOUT: &'static str = "Many ordinary files, mapped, summed and unmapped over and over";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        ensure!(
            options.mapping_cache != Some(Bytes(0)),
            "without a mapping cache there is nothing to measure: choose another --mapping-cache"
        );
        let stage = Stage::of::<Self>(common, 0, false)?;
        let grounds = grounds(&stage, &options.memory);
        let (mut rows, mut counts) = (Vec::new(), Vec::new());
        for &Bytes(file_bytes) in &options.sizes {
            let files = files_of(&stage, options, file_bytes, warm_bytes())?;
            counts.push(files);
            for ground in &grounds {
                let block = Block { options, stage: &stage, ground, files, file_bytes };
                rows.extend(block.run()?);
            }
        }
        let definitions = definitions(options, &grounds);
        let config = [
            ("file_sizes", json!(options.sizes.iter().map(|size| size.0).collect::<Vec<_>>())),
            ("files", json!(counts)),
            ("zipf_exponent", json!(crate::zipf::EXPONENT)),
            ("mapping_cache_bytes", json!(options.mapping_cache.map(|bytes| bytes.0))),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, move |rows| lowest_ratios(&definitions, rows), config))
    }
}

/// The requested number of files, or as many as stay in memory.
fn files_of(stage: &Stage, options: &Options, file_bytes: u64, room_bytes: u64) -> Result<u32> {
    ensure!(file_bytes > 0, "files of no length have nothing to sum: choose another of --sizes");
    let wanted = if stage.quick { options.files.min(QUICK_FILES) } else { options.files };
    let fitting = u32::try_from(room_bytes / file_bytes).unwrap_or(u32::MAX);
    ensure!(
        fitting > 0,
        "files of {} do not stay in memory, of which a quarter is {}: choose another of --sizes",
        Bytes(file_bytes),
        Bytes(room_bytes)
    );
    if fitting < wanted {
        stage.note(format!(
            "{fitting} files of {} instead of {wanted}: more than a quarter of the memory that is \
             available would be needed to keep them warm",
            Bytes(file_bytes)
        ));
    }
    Ok(wanted.min(fitting))
}

/// The measurements with one length on one file system.
struct Block<'a> {
    options: &'a Options,
    stage: &'a Stage,
    ground: &'a Ground,
    files: u32,
    file_bytes: u64,
}

impl Block<'_> {
    fn run(&self) -> Result<Vec<Row>> {
        let Self { options, stage, ground, files, file_bytes } = *self;
        let set = file_set(stage, ground, files, file_bytes)?;
        let summed_bytes = SUMMED_BYTES[usize::from(stage.quick)];
        let maps = (summed_bytes / file_bytes).clamp(1, MAPS_MAX);
        let metric = format!("sum_{}_{}", Bytes(file_bytes).suffix(), ground.file_system);
        let cells = stage.wanted(SYSTEMS).map(|contender| {
            let mut job = job(stage, contender, set.path(), FilesWork::Sum { files });
            job.accesses = options.maps.unwrap_or(maps);
            job.source.cache_bytes = if contender == MAPPER_READ_ONCE {
                // One byte, so that nothing is parked: this measures files that are seen once.
                1
            } else {
                options.mapping_cache.map_or(0, |bytes| bytes.0)
            };
            Cell::new(metric.clone(), ("µs", 1e3), job)
        });
        run_block(stage, cells.collect(), |job, measured| {
            let sums = summed_files(job, files).map(|number| set.sums()[number as usize]);
            let expected = sums.fold(0, u64::wrapping_add);
            let found = measured.lanes.first().map(|lane| lane.checksum);
            ensure!(found == Some(expected), "its sums are not those of the files");
            Ok(())
        })
    }
}

fn definitions(options: &Options, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for size in &options.sizes {
        let size = size.suffix();
        for (name, others) in [("mmap", ANY_MMAP), ("read", &[READ][..])] {
            let name = format!("mapping_cache_vs_{name}_{size}");
            all.push(Lowest::everywhere(name, others, MAPPER, &format!("sum_{size}"), grounds));
        }
        let name = format!("read_once_vs_best_of_read_and_mmap_{size}");
        let metric = format!("sum_{size}");
        all.push(Lowest::everywhere(name, READ_OR_MMAP, MAPPER_READ_ONCE, &metric, grounds));
    }
    all
}
