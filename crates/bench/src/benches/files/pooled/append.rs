//! `append`: a file that grows piece by piece.
//!
//! | contender | a piece |
//! |---|---|
//! | `syscalls` | `pwrite` at the end |
//! | `mmap`, `mmap_populate` | `ftruncate`, then stores to a mapping made in advance, populated or not |
//! | `pool` | written at the end of the file in the pool |
//! | `view` | stored to a view of the range added to the file in the pool |
//!
//! `prezeroed_…`: the file grows once, into space of a new pool, which is known to be zero.
//! `sustained_…`: the file is removed and grows again several times, so that space must be reused.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{MMAP, check_warm};
use crate::benches::files::{
    Ground, Lowest, cell, file_systems, grounds, job, lowest_ratios, run_block_after,
};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::harness::{AppendWork, PooledWork};
use crate::options::AppendOptions;
use crate::report::{Report, Row};
use crate::scratch::{empty, scratch_directory};
use aquifer_host::units::Bytes;

const SYSTEMS: &[System] =
    &[System::Syscalls, System::Mmap, System::MmapPopulate, System::Pool, System::View];
/// How often the file grows.
const TIMES: [(&str, u32); 2] = [("prezeroed", 1), ("sustained", 4)];

/// Runs the bench.
pub fn run(options: &AppendOptions) -> Result<Report> {
    let quick = options.common.quick;
    let default_bytes = if quick { 8 << 20 } else { 64 << 20 };
    let size_bytes = options.size.map_or(default_bytes, |size| size.0);
    for piece in &options.pieces {
        ensure!(
            piece.0 > 0 && piece.0 <= size_bytes && piece.0.is_multiple_of(8),
            "a file of {} does not grow by {piece}: choose other --pieces, multiples of 8",
            Bytes(size_bytes)
        );
    }
    check_warm(size_bytes)?;
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS], 4 * size_bytes, false)?;
    let grounds = grounds(&mut stage, &options.memory);
    let mut notes = std::mem::take(&mut stage.notes);
    let mut rows = Vec::new();
    for ground in &grounds {
        rows.extend(block(options, &stage, ground, size_bytes, &mut notes)?);
    }
    stage.notes = notes;
    let found = lowest_ratios(&definitions(options, &grounds), &rows);
    let config = [
        ("size_bytes", json!(size_bytes)),
        ("pieces", json!(options.pieces.iter().map(|piece| piece.0).collect::<Vec<_>>())),
        ("file_systems", file_systems(&grounds)),
    ];
    Ok(stage.report("append", rows, found, config))
}

fn block(
    options: &AppendOptions,
    stage: &Stage,
    ground: &Ground,
    file_bytes: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<Row>> {
    let directory = scratch_directory(&ground.path)?;
    let mut cells = Vec::new();
    for (kind, times) in TIMES {
        for piece in &options.pieces {
            let metric = format!("{kind}_{}_{}", piece.suffix(), ground.file_system);
            let work = PooledWork::Append(AppendWork { piece_bytes: piece.0, file_bytes, times });
            cells.extend(stage.wanted(SYSTEMS).map(|system| {
                let job = job(stage, system, directory.path(), 0, work);
                cell(metric.clone(), ("µs", 1e3), job)
            }));
        }
    }
    run_block_after(stage, || empty(directory.path()), cells, notes, |_, _| Ok(()))
}

fn definitions(options: &AppendOptions, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for (kind, _) in TIMES {
        for piece in &options.pieces {
            let metric = format!("{kind}_{}", piece.suffix());
            for (ours, name, others) in [
                ("view", "mmap", MMAP),
                ("view", "write", &["syscalls"]),
                ("pool", "mmap", MMAP),
                ("pool", "write", &["syscalls"]),
            ] {
                let name = format!("{ours}_append_{kind}_vs_{name}_append_{}", piece.suffix());
                all.push(Lowest::everywhere(name, others, ours, &metric, grounds));
            }
        }
    }
    all
}
