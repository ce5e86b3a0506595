//! `view`: the cost of a view, independent of the file's length, and in an aged pool.
//!
//! `open_…`: a file is opened by path, its first word is read, and it is closed; for the short file
//! and for the long one. `aged_…`: like `sum_…` of `read-once`, after small files filled the pool
//! and half of them were removed, so that files consist of many runs of pages. The kernel's files
//! are not aged, since that does not affect warm files.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{MMAP, make_set};
use crate::benches::files::{
    Ground, Lowest, cell, file_systems, grounds, job, lowest_ratios, run_block,
};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::harness::PooledWork;
use crate::options::ViewOptions;
use crate::pooled_set::Age;
use crate::report::{Ratio, Report, Row};
use aquifer_host::units::Bytes;

const OPENERS: &[System] = &[System::Mmap, System::View];
const READERS: &[System] =
    &[System::Read, System::Mmap, System::MmapPopulate, System::Pool, System::View];

const SMALL: Bytes = Bytes(4 << 10);
const PASSES: u32 = 3;
/// How often files are opened, normally and in the quick form.
const OPENS: [u64; 2] = [200_000, 500];

/// Runs the bench.
pub fn run(options: &ViewOptions) -> Result<Report> {
    let quick = options.common.quick;
    let large = if quick { Bytes(options.large.0.min(8 << 20)) } else { options.large };
    let set_bytes = options.set.map_or(if quick { 2 << 20 } else { 64 << 20 }, |set| set.0);
    let mut stage = Stage::prepare(&options.common, &[OPENERS, READERS], 0, false)?;
    let grounds = grounds(&mut stage, &options.memory);
    let mut notes = std::mem::take(&mut stage.notes);
    let mut rows = Vec::new();
    for ground in &grounds {
        for size in [SMALL, large] {
            rows.extend(open(&stage, ground, size, &mut notes)?);
        }
        for &size in &options.sizes {
            rows.extend(aged(&stage, ground, size, set_bytes, &mut notes)?);
        }
    }
    stage.notes = notes;
    let found = lowest_ratios(&definitions(options, large, &grounds), &rows);
    let config = [
        ("large_bytes", json!(large.0)),
        ("file_sizes", json!(options.sizes.iter().map(|size| size.0).collect::<Vec<_>>())),
        ("set_bytes", json!(set_bytes)),
        ("file_systems", file_systems(&grounds)),
    ];
    Ok(stage.report("view", rows, found, config))
}

fn open(stage: &Stage, ground: &Ground, size: Bytes, notes: &mut Vec<String>) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, 1, size.0, Age::New)?;
    let metric = format!("open_{}_{}", size.suffix(), ground.file_system);
    let cells = stage.wanted(OPENERS).map(|system| {
        let mut job = job(stage, system, set.path(), 0, PooledWork::Open { file: 0 });
        job.accesses = OPENS[usize::from(stage.quick)];
        job.warm_accesses = job.accesses / 10;
        cell(metric.clone(), ("ns", 1.0), job)
    });
    run_block(stage, cells.collect(), notes, |_, _| Ok(()))
}

fn aged(
    stage: &Stage,
    ground: &Ground,
    size: Bytes,
    set_bytes: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<Row>> {
    let files = u32::try_from(set_bytes.checked_div(size.0).unwrap_or(0))?;
    ensure!(files > 0, "no file of {size} fits {}: choose another of --sizes", Bytes(set_bytes));
    let set = make_set(stage, ground, files, size.0, Age::Aged)?;
    let expected = set.sums().iter().copied().fold(0, u64::wrapping_add);
    let metric = format!("aged_{}_{}", size.suffix(), ground.file_system);
    let work = PooledWork::Sum { files, threads: 1, passes: PASSES };
    let cells = stage
        .wanted(READERS)
        .map(|system| cell(metric.clone(), ("µs", 1e3), job(stage, system, set.path(), 0, work)));
    run_block(stage, cells.collect(), notes, |_, measured| {
        let found = measured.lanes.first().map(|lane| lane.checksum);
        let expected = expected.wrapping_mul(u64::from(PASSES) + 1);
        ensure!(found == Some(expected), "its sums are not those of the files");
        Ok(())
    })
}

fn definitions(options: &ViewOptions, large: Bytes, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for size in &options.sizes {
        let size = size.suffix();
        for (name, others) in [("read", &["read"][..]), ("mmap", MMAP)] {
            let name = format!("aged_view_vs_{name}_{size}");
            all.push(Lowest::everywhere(name, others, "view", &format!("aged_{size}"), grounds));
        }
    }
    // A ratio of times: smaller is better, so each file system has its own ratio.
    for ground in grounds {
        let name = format!("open_view_{}_vs_4k_{}", large.suffix(), ground.file_system);
        let of = |size: Bytes| format!("open_{}_{}", size.suffix(), ground.file_system);
        let ratio = Ratio {
            other_metric: of(large),
            ..Ratio::new(name.clone(), &["view"], "view", of(SMALL))
        };
        all.push(Lowest { name, each: vec![ratio] });
    }
    all
}
