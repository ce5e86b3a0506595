//! `flush`: stores to some pages of a large mapped file, which are then made durable.
//!
//! `flush_…` is the flush alone, `store_and_flush_…` includes the stores. The suffix is the
//! percentage of pages without its decimal point: `01` is 0.1 %. Afterwards the stores are verified
//! on the device, bypassing all caches.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{cell, job, row_of_detail, run_block, warm_bytes};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::data::DataFile;
use crate::harness::{Cell, FilesWork, Job, Work, progress_bar};
use crate::options::FlushOptions;
use crate::raw::{PAGE_BYTES, device_written_bytes};
use crate::report::{Ratio, Report, ratios};
use crate::workload::flushed_stores;
use aquifer_host::units::Bytes;

const SYSTEMS: &[System] = &[System::Msync, System::Mapper];

/// Length of the file, normally and in the quick form.
const SIZE_BYTES: [u64; 2] = [1 << 30, 16 << 20];
/// Stores of each measurement that are verified on the device.
const VERIFIED_STORES: usize = 256;

/// Runs the bench.
pub fn run(options: &FlushOptions) -> Result<Report> {
    let default_bytes = SIZE_BYTES[usize::from(options.common.quick)];
    let size_bytes = options.size.map_or(default_bytes, |size| size.0);
    let pages = size_bytes / PAGE_BYTES as u64;
    let room_bytes = warm_bytes();
    ensure!(
        (1..=room_bytes / PAGE_BYTES as u64).contains(&pages),
        "a file of {} is empty or does not stay in memory, of which a quarter is {}: choose another \
         --size",
        Bytes(size_bytes),
        Bytes(room_bytes)
    );
    let mut stage = Stage::prepare(&options.common, &[SYSTEMS], pages * PAGE_BYTES as u64, true)?;
    let bar = progress_bar(size_bytes, "{bytes}/{total_bytes} writing the data file");
    let data = DataFile::create(stage.place.path(), pages, stage.seed, |written_bytes| {
        bar.inc(written_bytes);
    });
    bar.finish_and_clear();
    let data = data?;
    let mut notes = std::mem::take(&mut stage.notes);
    if device_written_bytes(&data.open()?)?.is_none() {
        notes.push("this file system has no device whose counters say what was written".to_owned());
    }
    let cells = cells(options, &stage, &data);
    let mut rows = run_block(&stage, cells, &mut notes, |job, _| verify(job, &data))?;
    let with_stores: Vec<_> = rows
        .iter()
        .filter_map(|row| {
            let metric = format!("store_and_{}", row.metric);
            row_of_detail(row, metric, row.unit, "with_stores_ms")
        })
        .collect();
    rows.extend(with_stores);
    stage.notes = notes;
    let found = ratios(&definitions(options), &rows);
    let config = [("size_bytes", json!(size_bytes)), ("dirty_percent", json!(options.dirty))];
    Ok(stage.report("flush", rows, found, config))
}

fn cells(options: &FlushOptions, stage: &Stage, data: &DataFile) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &percent in &options.dirty {
        let pages = ((data.pages() as f64 * percent / 100.0) as u64).max(1);
        for system in stage.wanted(SYSTEMS) {
            let salt = cells.len() as u64 + 1;
            let work = FilesWork::Flush { pages, salt };
            let job = job(stage, system, &data.path(), data.pages(), work);
            cells.push(cell(format!("flush_{}", suffix(percent)), ("ms", 1e6), job));
        }
    }
    cells
}

/// Verifies stores on the device.
fn verify(job: &Job, data: &DataFile) -> Result<()> {
    let Work::Files(FilesWork::Flush { pages, salt }) = job.work else { return Ok(()) };
    let stores = flushed_stores(job, pages, salt)?;
    let step = stores.len().div_ceil(VERIFIED_STORES).max(1);
    data.verify_stores(stores.into_iter().step_by(step))
}

/// A percentage in a metric's name: 0.1 % is `01`.
fn suffix(percent: f64) -> String {
    percent.to_string().replace('.', "")
}

fn definitions(options: &FlushOptions) -> Vec<Ratio> {
    let mut all = Vec::new();
    for &percent in &options.dirty {
        let part = suffix(percent);
        let name = format!("flush_exact_vs_msync_{part}");
        let stores = format!("{name}_with_stores");
        all.push(Ratio::new(name, &["msync"], "mapper", format!("flush_{part}")));
        all.push(Ratio::new(stores, &["msync"], "mapper", format!("store_and_flush_{part}")));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_names() {
        assert_eq!(suffix(0.1), "01");
        assert_eq!(suffix(10.0), "10");
        assert_eq!(suffix(2.5), "25");
    }
}
