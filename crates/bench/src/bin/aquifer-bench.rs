//! The benches and the demonstration, started by `aquifer bench` and `aquifer demo`. A separate
//! program, since it depends on the systems Aquifer is compared with.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use aquifer_host::failure;
use clap::{Parser, Subcommand};

/// Aquifer's benches
#[derive(Parser)]
#[command(name = "aquifer-bench", bin_name = "aquifer", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compare Aquifer with what a program would use otherwise
    Bench(aquifer_bench::BenchArgs),
    /// Search a graph larger than memory
    Demo(aquifer_bench::DemoArgs),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Bench(args) => aquifer_bench::main(&args),
        Command::Demo(args) => aquifer_bench::demo(&args),
    };
    match done {
        Err(error) if !failure::is_closed_pipe(&error) => {
            failure::print_error(&error);
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}
