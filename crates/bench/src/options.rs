//! The command line of the bench. Every flag is defined here once; help and manual page follow from
//! it.

mod files;
mod pooled;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use aquifer_host::units::Bytes;

pub use files::{
    FlushOptions, MapAheadOptions, MappingCacheOptions, Memory, SearchOptions, UnmapOptions,
};
pub use pooled::{
    AppendOptions, MetadataOptions, PswapOptions, ReadOnceOptions, RepetitiveOptions,
    SharedOptions, ViewOptions,
};

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
  aquifer bench psync --dir /mnt/nvme             durable commits beside LMDB, SQLite, redb and libpmemobj
  aquifer bench compute --rates 4                 matrices in persistent objects, made durable four times a second
  aquifer bench recover --only object             how long attaching takes after a crash
  aquifer bench mapping-cache                     ordinary files, mapped over and over
  aquifer bench search --tree ~/src               text search over a source tree
  aquifer bench read-once                         files of a pool, opened, summed and closed
  aquifer bench shared --processes 1,4            processes that share files of a pool

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
    /// Random stores on a few pages, then a durable commit
    Psync(PsyncOptions),
    /// Matrix kernels that make their results durable a few times a second
    Compute(ComputeOptions),
    /// Opening again after a crash
    Recover(RecoverOptions),
    /// Many ordinary files, mapped, summed and unmapped over and over
    MappingCache(MappingCacheOptions),
    /// One large file: sequential, random and prefetched pages
    MapAhead(MapAheadOptions),
    /// Mappings that are used for a moment only
    Unmap(UnmapOptions),
    /// A file with few or many dirtied pages, made durable
    Flush(FlushOptions),
    /// Text search over a source tree
    Search(SearchOptions),
    /// Files of a pool, each opened by path, summed and closed
    ReadOnce(ReadOnceOptions),
    /// Views of files of a pool: short and long ones, and of fragmented files
    View(ViewOptions),
    /// Records of one large file of a pool, read and overwritten
    Repetitive(RepetitiveOptions),
    /// Files of a pool that grow
    Append(AppendOptions),
    /// Several processes with the same file of a pool, or one each
    Shared(SharedOptions),
    /// Files of a pool that are made, looked up and removed
    Metadata(MetadataOptions),
    /// A file of a pool that takes the content of another one
    Pswap(PswapOptions),
}

impl Bench {
    /// The options that all benches have.
    pub const fn common(&self) -> &Common {
        match self {
            Self::Hit(options)
            | Self::Fault(options)
            | Self::OutOfCore(options)
            | Self::Bfs(options) => &options.common,
            Self::Psync(options) => &options.common,
            Self::Compute(options) => &options.common,
            Self::Recover(options) => &options.common,
            Self::MappingCache(options) => &options.common,
            Self::MapAhead(options) => &options.common,
            Self::Unmap(options) => &options.common,
            Self::Flush(options) => &options.common,
            Self::Search(options) => &options.common,
            Self::ReadOnce(options) => &options.common,
            Self::View(options) => &options.common,
            Self::Repetitive(options) => &options.common,
            Self::Append(options) => &options.common,
            Self::Shared(options) => &options.common,
            Self::Metadata(options) => &options.common,
            Self::Pswap(options) => &options.common,
        }
    }
}

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

    /// Seed of data and accesses
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Small data, few accesses, one round: shows that it works, and nothing about speed
    #[arg(long)]
    pub quick: bool,
}

/// What the benches of the cache understand.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

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

/// What `bench psync` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench psync --dir /mnt/nvme             all contenders on another disk
  aquifer bench psync --only object,lmdb --json   these two, as one JSON object
  aquifer bench psync --pages 1000 --stores 8     larger commits

libpmemobj takes part where it is installed (Debian: libpmemobj1).")]
pub struct PsyncOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Length of the array that is stored to [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,

    /// Distinct pages a commit stores to, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 10, 100],
          value_parser = count())]
    pub pages: Vec<u32>,

    /// Stores on each of these pages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count())]
    pub stores: u32,

    /// Length of each measurement, in seconds: long enough for several checkpoints
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = count(), conflicts_with = "commits")]
    pub seconds: u32,

    /// Commits of each measurement, instead of a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub commits: Option<u64>,

    /// Numbers of threads that commit at once, each to an object of its own, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4],
          value_parser = count())]
    pub threads: Vec<u32>,
}

/// What `bench compute` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench compute                           three kernels, four rates, some minutes
  aquifer bench compute --rates 4 --kernels lu    one of each
  aquifer bench compute --sizes paper --rates 4   the sizes of the paper on persistent memory objects")]
pub struct ComputeOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Only these kernels, separated by commas [default: all]
    #[arg(long, value_name = "KERNEL,…", value_delimiter = ',', value_enum)]
    pub kernels: Vec<KernelName>,

    /// Sizes of the matrices
    #[arg(long, value_enum, default_value_t = Sizes::Default)]
    pub sizes: Sizes,

    /// How often a second the results are made durable, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4, 10],
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rates: Vec<u32>,

    /// Threads that compute [default: the cores]
    #[arg(long, value_name = "N", value_parser = count())]
    pub threads: Option<u32>,
}

/// The kernels of `bench compute`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelName {
    /// LU decomposition of a matrix of doubles
    Lu,
    /// Two-dimensional convolution of integers
    Convolution,
    /// Tiled multiplication of matrices of integers
    Multiplication,
}

impl KernelName {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Lu, Self::Convolution, Self::Multiplication];

    /// The name in reports and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lu => "lu",
            Self::Convolution => "convolution",
            Self::Multiplication => "multiplication",
        }
    }
}

/// How large the matrices of `bench compute` are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sizes {
    /// Some seconds for each kernel on two cores
    Default,
    /// LU 3584 × 3584 doubles, convolution 4096 × 128 integers, multiplication 3072 × 3072 integers
    Paper,
}

/// What `bench recover` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench recover                           against log length, then against object size
  aquifer bench recover --logs 1M,64M --only object")]
pub struct RecoverOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// How much has been committed before the crash, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(1 << 20), Bytes(4 << 20), Bytes(16 << 20)])]
    pub logs: Vec<Bytes>,

    /// Lengths of the array, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(16 << 20), Bytes(64 << 20), Bytes(256 << 20)])]
    pub sizes: Vec<Bytes>,
}

fn count() -> clap::builder::RangedI64ValueParser<u32> {
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
