//! The benches, started by `aquifer bench`. A separate program, since it depends on the systems Aquifer is
//! compared with.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Benchmarks of Aquifer
#[derive(Parser)]
#[command(name = "aquifer-bench", bin_name = "aquifer", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  aquifer bench hit                 compare random loads from resident memory
  aquifer bench out-of-core --json  compare reads of a file larger than memory, as one JSON object";

#[derive(Subcommand)]
enum Command {
    /// Compare Aquifer with mmap, direct reads, user-space caches and databases
    Bench(aquifer_bench::BenchArgs),
    /// Serves a mount, by other processes: started by `bench mount`
    #[command(hide = true)]
    MountKeeper,
    /// Answers the requests of a mount: started by its keeper
    #[command(hide = true)]
    MountServer,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Bench(args) => aquifer_bench::main(&args),
        Command::MountKeeper => return aquifer_fuse::keeper_main(),
        Command::MountServer => return aquifer_fuse::server_main(),
    };
    match done {
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
        Ok(()) => ExitCode::SUCCESS,
    }
}
