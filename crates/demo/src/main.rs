//! The demonstration as a program of its own: `./run`.
#![forbid(unsafe_code)]

use clap::Parser;

/// A file larger than memory, used as memory: by mmap, by mmap with care, and by Aquifer
#[derive(Parser)]
#[command(name = "aquifer-demo", version)]
struct Cli {
    #[command(flatten)]
    args: aquifer_demo::DemoArgs,
}

fn main() -> anyhow::Result<()> {
    aquifer_demo::main(&Cli::parse().args)
}
