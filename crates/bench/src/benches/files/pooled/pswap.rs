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
use serde_json::json;

use super::make_set;
use crate::benches::files::{
    Ground, Lowest, cell, file_systems, grounds, job, lowest_ratios, run_block,
};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::harness::PooledWork;
use crate::options::PswapOptions;
use crate::pooled_set::Age;
use crate::report::{Report, Row};

const SYSTEMS: &[System] =
    &[System::Syscalls, System::Mmap, System::MmapPopulate, System::PoolCopy, System::Pool];
const COPIES: &[&str] = &["syscalls", "mmap", "mmap_populate", "pool_copy"];
/// Exchanges in a measurement: odd, so that the result differs. Copies are made once.
const EXCHANGES: u64 = 101;

/// Runs the bench.
pub fn run(options: &PswapOptions) -> Result<Report> {
    let default_bytes = if options.common.quick { 8 << 20 } else { 1 << 30 };
    let size_bytes = options.size.map_or(default_bytes, |size| size.0).next_multiple_of(4096);
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS], 0, false)?;
    let grounds = grounds(&mut stage, &options.memory);
    let mut notes = std::mem::take(&mut stage.notes);
    let mut rows = Vec::new();
    for ground in &grounds {
        rows.extend(block(&stage, ground, size_bytes, &mut notes)?);
    }
    stage.notes = notes;
    let ratio = Lowest::everywhere("pswap_vs_copy", COPIES, "pool", "replace", &grounds);
    let found = lowest_ratios(&[ratio], &rows);
    let config = [("size_bytes", json!(size_bytes)), ("file_systems", file_systems(&grounds))];
    Ok(stage.report("pswap", rows, found, config))
}

fn block(
    stage: &Stage,
    ground: &Ground,
    file_bytes: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, 2, file_bytes, Age::New)?;
    let metric = format!("replace_{}", ground.file_system);
    let cells = stage.wanted(SYSTEMS).map(|system| {
        let mut job = job(stage, system, set.path(), 0, PooledWork::Replace { file_bytes });
        job.accesses = if system == System::Pool { EXCHANGES } else { 1 };
        cell(metric.clone(), ("µs", 1e3), job)
    });
    run_block(stage, cells.collect(), notes, |_, _| Ok(()))
}
