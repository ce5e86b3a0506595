//! `aquifer umount`: unmounts a pool, and waits until it is closed.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use aquifer::fuse::{UnmountError, Unmounted, unmount};

use crate::output;

/// Arguments of `aquifer umount`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer umount /mnt            unmount it, and wait until all is in the pool
  aquifer umount --lazy /mnt     although programs use it: it ends with its last use

The command returns when the process that served the mount has closed the pool: then all that was written is in the pool, and other \
programs can write to it. Where it cannot wait for that, it says so. `umount DIR` works too, but returns before that.")]
pub struct Args {
    /// Directories where pools are mounted
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,

    /// Also while programs use it: the directory is empty at once, and the mount ends with its last
    /// use; the command does not wait for that
    #[arg(long, short)]
    lazy: bool,

    /// How long to wait until the pool is closed, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    wait: u64,
}

/// Unmounts all of them.
pub fn run(args: &Args) -> Result<()> {
    let wait = Duration::from_secs(if args.lazy { 0 } else { args.wait });
    let mut failed = false;
    for directory in &args.directories {
        let error = match unmount(directory, args.lazy, wait) {
            Ok(Unmounted::NotWaited) if !args.lazy => {
                let at = directory.display();
                output::warn(&format!(
                    "{at} is unmounted; whether the pool is closed could not be told"
                ));
                continue;
            }
            Ok(_) => continue,
            Err(UnmountError::StillOpen { .. }) if args.lazy => continue,
            Err(error) => error,
        };
        failed = true;
        output::print_error(&match error {
            UnmountError::Busy { ref path } => {
                let path = path.display();
                anyhow::anyhow!(
                    "{error}; `fuser -vm {path}` shows which, --lazy unmounts it nevertheless"
                )
            }
            error => error.into(),
        });
    }
    if failed { bail!(output::Said) } else { Ok(()) }
}
