//! `bfs`: breadth-first search over an R-MAT graph, from a cold start.
//!
//! Every contender runs the same search. `mmap` and `mmap_random` stand for programs as they are; for
//! `mmap_willneed` the frontier is prefetched with vectored `process_madvise(WILLNEED)`, exactly where the
//! mapping's own prefetch is called. Memory is the budget plus what the search needs for itself (levels and
//! frontiers, 12 bytes a vertex), the same for all. The number of threads is the largest asked for.

use std::cell::OnceCell;

use anyhow::{Result, ensure};
use serde_json::json;

use super::setting::{Defaults, Setting};
use crate::contender::{Source, System};
use crate::graph::{GraphFile, Rmat, Shape, state_bytes};
use crate::harness::{Cell, Job, LaneAnswer, Schedule, Work, progress_bar};
use crate::options::Options;
use crate::raw::{PAGE_BYTES, drop_cache};
use crate::report::{Ratio, Report};

const SYSTEMS: &[System] =
    &[System::Mmap, System::MmapRandom, System::MmapWillneed, System::Mapping];

/// Runs the bench.
pub fn run(options: &Options) -> Result<Report> {
    let defaults = Defaults { size_bytes: [256 << 20, 64 << 20], data_per_budget: 4, scarce: true };
    let mut setting = Setting::prepare(options, defaults)?;
    let rmat = Rmat { shape: Shape::for_size(setting.size_bytes), seed: setting.seed };
    let bar = progress_bar(1000, "generating the graph");
    let file = GraphFile::create(setting.place.path(), &rmat, |share| {
        bar.set_position((share * 1000.0) as u64);
    });
    bar.finish_and_clear();
    let file = file?;
    let graph = file.graph();
    let threads = setting.threads.last().copied().unwrap_or(1);
    let limit_bytes = Some(setting.budget_bytes + state_bytes(&graph));
    let cells = SYSTEMS.iter().map(|&system| {
        let job = Job {
            system,
            source: Source {
                path: file.path(),
                pages: graph.file_bytes() / PAGE_BYTES as u64,
                writable: false,
                cache_bytes: setting.cache_bytes(),
                base_pages: false,
            },
            work: Work::Bfs { threads },
            seed: setting.seed,
            round: 0,
            accesses: 0,
            // Read-ahead that brings in what evicts the rest can take an hour. A form that is this slow is
            // not the best one of mmap, so leaving it out changes no ratio.
            deadline_ms: if setting.quick { 10_000 } else { 90_000 },
            warm_accesses: 0,
            warm_deadline_ms: 0,
            limit_bytes: setting.limiter.as_ref().and(limit_bytes),
        };
        Cell { metric: "search".to_owned(), unit: ("ms", 1e6), job, limit_bytes }
    });
    let cells = cells.collect();
    let answer = OnceCell::<Vec<LaneAnswer>>::new();
    let mut notes = std::mem::take(&mut setting.notes);
    let schedule = Schedule {
        limiter: setting.limiter.as_ref(),
        rounds: setting.rounds,
        before: Box::new(|| Ok(drop_cache(file.file())?)),
        check: Box::new(|_, measured| {
            let first = answer.get_or_init(|| measured.lanes.clone());
            ensure!(*first == measured.lanes, "it found other levels than the search before it");
            Ok(())
        }),
    };
    let rows = schedule.run(cells, &mut notes)?;
    drop(schedule);
    setting.notes = notes;
    let mut report = setting.report("bfs", rows, &definitions());
    report.config.insert("vertices", json!(graph.vertices));
    report.config.insert("entries", json!(graph.entries));
    report.config.insert("threads", json!([threads]));
    Ok(report)
}

fn definitions() -> Vec<Ratio> {
    vec![
        Ratio::new(
            "mapping_vs_mmap",
            &["mmap", "mmap_random", "mmap_willneed"],
            "mapping",
            "search",
        ),
        Ratio::new("mapping_vs_plain_mmap", &["mmap", "mmap_random"], "mapping", "search"),
    ]
}
