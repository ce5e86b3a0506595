//! `aquifer demo`: a one-minute demonstration of Aquifer.
//!
//! A graph file four times larger than the memory of its readers; breadth-first search and random
//! lookups over it, once through Aquifer and once through mmap under the same limit. Only one
//! round, so it illustrates; the benches measure.

use std::fmt::Write as _;

use anyhow::Result;
use serde_json::json;

use super::graph_run::GraphRun;
use super::setting::Defaults;
use crate::contender::System;
use crate::harness::Work;
use crate::options::{Common, DemoArgs, Device, Options};
use crate::report::{Ratio, Report, Row, aligned, number};
use aquifer_host::units::Bytes;

/// The contenders, and their display names.
const SYSTEMS: &[(System, &str)] = &[
    (System::Mmap, "mmap"),
    (System::MmapRandom, "mmap, MADV_RANDOM"),
    (System::MmapWillneed, "mmap, prefetch by hand (WILLNEED)"),
    (System::Mapping, "Aquifer"),
];

const SEARCH: &str = "search";
const LOOKUP: &str = "lookup";
/// The time after which a contender is stopped.
const PATIENCE_MS: u64 = 12_000;

/// The result of the demonstration.
pub struct Demonstration {
    /// As text.
    pub text: String,
    /// As JSON: the report of a bench.
    pub report: Report,
}

/// Runs the demonstration.
pub fn demo(args: &DemoArgs) -> Result<Demonstration> {
    let common = Common {
        json: false,
        dir: args.dir.clone(),
        device: Device::Disk,
        only: Vec::new(),
        rounds: Some(1),
        seed: 1,
        quick: false,
    };
    let options =
        Options { common, size: Some(args.size), budget: args.budget, threads: Vec::new() };
    let defaults =
        Defaults { contenders: &[], size_bytes: [0, 0], data_per_budget: 4, scarce: true };
    let mut run = GraphRun::prepare(&options, defaults)?;
    let limited = run.setting.limiter.is_some();
    let mut text = introduction(&run, limited);
    let threads = run.threads();
    let mut cells = Vec::new();
    for &(system, _) in SYSTEMS.iter().filter(|(system, _)| limited || *system == System::Mapping) {
        let search = Work::Bfs { threads };
        cells.push(run.cell(SEARCH, ("s", 1e9), system, search, PATIENCE_MS));
        let lookup = Work::Lookup { threads };
        cells.push(run.cell(LOOKUP, ("µs", 1e3), system, lookup, PATIENCE_MS));
    }
    let rows = run.measure(cells)?;
    text.push_str(&table(&rows, limited, &run.setting.stage.notes));
    for note in &run.setting.stage.notes {
        // Stopped contenders are already in the table.
        if !note.contains("not finished in time") {
            let _ = writeln!(text, "\nnote: {note}");
        }
    }
    let mut report = run.setting.report("demo", rows, &definitions());
    report.config.insert("vertices", json!(run.graph().vertices));
    report.config.insert("entries", json!(run.graph().entries));
    report.config.insert("threads", json!([threads]));
    Ok(Demonstration { text, report })
}

/// From one round each: illustrations, not measurements.
fn definitions() -> Vec<Ratio> {
    let others: &[&str] = &["mmap", "mmap_random", "mmap_willneed"];
    vec![
        Ratio::new("mapping_vs_mmap_search", others, "mapping", SEARCH),
        Ratio::new("mapping_vs_mmap_lookup", others, "mapping", LOOKUP),
    ]
}

fn introduction(run: &GraphRun, limited: bool) -> String {
    let graph = run.graph();
    let mut text = format!(
        "A graph of {} vertices and {} edges in a file of {}, read as memory with {} of DRAM\n",
        number(graph.vertices as f64),
        number((graph.entries / 2) as f64),
        Bytes(graph.file_bytes()),
        Bytes(run.setting.budget_bytes),
    );
    if !limited {
        text.push_str(
            "(mmap is not shown: without permission to limit its memory it would simply hold the \
             whole file)\n",
        );
    }
    text.push('\n');
    text
}

fn table(rows: &[Row], limited: bool, notes: &[String]) -> String {
    let cell = |system: System, metric: &str| {
        let row = rows.iter().find(|row| row.system == system.name() && row.metric == metric);
        let Some(row) = row else {
            let left_out = format!("{metric} of {} is left out", system.name());
            let note = notes.iter().find(|note| note.starts_with(&left_out));
            let stopped = note.is_some_and(|note| note.contains("not finished in time"));
            return if stopped { format!("> {} s", PATIENCE_MS / 1000) } else { "-".to_owned() };
        };
        format!("{} {}", number(row.median), row.unit)
    };
    let mut lines = vec![["", "breadth-first search", "a lookup"].map(str::to_owned)];
    let shown = SYSTEMS.iter().filter(|(system, _)| limited || *system == System::Mapping);
    for &(system, name) in shown {
        lines.push([name.to_owned(), cell(system, SEARCH), cell(system, LOOKUP)]);
    }
    aligned(&lines, 1)
}
