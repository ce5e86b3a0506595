//! `mapping-cache`: files of a fixed length, chosen by Zipf's law, opened by name, summed, closed.
//!
//! | contender | each file |
//! |---|---|
//! | `mmap`, `mmap_populate` | `open`, `fstat`, `mmap`, sum, `munmap`, `close` |
//! | `read` | `open`, `fstat`, `pread` into a reused buffer, sum, `close` |
//! | `mapper` | a view by name, sum, view dropped: the mapping is parked, and reused the next time |
//! | `mapper_read_once` | [`read_once`](aquifer::Mapper::read_once) with the sum as its closure; no mapping is parked |

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Ground, Lowest, cell, file_systems, grounds, job, lowest_ratios, run_block, warm_bytes,
};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::file_set::FileSet;
use crate::harness::{FilesWork, progress_bar};
use crate::options::MappingCacheOptions;
use crate::report::{Report, Row};
use crate::scratch::scratch_directory;
use crate::workload::summed_files;
use aquifer_host::units::Bytes;

const SYSTEMS: &[System] =
    &[System::Mmap, System::MmapPopulate, System::Read, System::Mapper, System::MapperReadOnce];
const MMAP: &[&str] = &["mmap", "mmap_populate"];
const READ_OR_MMAP: &[&str] = &["read", "mmap", "mmap_populate"];

/// Bytes summed in a measurement, normally and in the quick form, and the most files.
const SUMMED_BYTES: [u64; 2] = [8 << 30, 4 << 20];
const MAPS_MAX: u64 = 200_000;
/// Files of the quick form.
const QUICK_FILES: u32 = 16;

/// Runs the bench.
pub fn run(options: &MappingCacheOptions) -> Result<Report> {
    ensure!(
        options.mapping_cache != Some(Bytes(0)),
        "without a mapping cache there is nothing to measure: choose another --mapping-cache"
    );
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS], 0, false)?;
    let grounds = grounds(&mut stage, &options.memory);
    let mut notes = std::mem::take(&mut stage.notes);
    let (mut rows, mut counts) = (Vec::new(), Vec::new());
    for &Bytes(file_bytes) in &options.sizes {
        let files = files_of(options, file_bytes, warm_bytes(), &mut notes)?;
        counts.push(files);
        for ground in &grounds {
            let block = Block { options, stage: &stage, ground, files, file_bytes };
            rows.extend(block.run(&mut notes)?);
        }
    }
    stage.notes = notes;
    let found = lowest_ratios(&definitions(options, &grounds), &rows);
    let config = [
        ("file_sizes", json!(options.sizes.iter().map(|size| size.0).collect::<Vec<_>>())),
        ("files", json!(counts)),
        ("zipf_exponent", json!(crate::zipf::EXPONENT)),
        ("mapping_cache_bytes", json!(options.mapping_cache.map(|bytes| bytes.0))),
        ("file_systems", file_systems(&grounds)),
    ];
    Ok(stage.report("mapping-cache", rows, found, config))
}

/// The requested number of files, or as many as stay in memory.
fn files_of(
    options: &MappingCacheOptions,
    file_bytes: u64,
    room_bytes: u64,
    notes: &mut Vec<String>,
) -> Result<u32> {
    ensure!(file_bytes > 0, "files of no length have nothing to sum: choose another of --sizes");
    let wanted = if options.common.quick { options.files.min(QUICK_FILES) } else { options.files };
    let fitting = u32::try_from(room_bytes / file_bytes).unwrap_or(u32::MAX);
    ensure!(
        fitting > 0,
        "files of {} do not stay in memory, of which a quarter is {}: choose another of --sizes",
        Bytes(file_bytes),
        Bytes(room_bytes)
    );
    if fitting < wanted {
        notes.push(format!(
            "{fitting} files of {} instead of {wanted}: more than a quarter of the memory that is \
             available would be needed to keep them warm",
            Bytes(file_bytes)
        ));
    }
    Ok(wanted.min(fitting))
}

/// The measurements with one length on one file system.
struct Block<'a> {
    options: &'a MappingCacheOptions,
    stage: &'a Stage,
    ground: &'a Ground,
    files: u32,
    file_bytes: u64,
}

impl Block<'_> {
    fn run(&self, notes: &mut Vec<String>) -> Result<Vec<Row>> {
        let Self { options, stage, ground, files, file_bytes } = *self;
        let bar = progress_bar(u64::from(files), "{pos}/{len} writing files");
        let directory = scratch_directory(&ground.path)?;
        let set = FileSet::create(directory, files, file_bytes, stage.seed, || bar.inc(1));
        bar.finish_and_clear();
        let set = set?;
        let summed_bytes = SUMMED_BYTES[usize::from(stage.quick)];
        let maps = (summed_bytes / file_bytes).clamp(1, MAPS_MAX);
        let metric = format!("sum_{}_{}", Bytes(file_bytes).suffix(), ground.file_system);
        let cells = stage.wanted(SYSTEMS).map(|system| {
            let mut job = job(stage, system, set.path(), 0, FilesWork::Sum { files });
            job.accesses = options.maps.unwrap_or(maps);
            job.source.cache_bytes = match system {
                // One byte, so that nothing is parked: this measures files that are seen once.
                System::MapperReadOnce => 1,
                _ => options.mapping_cache.map_or(0, |bytes| bytes.0),
            };
            cell(metric.clone(), ("µs", 1e3), job)
        });
        run_block(stage, cells.collect(), notes, |job, measured| {
            let sums = summed_files(job, files).map(|number| set.sums()[number as usize]);
            let expected = sums.fold(0, u64::wrapping_add);
            let found = measured.lanes.first().map(|lane| lane.checksum);
            ensure!(found == Some(expected), "its sums are not those of the files");
            Ok(())
        })
    }
}

fn definitions(options: &MappingCacheOptions, grounds: &[Ground]) -> Vec<Lowest> {
    let mut all = Vec::new();
    for size in &options.sizes {
        let size = size.suffix();
        for (name, others) in [("mmap", MMAP), ("read", &["read"])] {
            let name = format!("mapping_cache_vs_{name}_{size}");
            all.push(Lowest::everywhere(name, others, "mapper", &format!("sum_{size}"), grounds));
        }
        let name = format!("read_once_vs_best_of_read_and_mmap_{size}");
        let metric = format!("sum_{size}");
        all.push(Lowest::everywhere(name, READ_OR_MMAP, "mapper_read_once", &metric, grounds));
    }
    all
}
