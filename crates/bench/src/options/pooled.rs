//! Options of the benches about files in pools.

use clap::Args;

use super::{Common, Memory, count};
use aquifer_host::units::Bytes;

/// What `bench read-once` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench read-once                         three lengths, 64 MiB of files, about two minutes
  aquifer bench read-once --full                  4 KiB to 1 GiB, and 2 GiB of files, too
  aquifer bench read-once --sizes 16K --threads 1 --json")]
pub struct ReadOnceOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Lengths of the files, separated by commas [default: 4K,32K,256K; --full: to 1G]
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',')]
    pub sizes: Vec<Bytes>,

    /// Lengths of all files together, separated by commas [default: 64M; --full: 64M,2G]
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',')]
    pub sets: Vec<Bytes>,

    /// Numbers of threads, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2],
          value_parser = count())]
    pub threads: Vec<u32>,

    /// How often all files are read in each measurement, after the first time
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count())]
    pub passes: u32,

    /// All lengths and sets
    #[arg(long)]
    pub full: bool,
}

/// What `bench view` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench view                              what opening costs, short or long, and fragmented files
  aquifer bench view --large 512M --json          with less memory")]
pub struct ViewOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Length of the long file, which is opened and hardly read
    #[arg(long, value_name = "BYTES", default_value = "4G")]
    pub large: Bytes,

    /// Lengths of the files in the aged pool, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(32 << 10), Bytes(256 << 10)])]
    pub sizes: Vec<Bytes>,

    /// Length of all these files together [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    pub set: Option<Bytes>,
}

/// What `bench repetitive` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench repetitive                        1 and 4 KiB, in order and at random
  aquifer bench repetitive --size 1G --only syscalls,pool")]
pub struct RepetitiveOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Length of the file [default: 256 MiB]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,

    /// Records in each measurement
    #[arg(long, value_name = "N", default_value_t = 200_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub records: u64,
}

/// What `bench append` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench append                            pieces of 4 KiB to 4 MiB
  aquifer bench append --pieces 64K --size 512M --json")]
pub struct AppendOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Lengths of a piece, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(4 << 10), Bytes(64 << 10), Bytes(1 << 20), Bytes(4 << 20)])]
    pub pieces: Vec<Bytes>,

    /// How long the file gets [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,
}

/// What `bench shared` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench shared                            1, 2 and 4 processes, the same file or one each
  aquifer bench shared --processes 8 --only syscalls,pool --json

Page faults of a second process are counted on a hugetlbfs, which is mounted for that and gets its pages for
that: only root can do so.")]
pub struct SharedOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Numbers of processes, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 4],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub processes: Vec<u32>,

    /// Length of each file [default: 64 MiB]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,

    /// Records of 4 KiB of each process in each measurement
    #[arg(long, value_name = "N", default_value_t = 100_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub records: u64,

    /// Length of the file on the hugetlbfs [default: 2 GiB]
    #[arg(long, value_name = "BYTES")]
    pub huge: Option<Bytes>,
}

/// What `bench metadata` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench metadata                          one process and four
  aquifer bench metadata --processes 1,2,8 --json")]
pub struct MetadataOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Numbers of processes, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 4],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub processes: Vec<u32>,

    /// Files that each process makes in each measurement
    #[arg(long, value_name = "N", default_value_t = 20_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub files: u64,
}

/// What `bench pswap` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench pswap                             1 GiB replaced
  aquifer bench pswap --size 64M --json")]
pub struct PswapOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Length of the file [default: 1 GiB]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,
}
