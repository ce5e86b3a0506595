//! `aquifer pool create`: creates a file, allocates and zeroes it, then formats it.
//!
//! Impossible requests are rejected before a file is created or content is lost: options that do
//! not fit the size, an existing file, a device that may hold data.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Error, Result, anyhow, bail, ensure};
use aquifer::pool::media::{self, OpenError};
use aquifer::{PersistenceDomain, Pool, PoolError};
use aquifer_sys::devdax;
use aquifer_sys::units::Bytes;

use super::info::Report;
use super::undo::Undo;
use super::{explain_domain, format_note};
use crate::{output, progress};

/// Arguments of `aquifer pool create`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer pool create data.pool --size 1G                  in a new file
  aquifer pool create /mnt/pmem/data.pool --size 16G       on a DAX mount, which is detected
  aquifer pool create data.pool --size 1G --log 256M       with space for large commits

Allocates and writes every byte of the file, so that no later write fails for lack of space. A new file gets its name only when \
the pool in it is complete: if interrupted, the command leaves nothing.")]
pub struct Args {
    /// File to create, or device to use
    path: PathBuf,

    /// Length of the pool, for example 1G (K, M, G and T are powers of 1024); on a device, the
    /// length of the device
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    size: Bytes,

    /// Length of the log; a commit of up to a quarter of it is logged whole [default: a quarter of
    /// the pool, between 64 KiB and 128 MiB]
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    log: Option<Bytes>,

    /// Number of slots for files, directories and objects, rounded up [default: one for each MiB,
    /// between 1,000 and 65,000; under 16 MiB, one for each 8 KiB]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    inodes: Option<u64>,

    /// For tests: treat the file as this persistence domain while the pool is created. It is not
    /// recorded in the pool [default: detected]
    #[arg(long, value_enum)]
    domain: Option<Domain>,

    /// Overwrite an existing file or a device; its content is lost
    #[arg(long)]
    force: bool,

    /// Print the result as one JSON object, like `aquifer pool info`
    #[arg(long)]
    json: bool,
}

/// What makes bytes durable.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Domain {
    /// Durable by cache-line flush and fence
    Dax,
    /// Durable by write-back and a flush of the device
    PageCache,
    /// Never durable
    Volatile,
}

impl From<Domain> for PersistenceDomain {
    fn from(domain: Domain) -> PersistenceDomain {
        match domain {
            Domain::Dax => PersistenceDomain::Dax,
            Domain::PageCache => PersistenceDomain::PageCache,
            Domain::Volatile => PersistenceDomain::Volatile,
        }
    }
}

/// Creates the pool and prints its description.
pub fn run(args: &Args) -> Result<()> {
    // Without shared memory: no other process needs it yet.
    let mut options = Pool::options().exclusive(true).overwrite(args.force);
    if let Some(inodes) = args.inodes {
        options = options.inodes(inodes);
    }
    if let Some(log) = args.log {
        options = options.log_bytes(log.0);
    }
    if let Some(domain) = args.domain {
        options = options.domain(domain.into());
    }
    options.layout(args.size.0)?;
    check_place(args)?;
    let undo = Undo::new(&args.path, true);
    let bar = progress::Bytes::new("allocating and zeroing");
    let mut told = |done, all| {
        bar.at(done, all);
        undo.ends_if_interrupted(&bar);
    };
    let pool = options.create_with_progress(&args.path, args.size.0, &mut told);
    drop(bar);
    let pool = pool.map_err(|error| match error {
        PoolError::NotOpened(error) => explain(error),
        error => error.into(),
    })?;
    let (report, text) = (Report::of(&pool)?.when_closed(), describe(&args.path, &pool)?);
    drop(pool);
    if args.json { output::print_json(&report, true) } else { output::print(&text) }
}

/// Adapts the library's errors about media to creating a pool.
fn explain(error: OpenError) -> Error {
    match error {
        OpenError::Exists { path } if path.is_symlink() && !path.exists() => {
            anyhow!(
                "{}: File exists: it is a symbolic link to a missing file; remove it, or choose another path",
                path.display()
            )
        }
        OpenError::Exists { path } => anyhow!(
            "{}: File exists; choose another path, or overwrite it with --force",
            path.display()
        ),
        OpenError::Missing { path } => anyhow!(
            "{}: No such file or directory: its directory does not exist or cannot hold files; choose another path",
            path.display()
        ),
        OpenError::NoPermission { path, .. } => {
            anyhow!(
                "{}: Permission denied to create or overwrite it; choose another path",
                path.display()
            )
        }
        OpenError::ReadOnlyMedia { path } => {
            anyhow!("{}: Read-only file system or device; choose another path", path.display())
        }
        error => error.into(),
    }
}

/// Checks conditions that would otherwise be detected only after existing content is lost.
fn check_place(args: &Args) -> Result<()> {
    match std::fs::metadata(&args.path) {
        Ok(metadata) if is_device(&metadata) => check_device(args),
        Ok(metadata) if metadata.is_file() && args.force => check_room(args, &metadata),
        _ => Ok(()),
    }
}

/// Checks the free space. An existing file is truncated before it gets its new length.
fn check_room(args: &Args, metadata: &Metadata) -> Result<()> {
    /// The unit of `st_blocks` on every file system.
    const BLOCK_BYTES: u64 = 512;
    let Ok(free_bytes) = aquifer_sys::machine::free_bytes(&args.path) else { return Ok(()) };
    let there_bytes = free_bytes.saturating_add(metadata.blocks() * BLOCK_BYTES);
    ensure!(
        args.size.0 <= there_bytes,
        "{}: No space left on device for {}: {} are available, including the present file; free space, or make it smaller",
        args.path.display(),
        args.size,
        Bytes(there_bytes),
    );
    Ok(())
}

/// A pool uses a whole device, and only with `--force`.
fn check_device(args: &Args) -> Result<()> {
    let path = args.path.display();
    ensure!(args.force, "{path} is a device; --force overwrites it, and its content is lost");
    let len_bytes = device_len_bytes(&args.path)?;
    if args.size.0 != len_bytes {
        bail!(
            "{path}: a pool uses the whole device, which has {len_bytes} bytes; pass --size {len_bytes}"
        );
    }
    Ok(())
}

fn is_device(metadata: &Metadata) -> bool {
    metadata.file_type().is_block_device() || devdax::is_devdax(metadata)
}

fn device_len_bytes(path: &Path) -> Result<u64, OpenError> {
    Ok(media::OpenOptions::new().open(path)?.len_bytes())
}

fn describe(path: &Path, pool: &Pool) -> Result<String, PoolError> {
    let info = pool.info()?;
    let layout = info.layout;
    let lines = [
        ("domain", explain_domain(info.domain)),
        ("log", Bytes(layout.log().len_bytes).to_string()),
        ("inodes", output::count(layout.slots() - 1)),
        ("free", Bytes(info.free_pages * aquifer::pool::format::PAGE_BYTES).to_string()),
    ];
    Ok(format!(
        "created a pool of {} in {}, {}\n{}",
        Bytes(layout.len_bytes()),
        path.display(),
        format_note(),
        output::columns(&lines.map(|(name, value)| [name.to_owned(), value])),
    ))
}
