//! The command line of the bench. Every flag is defined here once; help and manual page follow from it.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use crate::contender::System;
use crate::units::Bytes;

/// Arguments of `aquifer bench`.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    /// Which bench
    #[command(subcommand)]
    pub bench: Bench,
}

const EXAMPLES: &str = "\
Examples:
  aquifer bench out-of-core                       2 GiB of data, 256 MiB of memory, this directory's disk
  aquifer bench out-of-core --device zram         the same on a fast device made for the run (root)
  aquifer bench bfs --dir /mnt/nvme --json        graph search on another disk, as one JSON object
  aquifer bench hit --rounds 9                    what an access to resident memory costs

Out-of-core benches limit memory with a control group, which needs root or a delegated group:
  systemd-run --user --scope -p Delegate=yes aquifer bench out-of-core";

/// The benches.
#[derive(Debug, Clone, Subcommand)]
pub enum Bench {
    /// Random 8-byte loads from memory that is all resident
    Hit(Options),
    /// Where the time of one miss goes
    Fault(Options),
    /// Random pages of a file several times larger than memory
    OutOfCore(Options),
    /// Breadth-first search over a graph larger than memory
    Bfs(Options),
}

/// What all benches understand.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,

    /// Directory for the data file; its file system and disk are what is measured (unless --device
    /// makes another one)
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,

    /// Device for the data file
    #[arg(long, value_enum, default_value_t = Device::Disk)]
    pub device: Device,

    /// Length of the data file [default: 2 GiB; hit and bfs: 256 MiB]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,

    /// Memory each contender gets, its own cache included [default: an eighth of the size; bfs: a
    /// quarter]
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<Bytes>,

    /// Only these contenders, separated by commas, for example mmap_random,mapping; ratios need both sides
    #[arg(long, value_name = "SYSTEM,…", value_delimiter = ',', value_parser = System::parse)]
    pub only: Vec<System>,

    /// How often everything is measured; medians are reported
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,

    /// Numbers of threads, separated by commas [default: 1, 2, 4, … up to the cores]
    #[arg(long, value_name = "N,…", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Vec<u32>,

    /// Seed of data and accesses
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Small data, few accesses, one round: shows that it works, and nothing about speed
    #[arg(long)]
    pub quick: bool,
}

/// Where the data file can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// What `--dir` is on
    Disk,
    /// A compressed memory device, made for the run and removed after it; needs root
    Zram,
}

/// Arguments of `aquifer demo`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer demo                                    a graph in this directory
  aquifer demo --dir /mnt/nvme --size 1G          a larger graph on another disk
  aquifer demo --json                             as one JSON object, in the form of the benches")]
pub struct DemoArgs {
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,

    /// Directory for the graph file; it is removed afterwards
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,

    /// Length of the graph file
    #[arg(long, value_name = "BYTES", default_value = "192M")]
    pub size: Bytes,

    /// Memory that Aquifer and mmap each get [default: a quarter of the size]
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<Bytes>,
}
