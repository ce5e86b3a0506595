//! The benches and the demo as a program of their own, for tests and for work on the bench itself.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand};

/// Aquifer's benches
#[derive(Parser)]
#[command(name = "aquifer-bench")]
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

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Bench(args) => aquifer_bench::main(&args),
        Command::Demo(args) => aquifer_bench::demo(&args),
    }
}
