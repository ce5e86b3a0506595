//! `cyclic`: data a little larger than memory, read again and again.
//!
//! | metric | what |
//! |---|---|
//! | `cycle` | a pass over all pages in order, after a few such passes |
//! | `random`, `zipf` | random pages of the same data, equally often or by Zipf's law |
//! | `once` | the first pass over all pages, from a cold start |
//!
//! Under an order like LRU a page leaves memory just before it is needed again, and all passes read
//! everything. Keeping a part of the data avoids that, and must not cost other work anything: the
//! other metrics have the same settings. The detail `read_bytes` is what a pass reads.

use anyhow::Result;

use super::declaration::{Bench, Contenders};
use super::ratio::{Figure, Ratio};
use super::setting::{Defaults, Setting};
use crate::contender::Contender;
use crate::contenders::{
    MAPPING, MAPPING_KERNEL, MAPPING_USER, MMAP, MMAP_RANDOM, MMAP_SEQUENTIAL, PAGES,
};
use crate::data::expected_sample;
use crate::harness::Cell;
use crate::job::{Job, Measured, Work};
use crate::options::{CacheOptions, Common};
use crate::report::Report;
use crate::workload::{READ_BYTES, lane_pages};
use aquifer_sys::units::Bytes;

const SCANNERS: &[&Contender] =
    &[MMAP, MMAP_SEQUENTIAL, MAPPING, MAPPING_KERNEL, MAPPING_USER, PAGES];
const READERS: &[&Contender] = &[MMAP, MMAP_RANDOM, MAPPING, MAPPING_KERNEL, MAPPING_USER, PAGES];

/// Data per memory.
const DATA_PERCENT: u64 = 128;
const WARM_PASSES: u32 = 4;
const PASSES: u32 = 4;

/// The declaration of the bench.
pub struct Cyclic;

impl Bench for Cyclic {
    type Options = CacheOptions;
    const NAME: &'static str = "cyclic";
    const ABOUT: &'static str = "Passes over data a little larger than memory";
    const CONTENDERS: Contenders = &[SCANNERS, READERS];

    fn run(common: &Common, options: &CacheOptions) -> Result<Report> {
        let defaults = Defaults {
            name: Self::NAME,
            contenders: Self::CONTENDERS,
            size_bytes: [512 << 20, 64 << 20],
            data_per_budget: 1,
            scarce: true,
        };
        let size_bytes =
            options.size.map_or(defaults.size_bytes[usize::from(common.quick)], |size| size.0);
        let budget = options.budget.unwrap_or(Bytes(size_bytes * 100 / DATA_PERCENT));
        let options = CacheOptions { budget: Some(budget), ..options.clone() };
        let setting = Setting::prepare(common, &options, defaults)?;
        let data = setting.data_file()?;
        let warm_passes = if setting.stage.quick { 1 } else { WARM_PASSES };
        let cycle = Work::Cycle { warm_passes, passes: PASSES };
        let once = Work::Cycle { warm_passes: 0, passes: 1 };
        let random = Work::Read { threads: 1 };
        let mut cells = Vec::new();
        for (metric, work, contenders) in [
            ("cycle", cycle, SCANNERS),
            ("once", once, SCANNERS),
            ("random", random, READERS),
            ("zipf", Work::Zipf, READERS),
        ] {
            for contender in setting.stage.wanted(contenders) {
                let mut job = setting.job(contender, &data, work.clone(), 100_000);
                job.limit_bytes = setting.limiter.as_ref().map(|_| setting.budget_bytes);
                job.warm_accesses = 3 * setting.pages();
                if setting.stage.quick {
                    (job.accesses, job.warm_deadline_ms) = (500, 200);
                }
                let is_pass = matches!(work, Work::Cycle { .. });
                let unit = if is_pass { ("ms", 1e6) } else { ("µs", 1e3) };
                let limit_bytes = Some(setting.budget_bytes);
                cells.push(Cell { limit_bytes, ..Cell::new(metric, unit, job) });
            }
        }
        let rows = setting.measure(&data, cells, check)?;
        Ok(setting.report(rows, definitions()))
    }
}

fn check(job: &Job, measured: &Measured) -> Result<()> {
    for (lane, answer) in (0_u32..).zip(&measured.lanes) {
        let pages = lane_pages(job, lane).take(usize::try_from(answer.accesses)?);
        let expected = pages.map(|page| expected_sample(job.seed, page)).fold(0, u64::wrapping_add);
        anyhow::ensure!(answer.checksum == expected, "it read something else than the file holds");
    }
    Ok(())
}

fn definitions() -> Vec<Ratio> {
    let scans: &[&Contender] = &[MMAP, MMAP_SEQUENTIAL];
    let reads: &[&Contender] = &[MMAP, MMAP_RANDOM];
    let mut all = vec![
        Ratio {
            figure: Figure::Detail(READ_BYTES),
            ..Ratio::new("bytes_read_kernel_vs_ours", scans, MAPPING, "cycle")
        },
        Ratio::new("time_vs_mmap", scans, MAPPING, "cycle"),
        Ratio::new("once_vs_mmap", scans, MAPPING, "once"),
        Ratio::new("random_vs_mmap", reads, MAPPING, "random"),
        Ratio::new("zipf_vs_mmap", reads, MAPPING, "zipf"),
    ];
    for ours in [MAPPING_USER, PAGES] {
        let name = ours.name;
        all.extend([
            Ratio {
                figure: Figure::Detail(READ_BYTES),
                ..Ratio::new(format!("bytes_read_kernel_vs_{name}"), scans, ours, "cycle")
            },
            Ratio::new(format!("{name}_vs_mmap_cycle"), scans, ours, "cycle"),
            Ratio::new(format!("{name}_vs_mmap_random"), reads, ours, "random"),
            Ratio::new(format!("{name}_vs_mmap_zipf"), reads, ours, "zipf"),
        ]);
    }
    all
}
