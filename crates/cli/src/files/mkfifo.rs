//! `aquifer mkfifo`: creates named pipes in a pool.

use anyhow::Result;
use aquifer::fs::SpecialFile;

use super::{PATHS_HELP, Place, mknod, place};
use crate::access::Access;

/// Arguments of `aquifer mkfifo`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}\n\n{PATHS_HELP}", mknod::HELP))]
pub struct Args {
    /// Named pipes to create
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/PATH")]
    places: Vec<Place>,

    /// Permissions, in octal [default: 666 without the bits of the umask]
    #[arg(short, long, value_name = "MODE", value_parser = super::mode)]
    mode: Option<u32>,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer mkfifo data.pool:/queue
  aquifer mkfifo -m 600 data.pool:/run/in data.pool:/run/out";

/// Creates the pipes, durably.
pub fn run(args: &Args) -> Result<()> {
    super::change_each(&args.access, &args.places, |files, place| {
        mknod::make(files, place, SpecialFile::Fifo, args.mode)
    })
}
