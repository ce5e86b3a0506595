//! `compute`: matrix kernels whose results are made durable a few times a second.
//!
//! Each kernel runs with its matrices in persistent objects (`object`), in shared file mappings
//! that are made durable at the same rate but are not crash-consistent (`msync`), and in plain
//! memory (`memory`), which gives the cost of the computation alone. The workload defines what is
//! made durable, and when.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, ensure};
use serde_json::json;

use super::stage::Stage;
use crate::contender::{Source, System};
use crate::harness::{Cell, ComputeWork, Job, LaneAnswer, Schedule, Work};
use crate::kernels::{Scale, find};
use crate::options::{ComputeOptions, KernelName};
use crate::raw::sync_file_system;
use crate::report::{Ratio, Report, geometric_mean, ratios};
use crate::scratch::{empty, scratch_directory};
use aquifer_host::machine::cores;

const DURABLE: &[System] = &[System::Object, System::Msync];
const MEMORY: &[System] = &[System::Memory];

/// Runs the bench.
pub fn run(options: &ComputeOptions) -> Result<Report> {
    let quick = options.common.quick;
    let kernels = if options.kernels.is_empty() { &KernelName::ALL[..] } else { &options.kernels };
    let rates = if quick { vec![100] } else { options.rates.clone() };
    let threads = options.threads.unwrap_or_else(|| u32::try_from(cores()).unwrap_or(1));
    let scale = |kernel| Scale::of(kernel, options.sizes, quick);
    let len_bytes = |&kernel: &KernelName| -> u64 {
        let shapes = find(kernel, scale(kernel)).matrices();
        shapes.iter().map(|shape| shape.len_bytes as u64).sum()
    };
    let largest_bytes = kernels.iter().map(len_bytes).max().unwrap_or(0);
    let mut stage = Stage::prepare(
        &options.common,
        &[MEMORY, DURABLE],
        4 * largest_bytes + (256 << 20),
        false,
    )?;
    let directory = scratch_directory(stage.place.path())?;

    let cell = |kernel: KernelName, system: System, rate_hz: u32| {
        let scale = scale(kernel);
        let job = Job {
            system,
            source: Source {
                path: directory.path().to_owned(),
                pages: 0,
                writable: true,
                cache_bytes: 0,
                base_pages: false,
            },
            work: Work::Compute(ComputeWork { kernel, scale, rate_hz, threads }),
            seed: stage.seed,
            round: 0,
            accesses: 1,
            deadline_ms: 0,
            warm_accesses: 0,
            warm_deadline_ms: 0,
            limit_bytes: None,
        };
        Cell { metric: metric(kernel, rate_hz), unit: ("s", 1e9), job, limit_bytes: None }
    };
    let mut cells = Vec::new();
    for &kernel in kernels {
        cells.extend(stage.wanted(MEMORY).map(|system| cell(kernel, system, 0)));
        for &rate_hz in &rates {
            cells.extend(stage.wanted(DURABLE).map(|system| cell(kernel, system, rate_hz)));
        }
    }
    let mut notes = std::mem::take(&mut stage.notes);
    notes.push(
        "msync and memory are not crash-consistent: after a crash what they computed is torn or gone"
            .to_owned(),
    );
    let answers = RefCell::new(HashMap::<KernelName, Vec<LaneAnswer>>::new());
    let schedule = Schedule {
        limiter: None,
        rounds: stage.rounds,
        before: Box::new(|| {
            empty(directory.path())?;
            Ok(sync_file_system(directory.path())?)
        }),
        check: Box::new(|job, measured| {
            let Work::Compute(work) = job.work else { return Ok(()) };
            let mut answers = answers.borrow_mut();
            let first = answers.entry(work.kernel).or_insert_with(|| measured.lanes.clone());
            ensure!(*first == measured.lanes, "it computed something else than the one before it");
            Ok(())
        }),
    };
    let rows = schedule.run(cells, &mut notes)?;
    drop(schedule);
    stage.notes = notes;

    let mut found = BTreeMap::new();
    for rate_hz in rates.iter().copied() {
        for (name, other) in [("overhead", "msync"), ("overhead_vs_memory", "memory")] {
            let each = ratios(&overheads(name, kernels, rate_hz, other), &rows);
            if each.len() == kernels.len() {
                let mean = geometric_mean(each.values().copied());
                found.insert(format!("{name}_geomean_{rate_hz}hz"), mean);
            }
            found.extend(each);
        }
    }
    let scales: BTreeMap<_, _> =
        kernels.iter().map(|&kernel| (kernel.name(), scale(kernel))).collect();
    let config =
        [("threads", json!(threads)), ("rates_hz", json!(rates)), ("scales", json!(scales))];
    Ok(stage.report("compute", rows, found, config))
}

fn metric(kernel: KernelName, rate_hz: u32) -> String {
    match rate_hz {
        0 => kernel.name().to_owned(),
        _ => format!("{}_{rate_hz}hz", kernel.name()),
    }
}

/// The run time over that of `other`, for each kernel: smaller is better.
fn overheads(name: &str, kernels: &[KernelName], rate_hz: u32, other: &'static str) -> Vec<Ratio> {
    let overhead = |&kernel: &KernelName| {
        let other_rate_hz = if other == "memory" { 0 } else { rate_hz };
        Ratio {
            other_metric: metric(kernel, rate_hz),
            ours: other,
            our_metric: metric(kernel, other_rate_hz),
            ..Ratio::new(
                format!("{name}_{}_{rate_hz}hz", kernel.name()),
                &["object"],
                other,
                String::new(),
            )
        }
    };
    kernels.iter().map(overhead).collect()
}
