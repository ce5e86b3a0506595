//! `aquifer get`: copies files and trees out of a pool.

use std::path::PathBuf;

use anyhow::Result;

use super::copying::{self, CopyArgs, HELP};
use super::tree::{Local, Pooled};
use super::{PATHS_HELP, Place, Pools, place};
use crate::access::ReadAccess;

/// Arguments of `aquifer get`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{HELP}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Files and trees to copy, all from one pool
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/SOURCE")]
    sources: Vec<Place>,

    /// Target directory, or name of the copy
    #[arg(value_name = "DEST")]
    destination: PathBuf,

    #[command(flatten)]
    copy: CopyArgs,

    #[command(flatten)]
    access: ReadAccess,
}

const EXAMPLES: &str = "\
Examples:
  aquifer get data.pool:/today .                      copy a file, under its own name
  aquifer get data.pool:/today notes.txt              under another name
  aquifer get -r data.pool:/photos /backup            copy a tree into a directory
  aquifer get -r data.pool:/ everything               copy all files of a pool

`aquifer cat` writes a file to standard output.";

/// Copies the files.
pub fn run(args: &Args) -> Result<()> {
    let (first, sources) = super::of_one_pool(&args.sources)?;
    let pool = Pooled::new(Pools::to_read(&args.access).files(first)?, first);
    copying::copy(
        &args.copy,
        (&pool, &sources),
        (&Local, &args.destination),
        copying::identity(first),
        |_, _| Ok(()),
    )?
    .end()
}
