//! `aquifer demo`: a short demonstration of Aquifer.
//!
//! One file, larger than the memory of its readers, and two kinds of work on it: a breadth-first
//! search of the graph that it holds, in a quarter of its length, and repeated passes over all of
//! it, in little less than its length. Each is done with plain mmap, with mmap by a program that
//! sorts and prefetches by hand, and with Aquifer's `visit_many`, under the same limits. Only one
//! round, so it illustrates; the benches measure.

use std::fmt::Write as _;

use anyhow::Result;
use serde_json::json;

use super::graph_run::GraphRun;
use super::ratio::Ratio;
use super::setting::Defaults;
use crate::contender::Contender;
use crate::contenders::{MAPPING_VISITED, MMAP, MMAP_SORTED_WILLNEED, MMAP_SORTED_WILLNEED_16K};
use crate::options::{CacheOptions, Common, DemoArgs, Device};
use crate::report::{Report, Row, aligned, number};
use aquifer_host::Bytes;

/// The contenders, and their display names. Of several forms the best counts.
const SYSTEMS: &[(&[&Contender], &str)] = &[
    (&[MMAP], "mmap"),
    (&[MMAP_SORTED_WILLNEED, MMAP_SORTED_WILLNEED_16K], "mmap, sorted and prefetched by hand"),
    (&[MAPPING_VISITED], "Aquifer"),
];

const SEARCH: &str = "search";
const PASSES: &str = "passes";
/// How often the file is read by the passes.
const PASS_COUNT: u32 = 10;
/// The file is that much larger than the memory of the passes, in percent.
const DATA_PERCENT: u64 = 128;
/// The time after which a contender is stopped.
const PATIENCE_MS: u64 = 4_000;

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
    let passes_bytes = run.graph().file_bytes() * 100 / DATA_PERCENT;
    let limited = run.setting.limiter.is_some();
    let mut cells = Vec::new();
    for (forms, _) in shown(limited) {
        let unit = ("s", 1e9);
        cells.extend(forms.iter().map(|form| run.search_cell(SEARCH, unit, form, PATIENCE_MS)));
        // The forms differ in searches only.
        let passes = run.passes_cell(PASSES, unit, forms[0], PASS_COUNT, passes_bytes, PATIENCE_MS);
        cells.push(passes);
    }
    let rows = run.measure(cells)?;
    let notes = run.setting.stage.notes();
    let mut text = introduction(&run, limited);
    text.push_str(&table(&run, passes_bytes, &rows, limited, &notes));
    text.push_str(EXPLANATION);
    for note in &notes {
        // Stopped contenders are already in the table.
        if !note.contains("not finished in time") {
            let _ = writeln!(text, "\nnote: {note}");
        }
    }
    let mut report = run.report(rows, &definitions());
    report.config.insert("passes_budget_bytes", json!(passes_bytes));
    Ok(Demonstration { text, report })
}

/// The contenders that can be shown: without a memory limit only Aquifer.
fn shown(limited: bool) -> impl Iterator<Item = (&'static [&'static Contender], &'static str)> {
    SYSTEMS.iter().copied().filter(move |(forms, _)| limited || forms.contains(&MAPPING_VISITED))
}

/// From one round each: illustrations, not measurements.
fn definitions() -> Vec<Ratio> {
    let others: &[&Contender] = &[MMAP, MMAP_SORTED_WILLNEED, MMAP_SORTED_WILLNEED_16K];
    vec![
        Ratio::new("visit_vs_mmap_search", others, MAPPING_VISITED, SEARCH),
        Ratio::new("visit_vs_mmap_passes", others, MAPPING_VISITED, PASSES),
    ]
}

fn introduction(run: &GraphRun, limited: bool) -> String {
    let graph = run.graph();
    let mut text = format!(
        "A file of {} holds a graph of {} vertices and {} edges. Programs use it as memory, with less \
         DRAM than it needs.\n",
        Bytes(graph.file_bytes()),
        number(graph.vertices as f64),
        number((graph.entries / 2) as f64),
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

const EXPLANATION: &str = "
Search: what is read next depends on what was just read. mmap waits for one page at a time. Aquifer's
visit_many takes all that is known to be needed, reads neighbours together and many at once, and hands
over each range as it arrives.
Passes: what is needed next is what the system has just dropped. Aquifer keeps what fits.
";

fn table(
    run: &GraphRun,
    passes_bytes: u64,
    rows: &[Row],
    limited: bool,
    notes: &[String],
) -> String {
    let cell = |forms: &[&Contender], metric: &str| {
        let of_form =
            |row: &&Row| row.metric == metric && forms.iter().any(|form| row.system == form.name);
        let best = rows.iter().filter(of_form).min_by(|a, b| a.median.total_cmp(&b.median));
        let Some(row) = best else {
            let stopped = forms.iter().any(|form| {
                let left_out = format!("{metric} of {} is left out", form.name);
                let note = notes.iter().find(|note| note.starts_with(&left_out));
                note.is_some_and(|note| note.contains("not finished in time"))
            });
            return if stopped { format!("> {} s", PATIENCE_MS / 1000) } else { "-".to_owned() };
        };
        format!("{} {}", number(row.median), row.unit)
    };
    let mebibytes = |bytes: u64| format!("with {} MiB", bytes >> 20);
    let mut lines = vec![
        [String::new(), "search the graph".to_owned(), format!("read all {PASS_COUNT} times")],
        [String::new(), mebibytes(run.setting.budget_bytes), mebibytes(passes_bytes)],
    ];
    for (forms, name) in shown(limited) {
        lines.push([name.to_owned(), cell(forms, SEARCH), cell(forms, PASSES)]);
    }
    aligned(&lines, 1)
}
