//! The benches behind `aquifer bench`: Aquifer beside the systems a program would otherwise use.
//!
//! ```text
//! benches: options, which contenders, which ratios ──▶ report: table or JSON
//!    │
//! harness: interleaved rounds, one process for each contender and round
//!    │                         inside a memory-limited group (limit), on a chosen
//!    │ job                     file system (place), with checkable data (data, graph)
//!    ▼
//! contenders: mmap, direct reads, a user-space cache, …: each declared once
//!    │
//! workload: the loops that are timed ──▶ contender: the interfaces they use, and their implementations
//! ```
//!
//! The rules that make the figures comparable: contenders run interleaved in the same run, each in
//! a fresh process; where memory is scarce they get the same limit, including their own caches; the
//! file is cold or warm before each measurement, and that is checked; every contender makes the
//! same accesses, and its answer is checked; medians over at least five rounds are reported; "mmap"
//! is always its best form. The report notes what is impossible on a machine (limiting memory,
//! keeping it awake, a contender).
//!
//! A program that calls [`main`] must do so again when it is started with the same
//! arguments: contenders run in separate processes of the same program.

mod benches;
mod cells;
mod contender;
mod contenders;
mod data;
mod file_set;
mod floors;
mod graph;
mod harness;
mod job;
mod kernels;
mod options;
mod place;
mod pooled_set;
mod raw;
mod report;
mod rng;
mod row_file;
mod scratch;
mod source_tree;
mod stats;
mod suite;
mod sum;
mod threads;
mod workload;
mod zipf;

use std::io::Write;

use anyhow::Result;

pub use benches::BenchArgs;

/// Runs the bench named by `args` and prints its report to standard output.
pub fn main(args: &BenchArgs) -> Result<()> {
    if harness::run_if_child(run_job)? || aquifer_demo::run_if_child()? {
        return Ok(());
    }
    let text = args.bench.run()?;
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}

/// The work of a child.
fn run_job(job: &job::Job) -> Result<job::Measured> {
    workload::run(job, benches::contender(&job.contender)?)
}
