//! `compute`: matrix kernels whose results are made durable a few times a second.
//!
//! Each kernel runs with its matrices in persistent objects (`object`), in shared file mappings
//! that are made durable at the same rate but are not crash-consistent (`msync`), and in plain
//! memory (`memory`), which gives the cost of the computation alone. The workload defines what is
//! made durable, and when.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::declaration::{Bench, Contenders};
use super::ratio::{Ratio, geometric_mean, ratios};
use super::stage::{Answers, Stage};
use crate::contender::Contender;
use crate::contenders::{MEMORY, MSYNC, OBJECT};
use crate::harness::Cell;
use crate::job::{ComputeWork, Job, Work};
use crate::kernels::{KernelName, Scale, Sizes, find};
use crate::options::{Common, count};
use crate::report::{Report, Row};
use crate::scratch::scratch_directory;
use aquifer_sys::machine::cores;

const DURABLE: &[&Contender] = &[OBJECT, MSYNC];
const VOLATILE: &[&Contender] = &[MEMORY];

/// The options of `bench compute`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench compute                           three kernels, four rates, some minutes
  aquifer bench compute --rates 4 --kernels lu    one of each
  aquifer bench compute --sizes paper --rates 4   the sizes of the paper on persistent memory objects")]
pub struct Options {
    /// Only these kernels, separated by commas [default: all]
    #[arg(long, value_name = "KERNEL,…", value_delimiter = ',', value_enum)]
    kernels: Vec<KernelName>,

    /// Sizes of the matrices
    #[arg(long, value_enum, default_value_t = Sizes::Default)]
    sizes: Sizes,

    /// How often a second the results are made durable, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4, 10],
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    rates: Vec<u32>,

    /// Threads that compute [default: the cores]
    #[arg(long, value_name = "N", value_parser = count())]
    threads: Option<u32>,
}

/// The declaration of the bench.
pub struct Compute;

impl Bench for Compute {
    type Options = Options;
    const NAME: &'static str = "compute";
    const ABOUT: &'static str =
        "Matrix kernels that make their results durable a few times a second";
    const CONTENDERS: Contenders = &[VOLATILE, DURABLE];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let quick = common.quick;
        let kernels =
            if options.kernels.is_empty() { &KernelName::ALL[..] } else { &options.kernels };
        let rates = if quick { vec![100] } else { options.rates.clone() };
        let threads = options.threads.unwrap_or_else(|| u32::try_from(cores()).unwrap_or(1));
        let scale = |kernel| Scale::of(kernel, options.sizes, quick);
        let len_bytes = |&kernel: &KernelName| -> u64 {
            let shapes = find(kernel, scale(kernel)).matrices();
            shapes.iter().map(|shape| shape.len_bytes as u64).sum()
        };
        let largest_bytes = kernels.iter().map(len_bytes).max().unwrap_or(0);
        let stage = Stage::of::<Self>(common, 4 * largest_bytes + (256 << 20), false)?;
        let directory = scratch_directory(stage.place.path())?;

        let cell = |kernel: KernelName, contender: &Contender, rate_hz: u32| {
            let scale = scale(kernel);
            let work = Work::Compute(ComputeWork { kernel, scale, rate_hz, threads });
            let path = directory.path().to_owned();
            let mut job = Job::new(contender.name, path, stage.seed, work);
            job.source.writable = true;
            job.accesses = 1;
            Cell::new(metric(kernel, rate_hz), ("s", 1e9), job)
        };
        let mut cells = Vec::new();
        for &kernel in kernels {
            cells.extend(stage.wanted(VOLATILE).map(|contender| cell(kernel, contender, 0)));
            for &rate_hz in &rates {
                let wanted = stage.wanted(DURABLE);
                cells.extend(wanted.map(|contender| cell(kernel, contender, rate_hz)));
            }
        }
        stage.note(
            "msync and memory are not crash-consistent: after a crash what they computed is torn or gone",
        );
        let answers = Answers::new();
        let before = || directory.empty_and_sync();
        let rows = stage.measure(None, before, cells, |job, measured| {
            let Work::Compute(work) = job.work else { return Ok(()) };
            answers.check(work.kernel, measured)
        })?;

        let (all_kernels, all_rates) = (kernels.to_vec(), rates.clone());
        let compare = move |rows: &[Row]| {
            let mut found = BTreeMap::new();
            for rate_hz in all_rates.iter().copied() {
                for (name, other) in [("overhead", MSYNC), ("overhead_vs_memory", MEMORY)] {
                    let each = ratios(&overheads(name, &all_kernels, rate_hz, other), rows);
                    if each.len() == all_kernels.len() {
                        let mean = geometric_mean(each.values().copied());
                        found.insert(format!("{name}_geomean_{rate_hz}hz"), mean);
                    }
                    found.extend(each);
                }
            }
            found
        };
        let scales: BTreeMap<_, _> =
            kernels.iter().map(|&kernel| (kernel.name(), scale(kernel))).collect();
        let config =
            [("threads", json!(threads)), ("rates_hz", json!(rates)), ("scales", json!(scales))];
        Ok(stage.report(rows, compare, config))
    }
}

fn metric(kernel: KernelName, rate_hz: u32) -> String {
    match rate_hz {
        0 => kernel.name().to_owned(),
        _ => format!("{}_{rate_hz}hz", kernel.name()),
    }
}

/// The run time over that of `other`, for each kernel: smaller is better.
fn overheads(
    name: &str,
    kernels: &[KernelName],
    rate_hz: u32,
    other: &'static Contender,
) -> Vec<Ratio> {
    let overhead = |&kernel: &KernelName| {
        let other_rate_hz = if other == MEMORY { 0 } else { rate_hz };
        Ratio {
            other_metric: metric(kernel, rate_hz),
            ours: other,
            our_metric: metric(kernel, other_rate_hz),
            ..Ratio::new(
                format!("{name}_{}_{rate_hz}hz", kernel.name()),
                &[OBJECT],
                other,
                String::new(),
            )
        }
    };
    kernels.iter().map(overhead).collect()
}
