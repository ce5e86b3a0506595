//! `hit`: the cost of an access when everything is resident.
//!
//! Random 8-byte loads over a range that is warm in every contender. Raw mappings and anonymous
//! memory are kept to base pages, so that the comparison is about access paths and not about
//! translation sizes; the detail `huge_mapped_bytes` tells how much was mapped with larger pages
//! anyway. A contender that misses, by its own counters or by page faults, fails the run.

use anyhow::Result;

use super::declaration::{Bench, Contenders};
use super::ratio::Ratio;
use super::setting::{Defaults, Setting};
use super::stage::Answers;
use crate::contender::Contender;
use crate::contenders::{
    ANONYMOUS, MAPPING, MAPPING_KERNEL, MAPPING_TOUCH, MAPPING_USER, MMAP, MMAP_RANDOM, PAGES,
    USER_CACHE,
};
use crate::harness::Cell;
use crate::job::Work;
use crate::options::{CacheOptions, Common};
use crate::raw::cached_bytes;
use crate::report::Report;

const SYSTEMS: &[&Contender] = &[
    ANONYMOUS,
    MMAP,
    MMAP_RANDOM,
    USER_CACHE,
    MAPPING,
    MAPPING_KERNEL,
    MAPPING_USER,
    MAPPING_TOUCH,
    PAGES,
];

/// The declaration of the bench.
pub struct Hit;

impl Bench for Hit {
    type Options = CacheOptions;
    const NAME: &'static str = "hit";
    const ABOUT: &'static str = "Random 8-byte loads from memory that is all resident";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &CacheOptions) -> Result<Report> {
        let defaults = Defaults {
            name: Self::NAME,
            contenders: Self::CONTENDERS,
            size_bytes: [256 << 20, 16 << 20],
            data_per_budget: 1,
            scarce: false,
        };
        let setting = Setting::prepare(common, options, defaults)?;
        let data = setting.data_file()?;
        let accesses = if common.quick { 100_000 } else { 10_000_000 };
        let cells = setting.stage.wanted(SYSTEMS).map(|contender| {
            let mut job = setting.job(contender, &data, Work::Load, accesses);
            job.source.base_pages = true;
            // Nothing may be evicted, including through a cache's bookkeeping or uneven sharding.
            job.source.cache_bytes = 2 * setting.size_bytes;
            job.source.page_cache_bytes = 2 * setting.size_bytes;
            Cell::new("load", ("ns", 1.0), job)
        });
        let answers = Answers::new();
        let rows = setting
            .measure(&data, cells.collect(), |job, measured| answers.check(job.round, measured))?;
        if cached_bytes(&data.open()?)?.is_none() {
            setting.stage.note("this kernel has no cachestat (6.5): warmth was not checked");
        }
        Ok(setting.report(rows, definitions()))
    }
}

fn definitions() -> Vec<Ratio> {
    let load = |name: &str, others, ours| Ratio::new(name, others, ours, "load");
    vec![
        load("mapping_vs_file_mmap", &[MMAP, MMAP_RANDOM], MAPPING),
        load("mapping_vs_anonymous", &[ANONYMOUS], MAPPING),
        load("pages_vs_user_cache", &[USER_CACHE], PAGES),
    ]
}
