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
    /// What is removed; of a symbolic link, the link
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/PATH")]
    places: Vec<Place>,

    /// Remove directories, with everything in them
    #[arg(short, long, short_alias = 'R')]
    recursive: bool,

    /// Remove empty directories as well
    #[arg(short = 'd', long = "dir")]
    directory: bool,

    /// What is not there is no error
    #[arg(short, long)]
    force: bool,

    /// Print what is removed
    #[arg(short, long)]
    verbose: bool,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer rm data.pool:/logs/today
  aquifer rm -r data.pool:/logs
  aquifer find data.pool:/ -name '*.tmp' -print0 | xargs -0 aquifer rm

Nothing is asked. A program that has a removed file open goes on with it.";

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
            "{}: a directory is removed by its name; the root of a pool stays, remove what is in it",
            place.show()
        );
    }
    match metadata.is_dir() {
        false => files.remove_file(place.path()).at(place)?,
        true if args.recursive => files.remove_dir_all(place.path()).at(place)?,
        true if args.directory => files.remove_dir(place.path()).at(place)?,
        true => bail!(
            "{}: this is a directory; -r removes it with what is in it, -d if it is empty",
            place.show()
        ),
    }
    if args.verbose { output::print(&format!("removed {}\n", place.show())) } else { Ok(()) }
}
