//! `map-ahead`: one large file, read sequentially or at random, warm or from its device.
//!
//! | metric | what |
//! |---|---|
//! | `stream` | warm, one reader, page-sized records |
//! | `stream_2readers` | the same in two halves, with as many processors as readers: none is idle |
//! | `stream_cold_1stream`, `_4streams` | from the device, at one position or at four in turn |
//! | `random` | warm, random pages, without advice |
//! | `prefetch` | from the device, random pages that are known in advance |

use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Ground, Lowest, cell, file_systems, grounds, job, lowest_ratios, run_block, warm_bytes,
};
use crate::benches::stage::Stage;
use crate::contender::System;
use crate::data::{DataFile, check_space};
use crate::harness::{Cell, FilesWork, progress_bar};
use crate::options::MapAheadOptions;
use crate::raw::PAGE_BYTES;
use crate::report::{Ratio, Report, Row};
use aquifer_host::machine::memory_bytes;
use aquifer_host::units::Bytes;

const STREAM: &[System] =
    &[System::Mmap, System::MmapPopulate, System::Mapper, System::MapperUnadvised];
const COLD: &[System] = &[
    System::Mmap,
    System::MmapPopulate,
    System::MmapSequential,
    System::MmapWillneed,
    System::Mapper,
];
const RANDOM: &[System] = &[System::Mmap, System::MmapRandom, System::Mapper];
const PREFETCH: &[System] = &[
    System::Mmap,
    System::MmapRandom,
    System::MmapWillneed,
    System::MmapWillneedAhead,
    System::Mapper,
];

/// Readers in the measurement without an idle processor.
const READERS: u32 = 2;
/// Length of the file, normally and in the quick form.
const SIZE_BYTES: [u64; 2] = [4 << 30, 16 << 20];
/// At most this much is read from the device in a measurement.
const COLD_BYTES: u64 = 1 << 30;
/// Random pages of a measurement, warm and from the device.
const RANDOM_PAGES: u64 = 250_000;
const PREFETCHED_PAGES: u64 = 4096;

/// Runs the bench.
pub fn run(options: &MapAheadOptions) -> Result<Report> {
    let size_bytes = size(options)?;
    let mut stage =
        Stage::prepare(&options.common, &[STREAM, COLD, RANDOM, PREFETCH], size_bytes, false)?;
    let grounds = grounds(&mut stage, &options.memory);
    let mut notes = std::mem::take(&mut stage.notes);
    let mut rows = Vec::new();
    for ground in &grounds {
        let block = Block { stage: &stage, ground, size_bytes };
        rows.extend(block.run(&mut notes)?);
    }
    if grounds.iter().all(Ground::is_in_memory) {
        notes.push("nothing was read from a device: choose a --dir on a disk".to_owned());
    }
    stage.notes = notes;
    let found = lowest_ratios(&definitions(&grounds), &rows);
    let config = [
        ("size_bytes", json!(size_bytes)),
        ("cold_bytes", json!(size_bytes.min(COLD_BYTES))),
        ("file_systems", file_systems(&grounds)),
    ];
    Ok(stage.report("map-ahead", rows, found, config))
}

/// The requested size, or the smaller of 4 GiB and a quarter of memory; fails if it would not stay
/// in memory.
fn size(options: &MapAheadOptions) -> Result<u64> {
    let default_bytes = SIZE_BYTES[usize::from(options.common.quick)].min(memory_bytes() / 4);
    let size_bytes = options.size.map_or(default_bytes, |size| size.0);
    let size_bytes = size_bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    // A page of the mapping is numbered by 32 bits.
    ensure!(
        size_bytes >= 16 * PAGE_BYTES as u64 && size_bytes <= 1 << 44,
        "a file of {} is too small or too large: choose a --size between 64 KiB and 16 TiB",
        Bytes(size_bytes)
    );
    let room_bytes = 2 * warm_bytes();
    ensure!(
        size_bytes <= room_bytes,
        "a file of {} does not stay in memory, of which a half is {}: choose a smaller --size",
        Bytes(size_bytes),
        Bytes(room_bytes)
    );
    Ok(size_bytes)
}

/// The measurements on one file system.
struct Block<'a> {
    stage: &'a Stage,
    ground: &'a Ground,
    size_bytes: u64,
}

