//! `aquifer doctor`: the machine's features, the form each mechanism takes on it, and the costs.
//!
//! ```text
//! features   the kernel's features, found by trying (aquifer_sys::features)
//! forms      the forms the engine chooses, reported by the engine itself where possible
//! costs      primitives measured for a few milliseconds each (aquifer_sys::cost, and the engine's own)
//! left       shared memory of pools that no process uses
//! ```
//! Nothing on the system is changed; `--dir` temporarily holds a data file of 16 MiB.

mod bare;
mod costs;
mod forms;
mod mounting;
mod report;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use aquifer::pool::Pool;
use aquifer_sys::features;
use aquifer_sys::limit::Limiter;
use aquifer_sys::machine::Machine;

use crate::output;
use report::{Feature, Left, Report};

/// Arguments of `aquifer doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer doctor                    for files in the current directory
  aquifer doctor --dir /mnt/nvme    for files on another disk
  aquifer doctor --json             as one JSON object, costs in nanoseconds

Creates temporary files of up to 16 MiB in the directory and in /dev/shm, and removes them.")]
pub struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Directory whose file system and disk are examined; must be writable
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,

    /// Skip the measurements of costs
    #[arg(long)]
    no_costs: bool,
}

/// Length of the data file.
const DATA_BYTES: usize = 16 << 20;

/// Examines the machine and prints the report.
pub fn run(args: &Args) -> Result<()> {
    let directory = args.dir.canonicalize().map_err(|error| {
        anyhow!(
            "cannot use the directory {}: {error}; choose an existing directory with --dir",
            args.dir.display()
        )
    })?;
    let data = data_file(&directory)?;
    let report = Report {
        machine: Machine::describe(&directory),
        directory: directory.display().to_string(),
        features: features(),
        limits: features::limits().into(),
        mechanisms: forms::all(data.path())?,
        costs: if args.no_costs { vec![] } else { costs::all(data.path()) },
        left_memory: Pool::left_memory(None).into_iter().flatten().map(Left::from).collect(),
    };
    if args.json { output::print_json(&report, true) } else { output::print(&report.to_text()) }
}

/// Creates a file whose blocks are allocated and written.
fn data_file(directory: &Path) -> Result<tempfile::NamedTempFile> {
    let create = || {
        let mut file = tempfile::Builder::new()
            .prefix("doctor-")
            .suffix(".aquifer-data")
            .tempfile_in(directory)?;
        let block: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
        for _ in 0..DATA_BYTES >> 20 {
            file.write_all(&block)?;
        }
        file.as_file().sync_data()?;
        std::io::Result::Ok(file)
    };
    create().map_err(|error| {
        anyhow!(
            "cannot write a file in {}: {error}; choose a writable directory with --dir",
            directory.display()
        )
    })
}

fn features() -> Vec<Feature> {
    let mut features: Vec<_> = features::probe_all().into_iter().map(Feature::from).collect();
    let purpose = "the same memory limit for all contenders of demo and bench";
    features.push(match Limiter::find() {
        Ok(limiter) => Feature::new("memory control group", true, purpose, limiter.describe()),
        Err(error) => Feature::new("memory control group", false, purpose, error.to_string()),
    });
    features.extend(mounting::features());
    features
}
