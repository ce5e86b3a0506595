//! `pswap`: replaces the content of a file by that of another, by exchanging pages or by copying.
//!
//! | contender | how |
//! |---|---|
//! | `syscalls` | `pread` and `pwrite` of 1 MiB at a time |
//! | `mmap`, `mmap_populate` | copied from one mapping to the other, through a buffer of 1 MiB |
//! | `pool_copy` | the same through the pool's reads and writes |
//! | `pool` | `pswap` |
//!
//! `data_written_bytes` in the details of `pool` counts pages of the pool's data that were dirty
//! afterwards. It is missing in memory, where the kernel does not count them.

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::make_set;
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::files::{Ground, Lowest, file_systems, grounds, job, lowest_ratios, run_block};
use crate::benches::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MMAP, MMAP_POPULATE, POOL, POOL_COPY, SYSCALLS};
use crate::harness::Cell;
use crate::job::PooledWork;
use crate::options::{Common, Memory};
use crate::pooled_set::Age;
use crate::report::{Report, Row};
use aquifer_sys::units::Bytes;

const SYSTEMS: &[&Contender] = &[SYSCALLS, MMAP, MMAP_POPULATE, POOL_COPY, POOL];
const COPIES: &[&Contender] = &[SYSCALLS, MMAP, MMAP_POPULATE, POOL_COPY];
/// Exchanges in a measurement: odd, so that the result differs. Copies are made once.
const EXCHANGES: u64 = 101;

/// The options of `bench pswap`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench pswap                             1 GiB replaced
  aquifer bench pswap --size 64M --json")]
pub struct Options {
    /// Where the files in memory are.
    #[command(flatten)]
    memory: Memory,

    /// Length of the file [default: 1 GiB]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,
}

/// The declaration of the bench.
pub struct Pswap;

impl Bench for Pswap {
    type Options = Options;
    const NAME: &'static str = "pswap";
    const ABOUT: &'static str = "A file of a pool that takes the content of another one";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let default_bytes = if common.quick { 8 << 20 } else { 1 << 30 };
        let size_bytes = options.size.map_or(default_bytes, |size| size.0).next_multiple_of(4096);
        let stage = Stage::of::<Self>(common, 0, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for ground in &grounds {
            rows.extend(block(&stage, ground, size_bytes)?);
        }
        let ratio = Lowest::everywhere("pswap_vs_copy", COPIES, POOL, "replace", &grounds);
        let config = [("size_bytes", json!(size_bytes)), ("file_systems", file_systems(&grounds))];
        Ok(stage.report(
            rows,
            move |rows| lowest_ratios(std::slice::from_ref(&ratio), rows),
            config,
        ))
    }
}

fn block(stage: &Stage, ground: &Ground, file_bytes: u64) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, 2, file_bytes, Age::New)?;
    let metric = format!("replace_{}", ground.file_system);
    let cells = stage.wanted(SYSTEMS).map(|contender| {
        let mut job = job(stage, contender, set.path(), PooledWork::Replace { file_bytes });
        job.accesses = if contender == POOL { EXCHANGES } else { 1 };
        Cell::new(metric.clone(), ("µs", 1e3), job)
    });
    run_block(stage, cells.collect(), |_, _| Ok(()))
}
