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

use anyhow::{Result, ensure};

use super::declaration::{Bench, Contenders};
use super::setting::{Defaults, Setting};
use crate::contender::Contender;
use crate::contenders::{MAPPING_USER, MMAP_RANDOM, PAGES};
use crate::data::DataFile;
use crate::harness::Cell;
use crate::job::Work;
use crate::options::{CacheOptions, Common};
use crate::raw::PAGE_BYTES;
use crate::report::{Report, Row};

const SYSTEMS: &[&Contender] = &[MMAP_RANDOM, MAPPING_USER, PAGES];

const ANATOMY: &str = "anatomy";
const ROOMY: &str = "miss with room";
const FULL: &str = "total";

/// The declaration of the bench.
pub struct Fault;

impl Bench for Fault {
    type Options = CacheOptions;
    const NAME: &'static str = "fault";
    const ABOUT: &'static str = "Where the time of one miss goes";
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
        let data = setting.data_file()?;
        let wanted = setting.stage.wanted(SYSTEMS);
        let cells = wanted.flat_map(|contender| cells(&setting, &data, contender)).collect();
        let rows = setting.measure(&data, cells, |job, measured| {
            let made: u64 = measured.lanes.iter().map(|lane| lane.accesses).sum();
            ensure!(made == job.accesses, "only {made} of {} accesses in time", job.accesses);
            Ok(())
        })?;
        let limited = setting.limiter.is_some();
        let parts = SYSTEMS.iter().flat_map(|contender| parts_of(&rows, contender.name, limited));
        Ok(setting.report(parts.collect(), Vec::new()))
    }
}

fn cells(setting: &Setting, data: &DataFile, contender: &Contender) -> [Cell; 3] {
    // Few of many pages, so that neighbours are rarely loaded together by chance.
    let accesses = (setting.pages() / 64).min(10_000);
    let anatomy = setting.job(contender, data, Work::Anatomy, accesses);
    let mut full = setting.job(contender, data, Work::Miss, accesses);
    full.warm_accesses = setting.budget_bytes / PAGE_BYTES as u64 * 5 / 4;
    full.deadline_ms = 60_000;
    full.limit_bytes = setting.limiter.as_ref().map(|_| setting.budget_bytes);
    // The same accesses, with room for all of them.
    let mut roomy = full.clone();
    roomy.limit_bytes = None;
    let room_bytes = (full.warm_accesses + accesses) * PAGE_BYTES as u64;
    roomy.source.cache_bytes = room_bytes + room_bytes / 2;
    let cell =
        |metric, job, limit_bytes| Cell { limit_bytes, ..Cell::new(metric, ("ns", 1.0), job) };
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
    let part = |metric: &str, median| {
        Row::of(system, metric, anatomy.unit.clone(), vec![median], Vec::new())
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
    use crate::report::Round;

    #[test]
    fn the_parts_add_up() {
        let row = |metric: &str, median: f64, details: &[(&str, f64)]| {
            let details = details.iter().map(|&(name, ns)| (name.to_owned(), ns)).collect();
            let round = Round { details, ..Round::default() };
            Row::of("s", metric, "ns", vec![median], vec![round])
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
