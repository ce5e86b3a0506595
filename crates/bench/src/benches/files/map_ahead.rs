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
use clap::Args;
use serde_json::json;

use super::{Ground, Lowest, file_systems, grounds, job, lowest_ratios, run_block, warm_bytes};
use crate::benches::declaration::{Bench, Contenders};
use crate::benches::ratio::Ratio;
use crate::benches::stage::{Stage, data_file};
use crate::contender::Contender;
use crate::contenders::{
    MAPPER, MAPPER_UNADVISED, MMAP, MMAP_POPULATE, MMAP_RANDOM, MMAP_SEQUENTIAL, MMAP_WILLNEED,
    MMAP_WILLNEED_AHEAD,
};
use crate::data::check_space;
use crate::harness::Cell;
use crate::job::FilesWork;
use crate::options::{Common, Memory};
use crate::raw::PAGE_BYTES;
use crate::report::{Report, Row};
use aquifer_sys::machine::memory_bytes;
use aquifer_sys::units::Bytes;

const STREAM: &[&Contender] = &[MMAP, MMAP_POPULATE, MAPPER, MAPPER_UNADVISED];
const COLD: &[&Contender] = &[MMAP, MMAP_POPULATE, MMAP_SEQUENTIAL, MMAP_WILLNEED, MAPPER];
const RANDOM: &[&Contender] = &[MMAP, MMAP_RANDOM, MAPPER];
const PREFETCH: &[&Contender] = &[MMAP, MMAP_RANDOM, MMAP_WILLNEED, MMAP_WILLNEED_AHEAD, MAPPER];

/// Readers in the measurement without an idle processor.
const READERS: u32 = 2;
/// Length of the file, normally and in the quick form.
const SIZE_BYTES: [u64; 2] = [4 << 30, 16 << 20];
/// At most this much is read from the device in a measurement.
const COLD_BYTES: u64 = 1 << 30;
/// Random pages of a measurement, warm and from the device.
const RANDOM_PAGES: u64 = 250_000;
const PREFETCHED_PAGES: u64 = 4096;

/// The options of `bench map-ahead`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench map-ahead                         warm, cold, random and prefetched pages of one file
  aquifer bench map-ahead --dir /mnt/nvme --size 8G
  aquifer bench map-ahead --only mmap,mmap_populate,mapper --json")]
pub struct Options {
    /// Where the file in memory is.
    #[command(flatten)]
    memory: Memory,

    /// Length of the file [default: 4 GiB, or a quarter of memory where that is less]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,
}

/// The declaration of the bench.
pub struct MapAhead;

impl Bench for MapAhead {
    type Options = Options;
    const NAME: &'static str = "map-ahead";
    const ABOUT: &'static str = "One large file: sequential, random and prefetched pages";
    const CONTENDERS: Contenders = &[STREAM, COLD, RANDOM, PREFETCH];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let size_bytes = size(common, options)?;
        let stage = Stage::of::<Self>(common, size_bytes, false)?;
        let grounds = grounds(&stage, &options.memory);
        let mut rows = Vec::new();
        for ground in &grounds {
            let block = Block { stage: &stage, ground, size_bytes };
            rows.extend(block.run()?);
        }
        if grounds.iter().all(Ground::is_in_memory) {
            stage.note("nothing was read from a device: choose a --dir on a disk");
        }
        let definitions = definitions(&grounds);
        let config = [
            ("size_bytes", json!(size_bytes)),
            ("cold_bytes", json!(size_bytes.min(COLD_BYTES))),
            ("file_systems", file_systems(&grounds)),
        ];
        Ok(stage.report(rows, move |rows| lowest_ratios(&definitions, rows), config))
    }
}

/// The requested size, or the smaller of 4 GiB and a quarter of memory; fails if it would not stay
/// in memory.
fn size(common: &Common, options: &Options) -> Result<u64> {
    let default_bytes = SIZE_BYTES[usize::from(common.quick)].min(memory_bytes() / 4);
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
    fn run(&self) -> Result<Vec<Row>> {
        check_space(&self.ground.path, self.size_bytes + self.size_bytes / 64)?;
        let pages = self.size_bytes / PAGE_BYTES as u64;
        let data = data_file(&self.ground.path, pages, self.stage.seed)?;
        run_block(self.stage, self.cells(&data.path(), pages), |_, _| Ok(()))
    }

    fn cells(&self, path: &Path, pages: u64) -> Vec<Cell> {
        let (warm, cold) = (("ms", 1e6), ("µs", 1e3));
        let mut cells = Vec::new();
        let mut add = |metric: &str, unit, systems, work: FilesWork, pages, accesses| {
            let metric = format!("{metric}_{}", self.ground.file_system);
            cells.extend(self.stage.wanted(systems).map(|contender| {
                let mut job = job(self.stage, contender, path, work.clone());
                job.source.pages = pages;
                job.accesses = accesses;
                Cell::new(metric.clone(), unit, job)
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
        Lowest::everywhere(name, others, MAPPER, metric, grounds)
    };
    let mut all = vec![
        lowest("map_ahead_vs_default", &[MMAP], "stream"),
        lowest("map_ahead_vs_populate", &[MMAP_POPULATE], "stream"),
        lowest("map_ahead_vs_default_2readers", &[MMAP], "stream_2readers"),
        lowest("map_ahead_vs_populate_2readers", &[MMAP_POPULATE], "stream_2readers"),
        lowest("random_vs_default", &[MMAP], "random"),
        lowest("prefetch_vs_serial_faults", &[MMAP, MMAP_RANDOM], "prefetch"),
        lowest("prefetch_vs_willneed", &[MMAP_WILLNEED], "prefetch"),
        lowest("prefetch_vs_willneed_ahead", &[MMAP_WILLNEED_AHEAD], "prefetch"),
    ];
    for metric in ["stream", "stream_2readers"] {
        let name = format!("map_ahead_unadvised_vs_default{}", &metric["stream".len()..]);
        all.push(Lowest::everywhere(name, &[MMAP], MAPPER_UNADVISED, metric, grounds));
    }
    // The device's file system only; against the best of all forms of mmap.
    let others: &[&Contender] = &[MMAP, MMAP_POPULATE, MMAP_SEQUENTIAL, MMAP_WILLNEED];
    let mut each = Vec::new();
    for name in ["1stream", "4streams"] {
        for Ground { file_system, .. } in grounds {
            let metric = format!("stream_cold_{name}_{file_system}");
            let name = format!("map_ahead_vs_default_cold_{name}");
            each.push(Ratio::new(name, others, MAPPER, metric));
        }
    }
    all.push(Lowest { name: "map_ahead_vs_default_cold".to_owned(), each });
    all
}
