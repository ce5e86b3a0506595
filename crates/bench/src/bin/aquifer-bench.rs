//! The benches as a program of their own, for tests and for work on the bench itself.
#![forbid(unsafe_code)]

use clap::Parser;

/// Aquifer's benches
#[derive(Parser)]
#[command(name = "aquifer-bench")]
struct Cli {
    #[command(flatten)]
    args: aquifer_bench::BenchArgs,
}

fn main() -> anyhow::Result<()> {
    aquifer_bench::main(&Cli::parse().args)
}
