//! `bfs`: breadth-first search over an R-MAT graph, from a cold start.
//!
//! Every contender runs the same search. `mmap` and `mmap_random` represent unmodified programs;
//! for `mmap_willneed` the frontier is prefetched with vectored `process_madvise(WILLNEED)`,
//! exactly where the mapping's own prefetch is called. Each contender gets the budget plus the
//! memory of the search itself (levels and frontiers, 12 bytes per vertex). The largest requested
//! number of threads is used.

use anyhow::Result;
use serde_json::json;

use super::graph_run::GraphRun;
use super::setting::Defaults;
use crate::contender::System;
use crate::harness::Work;
use crate::options::Options;
use crate::report::{Ratio, Report};

const SYSTEMS: &[System] =
    &[System::Mmap, System::MmapRandom, System::MmapWillneed, System::Mapping];

/// Runs the bench.
pub fn run(options: &Options) -> Result<Report> {
    let defaults = Defaults {
        contenders: &[SYSTEMS],
        size_bytes: [256 << 20, 64 << 20],
        data_per_budget: 4,
        scarce: true,
    };
    let mut run = GraphRun::prepare(options, defaults)?;
    let (graph, threads) = (run.graph(), run.threads());
    // Read-ahead whose pages evict others can take an hour. A form that slow is not the best form
    // of mmap, so leaving it out changes no ratio.
    let deadline_ms = if run.setting.stage.quick { 3_000 } else { 90_000 };
    let cells =
        run.setting.stage.wanted(SYSTEMS).map(|system| {
            run.cell("search", ("ms", 1e6), system, Work::Bfs { threads }, deadline_ms)
        });
    let cells = cells.collect();
    let rows = run.measure(cells)?;
    let mut report = run.setting.report("bfs", rows, &definitions());
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
