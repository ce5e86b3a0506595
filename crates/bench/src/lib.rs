//! The benches behind `aquifer bench`: Aquifer beside what a program would use otherwise.
//!
//! ```text
//! options ──▶ benches: which contenders, which ratios ──▶ report: table or JSON
//!                │
//!             harness: interleaved rounds, one process for each contender and round
//!                │                         inside a memory-limited group (limit), on a chosen
//!                ▼                         file system (place), with checkable data (data, graph)
//!             workload ──▶ contender: mmap, direct reads, user-space cache, …
//! ```
//!
//! The rules, so that a figure can be believed: contenders run interleaved in the same run, each in a fresh
//! process; where memory is scarce they get the same limit, their own caches included; the file is cold or
//! warm before each measurement, and that is checked; every contender makes the same accesses, and its
//! answer is checked; medians over at least five rounds are reported; "mmap" is always its best form. What is
//! not possible on a machine (limiting memory, keeping it awake, a contender) is said in the report.
//!
//! A program that calls [`main`] or [`demo`] must do so again when it is started with the same arguments: that is how
//! contenders get processes of their own.

mod benches;
mod cells;
mod contender;
mod data;
mod file_set;
mod graph;
mod harness;
mod kernels;
mod options;
mod pooled_set;
mod raw;
mod report;
mod rng;
mod scratch;
mod source_tree;
mod stats;
mod sum;
mod workload;
mod zipf;

use std::io::Write;

use anyhow::Result;

pub use contender::System;
pub use options::{
    AppendOptions, Bench, BenchArgs, Common, ComputeOptions, DemoArgs, Device, FlushOptions,
    KernelName, MapAheadOptions, MappingCacheOptions, Memory, MetadataOptions, Options,
    PswapOptions, PsyncOptions, ReadOnceOptions, RecoverOptions, RepetitiveOptions, SearchOptions,
    SharedOptions, Sizes, UnmapOptions, ViewOptions,
};

/// Runs the bench that `args` name and prints its report on standard output.
pub fn main(args: &BenchArgs) -> Result<()> {
    if harness::run_if_child()? {
        return Ok(());
    }
    let report = benches::run(&args.bench)?;
    let mut output = std::io::stdout().lock();
    if args.bench.common().json {
        serde_json::to_writer_pretty(&mut output, &report)?;
        writeln!(output)?;
    } else {
        write!(output, "{}", report.to_text())?;
    }
    Ok(())
}

/// Runs the demonstration: a graph several times larger than the memory it is searched in, by Aquifer and by
/// mmap, and a table of both on standard output.
pub fn demo(args: &DemoArgs) -> Result<()> {
    if harness::run_if_child()? {
        return Ok(());
    }
    let shown = benches::demo(args)?;
    let mut output = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut output, &shown.report)?;
        writeln!(output)?;
    } else {
        write!(output, "{}", shown.text)?;
    }
    Ok(())
}
