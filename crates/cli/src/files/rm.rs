//! `aquifer rm`: removes names from a pool; with its last name, a file is removed.

use anyhow::{Result, bail};
use aquifer::FsError;

use super::failure::{At, Failures};
use super::place::last_name;
use super::{PATHS_HELP, Place, Pools, place};
use crate::access::Access;
use crate::output;

/// Arguments of `aquifer rm`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Files and directories to remove; of a symbolic link, the link itself
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/PATH")]
    places: Vec<Place>,

    /// Remove directories with their content
    #[arg(short, long, short_alias = 'R')]
    recursive: bool,

    /// Also remove empty directories
    #[arg(short = 'd', long = "dir")]
    directory: bool,

    /// Ignore missing files
    #[arg(short, long)]
    force: bool,

    /// Print each removed name
    #[arg(short, long)]
    verbose: bool,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer rm data.pool:/logs/today
  aquifer rm -r data.pool:/logs

There is no confirmation. Programs that have a removed file open can continue to use it.";

/// Removes the names, durably.
pub fn run(args: &Args) -> Result<()> {
    let mut pools = Pools::to_write(&args.access);
    let mut failures = Failures::default();
    let mut outcome = Ok(());
    for place in &args.places {
        let removed = remove(args, &mut pools, place);
        outcome = failures.note(removed);
        if outcome.is_err() {
            break;
        }
    }
    // Also sync what was removed before an error or an interruption.
    let synced = pools.sync();
    outcome.and_then(|()| synced.and_then(|()| failures.end()))
}

fn remove(args: &Args, pools: &mut Pools, place: &Place) -> Result<()> {
    let files = pools.files(place)?;
    let metadata = match files.symlink_metadata(place.path()) {
        Err(FsError::NotFound { .. }) if args.force => return Ok(()),
        metadata => metadata.at(place)?,
    };
    if metadata.is_dir() && last_name(place.path()).is_none() {
        bail!(
            "{}: a directory is removed by its name; the root of a pool cannot be removed, only its content",
            place.show()
        );
    }
    match metadata.is_dir() {
        false => files.remove_file(place.path()).at(place)?,
        true if args.recursive => files.remove_dir_all(place.path()).at(place)?,
        true if args.directory => files.remove_dir(place.path()).at(place)?,
        true => bail!(
            "{}: Is a directory; -r removes it with its content, -d if it is empty",
            place.show()
        ),
    }
    if args.verbose { output::print(&format!("removed {}\n", place.show())) } else { Ok(()) }
}
