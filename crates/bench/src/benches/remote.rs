//! `remote`: an object of a server behind a slow line, read by the processes of one node.
//!
//! | metric | what is timed |
//! |---|---|
//! | `random_cold` | a batch of 256 rows of 3 KiB by chance, with nothing local at first |
//! | `random_warm` | the same after a pass over the object; what was kept of it is on the disk, not in memory |
//! | `epoch` | a pass over the object |
//! | `second_epoch` | further passes by the same process: the median of three |
//! | `columns` | two columns of sixteen, in row groups: what a reader of Parquet files asks for |
//! | `_4p` | by four processes at once, each with rows of its own, or with a pass over all of the object |
//!
//! The server is in the bench's process: each request waits for the latency, and all answers share the line's rate. A
//! node's processes and helpers are in one group with one limit of memory. An interpreter is started, and a mount
//! made, before the clock starts. Decoding of columns is left out, since it would be the same for all.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aquifer_sys::limit::Limiter;
use aquifer_sys::units::Bytes;
use aquifer_testkit::object_server::Server;
use clap::Args;
use serde_json::json;

use super::declaration::{Bench, Contenders};
use super::ratio::{Figure, Ratio, ratios};
use super::stage::Stage;
use crate::contender::Contender;
use crate::contender::mounted::enter_namespace;
use crate::contender::remote::{BUCKET, KEY, expected_lines};
use crate::contenders::remote::{
    AQUIFER, AQUIFER_ROWS, LINE, OBJECT_STORE, OBJECT_STORE_RANGES, OBJECT_STORE_UNCOPIED, RCLONE,
    S3FS, S3FS_BLOCKCACHE, S3FS_FILECACHE,
};
use crate::harness::Cell;
use crate::job::{Job, Measured, RemoteKind, RemoteWork, TeamWork, Work};
use crate::options::{Common, count};
use crate::report::{Report, Row};
use crate::scratch::{Scratch, scratch_directory};
use crate::workload::remote::{column_ranges, drawn_rows};

const SYSTEMS: &[&Contender] = &[
    AQUIFER,
    AQUIFER_ROWS,
    OBJECT_STORE,
    OBJECT_STORE_RANGES,
    OBJECT_STORE_UNCOPIED,
    S3FS,
    S3FS_BLOCKCACHE,
    S3FS_FILECACHE,
    RCLONE,
    LINE,
];
/// The best of them is what ours is compared with.
const OTHERS: &[&Contender] =
    &[OBJECT_STORE, OBJECT_STORE_RANGES, S3FS, S3FS_BLOCKCACHE, S3FS_FILECACHE, RCLONE];
/// What there is to use as it is: no local copy is made by hand.
const OFF_THE_SHELF: &[&Contender] =
    &[OBJECT_STORE_UNCOPIED, S3FS_BLOCKCACHE, S3FS_FILECACHE, RCLONE];

const ROW_BYTES: u64 = 3072;
const BATCH_ROWS: usize = 256;
/// The object's length is a multiple of it: of a row, and of a row group.
const GRAIN_BYTES: u64 = 24 << 20;

/// The options of `bench remote`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench remote                            10 ms, 1 Gbit/s, an object of 768 MiB, 384 MiB of memory
  aquifer bench remote --only aquifer,object_store --latency-ms 50
  aquifer bench remote --metrics epoch,second_epoch --size 3GiB --budget 1GiB

.ci/remote-contenders installs rclone and the packages of Python. What is missing is left out. Mounting takes root.")]
pub struct Options {
    /// Length of the object [default: 768 MiB]
    #[arg(long, value_name = "BYTES")]
    size: Option<Bytes>,

    /// Memory that the processes of a node get together [default: half of the size]
    #[arg(long, value_name = "BYTES")]
    budget: Option<Bytes>,

    /// How long each request waits
    #[arg(long, value_name = "MS", default_value_t = 10)]
    latency_ms: u64,

    /// Rate that all answers share, in bytes a second; the default is 1 Gbit/s
    #[arg(long, value_name = "BYTES", default_value_t = 125_000_000)]
    line_rate: u64,

    /// Most requests of a process at once
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = count())]
    in_flight: u32,

    /// Only these metrics, separated by commas
    #[arg(long, value_name = "METRIC,…", value_delimiter = ',')]
    metrics: Vec<String>,

    /// Interpreter with s3fs [default: that of .ci/remote-contenders, or python3]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,

    /// The program rclone [default: that of .ci/remote-contenders, or rclone]
    #[arg(long, value_name = "PATH")]
    rclone: Option<PathBuf>,
}

const fn random(is_warm: bool) -> RemoteKind {
    RemoteKind::Random { row_bytes: ROW_BYTES, batch_rows: BATCH_ROWS, is_warm }
}

const MILLISECONDS: (&str, f64) = ("ms", 1e6);
const SECONDS: (&str, f64) = ("s", 1e9);

