//! `fault`: the parts of the time of one miss, as in figure 8 of the Aquila paper.
//!
//! | part | what | how |
//! |---|---|---|
//! | trap | from the load to the handler and back | [`Work::Anatomy`] |
//! | lookup | finding that, and where, the page is missing | [`Work::Anatomy`] |
//! | install | mapping it at its address | [`Work::Anatomy`] |
//! | io | reading it from the device | a miss with plenty of memory, less the three above |
//! | evict | making room for it | a miss with a full cache, less one with plenty of memory |
//!
//! So the parts add up to `total`, a miss with a full cache.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::setting::{Defaults, Setting};
use crate::contender::System;
use crate::data::DataFile;
use crate::harness::{Cell, Schedule, Work};
use crate::options::Options;
use crate::raw::{PAGE_BYTES, drop_cache};
use crate::report::{Report, Row};

const SYSTEMS: &[System] = &[System::MmapRandom, System::MappingUser, System::Pages];

const ANATOMY: &str = "anatomy";
const ROOMY: &str = "miss with room";
const FULL: &str = "total";

/// Runs the bench.
pub fn run(options: &Options) -> Result<Report> {
    let defaults = Defaults {
        contenders: &[SYSTEMS],
        size_bytes: [2 << 30, 256 << 20],
        data_per_budget: 8,
        scarce: true,
    };
    let mut setting = Setting::prepare(options, defaults)?;
    let data = setting.data_file()?;
    let cells = setting
        .stage
        .wanted(SYSTEMS)
        .flat_map(|system| cells(&setting, &data, system))
        .collect::<Vec<_>>();
    let mut notes = std::mem::take(&mut setting.stage.notes);
    let schedule = Schedule {
        limiter: setting.limiter.as_ref(),
        rounds: setting.stage.rounds,
        before: Box::new(|| Ok(drop_cache(&data.open()?)?)),
        check: Box::new(|job, measured| {
            let made: u64 = measured.lanes.iter().map(|lane| lane.accesses).sum();
            ensure!(made == job.accesses, "only {made} of {} accesses in time", job.accesses);
            Ok(())
        }),
    };
    let rows = schedule.run(cells, &mut notes)?;
    drop(schedule);
    setting.stage.notes = notes;
    let limited = setting.limiter.is_some();
    let rows = SYSTEMS.iter().flat_map(|system| parts_of(&rows, system.name(), limited)).collect();
    Ok(setting.report("fault", rows, &[]))
}

fn cells(setting: &Setting, data: &DataFile, system: System) -> [Cell; 3] {
    // Few of many pages, so that neighbours are rarely loaded together by chance.
    let accesses = (setting.pages() / 64).min(10_000);
    let anatomy = setting.job(system, data, Work::Anatomy, accesses);
    let mut full = setting.job(system, data, Work::Miss, accesses);
    full.warm_accesses = setting.budget_bytes / PAGE_BYTES as u64 * 5 / 4;
    full.deadline_ms = 60_000;
    full.limit_bytes = setting.limiter.as_ref().map(|_| setting.budget_bytes);
    // The same accesses, with room for all of them.
    let mut roomy = full.clone();
    roomy.limit_bytes = None;
    let room_bytes = (full.warm_accesses + accesses) * PAGE_BYTES as u64;
    roomy.source.cache_bytes = room_bytes + room_bytes / 2;
    let cell = |metric: &str, job, limit_bytes| Cell {
        metric: metric.to_owned(),
        unit: ("ns", 1.0),
        job,
        limit_bytes,
    };
    [
        cell(ANATOMY, anatomy, None),
        cell(ROOMY, roomy, None),
        cell(FULL, full, Some(setting.budget_bytes)),
    ]
}

/// Makes a row of each part. Without a memory limit there is no meaningful eviction.
fn parts_of(rows: &[Row], system: &str, limited: bool) -> Vec<Row> {
    let find = |metric: &str| rows.iter().find(|row| row.system == system && row.metric == metric);
    let (Some(anatomy), Some(roomy), Some(full)) = (find(ANATOMY), find(ROOMY), find(FULL)) else {
        return Vec::new();
    };
    let part = |metric: &str, median: f64| Row {
        metric: metric.to_owned(),
        median,
        values: Vec::new(),
        details: BTreeMap::new(),
        ..anatomy.clone()
    };
    let measured = |name: &str| anatomy.details.get(name).copied().unwrap_or(0.0);
    let (trap, lookup, install) = (measured("trap"), measured("lookup"), measured("install"));
    let mut parts = vec![
        part("trap", trap),
        part("lookup", lookup),
        part("io", roomy.median - trap - lookup - install),
        part("install", install),
    ];
    if limited {
        parts.push(part("evict", full.median - roomy.median));
        parts.push(full.clone());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up() {
        let row = |metric: &str, median: f64, details: &[(&str, f64)]| Row {
            system: "s",
            metric: metric.to_owned(),
            unit: "ns",
            median,
            p99: None,
            p999: None,
            rounds: 1,
            values: vec![median],
            details: details.iter().map(|&(name, ns)| (name.to_owned(), ns)).collect(),
        };
        let details = [("trap", 1.0), ("lookup", 2.0), ("install", 3.0)];
        let rows = [row(ANATOMY, 6.0, &details), row(ROOMY, 30.0, &[]), row(FULL, 50.0, &[])];
        let found: Vec<_> =
            parts_of(&rows, "s", true).into_iter().map(|row| (row.metric, row.median)).collect();
        let expected = [
            ("trap", 1.0),
            ("lookup", 2.0),
            ("io", 24.0),
            ("install", 3.0),
            ("evict", 20.0),
            ("total", 50.0),
        ];
        assert_eq!(found, expected.map(|(name, ns)| (name.to_owned(), ns)));
        assert!(parts_of(&rows[..2], "s", true).is_empty());
    }
}
