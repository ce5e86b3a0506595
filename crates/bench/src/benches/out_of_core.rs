//! `out-of-core`: random pages of a file several times larger than memory.
//!
//! Three kinds of work: single reads and single stores with each number of threads, and reads in
//! batches of 64 pages known in advance. Every contender's process is limited to the budget, for
//! any use of memory. Reads are checked against the file's content, stores by reading the device,
//! bypassing all caches.

use anyhow::{Result, ensure};

use super::declaration::{Bench, Contenders};
use super::ratio::{Figure, Ratio};
use super::setting::{Defaults, Setting};
use crate::contender::Contender;
use crate::contenders::{
    MAPPING, MAPPING_BATCHED, MAPPING_KERNEL, MAPPING_TOUCH, MAPPING_USER, MAPPING_VISITED, MMAP,
    MMAP_RANDOM, MMAP_WILLNEED, PAGES, PAGES_BATCHED, PAGES_VISITED, PREAD_DIRECT, USER_CACHE,
};
use crate::data::{DataFile, expected_sample};
use crate::harness::Cell;
use crate::job::{Job, Measured, Work};
use crate::options::{CacheOptions, Common};
use crate::raw::{PAGE_BYTES, cached_bytes};
use crate::report::Report;
use crate::workload::{lane_pages, stored_byte};

const READERS: &[&Contender] = &[
    MMAP,
    MMAP_RANDOM,
    PREAD_DIRECT,
    USER_CACHE,
    MAPPING,
    MAPPING_KERNEL,
    MAPPING_USER,
    MAPPING_TOUCH,
    PAGES,
];
const BATCHERS: &[&Contender] =
    &[MMAP_WILLNEED, MAPPING_BATCHED, MAPPING_VISITED, PAGES_BATCHED, PAGES_VISITED];
const WRITERS: &[&Contender] = &[MMAP, MMAP_RANDOM, PREAD_DIRECT, MAPPING, MAPPING_TOUCH, PAGES];

/// Pages in a batch.
const BATCH_PAGES: usize = 64;
/// Stores of each measurement that are verified on the device.
const VERIFIED_STORES: usize = 256;

/// The declaration of the bench.
pub struct OutOfCore;

impl Bench for OutOfCore {
    type Options = CacheOptions;
    const NAME: &'static str = "out-of-core";
    const ABOUT: &'static str = "Random pages of a file several times larger than memory";
    const CONTENDERS: Contenders = &[READERS, BATCHERS, WRITERS];

    fn run(common: &Common, options: &CacheOptions) -> Result<Report> {
        let defaults = Defaults {
            name: Self::NAME,
            contenders: Self::CONTENDERS,
            size_bytes: [2 << 30, 256 << 20],
            data_per_budget: 8,
            scarce: true,
        };
        let setting = Setting::prepare(common, options, defaults)?;
        let data = setting.data_file()?;
        let cells = cells(&setting, &data);
        let rows = setting.measure(&data, cells, |job, measured| check(job, measured, &data))?;
        if cached_bytes(&data.open()?)?.is_none() {
            setting.stage.note("this kernel has no cachestat (6.5): cold starts were not checked");
        }
        Ok(setting.report(rows, definitions(&setting.threads)))
    }
}

fn cells(setting: &Setting, data: &DataFile) -> Vec<Cell> {
    let mut cells = Vec::new();
    // A quick run only tests the bench; otherwise the deadline decides on slow devices.
    let (reads, stores) = if setting.stage.quick { (500, 500) } else { (100_000, 200_000) };
    let mut add = |metric: String, contender: &Contender, work: Work, accesses: u64| {
        let mut job = setting.job(contender, data, work, accesses);
        job.limit_bytes = setting.limiter.as_ref().map(|_| setting.budget_bytes);
        if contender != PREAD_DIRECT {
            job.warm_accesses = setting.budget_bytes / PAGE_BYTES as u64 * 5 / 4;
        }
        if matches!(job.work, Work::Write { .. }) {
            job.deadline_ms = 4000;
        }
        if setting.stage.quick {
            job.warm_deadline_ms = 200;
        }
        let limit_bytes = Some(setting.budget_bytes);
        cells.push(Cell { limit_bytes, ..Cell::new(metric, ("µs", 1e3), job) });
    };
    for &threads in &setting.threads {
        for contender in setting.stage.wanted(READERS) {
            add(format!("read_{threads}t"), contender, Work::Read { threads }, reads);
        }
    }
    for contender in setting.stage.wanted(BATCHERS) {
        let work = Work::Batch { pages: BATCH_PAGES };
        add(format!("read_batch{BATCH_PAGES}"), contender, work, reads);
    }
    for &threads in &setting.threads {
        for (contender, number) in setting.stage.wanted(WRITERS).zip(1_u64..) {
            let salt = u64::from(threads) << 32 | number;
            add(format!("write_{threads}t"), contender, Work::Write { threads, salt }, stores);
        }
    }
    cells
}

fn check(job: &Job, measured: &Measured, data: &DataFile) -> Result<()> {
    for (lane, answer) in (0_u32..).zip(&measured.lanes) {
        let pages = lane_pages(job, lane).take(usize::try_from(answer.accesses)?);
        let expected =
            pages.map(|page| expected_sample(data.seed(), page)).fold(0, u64::wrapping_add);
        ensure!(
            answer.checksum == expected,
            "thread {lane} read something else than the file holds"
        );
    }
    if let Work::Write { threads, salt } = job.work {
        for (lane, answer) in (0..threads).zip(&measured.lanes) {
            let accesses = usize::try_from(answer.accesses)?;
            let step = accesses.div_ceil(VERIFIED_STORES / threads as usize).max(1);
            let pages = lane_pages(job, lane).take(accesses).step_by(step);
            data.verify_stores(pages.map(|page| (page, stored_byte(salt, page))))?;
        }
    }
    Ok(())
}

/// The forms of mmap; the best of them for each metric is "mmap".
const ANY_MMAP: &[&Contender] = &[MMAP, MMAP_RANDOM];

fn definitions(threads: &[u32]) -> Vec<Ratio> {
    let mut all = Vec::new();
    for threads in threads {
        let read = format!("read_{threads}t");
        for ours in [MAPPING, MAPPING_TOUCH, PAGES] {
            all.push(Ratio::new(format!("{}_vs_mmap_{read}", ours.name), ANY_MMAP, ours, &read));
        }
        all.push(Ratio {
            figure: Figure::P999,
            ..Ratio::new(format!("p999_mapping_vs_mmap_{read}"), ANY_MMAP, MAPPING, &read)
        });
        let write = format!("write_{threads}t");
        all.push(Ratio::new(format!("mapping_vs_mmap_{write}"), ANY_MMAP, MAPPING, &write));
        let name = format!("pages_vs_user_cache_{read}");
        all.push(Ratio::new(name, &[USER_CACHE], PAGES, &read));
    }
    let batch = format!("read_batch{BATCH_PAGES}");
    let serial = "mapping_batched_vs_serial_mmap_read";
    all.push(Ratio {
        other_metric: "read_1t".to_owned(),
        ..Ratio::new(serial, ANY_MMAP, MAPPING_BATCHED, &batch)
    });
    for ours in [MAPPING_BATCHED, MAPPING_VISITED, PAGES_BATCHED, PAGES_VISITED] {
        let name = format!("{}_vs_willneed", ours.name);
        all.push(Ratio::new(name, &[MMAP_WILLNEED], ours, &batch));
    }
    all
}
