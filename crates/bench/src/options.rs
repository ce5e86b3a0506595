//! The command line: the options that several benches have. Those of a single bench are declared
//! with it.

use std::path::PathBuf;

use aquifer_sys::units::Bytes;
use clap::{Args, ValueEnum};

/// What all benches understand.
#[derive(Debug, Clone, Args)]
pub struct Common {
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

    /// Only these contenders, separated by commas, for example mmap_random,mapping; ratios need
    /// both sides
    #[arg(long, value_name = "SYSTEM,…", value_delimiter = ',')]
    pub only: Vec<String>,

    /// How often everything is measured; medians are reported
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,

    /// The number of the first round: each round has other accesses
    #[arg(skip)]
    pub first_round: u32,

    /// Measure further rounds until each floor is certainly met or missed
    #[arg(long)]
    pub until_sure: bool,

    /// The time after which --until-sure begins no further rounds
    #[arg(long, value_name = "MINUTES", default_value_t = 10, requires = "until_sure")]
    pub limit_minutes: u64,

    /// Seed of data and accesses
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Small data, few accesses, one round: shows that it works, and nothing about speed
    #[arg(long)]
    pub quick: bool,
}

/// What the benches of the cache understand.
#[derive(Debug, Clone, Args)]
pub struct CacheOptions {
    /// Length of the data file [default: 2 GiB; hit and bfs: 256 MiB]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,

    /// Memory each contender gets, its own cache included [default: an eighth of the size; bfs: a
    /// quarter]
    #[arg(long, value_name = "BYTES")]
    pub budget: Option<Bytes>,

    /// Numbers of threads, separated by commas [default: 1, 2, 4, … up to the cores]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = count())]
    pub threads: Vec<u32>,
}

/// Where else than on the disk files are put.
#[derive(Debug, Clone, Args)]
pub struct Memory {
    /// Directory in memory (a tmpfs) where everything is measured a second time
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub tmpfs_dir: PathBuf,
}

/// A number of threads, pages or files.
pub fn count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=1024)
}

/// Where the data file can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// What `--dir` is on
    Disk,
    /// A compressed memory device, made for the run and removed after it; needs root
    Zram,
}
