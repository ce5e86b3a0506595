//! `aquifer mkdir`: creates directories in a pool.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Result, bail};
use aquifer::{Files, FsError};

use super::failure::At;
use super::{PATHS_HELP, Place, place};
use crate::access::Access;

/// Arguments of `aquifer mkdir`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Directories to create
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/PATH")]
    places: Vec<Place>,

    /// Create missing parents as well; existing directories are not an error
    #[arg(short, long)]
    parents: bool,

    /// Permissions, in octal [default: 777 without the bits of the umask]
    #[arg(short, long, value_name = "MODE", value_parser = super::mode)]
    mode: Option<u32>,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer mkdir data.pool:/logs
  aquifer mkdir -p data.pool:/photos/2026/summer
  aquifer mkdir -m 700 data.pool:/private

The directories are durable when the command ends.";

/// Creates the directories, durably.
pub fn run(args: &Args) -> Result<()> {
    super::change_each(&args.access, &args.places, |files, place| make(args, files, place))
}

fn make(args: &Args, files: &Files, place: &Place) -> Result<()> {
    match args.parents {
        true if files.metadata(place.path()).is_ok_and(|there| there.is_dir()) => return Ok(()),
        true => files.create_dir_all(place.path()).at(place)?,
        false => match files.create_dir(place.path()) {
            Err(FsError::NotFound { .. }) => {
                bail!("{}: No such file or directory; -p creates missing parents", place.show())
            }
            made => made.at(place)?,
        },
    }
    match args.mode {
        Some(mode) => files.set_permissions(place.path(), Permissions::from_mode(mode)).at(place),
        None => Ok(()),
    }
}