impl Block<'_> {
    fn run(&self, notes: &mut Vec<String>) -> Result<Vec<Row>> {
        check_space(&self.ground.path, self.size_bytes + self.size_bytes / 64)?;
        let bar = progress_bar(self.size_bytes, "{bytes}/{total_bytes} writing the data file");
        let pages = self.size_bytes / PAGE_BYTES as u64;
        let data = DataFile::create(&self.ground.path, pages, self.stage.seed, |written_bytes| {
            bar.inc(written_bytes);
        });
        bar.finish_and_clear();
        let data = data?;
        run_block(self.stage, self.cells(&data.path(), pages), notes, |_, _| Ok(()))
    }

    fn cells(&self, path: &Path, pages: u64) -> Vec<Cell> {
        let (warm, cold) = (("ms", 1e6), ("µs", 1e3));
        let mut cells = Vec::new();
        let mut add = |metric: &str, unit, systems, work: FilesWork, pages, accesses| {
            let metric = format!("{metric}_{}", self.ground.file_system);
            cells.extend(self.stage.wanted(systems).map(|system| {
                let mut job = job(self.stage, system, path, pages, work.clone());
                job.accesses = accesses;
                cell(metric.clone(), unit, job)
            }));
        };
        let stream = FilesWork::Stream { readers: None, streams: 1, cold: false };
        add("stream", warm, STREAM, stream, pages, 0);
        let readers = FilesWork::Stream { readers: Some(READERS), streams: 1, cold: false };
        add(&format!("stream_{READERS}readers"), warm, STREAM, readers, pages, 0);
        add("random", warm, RANDOM, FilesWork::Scatter, pages, RANDOM_PAGES.min(pages));
        if !self.ground.is_in_memory() {
            let cold_pages = pages.min(COLD_BYTES / PAGE_BYTES as u64);
            for (streams, name) in [(1, "stream_cold_1stream"), (4, "stream_cold_4streams")] {
                let work = FilesWork::Stream { readers: None, streams, cold: true };
                add(name, warm, COLD, work, cold_pages, 0);
            }
            // So few of all pages that neighbours are rarely loaded together by chance.
            let prefetched = PREFETCHED_PAGES.min(pages / 16);
            add("prefetch", cold, PREFETCH, FilesWork::Prefetch, pages, prefetched);
        }
        cells
    }
}

fn definitions(grounds: &[Ground]) -> Vec<Lowest> {
    let lowest = |name: &str, others, metric: &str| {
        Lowest::everywhere(name, others, "mapper", metric, grounds)
    };
    let mut all = vec![
        lowest("map_ahead_vs_default", &["mmap"], "stream"),
        lowest("map_ahead_vs_populate", &["mmap_populate"], "stream"),
        lowest("map_ahead_vs_default_2readers", &["mmap"], "stream_2readers"),
        lowest("map_ahead_vs_populate_2readers", &["mmap_populate"], "stream_2readers"),
        lowest("random_vs_default", &["mmap"], "random"),
        lowest("prefetch_vs_serial_faults", &["mmap", "mmap_random"], "prefetch"),
        lowest("prefetch_vs_willneed", &["mmap_willneed"], "prefetch"),
        lowest("prefetch_vs_willneed_ahead", &["mmap_willneed_ahead"], "prefetch"),
    ];
    for metric in ["stream", "stream_2readers"] {
        let name = format!("map_ahead_unadvised_vs_default{}", &metric["stream".len()..]);
        all.push(Lowest::everywhere(name, &["mmap"], "mapper_unadvised", metric, grounds));
    }
    // The device's file system only; against the best of all forms of mmap.
    let others = &["mmap", "mmap_populate", "mmap_sequential", "mmap_willneed"];
    let mut each = Vec::new();
    for name in ["1stream", "4streams"] {
        for Ground { file_system, .. } in grounds {
            let metric = format!("stream_cold_{name}_{file_system}");
            let name = format!("map_ahead_vs_default_cold_{name}");
            each.push(Ratio::new(name, others, "mapper", metric));
        }
    }
    all.push(Lowest { name: "map_ahead_vs_default_cold".to_owned(), each });
    all
}
