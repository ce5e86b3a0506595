//! `rows`: fixed-length rows of a file several times larger than memory, as in embedding tables and
//! feature stores.
//!
//! Rows of 3 KiB by chance and rows of 256 bytes by Zipf's law, in batches of 256 that are known in
//! advance. `mmap_willneed` represents the loop that an expert writes over mmap: each batch in the
//! order of the file, its pages asked for by one vectored `process_madvise(WILLNEED)`, overlapping
//! ranges merged; `mmap_random` the one without that. Every contender's process is limited to the
//! budget, for any use of memory. The sums over the rows are checked.

use anyhow::{Result, ensure};

use super::declaration::{Bench, Contenders};
use super::ratio::Ratio;
use super::setting::{Defaults, Setting};
use crate::contender::Contender;
use crate::contenders::{MMAP_RANDOM, MMAP_WILLNEED, ROWS};
use crate::harness::{Cell, progress_bar};
use crate::job::{Draw, Job, Measured, RowsWork, Work};
use crate::options::{CacheOptions, Common};
use crate::raw::drop_cache;
use crate::report::Report;
use crate::row_file::RowFile;
use crate::workload::expected_answer;

const SYSTEMS: &[&Contender] = &[MMAP_RANDOM, MMAP_WILLNEED, ROWS];

/// Rows in a batch.
const BATCH_ROWS: usize = 256;

/// The measurements, by the end of their names.
const WORKS: [(&str, RowsWork); 2] = [
    ("3k_uniform", RowsWork { row_bytes: 3072, batch_rows: BATCH_ROWS, draw: Draw::Uniform }),
    ("256b_zipf", RowsWork { row_bytes: 256, batch_rows: BATCH_ROWS, draw: Draw::Zipf }),
];

/// The declaration of the bench.
pub struct RowsBench;

impl Bench for RowsBench {
    type Options = CacheOptions;
    const NAME: &'static str = "rows";
    const ABOUT: &'static str = "Batches of fixed-length rows of a file larger than memory";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &CacheOptions) -> Result<Report> {
        let defaults = Defaults {
            name: Self::NAME,
            contenders: Self::CONTENDERS,
            size_bytes: [2 << 30, 256 << 20],
            data_per_budget: 8,
            scarce: true,
        };
        let setting = Setting::prepare(common, options, defaults)?;
        let bar = progress_bar(setting.size_bytes, "{bytes}/{total_bytes} writing the data file");
        let (place, seed) = (setting.stage.place.path(), setting.stage.seed);
        let file = RowFile::create(place, setting.size_bytes, seed, |bytes| bar.inc(bytes));
        bar.finish_and_clear();
        let file = file?;
        let before = || Ok(drop_cache(&file.open()?)?);
        let limiter = setting.limiter.as_ref();
        let rows = setting.stage.measure(limiter, before, cells(&setting, &file), check)?;
        Ok(setting.report(rows, definitions()))
    }
}

fn cells(setting: &Setting, file: &RowFile) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (name, work) in WORKS {
        for contender in setting.stage.wanted(SYSTEMS) {
            let seed = setting.stage.seed;
            let mut job = Job::new(contender.name, file.path(), seed, Work::Rows(work));
            job.source.pages = setting.pages();
            job.source.cache_bytes = setting.cache_bytes();
            job.limit_bytes = setting.limiter.as_ref().map(|_| setting.budget_bytes);
            // Popular rows come to stay after many draws only; every contender gets the time.
            let fills = setting.budget_bytes / work.row_bytes;
            job.warm_accesses = if work.draw == Draw::Zipf { 6 * fills } else { fills * 5 / 4 };
            job.warm_deadline_ms = 10_000;
            (job.accesses, job.deadline_ms) = (1_000_000, 3000);
            if setting.stage.quick {
                job.warm_deadline_ms = 200;
                job.accesses = 1024;
            }
            let limit_bytes = Some(setting.budget_bytes);
            cells.push(Cell { limit_bytes, ..Cell::new(name, ("µs", 1e3), job) });
        }
    }
    cells
}

fn check(job: &Job, measured: &Measured) -> Result<()> {
    let Work::Rows(work) = job.work else { unreachable!("all cells are of this kind") };
    for answer in &measured.lanes {
        let expected = expected_answer(job, work, answer.accesses);
        ensure!(answer.checksum == expected, "it read something else than the file holds");
    }
    Ok(())
}

fn definitions() -> Vec<Ratio> {
    let mut all = Vec::new();
    for (metric, _) in WORKS {
        for (name, other) in
            [("willneed", &[MMAP_WILLNEED] as &[_]), ("mmap_random", &[MMAP_RANDOM])]
        {
            all.push(Ratio::new(format!("rows_vs_{name}_{metric}"), other, ROWS, metric));
        }
    }
    all
}
