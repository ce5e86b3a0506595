//! `demo`: the ratios of the demonstration. What it does, and for whom, is in the crate `aquifer-demo`.

use anyhow::Result;
use aquifer_demo::{DemoArgs, READERS, TASKS, Time};
use aquifer_sys::units::Bytes;
use serde_json::json;

use super::declaration::{Bench, Contenders};
use super::ratio::{Ratio, ratios};
use super::stage::Stage;
use crate::contender::Contender;
use crate::contenders::{MAPPING_VISITED, MMAP, MMAP_SORTED_WILLNEED};
use crate::options::Common;
use crate::report::{Report, Row};

/// The contenders, as [`READERS`].
const SYSTEMS: &[&Contender] = &[MMAP, MMAP_SORTED_WILLNEED, MAPPING_VISITED];

/// The options of `bench demo`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Length of the file
    #[arg(long, value_name = "BYTES", default_value = "128M")]
    size: Bytes,
}

/// The declaration of the bench.
pub struct Demo;

impl Bench for Demo {
    type Options = Options;
    const NAME: &'static str = "demo";
    const ABOUT: &'static str = "The demonstration, several times";
    const CONTENDERS: Contenders = &[SYSTEMS];

    fn run(common: &Common, options: &Options) -> Result<Report> {
        let size = if common.quick { Bytes(64 << 20) } else { options.size };
        let stage = Stage::of::<Self>(common, size.0, true)?;
        let args = DemoArgs { json: false, dir: stage.place.path().to_owned(), size, budget: None };
        let rounds =
            (0..stage.rounds).map(|_| aquifer_demo::measure(&args)).collect::<Result<Vec<_>>>()?;
        let mut rows = Vec::new();
        for (task, _) in TASKS {
            for (system, (reader, _)) in SYSTEMS.iter().zip(READERS) {
                let of = |time: &&Time| time.reader == reader && time.task == task;
                let found = rounds.iter().map(|times| times.iter().find(of)?.seconds);
                match found.collect::<Option<Vec<f64>>>() {
                    Some(values) => rows.push(Row::of(system.name, task, "s", values, Vec::new())),
                    None => stage
                        .note(format!("{task} of {} is left out: it took too long", system.name)),
                }
            }
        }
        let others: &[&Contender] = &[MMAP, MMAP_SORTED_WILLNEED];
        let definitions = TASKS.map(|(task, _)| {
            Ratio::new(format!("visit_vs_mmap_{task}"), others, MAPPING_VISITED, task)
        });
        let config = [("size_bytes", json!(size.0))];
        Ok(stage.report(rows, move |rows| ratios(&definitions, rows), config))
    }
}
