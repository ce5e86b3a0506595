//! `view`: the cost of a view, independent of the file's length, and in an aged pool.
//!
//! `open_…`: a file is opened by path, its first word is read, and it is closed; for the short file
//! and for the long one. `aged_…`: like `sum_…` of `read-once`, after small files filled the pool
//! and half of them were removed, so that files consist of many runs of pages. The kernel's files
//! are not aged, since that does not affect warm files.

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::{ANY_MMAP, make_set};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::files::{Ground, Lowest, file_systems, grounds, job, lowest_ratios, run_block};
use crate::benches::ratio::Ratio;
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MMAP, MMAP_POPULATE, POOL, READ, VIEW};
use crate::harness::Cell;
use crate::job::PooledWork;
use crate::options::{Common, Memory};
use crate::pooled_set::Age;
use crate::report::{Report, Row};
use aquifer_sys::units::Bytes;

const OPENERS: &[&Contender] = &[MMAP, VIEW];
const READERS: &[&Contender] = &[READ, MMAP, MMAP_POPULATE, POOL, VIEW];

const SMALL: Bytes = Bytes(4 << 10);
const PASSES: u32 = 3;
/// How often files are opened, normally and in the quick form.
const OPENS: [u64; 2] = [200_000, 500];

/// The options of `bench view`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench view                              what opening costs, short or long, and fragmented files
  aquifer bench view --large 512M --json          with less memory")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Length of the long file, which is opened and hardly read
    #[arg(long, value_name = "BYTES", default_value = "4G")]
    large: Bytes,

    /// Lengths of the files in the aged pool, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(32 << 10), Bytes(256 << 10)])]
    sizes: Vec<Bytes>,

    /// Length of all these files together [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    set: Option<Bytes>,
}

/// The declaration of the bench.
pub struct View;

impl Bench for View {
    type Options = Options;
    const NAME: &'static str = "view";
    const ABOUT: &'static str =
        "Views of files of a pool: short and long ones, and of fragmented files";
    const CONTENDERS: Contenders = &[OPENERS, READERS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let quick = common.quick;
        let large = if quick { Bytes(options.large.0.min(8 << 20)) } else { options.large };
        let set_bytes = options.set.map_or(if quick { 2 << 20 } else { 64 << 20 }, |set| set.0);
        let stage = Stage::of::<Self>(common, 0, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for ground in &grounds {
            for size in [SMALL, large] {
                rows.extend(open(&stage, ground, size)?);
            }
            for &size in &options.sizes {
                rows.extend(aged(&stage, ground, size, set_bytes)?);
            }
        }
        let definitions = definitions(options, large, &grounds);
        let config = [
            ("large_bytes", json!(large.0)),
            ("file_sizes", json!(options.sizes.iter().map(|size| size.0).collect::<Vec<_>>())),
            ("set_bytes", json!(set_bytes)),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, move |rows| lowest_ratios(&definitions, rows), config))
    }
}

fn open(stage: &Stage, ground: &Ground, size: Bytes) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, 1, size.0, Age::New)?;
    let metric = format!("open_{}_{}", size.suffix(), ground.file_system);
    let cells = stage.wanted(OPENERS).map(|contender| {
        let mut job = job(stage, contender, set.path(), PooledWork::Open { file: 0 });
        job.accesses = OPENS[usize::from(stage.quick)];
        job.warm_accesses = job.accesses / 10;
        Cell::new(metric.clone(), ("ns", 1.0), job)
    });
    run_block(stage, cells.collect(), |_, _| Ok(()))
}

fn aged(stage: &Stage, ground: &Ground, size: Bytes, set_bytes: u64) -> Result<Vec<Row>> {
    let files = u32::try_from(set_bytes.checked_div(size.0).unwrap_or(0))?;
    ensure!(files > 0, "no file of {size} fits {}: choose another of --sizes", Bytes(set_bytes));
    let set = make_set(stage, ground, files, size.0, Age::Aged)?;
    let expected = set.sums().iter().copied().fold(0, u64::wrapping_add);
    let metric = format!("aged_{}_{}", size.suffix(), ground.file_system);
    let work = PooledWork::Sum { files, threads: 1, passes: PASSES };
    let cells = stage.wanted(READERS).map(|contender| {
        Cell::new(metric.clone(), ("µs", 1e3), job(stage, contender, set.path(), work))
    });
    run_block(stage, cells.collect(), |_, measured| {
        let found = measured.lanes.first().map(|lane| lane.checksum);
        let expected = expected.wrapping_mul(u64::from(PASSES) + 1);
        ensure!(found == Some(expected), "its sums are not those of the files");
        Ok(())
    })
}

fn definitions(options: &Options, large: Bytes, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for size in &options.sizes {
        let size = size.suffix();
        for (name, others) in [("read", &[READ][..]), ("mmap", ANY_MMAP)] {
            let name = format!("aged_view_vs_{name}_{size}");
            all.push(Lowest::everywhere(name, others, VIEW, &format!("aged_{size}"), grounds));
        }
    }
    // A ratio of times: smaller is better, so each file system has its own ratio.
    for ground in grounds {
        let name = format!("open_view_{}_vs_4k_{}", large.suffix(), ground.file_system);
        let of = |size: Bytes| format!("open_{}_{}", size.suffix(), ground.file_system);
        let ratio =
            Ratio { other_metric: of(large), ..Ratio::new(name.clone(), &[VIEW], VIEW, of(SMALL)) };
        all.push(Lowest { name, each: vec![ratio] });
    }
    all
}
