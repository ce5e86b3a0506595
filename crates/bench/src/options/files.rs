//! Options of the benches about ordinary files.

use std::path::PathBuf;

use clap::Args;

use super::{Common, count};
use aquifer_host::units::Bytes;

/// Where else than on the disk files are put.
#[derive(Debug, Clone, Args)]
pub struct Memory {
    /// Directory in memory (a tmpfs) where everything is measured a second time
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub tmpfs_dir: PathBuf,
}

/// What `bench mapping-cache` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench mapping-cache                     on this directory's disk and in /dev/shm
  aquifer bench mapping-cache --sizes 4K,64K      other sizes
  aquifer bench mapping-cache --files 1000 --json

Files are opened, summed and closed again in an order drawn by Zipf's law. Of large files there are fewer, so
that all of them stay in memory; the report says how many.")]
pub struct MappingCacheOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Number of files
    #[arg(long, value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub files: u32,

    /// Lengths of the files, separated by commas
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',',
          default_values_t = [Bytes(32 << 10), Bytes(1 << 20)])]
    pub sizes: Vec<Bytes>,

    /// Files are mapped so often in each measurement [default: as many as sum to 8 GiB, at most
    /// 200,000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub maps: Option<u64>,

    /// What the mapping cache may keep [default: what it keeps by itself]
    #[arg(long, value_name = "BYTES")]
    pub mapping_cache: Option<Bytes>,
}

/// What `bench map-ahead` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench map-ahead                         warm, cold, random and prefetched pages of one file
  aquifer bench map-ahead --dir /mnt/nvme --size 8G
  aquifer bench map-ahead --only mmap,mmap_populate,mapper --json")]
pub struct MapAheadOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the file in memory is.
    #[command(flatten)]
    pub memory: Memory,

    /// Length of the file [default: 4 GiB, or a quarter of memory where that is less]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,
}

/// What `bench unmap` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench unmap                             one thread and two, on disk and in /dev/shm
  aquifer bench unmap --threads 1,2,4,8           how it scales
  aquifer bench unmap --file-size 64K --json")]
pub struct UnmapOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Where the files in memory are.
    #[command(flatten)]
    pub memory: Memory,

    /// Length of each file, and so of each mapping
    #[arg(long, value_name = "BYTES", default_value = "32K")]
    pub file_size: Bytes,

    /// Files of each thread
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count())]
    pub files: u32,

    /// Numbers of threads, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2],
          value_parser = count())]
    pub threads: Vec<u32>,

    /// Mappings each thread makes in each measurement
    #[arg(long, value_name = "N", default_value_t = 200_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub maps: u64,
}

/// What `bench flush` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench flush --dir /mnt/nvme             0.1 % and 10 % of a file of 1 GiB dirtied, then flushed
  aquifer bench flush --dirty 0.01,1,50           other parts, in percent
  aquifer bench flush --size 256M --json")]
pub struct FlushOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Length of the file [default: 1 GiB]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Bytes>,

    /// Parts of the file's pages that are stored to, in percent, separated by commas
    #[arg(long, value_name = "PERCENT,…", value_delimiter = ',', default_values_t = [0.1, 10.0],
          value_parser = percent)]
    pub dirty: Vec<f64>,
}

/// What `bench search` understands.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench search                            source files of this machine, copied to this directory
  aquifer bench search --tree ~/src,/usr/include  from these directories
  aquifer bench search --needle 'struct stat' --threads 4 --json

The files are copied into a scratch directory, with the directories they are in. Where there are fewer than
--files, they are copied again under other names; the report says so.")]
pub struct SearchOptions {
    /// What all benches understand.
    #[command(flatten)]
    pub common: Common,

    /// Directories to take source files from, separated by commas [default: /usr/include,
    /// /usr/share, ~/.cargo/registry, ~/.rustup and others that are there]
    #[arg(long, value_name = "DIR,…", value_delimiter = ',')]
    pub tree: Vec<PathBuf>,

    /// Number of files
    #[arg(long, value_name = "N", default_value_t = 50_000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub files: u32,

    /// Text to search for; it may lie across lines
    #[arg(long, value_name = "TEXT", default_value = "TODO",
          value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub needle: String,

    /// Threads that search [default: the cores]
    #[arg(long, value_name = "N", value_parser = count())]
    pub threads: Option<u32>,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 100.0 => Ok(value),
        _ => Err(format!("`{text}` is not a percentage above 0 and up to 100")),
    }
}