/// Name, unit, work, processes.
const METRICS: [(&str, (&str, f64), RemoteKind, u32); 7] = [
    ("random_cold", MILLISECONDS, random(false), 1),
    ("random_warm", MILLISECONDS, random(true), 1),
    ("epoch", SECONDS, RemoteKind::Pass { is_again: false }, 1),
    ("second_epoch", SECONDS, RemoteKind::Pass { is_again: true }, 1),
    ("columns", SECONDS, RemoteKind::Columns, 1),
    ("random_cold_4p", MILLISECONDS, random(false), 4),
    ("epoch_4p", SECONDS, RemoteKind::Pass { is_again: false }, 4),
];

/// The declaration of the bench.
pub struct RemoteBench;

impl Bench for RemoteBench {
    type Options = Options;
    const NAME: &'static str = "remote";
    const ABOUT: &'static str =
        "An object of a server behind a slow line, read by the processes of a node";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        for name in &options.metrics {
            let known = || METRICS.map(|metric| metric.0).join(", ");
            let is_known = METRICS.iter().any(|metric| metric.0 == name);
            ensure!(is_known, "`{name}` is no metric: --metrics takes {}", known());
        }
        // Before there are threads: user namespaces take none.
        let hidden = enter_namespace();
        let default_bytes = if common.quick { GRAIN_BYTES } else { 768 << 20 };
        let size_bytes = options.size.map_or(default_bytes, |size| size.0);
        let size_bytes = size_bytes / GRAIN_BYTES * GRAIN_BYTES;
        ensure!(size_bytes > 0, "--size has to be 24 MiB or more");
        // A quick run is of programs that need more memory than its object has bytes.
        let default_bytes = if common.quick { 512 << 20 } else { size_bytes / 2 };
        let budget_bytes = options.budget.map_or(default_bytes, |budget| budget.0);
        let stage = Stage::of::<Self>(common, 5 * size_bytes, true)?;
        let limiter = Limiter::find();
        if let Err(error) = &limiter {
            stage.note(format!("memory is NOT limited ({error}), so there are no ratios"));
        }
        let server = Server::empty();
        server.record(false);
        server.put_generated(&format!("{BUCKET}/{KEY}"), size_bytes, stage.seed);
        server.latency(Duration::from_millis(options.latency_ms));
        server.bytes_per_second(options.line_rate);
        let scratch = scratch_directory(stage.place.path())?;

        let work = RemoteWork {
            kind: RemoteKind::Columns,
            team: TeamWork { processes: 1, member: None },
            endpoint: server.endpoint(),
            object_bytes: size_bytes,
            in_flight: options.in_flight as usize,
            python: program(&options.python, "venv/bin/python3", "python3"),
            rclone: program(&options.rclone, "bin/rclone", "rclone"),
        };
        let mut cells = Vec::new();
        for (name, unit, kind, processes) in METRICS {
            if !options.metrics.is_empty() && !options.metrics.iter().any(|one| one == name) {
                continue;
            }
            for contender in stage.wanted(SYSTEMS).filter(|one| **one != *LINE) {
                if let (Err(reason), true) = (&hidden, *contender == *RCLONE) {
                    stage.note(format!("{name} of {} is left out: {reason:#}", contender.name));
                    continue;
                }
                let team = TeamWork { processes, member: None };
                let work = RemoteWork { kind, team, ..work.clone() };
                let mut job = Job::new(
                    contender.name,
                    scratch.path().to_owned(),
                    stage.seed,
                    Work::Remote(work),
                );
                job.source.cache_bytes = budget_bytes / 4 / u64::from(processes);
                (job.accesses, job.deadline_ms) = if stage.quick { (2, 200) } else { (40, 4000) };
                cells.push(Cell { limit_bytes: Some(budget_bytes), ..Cell::new(name, unit, job) });
            }
        }
        let mut rows = measure(&stage, limiter.as_ref().ok(), &scratch, cells)?;
        rows.extend(line_rows(options.line_rate, size_bytes));
        let definitions = if limiter.is_ok() { definitions() } else { Vec::new() };
        let config = [
            ("size_bytes", json!(size_bytes)),
            ("budget_bytes", json!(budget_bytes)),
            ("latency_ms", json!(options.latency_ms)),
            ("line_bytes_per_second", json!(options.line_rate)),
            ("in_flight", json!(options.in_flight)),
        ];
        Ok(stage.report(rows, move |rows| ratios(&definitions, rows), config))
    }
}

/// The program that was asked for, or that the script installed beside this one, or that of the search path.
fn program(asked: &Option<PathBuf>, installed: &str, name: &str) -> PathBuf {
    let beside = || {
        let target = std::env::current_exe().ok()?.parent()?.parent()?.to_owned();
        Some(target.join("remote-contenders").join(installed)).filter(|path| path.exists())
    };
    asked.clone().or_else(beside).unwrap_or_else(|| name.into())
}

fn measure(
    stage: &Stage,
    limiter: Option<&Limiter>,
    scratch: &Scratch,
    cells: Vec<Cell>,
) -> Result<Vec<Row>> {
    stage.measure(limiter, || scratch.empty_and_sync(), cells, check)
}

