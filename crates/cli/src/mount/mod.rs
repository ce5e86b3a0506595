//! `aquifer mount`, `aquifer umount` and `aquifer run`: pools as file systems for every program.
//!
//! | | |
//! |---|---|
//! | `options` | the options, and their names in the file systems table |
//! | `helper` | this program as `mount.fuse.aquifer`, which `mount` calls |
//! | `ways` | root mounts, others by `fusermount3`, or in namespaces of their own |

mod helper;
mod options;
pub mod run;
pub mod umount;
mod ways;

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::keep::notify_ready;
use anyhow::{Context, Result};
use aquifer::fuse::MountedPool;
use serde::Serialize;

use crate::files::entry::as_json;
use crate::output;

pub use helper::translated;
pub use ways::{why_no_device, why_no_namespace};

/// Arguments of `aquifer mount`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer mount data.pool /mnt                             all programs can use it, until `aquifer umount /mnt`
  aquifer mount data.pool /mnt --allow-other               for all users, as owners and modes permit
  aquifer mount data.pool /mnt --cache write-through       faster for many small files, slower for small writes
  aquifer mount data.pool /mnt --shared                    while other programs and mounts change the pool too
  aquifer mount --foreground data.pool /mnt                until Ctrl-C, or as a service
  aquifer mount                                            show which pools are mounted
  aquifer mount --json | jq -r '.mounts[].directory'       for programs

In /etc/fstab, with a link from /sbin/mount.fuse.aquifer to this program:
  /srv/data.pool  /mnt  fuse.aquifer  allow_other,nofail  0  0

Unless it is shared, the mount alone changes the pool: other programs can read it, and get an error that names this mount if they open it for writing. \
Mounting needs root, or fusermount3 (package fuse3); `aquifer run` needs neither. See docs/mount.md.")]
pub struct Args {
    /// The pool
    #[arg(requires = "directory")]
    pool: Option<PathBuf>,

    /// The directory that shows its files
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,

    /// Stay in the foreground until it is unmounted, or until SIGTERM or Ctrl-C unmounts it
    #[arg(long, short)]
    foreground: bool,

    /// Append to a file what happens to the mount: that its server has died, why it was not unmounted;
    /// in the foreground that is printed
    #[arg(long, value_name = "FILE", conflicts_with = "foreground")]
    log: Option<PathBuf>,

    /// Show the mounted pools as JSON
    #[arg(long, conflicts_with = "pool")]
    json: bool,

    #[command(flatten)]
    options: options::Options,
}

/// The mounted pools as JSON.
#[derive(Debug, Serialize)]
struct Report {
    mounts: Vec<Entry>,
}

#[derive(Debug, Serialize)]
struct Entry {
    pool: String,
    directory: String,
    read_only: bool,
    connection: u32,
    /// Requests without an answer; `null` where the kernel does not show it.
    waiting: Option<u64>,
}

/// Mounts a pool, or shows those that are mounted.
pub fn run(args: &Args) -> Result<()> {
    let (Some(pool), Some(directory)) = (&args.pool, &args.directory) else {
        return list(args.json);
    };
    if !args.foreground {
        ways::start(&args.options, pool, directory, |mounting| {
            let Some(path) = &args.log else { return Ok(mounting) };
            let log = File::options().append(true).create(true).open(path);
            Ok(mounting.log(log.with_context(|| path.display().to_string())?))
        })?;
        return Ok(());
    }
    ways::run(&args.options, pool, directory, || {
        // Ignore output errors: the reader of the log may have closed it.
        let _ = output::print(&format!("mounted {} at {}\n", pool.display(), directory.display()));
        if let Err(error) = notify_ready() {
            output::warn(&format!("cannot tell the service manager: {error}"));
        }
    })
}

fn list(json: bool) -> Result<()> {
    let mounts = aquifer::fuse::mounts()?;
    if json {
        let mounts = mounts.into_iter().map(Entry::from).collect();
        return output::print_json(&Report { mounts }, true);
    }
    let lines = mounts.into_iter().map(|it| {
        let [pool, directory] =
            [&it.source, &it.directory].map(|path| output::escaped(path.as_os_str().as_bytes()));
        let waiting = it.waiting.filter(|&waiting| waiting > 0);
        let how = it.read_only.then(|| "read-only".to_owned());
        let how = how.into_iter().chain(waiting.map(|count| format!("{count} requests waiting")));
        [pool, directory, how.collect::<Vec<_>>().join(", ")]
    });
    output::print(&output::columns(&lines.collect::<Vec<_>>()))
}

impl From<MountedPool> for Entry {
    fn from(it: MountedPool) -> Entry {
        let [pool, directory] =
            [&it.source, &it.directory].map(|path| as_json(path.as_os_str().as_bytes()).0);
        let MountedPool { read_only, connection, waiting, .. } = it;
        Entry { pool, directory, read_only, connection, waiting }
    }
}
