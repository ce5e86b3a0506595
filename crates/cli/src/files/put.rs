//! `aquifer put`: copies files and trees from the machine's file systems into a pool.

use std::path::PathBuf;

use anyhow::Result;

use super::copying::{self, CopyArgs, HELP};
use super::tree::{Local, Pooled};
use super::{PATHS_HELP, Place, Pools, place};
use crate::access::Access;

/// Arguments of `aquifer put`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{HELP}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Files and trees to copy
    #[arg(required = true, value_name = "SOURCE")]
    sources: Vec<PathBuf>,

    /// Target directory, or name of the copy
    #[arg(value_parser = place::parser(), value_name = "POOL:/DEST")]
    destination: Place,

    #[command(flatten)]
    copy: CopyArgs,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer put notes.txt data.pool:/                   copy a file, under its own name
  aquifer put notes.txt data.pool:/today              under another name
  aquifer put -r photos music data.pool:/media        copy trees into a directory
  aquifer put -r photos/. data.pool:/photos           copy the content of a directory";

/// Copies, and makes the copy durable.
pub fn run(args: &Args) -> Result<()> {
    let mut pools = Pools::to_write(&args.access);
    let pool = Pooled::new(pools.files(&args.destination)?, &args.destination);
    let done = copying::copy(
        &args.copy,
        (&Local, &args.sources),
        (&pool, args.destination.path()),
        copying::identity(&args.destination),
        |_, _| Ok(()),
    );
    // Also sync what was copied before an error or an interruption.
    let synced = pools.sync();
    done.and_then(|done| synced.and_then(|()| done.end()))
}
