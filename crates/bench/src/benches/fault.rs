//! `fault`: where the time of one miss goes, as in figure 8 of the Aquila paper.
//!
//! *trap*: from the load to the handler and back; *lookup*: finding out that and where the page is missing;
//! *io*: bringing it from the device; *install*: making it visible at its address; *evict*: making room for
//! it. How each part is obtained is documented with the job ([`crate::workload`]). `total` is a miss with a
//! full cache; the parts come from differences of means, so they add up to it only about.

use anyhow::{Result, ensure};

use super::setting::{Defaults, Setting};
use crate::contender::System;
use crate::harness::{Cell, Schedule, Work};
use crate::options::Options;
use crate::raw::{PAGE_BYTES, drop_cache};
use crate::report::{Report, Row};

const PARTS: [&str; 4] = ["trap", "lookup", "io", "install"];

/// Runs the bench.
pub fn run(options: &Options) -> Result<Report> {
    let defaults = Defaults { size_bytes: [2 << 30, 128 << 20], data_per_budget: 8, scarce: true };
    let mut setting = Setting::prepare(options, defaults)?;
    let data = setting.data_file()?;
    // Few pages of many, so that neighbours are not brought in together by accident.
    let accesses = (setting.pages() / 64).min(10_000);
    let system = System::MmapRandom;
    let anatomy = Cell {
        metric: "anatomy".to_owned(),
        unit: ("ns", 1.0),
        job: setting.job(system, &data, Work::Anatomy, accesses),
        limit_bytes: None,
    };
    let mut full = setting.job(system, &data, Work::Miss, accesses);
    full.warm_accesses = setting.budget_bytes / PAGE_BYTES as u64 * 5 / 4;
    full.deadline_ms = 60_000;
    full.limit_bytes = setting.limiter.as_ref().map(|_| setting.budget_bytes);
    // With the same accesses before it but plenty of memory: the difference is eviction and nothing else.
    let mut roomy = full.clone();
    roomy.limit_bytes = None;
    let miss = |metric: &str, job, limit_bytes| Cell {
        metric: metric.to_owned(),
        unit: ("ns", 1.0),
        job,
        limit_bytes,
    };
    let cells = vec![
        anatomy,
        miss("total", full, Some(setting.budget_bytes)),
        miss("miss_with_room", roomy, None),
    ];
    let mut notes = std::mem::take(&mut setting.notes);
    let schedule = Schedule {
        limiter: setting.limiter.as_ref(),
        rounds: setting.rounds,
        before: Box::new(|| Ok(drop_cache(data.file())?)),
        check: Box::new(|job, measured| {
            let made: u64 = measured.lanes.iter().map(|lane| lane.accesses).sum();
            ensure!(made == job.accesses, "only {made} of {} accesses in time", job.accesses);
            Ok(())
        }),
    };
    let rows = schedule.run(cells, &mut notes)?;
    drop(schedule);
    setting.notes = notes;
    let rows = parts_of(rows, setting.limiter.is_some());
    Ok(setting.report("fault", rows, &[]))
}

/// Makes a row of each part. Without a limit nothing is evicted.
fn parts_of(rows: Vec<Row>, limited: bool) -> Vec<Row> {
    let find = |metric: &str| rows.iter().find(|row| row.metric == metric);
    let (Some(anatomy), Some(total), Some(roomy)) =
        (find("anatomy"), find("total"), find("miss_with_room"))
    else {
        return rows;
    };
    let part = |metric: &str, median: f64| Row {
        metric: metric.to_owned(),
        median,
        p99: None,
        p999: None,
        values: Vec::new(),
        details: std::collections::BTreeMap::new(),
        ..anatomy.clone()
    };
    let mut parts: Vec<Row> =
        PARTS.iter().filter_map(|&name| Some(part(name, *anatomy.details.get(name)?))).collect();
    if limited {
        parts.push(part("evict", total.median - roomy.median));
        parts.push(total.clone());
    }
    parts.push(roomy.clone());
    parts
}
