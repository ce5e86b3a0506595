//! `aquifer mv`: renames and moves within a pool.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Result, bail};
use aquifer::Files;
use aquifer::fs::RenameMode;

use super::failure::{At, Failures};
use super::operands::Operands;
use super::place::last_name;
use super::{PATHS_HELP, Place, Pools};
use crate::access::Access;
use crate::output;

/// Arguments of `aquifer mv`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "aquifer mv [OPTIONS] <POOL:/SOURCE>... <POOL:/DEST>")]
#[command(after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Files and directories to move, of a symbolic link the link itself; and last the target directory, or the new name
    #[arg(required = true, num_args = 1.., value_names = NAMES)]
    operands: Vec<OsString>,

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

const NAMES: [&str; 2] = ["POOL:/SOURCE", "POOL:/DEST"];

const EXAMPLES: &str = "\
Examples:
  aquifer mv data.pool:/new data.pool:/current              rename a file, replacing another
  aquifer mv data.pool:/a data.pool:/b data.pool:/old       move two files into a directory
  aquifer mv -T --exchange data.pool:/v1 data.pool:/v2      exchange two trees

A move is atomic, even across a power cut: the file has its old name or its new one, never both or none. To move to another pool, use \
`aquifer cp -r`, then `aquifer rm -r`.";

/// Moves the sources, durably.
pub fn run(args: &Args) -> Result<()> {
    let operands = Operands { command: "mv", names: NAMES, all: &args.operands };
    let (sources, destination) = operands.divide(Place::parse, Place::parse)?;
    if let Some(other) = sources.iter().find(|from| !from.is_in_pool_of(&destination)) {
        bail!(
            "{} and {} are in different pools; use `aquifer cp -r`, then `aquifer rm -r`",
            other.show(),
            destination.show()
        );
    }
    let mut pools = Pools::to_write(&args.access);
    let files = pools.files(&destination)?;
    let mut failures = Failures::default();
    let mut outcome = Ok(());
    for source in &sources {
        let to = target(args, &files, (source, sources.len() > 1), &destination);
        let moved = to.and_then(|to| move_one(args, &files, source, &destination.with_path(to)));
        outcome = failures.note(moved);
        if outcome.is_err() {
            break;
        }
    }
    // Also sync what was done before an error or an interruption.
    let synced = pools.sync();
    outcome.and_then(|()| synced.and_then(|()| failures.end()))
}

fn target(
    args: &Args,
    files: &Files,
    (source, is_one_of_several): (&Place, bool),
    to: &Place,
) -> Result<PathBuf> {
    let destination = to.path();
    let is_directory = files.metadata(destination).is_ok_and(|there| there.is_dir());
    match last_name(source.path()) {
        Some(name) if is_directory && !args.no_target_directory => Ok(destination.join(name)),
        _ if is_one_of_several => bail!(
            "{}: Not a directory; several sources can only be moved to a directory",
            to.show()
        ),
        _ => Ok(destination.to_owned()),
    }
}

fn move_one(args: &Args, files: &Files, source: &Place, target: &Place) -> Result<()> {
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