fn check(job: &Job, measured: &Measured) -> Result<()> {
    let Work::Remote(work) = &job.work else { unreachable!("all cells are of this kind") };
    for (member, answer) in measured.lanes.iter().enumerate() {
        let lines = |range| expected_lines(job.seed, range);
        let expected = match work.kind {
            RemoteKind::Random { batch_rows, .. } => {
                let rows = answer.accesses as usize * batch_rows;
                drawn_rows(job, member as u32).take(rows).map(lines).fold(0, u64::wrapping_add)
            }
            RemoteKind::Pass { .. } => lines(0..work.object_bytes),
            RemoteKind::Columns => {
                let (footer, columns) = column_ranges(work.object_bytes);
                columns.into_iter().map(lines).fold(lines(footer), u64::wrapping_add)
            }
        };
        ensure!(answer.checksum == expected, "it read something else than the server has");
    }
    ensure!(measured.lanes.len() == work.team.processes as usize, "a process is missing");
    if [AQUIFER, AQUIFER_ROWS].iter().any(|ours| job.contender == ours.name) {
        let downloaded =
            measured.details.get("downloaded_bytes").context("the server's counters")?;
        check_downloaded(work, *downloaded)?;
    }
    Ok(())
}

/// Of Aquifer: what the tier has is downloaded once for the node.
fn check_downloaded(work: &RemoteWork, downloaded_bytes: f64) -> Result<()> {
    let most_bytes = match work.kind {
        RemoteKind::Random { is_warm: true, .. } => 0,
        RemoteKind::Pass { .. } => work.object_bytes,
        _ => return Ok(()),
    };
    // For headers, opening, and what was late.
    let slack_bytes = work.object_bytes / 64 + (256 << 10);
    ensure!(
        downloaded_bytes <= (most_bytes + slack_bytes) as f64,
        "{downloaded_bytes} bytes were downloaded, more than the {most_bytes} that a tier takes"
    );
    Ok(())
}

/// What the line takes for the bytes.
fn line_rows(line_rate: u64, size_bytes: u64) -> Vec<Row> {
    let batch_ms = BATCH_ROWS as f64 * ROW_BYTES as f64 / line_rate as f64 * 1e3;
    let row = |metric: &str, unit, value| Row::of(LINE.name, metric, unit, vec![value], Vec::new());
    let pass_s = size_bytes as f64 / line_rate as f64;
    vec![row("random_cold", "ms", batch_ms), row("epoch", "s", pass_s)]
}

fn definitions() -> Vec<Ratio> {
    let best = |name: &str, metric: &str| Ratio::new(name, OTHERS, AQUIFER, metric);
    let shelf = |name: &str, metric: &str| Ratio::new(name, OFF_THE_SHELF, AQUIFER, metric);
    vec![
        shelf("random_batches_vs_off_the_shelf", "random_cold"),
        shelf("random_batches_4p_vs_off_the_shelf", "random_cold_4p"),
        shelf("random_batches_warm_tier_vs_off_the_shelf", "random_warm"),
        shelf("second_epoch_vs_off_the_shelf", "second_epoch"),
        shelf("epoch_vs_off_the_shelf", "epoch"),
        shelf("epoch_4p_vs_off_the_shelf", "epoch_4p"),
        shelf("columns_vs_off_the_shelf", "columns"),
        best("random_batches_vs_best_other", "random_cold"),
        best("random_batches_4p_vs_best_other", "random_cold_4p"),
        best("random_batches_warm_tier_vs_best_other", "random_warm"),
        best("second_epoch_vs_best_other", "second_epoch"),
        best("epoch_vs_best_other", "epoch"),
        best("epoch_4p_vs_best_other", "epoch_4p"),
        best("columns_vs_best_other", "columns"),
        Ratio::new("random_batches_rows_vs_best_other", OTHERS, AQUIFER_ROWS, "random_cold"),
        Ratio::new(
            "random_batches_rows_warm_tier_vs_best_other",
            OTHERS,
            AQUIFER_ROWS,
            "random_warm",
        ),
        Ratio::new("sequential_vs_line_rate", &[LINE], AQUIFER, "epoch"),
        // Less is better.
        Ratio {
            other_metric: "epoch_4p".to_owned(),
            figure: Figure::Detail("downloaded_bytes"),
            ..Ratio::new("bytes_downloaded_4p_vs_1p", &[AQUIFER], AQUIFER, "epoch")
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downloads_of_what_the_tier_has_are_an_error() {
        let work = |kind| RemoteWork {
            kind,
            team: TeamWork { processes: 4, member: None },
            endpoint: String::new(),
            object_bytes: 768 << 20,
            in_flight: 64,
            python: PathBuf::new(),
            rclone: PathBuf::new(),
        };
        let object = f64::from(768 << 20);
        let second = RemoteKind::Pass { is_again: true };
        check_downloaded(&work(random(true)), 100.0).unwrap();
        check_downloaded(&work(random(true)), object / 10.0).unwrap_err();
        check_downloaded(&work(second), object).unwrap();
        check_downloaded(&work(second), 2.0 * object).unwrap_err();
        check_downloaded(&work(random(false)), 2.0 * object).unwrap();
    }
}
