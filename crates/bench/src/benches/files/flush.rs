//! `flush`: stores to some pages of a large mapped file, which are then made durable.
//!
//! `flush_…` is the flush alone, `store_and_flush_…` includes the stores. The suffix is the
//! percentage of pages without its decimal point: `01` is 0.1 %. Afterwards the stores are verified
//! on the device, bypassing all caches.

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::{job, row_of_detail, run_block, warm_bytes};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::ratio::{Ratio, ratios};
use crate::benches::stage::{Stage, data_file};
use crate::contender::Contender;
use crate::contenders::{MAPPER, MSYNC};
use crate::data::DataFile;
use crate::harness::Cell;
use crate::job::{FilesWork, Job, Work};
use crate::options::Common;
use crate::raw::{PAGE_BYTES, device_written_bytes};
use crate::report::Report;
use crate::workload::flushed_stores;
use aquifer_sys::units::Bytes;

const SYSTEMS: &[&Contender] = &[MSYNC, MAPPER];

/// Length of the file, normally and in the quick form.
const SIZE_BYTES: [u64; 2] = [1 << 30, 16 << 20];
/// Stores of each measurement that are verified on the device.
const VERIFIED_STORES: usize = 256;

/// The options of `bench flush`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench flush --dir /mnt/nvme             0.1 % and 10 % of a file of 1 GiB dirtied, then flushed
  aquifer bench flush --dirty 0.01,1,50           other shares, in percent
  aquifer bench flush --size 256M --json")]
pub struct Options {
    /// Length of the file [default: 1 GiB]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,

    /// Shares of the file's pages that are stored to, in percent, separated by commas
    #[arg(long, value_name = "PERCENT,…", value_delimiter = ',', default_values_t = [0.1, 10.0],
          value_parser = percent)]
    dirty: Vec<f64>,
}

/// The declaration of the bench.
pub struct Flush;

impl Bench for Flush {
    type Options = Options;
    const NAME: &'static str = "flush";
    const ABOUT: &'static str = "A file with few or many dirtied pages, made durable";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let default_bytes = SIZE_BYTES[usize::from(common.quick)];
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
        let stage = Stage::of::<Self>(common, pages * PAGE_BYTES as u64, true)?;
        let data = data_file(stage.place.path(), pages, stage.seed)?;
        if device_written_bytes(&data.open()?)?.is_none() {
            stage.note("this file system has no device whose counters say what was written");
        }
        let cells = cells(options, &stage, &data);
        let mut rows = run_block(&stage, cells, |job, _| verify(job, &data))?;
        let with_stores: Vec<_> = rows
            .iter()
            .filter_map(|row| {
                let metric = format!("store_and_{}", row.metric);
                row_of_detail(row, metric, row.unit.clone(), "with_stores_ms")
            })
            .collect();
        rows.extend(with_stores);
        let definitions = definitions(options);
        let config = [("size_bytes", json!(size_bytes)), ("dirty_percent", json!(options.dirty))];
        Ok(stage.report(rows, move |rows| ratios(&definitions, rows), config))
    }
}

fn cells(options: &Options, stage: &Stage, data: &DataFile) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &percent in &options.dirty {
        let pages = ((data.pages() as f64 * percent / 100.0) as u64).max(1);
        for contender in stage.wanted(SYSTEMS) {
            let salt = cells.len() as u64 + 1;
            let work = FilesWork::Flush { pages, salt };
            let mut job = job(stage, contender, &data.path(), work);
            job.source.pages = data.pages();
            cells.push(Cell::new(format!("flush_{}", suffix(percent)), ("ms", 1e6), job));
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

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 100.0 => Ok(value),
        _ => Err(format!("`{text}` is not a percentage above 0 and up to 100")),
    }
}

fn definitions(options: &Options) -> Vec<Ratio> {
    let mut all = Vec::new();
    for &percent in &options.dirty {
        let share = suffix(percent);
        let name = format!("flush_exact_vs_msync_{share}");
        let stores = format!("{name}_with_stores");
        all.push(Ratio::new(name, &[MSYNC], MAPPER, format!("flush_{share}")));
        all.push(Ratio::new(stores, &[MSYNC], MAPPER, format!("store_and_flush_{share}")));
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
