//! `aquifer demo`: a one-minute demonstration of Aquifer.
//!
//! A graph file four times larger than the memory of its readers; breadth-first search and random
//! lookups over it, once through Aquifer and once through mmap under the same limit. Only one
//! round, so it illustrates; the benches measure.

use std::fmt::Write as _;

use anyhow::Result;

use super::graph_run::GraphRun;
use super::ratio::Ratio;
use super::setting::Defaults;
use crate::contender::Contender;
use crate::contenders::{MAPPING, MMAP, MMAP_RANDOM, MMAP_WILLNEED};
use crate::job::Work;
use crate::options::{CacheOptions, Common, DemoArgs, Device};
use crate::report::{Report, Row, aligned, number};
use aquifer_host::Bytes;

/// The contenders, and their display names.
const SYSTEMS: &[(&Contender, &str)] = &[
    (MMAP, "mmap"),
    (MMAP_RANDOM, "mmap, MADV_RANDOM"),
    (MMAP_WILLNEED, "mmap, prefetch by hand (WILLNEED)"),
    (MAPPING, "Aquifer"),
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
    let options = CacheOptions { size: Some(args.size), budget: args.budget, threads: Vec::new() };
    let defaults = Defaults {
        name: "demo",
        contenders: &[],
        size_bytes: [0, 0],
        data_per_budget: 4,
        scarce: true,
    };
    let run = GraphRun::prepare(&common, &options, defaults)?;
    let limited = run.setting.limiter.is_some();
    let mut text = introduction(&run, limited);
    let threads = run.threads();
    let mut cells = Vec::new();
    for (contender, _) in shown(limited) {
        let search = Work::Bfs { threads };
        cells.push(run.cell(SEARCH, ("s", 1e9), contender, search, PATIENCE_MS));
        let lookup = Work::Lookup { threads };
        cells.push(run.cell(LOOKUP, ("µs", 1e3), contender, lookup, PATIENCE_MS));
    }
    let rows = run.measure(cells)?;
    let notes = run.setting.stage.notes();
    text.push_str(&table(&rows, limited, &notes));
    for note in &notes {
        // Stopped contenders are already in the table.
        if !note.contains("not finished in time") {
            let _ = writeln!(text, "\nnote: {note}");
        }
    }
    Ok(Demonstration { text, report: run.report(rows, &definitions()) })
}

/// The contenders that can be shown: without a memory limit only Aquifer.
fn shown(limited: bool) -> impl Iterator<Item = (&'static Contender, &'static str)> {
    SYSTEMS.iter().copied().filter(move |(contender, _)| limited || *contender == MAPPING)
}

/// From one round each: illustrations, not measurements.
fn definitions() -> Vec<Ratio> {
    let others: &[&Contender] = &[MMAP, MMAP_RANDOM, MMAP_WILLNEED];
    vec![
        Ratio::new("mapping_vs_mmap_search", others, MAPPING, SEARCH),
        Ratio::new("mapping_vs_mmap_lookup", others, MAPPING, LOOKUP),
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
    let cell = |contender: &Contender, metric: &str| {
        let row = rows.iter().find(|row| row.system == contender.name && row.metric == metric);
        let Some(row) = row else {
            let left_out = format!("{metric} of {} is left out", contender.name);
            let note = notes.iter().find(|note| note.starts_with(&left_out));
            let stopped = note.is_some_and(|note| note.contains("not finished in time"));
            return if stopped { format!("> {} s", PATIENCE_MS / 1000) } else { "-".to_owned() };
        };
        format!("{} {}", number(row.median), row.unit)
    };
    let mut lines = vec![["", "breadth-first search", "a lookup"].map(str::to_owned)];
    for (contender, name) in shown(limited) {
        lines.push([name.to_owned(), cell(contender, SEARCH), cell(contender, LOOKUP)]);
    }
    aligned(&lines, 1)
}
