//! `aquifer run`: runs a command that sees pools as directories.
//!
//! The pools are mounted in a mount namespace of the command's own where the system permits it, so
//! no other program sees them, and no privileges are needed. A mount ends with the command, or with the
//! last program that it has left behind and that uses it.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result};
use aquifer::fuse::{Keeper, UnmountError, unmount};
use aquifer_sys::signal::Ending;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::{options, ways};
use crate::files::{Place, place_parser};
use crate::output;

/// Arguments of `aquifer run`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer run --pool data.pool:/mnt -- ls -l /mnt
  aquifer run --pool repository.pool:/src --no-xattrs -- make -C /src -j4
  aquifer run --pool a.pool:/a --pool b.pool:/b -- rsync -a /a/ /b/

Only the command and its children see the directory's new content, and it needs no privileges but user namespaces and /dev/fuse. There \
only one user exists: files of others show the user nobody, and chown fails. Where there are no namespaces, fusermount3 mounts it for \
all programs as long as the command runs. The exit status is that of the command, or 128 and its signal's number; 127 if the command \
is not found, 126 if it cannot be run.")]
pub struct Args {
    /// A pool, and the directory, from the root on, that shows its files; may be repeated
    #[arg(long = "pool", required = true, value_name = "POOL:DIR", value_parser = place_parser())]
    pools: Vec<Place>,

    #[command(flatten)]
    options: options::Options,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// How long to wait until a pool is closed.
const WAIT: Duration = Duration::from_secs(30);

/// A pool that is mounted for the command.
struct Mounted<'p> {
    place: &'p Place,
    keeper: Option<Keeper>,
}

/// Runs the command. Ends the process with its exit status.
pub fn run(args: &Args) -> Result<()> {
    let hidden = ways::enter_namespaces();
    // Not before: a process of several threads enters no user namespace.
    let ending = Ending::wait_for().context("cannot wait for signals")?;
    // However this process ends, its end closes this pipe, and with it the mounts.
    let (other_end, _alive) = io::pipe().context("cannot make a pipe")?;
    let mut mounted = Vec::new();
    for place in &args.pools {
        let started = ways::start(&args.options, place.pool(), place.path(), |mounting| {
            let other_end = other_end.try_clone().context("cannot make a pipe")?;
            Ok(mounting.until_closed(other_end.into()))
        });
        let keeper = match &hidden {
            Ok(_) => started,
            Err(reason) => started.with_context(|| reason.clone()),
        }?;
        mounted.push(Mounted { place, keeper: Some(keeper) });
    }
    if let Err(reason) = &hidden {
        output::warn(&format!("all programs see the pool while the command runs: {reason}"));
    }
    if let Ok(Some(rights)) = &hidden {
        rights.restore().context("cannot drop the right to mount")?;
    }
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let mut command = Command::new(program);
    command.args(arguments);
    // The present directory may be one that a pool hides now.
    let is_hidden = |here: &PathBuf| args.pools.iter().any(|it| here.starts_with(it.path()));
    let here = std::env::current_dir().ok().filter(|here| is_hidden(here) && here.is_dir());
    here.into_iter().fold(&mut command, Command::current_dir);
    ending.leave_to(&mut command);
    let status = match command.spawn() {
        Ok(child) => status_of(wait(child, &ending)?),
        Err(error) => {
            output::print_error(&anyhow::anyhow!("cannot run {}: {error}", program.display()));
            if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
        }
    };
    // The last first: a pool may be mounted in another one.
    while let Some(last) = mounted.pop() {
        // The command has ended, and its status is what counts.
        if let Err(error) = last.end() {
            output::warn(&format!("{error:#}"));
        }
    }
    std::process::exit(status);
}

impl Mounted<'_> {
    fn end(mut self) -> Result<()> {
        let path = self.place.path();
        // Dropped with it, the mount would be removed again.
        let keeper = self.keeper.take();
        match unmount(path, false, WAIT) {
            // The command has unmounted it.
            Err(UnmountError::NotMounted { .. }) => Ok(()),
            Err(UnmountError::Busy { .. }) => {
                let at = path.display();
                output::warn(&format!(
                    "programs that the command has left behind use {at} until they end"
                ));
                match unmount(path, true, Duration::ZERO) {
                    Ok(_) | Err(UnmountError::StillOpen { .. }) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            }
            ended => {
                ended?;
                if let Some(keeper) = keeper {
                    keeper.wait().context("the process that served the mount")?;
                }
                Ok(())
            }
        }
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        if self.keeper.is_some() {
            // A later pool could not be mounted.
            let _ = unmount(self.place.path(), true, Duration::ZERO);
        }
    }
}

/// Waits for the command, and passes signals on to it that ask this process to end.
fn wait(mut child: Child, ending: &Ending) -> Result<ExitStatus> {
    let pid = Pid::from_child(&child);
    let ended = pidfd_open(pid, PidfdFlags::empty()).context("cannot wait for the command")?;
    loop {
        let ready = {
            let mut files = [
                PollFd::new(&ended, PollFlags::IN),
                PollFd::from_borrowed_fd(ending.as_fd(), PollFlags::IN),
            ];
            match poll(&mut files, None) {
                Err(rustix::io::Errno::INTR) => continue,
                polled => polled.context("cannot wait for the command")?,
            };
            files.map(|file| !file.revents().is_empty())
        };
        if ready[0] {
            return child.wait().context("cannot wait for the command");
        }
        while let Some(signal) = ending.take() {
            // What a terminal sends, it has sent to the command as well.
            if signal == Signal::TERM.as_raw() {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
    }
}

fn status_of(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}
