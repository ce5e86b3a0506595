//! `aquifer version`.

use anyhow::Result;
use serde::Serialize;

use crate::output;

/// Arguments of `aquifer version`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  aquifer version --json")]
pub struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
    architecture: &'static str,
    optimised: bool,
}

/// Prints the version.
pub fn run(args: &Args) -> Result<()> {
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        architecture: std::env::consts::ARCH,
        optimised: !cfg!(debug_assertions),
    };
    if args.json {
        return output::print_json(&version, true);
    }
    let build = if version.optimised { "release build" } else { "debug build: slow" };
    output::print(&format!("aquifer {} ({}, {build})\n", version.version, version.architecture))
}
