//! `metadata`: creating, looking up and removing an empty file, by one process or by several in
//! separate directories.

use anyhow::Result;
use serde_json::json;

use super::{make_set, on_some};
use crate::benches::files::{
    Ground, Lowest, cell, file_systems, grounds, job, lowest_ratios, run_block,
};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::harness::{PooledWork, TeamWork};
use crate::options::MetadataOptions;
use crate::pooled_set::Age;
use crate::report::{Report, Row};

const SYSTEMS: &[System] = &[System::Syscalls, System::Pool];
/// Files of the quick form.
const QUICK_FILES: u64 = 200;
/// Files that the set contains anyway, so that the parent directory is not empty.
const OTHER_FILES: u32 = 16;

/// Runs the bench.
pub fn run(options: &MetadataOptions) -> Result<Report> {
    let files = if options.common.quick { options.files.min(QUICK_FILES) } else { options.files };
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS], 0, false)?;
    let grounds = grounds(&mut stage, &options.memory);
    let mut notes = std::mem::take(&mut stage.notes);
    let mut rows = Vec::new();
    for ground in &grounds {
        rows.extend(block(options, &stage, ground, files, &mut notes)?);
    }
    stage.notes = notes;
    let found = lowest_ratios(&definitions(options, &grounds), &rows);
    let config = [
        ("files_a_process", json!(files)),
        ("processes", json!(options.processes)),
        ("file_systems", file_systems(&grounds)),
    ];
    Ok(stage.report("metadata", rows, found, config))
}

fn block(
    options: &MetadataOptions,
    stage: &Stage,
    ground: &Ground,
    files: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<Row>> {
    let set = make_set(stage, ground, OTHER_FILES, 4096, Age::New)?;
    let mut cells = Vec::new();
    for &processes in &options.processes {
        let metric = format!("create_stat_unlink_{processes}p_{}", ground.file_system);
        let work = PooledWork::Names(TeamWork { processes, member: None });
        cells.extend(stage.wanted(SYSTEMS).map(|system| {
            let mut job = job(stage, system, set.path(), 0, work);
            job.accesses = files;
            job.warm_accesses = files / 8;
            cell(metric.clone(), ("µs", 1e3), job)
        }));
    }
    run_block(stage, cells, notes, |_, _| Ok(()))
}

fn definitions(options: &MetadataOptions, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for processes in &options.processes {
        let metrics = [format!("create_stat_unlink_{processes}p")];
        for (other, in_memory) in [("tmpfs", true), ("disk", false)] {
            let name = format!("create_stat_unlink_vs_{other}_{processes}p");
            all.push(on_some(&name, &["syscalls"], "pool", &metrics, grounds, in_memory));
        }
    }
    all
}
