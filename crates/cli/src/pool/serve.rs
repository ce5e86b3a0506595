//! `aquifer pool serve`: the broker of a pool.
//!
//! Processes that may read the pool file may read the shared memory of the pool's processes and may
//! request access. The command serves until it is terminated; processes that have got access keep
//! it.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::keep::shared_mode;
use anyhow::{Context, Result};
use aquifer::pool::broker::Asked;
use aquifer::pool::{AccessKey, Broker};
use aquifer::{Pool, PoolOptions};
use aquifer_sys::signal;

use crate::output;

/// Arguments of `aquifer pool serve`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer pool serve data.pool            with the key in data.pool.key, created if missing
  aquifer pool serve /dev/dax0.0 --socket /run/dax.socket --key-file /etc/dax.key

Run it as the owner of the pool. It opens the pool for writing, and passes writable descriptors to processes that present the key \
(`Pool::grant_access`, and commands with --access-key-file); it prints each request. Users who may read the pool file may send one. \
It ends on SIGTERM and Ctrl-C, and removes its socket, but not the key file; processes that have access keep it. A pool has at most \
one broker.")]
pub struct Args {
    /// Path of the pool
    path: PathBuf,

    /// Socket to listen at [default: the pool's path followed by `.socket`]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// File with the key, of mode 600; created with a random key if missing [default: the pool's
    /// path followed by `.key`]
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Directory for the pool's shared memory, if this is the first process that opens the pool;
    /// other processes also search `/dev/shm` and the pool's directory [default: /dev/shm]
    #[arg(long, value_name = "DIR")]
    shared_memory: Option<PathBuf>,
}

/// Serves until it is terminated.
pub fn run(args: &Args) -> Result<()> {
    // Before the pool starts threads.
    let ending = signal::Ending::wait_for().context("cannot wait for signals")?;
    let path = args.path.display();
    let metadata = std::fs::metadata(&args.path);
    let mode = metadata.map_or(0o600, |metadata| shared_mode(&metadata));
    let options = Pool::options().segment_mode(mode);
    let options = args.socket.iter().fold(options, PoolOptions::broker_socket);
    let options = args.shared_memory.iter().fold(options, PoolOptions::segment_directory);
    let pool = options.open(&args.path)?;
    let key_file = args.key_file.clone().unwrap_or_else(|| beside(&args.path, ".key"));
    let (key, how) = key_in(&key_file)?;
    let broker = Broker::bind(&pool, &key, &options)?;
    drop(pool);
    let socket = broker.socket().display();
    let made = std::fs::metadata(broker.socket()).map_or(mode, |made| made.permissions().mode());
    if mode & !made & 0o044 != 0 {
        output::warn(&format!(
            "another process has {path} open, and shares it with fewer users than may read the file; end that process and restart"
        ));
    }
    let key_file = key_file.display();
    output::print(&format!("serving {path} at {socket}; the key {how} {key_file}\n"))?;
    // Ignore output errors: the reader of the log may have closed it.
    broker.serve(ending.as_fd(), &|asked| drop(output::print(&line(asked))))?;
    drop(output::print("ended; processes that have access keep it\n"));
    Ok(())
}

fn line(asked: &Asked) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}  {asked}\n", output::moment(now.as_nanos() as u64))
}

fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// The key in a file, or a new one.
fn key_in(path: &Path) -> Result<(AccessKey, &'static str)> {
    if path.exists() {
        Ok((AccessKey::from_file(path)?, "is in"))
    } else {
        Ok((AccessKey::create_file(path)?, "was created in"))
    }
}
