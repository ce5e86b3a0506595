//! `aquifer mv`: renames and moves within a pool.

use std::path::PathBuf;

use anyhow::{Result, bail};
use aquifer::Files;
use aquifer::fs::RenameMode;

use super::failure::{At, Failures};
use super::place::last_name;
use super::{PATHS_HELP, Place, Pools, place};
use crate::access::Access;
use crate::output;

/// Arguments of `aquifer mv`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Files and directories to move; of a symbolic link, the link itself
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/SOURCE")]
    sources: Vec<Place>,

    /// Target directory, or new name
    #[arg(value_parser = place::parser(), value_name = "POOL:/DEST")]
    destination: Place,

    /// Do not replace an existing file: that is an error
    #[arg(short, long)]
    no_clobber: bool,

    /// Treat DEST as the new name, even if it is a directory
    #[arg(short = 'T', long)]
    no_target_directory: bool,

    /// Exchange the files or directories of the two names
    #[arg(long, conflicts_with = "no_clobber")]
    exchange: bool,

    /// Print each move
    #[arg(short, long)]
    verbose: bool,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer mv data.pool:/new data.pool:/current              rename a file, replacing another
  aquifer mv data.pool:/a data.pool:/b data.pool:/old       move two files into a directory
  aquifer mv -T --exchange data.pool:/v1 data.pool:/v2      exchange two trees

A move is atomic, even across a power cut: the file has its old name or its new one, never both or none. To move to another pool, use \
`aquifer cp -r`, then `aquifer rm -r`.";

/// Moves the sources, durably.
pub fn run(args: &Args) -> Result<()> {
    if let Some(other) = args.sources.iter().find(|from| !from.is_in_pool_of(&args.destination)) {
        bail!(
            "{} and {} are in different pools; use `aquifer cp -r`, then `aquifer rm -r`",
            other.show(),
            args.destination.show()
        );
    }
    let mut pools = Pools::to_write(&args.access);
    let files = pools.files(&args.destination)?;
    let mut failures = Failures::default();
    let mut outcome = Ok(());
    for source in &args.sources {
        let moved = move_one(args, &files, source);
        outcome = failures.note(moved);
        if outcome.is_err() {
            break;
        }
    }
    // Also sync what was done before an error or an interruption.
    let synced = pools.sync();
    outcome.and_then(|()| synced.and_then(|()| failures.end()))
}

fn target(args: &Args, files: &Files, source: &Place) -> Result<PathBuf> {
    let destination = args.destination.path();
    let is_directory = files.metadata(destination).is_ok_and(|there| there.is_dir());
    match last_name(source.path()) {
        Some(name) if is_directory && !args.no_target_directory => Ok(destination.join(name)),
        _ if args.sources.len() > 1 => bail!(
            "{}: Not a directory; several sources can only be moved to a directory",
            args.destination.show()
        ),
        _ => Ok(destination.to_owned()),
    }
}

fn move_one(args: &Args, files: &Files, source: &Place) -> Result<()> {
    let target = args.destination.with_path(target(args, files, source)?);
    let mode = match (args.exchange, args.no_clobber) {
        (true, _) => RenameMode::Exchange,
        (_, true) => RenameMode::NoReplace,
        _ => RenameMode::Replace,
    };
    files.rename_with(source.path(), target.path(), mode).at(source)?;
    if args.verbose {
        output::print(&format!("{} -> {}\n", source.show(), target.show()))
    } else {
        Ok(())
    }
}
