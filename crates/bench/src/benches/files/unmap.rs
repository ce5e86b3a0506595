//! `unmap`: short-lived mappings of warm, open files.
//!
//! Every thread maps its own files in turn, touches each of their pages, and drops the mapping.
//! Caches of mappings are off, since otherwise they would be measured.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Ground, Lowest, cell, file_systems, grounds, job, lowest_ratios, run_block, warm_bytes,
};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::file_set::FileSet;
use crate::harness::{FilesWork, progress_bar};
use crate::options::UnmapOptions;
use crate::report::{Report, Row};
use crate::scratch::scratch_directory;
use aquifer_host::units::Bytes;

const SYSTEMS: &[System] =
    &[System::Mmap, System::MmapPopulate, System::Read, System::MapperSync, System::MapperAsync];
const MMAP: &[&str] = &["mmap", "mmap_populate"];

/// Maps of each thread in the quick form.
const QUICK_MAPS: u64 = 1000;

/// Runs the bench.
pub fn run(options: &UnmapOptions) -> Result<Report> {
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
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS], all_bytes, false)?;
    let grounds = grounds(&mut stage, &options.memory);
    let mut notes = std::mem::take(&mut stage.notes);
    let mut rows = Vec::new();
    for ground in &grounds {
        rows.extend(block(options, &stage, ground, options.files * most, &mut notes)?);
    }
    stage.notes = notes;
    let found = lowest_ratios(&definitions(options, &grounds), &rows);
    let config = [
        ("file_bytes", json!(options.file_size.0)),
        ("files_a_thread", json!(options.files)),
        ("threads", json!(options.threads)),
        ("maps_a_thread", json!(maps(options))),
        ("file_systems", file_systems(&grounds)),
    ];
    Ok(stage.report("unmap", rows, found, config))
}

fn maps(options: &UnmapOptions) -> u64 {
    if options.common.quick { options.maps.min(QUICK_MAPS) } else { options.maps }
}

/// The measurements on one file system.
fn block(
    options: &UnmapOptions,
    stage: &Stage,
    ground: &Ground,
    files: u32,
    notes: &mut Vec<String>,
) -> Result<Vec<Row>> {
    let bar = progress_bar(u64::from(files), "{pos}/{len} writing files");
    let directory = scratch_directory(&ground.path)?;
    let file_bytes = options.file_size.0;
    let set = FileSet::create(directory, files, file_bytes, stage.seed, || bar.inc(1));
    bar.finish_and_clear();
    let set = set?;
    let mut cells = Vec::new();
    for &threads in &options.threads {
        let metric = format!("map_{threads}t_{}", ground.file_system);
        let work = FilesWork::Touch { files: options.files, file_bytes, threads };
        cells.extend(stage.wanted(SYSTEMS).map(|system| {
            let mut job = job(stage, system, set.path(), 0, work.clone());
            job.accesses = maps(options);
            cell(metric.clone(), ("µs", 1e3), job)
        }));
    }
    run_block(stage, cells, notes, |_, _| Ok(()))
}

fn definitions(options: &UnmapOptions, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for threads in &options.threads {
        let metric = format!("map_{threads}t");
        for (name, others, ours) in [
            ("async_unmap_vs_sync", MMAP, "mapper_async"),
            ("async_unmap_vs_own_sync", &["mapper_sync"], "mapper_async"),
            ("async_unmap_vs_read", &["read"], "mapper_async"),
            ("sync_unmap_vs_mmap", MMAP, "mapper_sync"),
        ] {
            let name = format!("{name}_{threads}t");
            all.push(Lowest::everywhere(name, others, ours, &metric, grounds));
        }
    }
    all
}
