//! `hit`: the cost of an access when everything is resident.
//!
//! Random 8-byte loads over a range that is warm in every contender. Raw mappings and anonymous
//! memory are kept to base pages, so that the comparison is about access paths and not about
//! translation sizes; the detail `huge_mapped_bytes` tells how much was mapped with larger pages
//! anyway.

use std::cell::RefCell;
use std::collections::HashMap;

use anyhow::{Result, ensure};

use super::setting::{Defaults, Setting};
use crate::contender::System;
use crate::harness::{Cell, LaneAnswer, Schedule, Work};
use crate::options::Options;
use crate::raw::{cached_bytes, drop_cache};
use crate::report::{Ratio, Report};

const SYSTEMS: &[System] = &[
    System::Anonymous,
    System::Mmap,
    System::MmapRandom,
    System::UserCache,
    System::Mapping,
    System::MappingKernel,
    System::MappingUser,
    System::MappingTouch,
    System::Pages,
];

/// Runs the bench.
pub fn run(options: &Options) -> Result<Report> {
    let defaults = Defaults {
        contenders: &[SYSTEMS],
        size_bytes: [256 << 20, 16 << 20],
        data_per_budget: 1,
        scarce: false,
    };
    let mut setting = Setting::prepare(options, defaults)?;
    let data = setting.data_file()?;
    let accesses = if setting.stage.quick { 100_000 } else { 10_000_000 };
    let cells = setting.stage.wanted(SYSTEMS).map(|system| {
        let mut job = setting.job(system, &data, Work::Load, accesses);
        job.source.base_pages = true;
        // Nothing may be evicted, including through a cache's bookkeeping or uneven sharding.
        job.source.cache_bytes = 2 * setting.size_bytes;
        Cell { metric: "load".to_owned(), unit: ("ns", 1.0), job, limit_bytes: None }
    });
    let cells = cells.collect();
    let answers = RefCell::new(HashMap::<u32, Vec<LaneAnswer>>::new());
    let mut notes = std::mem::take(&mut setting.stage.notes);
    let schedule = Schedule {
        limiter: None,
        rounds: setting.stage.rounds,
        before: Box::new(|| Ok(drop_cache(&data.open()?)?)),
        check: Box::new(|job, measured| {
            let mut answers = answers.borrow_mut();
            let first = answers.entry(job.round).or_insert_with(|| measured.lanes.clone());
            ensure!(*first == measured.lanes, "it read other bytes than the contender before it");
            Ok(())
        }),
    };
    let rows = schedule.run(cells, &mut notes)?;
    if cached_bytes(&data.open()?)?.is_none() {
        notes.push("this kernel has no cachestat (6.5): warmth was not checked".to_owned());
    }
    setting.stage.notes = notes;
    Ok(setting.report("hit", rows, &definitions()))
}

fn definitions() -> Vec<Ratio> {
    let load = |name: &str, others, ours| Ratio::new(name, others, ours, "load");
    vec![
        load("mapping_vs_file_mmap", &["mmap", "mmap_random"], "mapping"),
        load("mapping_vs_anonymous", &["anonymous"], "mapping"),
        load("pages_vs_user_cache", &["user_cache"], "pages"),
    ]
}
