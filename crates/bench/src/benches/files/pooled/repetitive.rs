//! `repetitive`: records of one large file, read and overwritten repeatedly by one process.
//!
//! | contender | a record |
//! |---|---|
//! | `syscalls` | `pread`, `pwrite` |
//! | `mmap`, `mmap_populate` | copied from and to a shared mapping |
//! | `pool` | read from and written to the file in the pool |

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::{ANY_MMAP, make_set, on_some};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::files::{Ground, Lowest, file_systems, grounds, job, lowest_ratios, run_block};
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MMAP, MMAP_POPULATE, POOL, SYSCALLS};
use crate::harness::Cell;
use crate::job::{PooledWork, RecordWork, TeamWork};
use crate::options::{Common, Memory};
use crate::pooled_set::Age;
use crate::report::{Report, Row};
use crate::workload::record_files;
use aquifer_sys::units::Bytes;

/// Contenders that have records.
pub const SYSTEMS: &[&Contender] = &[SYSCALLS, MMAP, MMAP_POPULATE, POOL];

const RECORDS: [u32; 2] = [1 << 10, 4 << 10];
const ORDERS: [(&str, bool); 2] = [("sequential", false), ("random", true)];
/// The actions on records.
pub const ACTIONS: [(&str, bool); 2] = [("read", false), ("write", true)];

/// Records and length of the file in the quick form.
pub const QUICK: (u64, u64) = (500, 2 << 20);

/// The options of `bench repetitive`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench repetitive                        1 and 4 KiB, in order and at random
  aquifer bench repetitive --size 1G --only syscalls,pool")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Length of the file [default: 256 MiB]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,

    /// Records in each measurement
    #[arg(long, value_name = "N", default_value_t = 200_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    records: u64,
}

/// The declaration of the bench.
pub struct Repetitive;

impl Bench for Repetitive {
    type Options = Options;
    const NAME: &'static str = "repetitive";
    const ABOUT: &'static str = "Records of one large file of a pool, read and overwritten";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let quick = common.quick;
        let default_bytes = if quick { QUICK.1 } else { 256 << 20 };
        let size_bytes = options.size.map_or(default_bytes, |size| size.0).next_multiple_of(4096);
        let records = if quick { options.records.min(QUICK.0) } else { options.records };
        let stage = Stage::of::<Self>(common, 0, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for ground in &grounds {
            rows.extend(block(&stage, ground, size_bytes, records)?);
        }
        let definitions = definitions(&grounds);
        let config = [
            ("size_bytes", json!(size_bytes)),
            ("records", json!(records)),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, move |rows| lowest_ratios(&definitions, rows), config))
    }
}

fn block(stage: &Stage, ground: &Ground, file_bytes: u64, records: u64) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, record_files(1), file_bytes, Age::New)?;
    let mut cells = Vec::new();
    for (action, writes) in ACTIONS {
        for record_bytes in RECORDS {
            for (order, is_random) in ORDERS {
                let metric = metric(action, record_bytes, order);
                let metric = format!("{metric}_{}", ground.file_system);
                let work = PooledWork::Records(RecordWork {
                    record_bytes,
                    file_bytes,
                    writes,
                    is_random,
                    own_files: false,
                    team: TeamWork { processes: 1, member: None },
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

fn metric(action: &str, record_bytes: u32, order: &str) -> String {
    format!("{action}_{}_{order}", Bytes(u64::from(record_bytes)).suffix())
}

fn definitions(grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for (action, _) in ACTIONS {
        for record_bytes in RECORDS {
            let metrics = ORDERS.map(|(order, _)| metric(action, record_bytes, order));
            let size = Bytes(u64::from(record_bytes)).suffix();
            let name = |other: &str| format!("{action}_{size}_vs_{other}");
            let calls: &[&Contender] = &[SYSCALLS];
            all.push(on_some(&name("tmpfs"), calls, POOL, &metrics, grounds, true));
            all.push(on_some(&name("disk"), calls, POOL, &metrics, grounds, false));
            all.push(on_some(&name("mmap_in_memory"), ANY_MMAP, POOL, &metrics, grounds, true));
            all.push(on_some(&name("mmap_on_disk"), ANY_MMAP, POOL, &metrics, grounds, false));
        }
    }
    all
}
