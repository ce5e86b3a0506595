//! `aquifer pool keep`: keeps a pool open, so that commands and programs that open it only join.

use std::os::fd::AsFd;
use std::path::PathBuf;

use crate::keep::{keep, notify_ready, shared_mode};
use anyhow::{Context, Result};
use aquifer::{Pool, PoolOptions};
use aquifer_sys::signal;

use crate::output;

/// Arguments of `aquifer pool keep`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer pool keep data.pool
  systemctl start \"$(systemd-escape --path --template=aquifer-keep@.service /srv/data.pool)\"

The first process that opens a pool reads its state, and the last one writes it back; while one has it open, others only join, and \
closing it takes them no write. So a pool that is used by many short commands is kept open by one. Run it as the owner of the pool. It \
ends on SIGTERM and Ctrl-C, and tells systemd when it is ready (`Type=notify`; docs/files.md has the unit). Processes that have the pool \
open keep it. If it is killed, nothing is lost: the next process recovers the pool, or joins those that are left. If the disk of the pool fails or is full, \
it ends with status 1, so that the next process can recover the pool.")]
pub struct Args {
    /// Path of the pool
    path: PathBuf,

    /// Directory for the pool's shared memory, if this is the first process that opens the pool;
    /// other processes also search `/dev/shm` and the pool's directory [default: /dev/shm]
    #[arg(long, value_name = "DIR")]
    shared_memory: Option<PathBuf>,
}

/// Keeps the pool open until it is terminated.
pub fn run(args: &Args) -> Result<()> {
    // Before the pool starts threads.
    let ending = signal::Ending::wait_for().context("cannot wait for signals")?;
    let mode = std::fs::metadata(&args.path).map_or(0o600, |metadata| shared_mode(&metadata));
    let options = Pool::options().passive(true).segment_mode(mode);
    let options = args.shared_memory.iter().fold(options, PoolOptions::segment_directory);
    let pool = options.open(&args.path)?;
    // Other processes may have it open since it failed.
    pool.check_usable()?;
    output::print(&format!("keeping {} open\n", args.path.display()))?;
    if let Err(error) = notify_ready() {
        output::warn(&format!("cannot tell the service manager: {error}"));
    }
    keep(&pool, ending.as_fd())?;
    drop(pool);
    // Ignore output errors: the reader of the log may have closed it.
    drop(output::print("closed\n"));
    Ok(())
}
