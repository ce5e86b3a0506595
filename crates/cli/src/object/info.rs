//! `aquifer object info`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::Result;

use super::{describe, open_to_read};
use crate::access::ReadAccess;
use crate::output;

/// Arguments of `aquifer object info`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer object info data.pool graph
  aquifer object info data.pool graph --json | jq .state

Needs no key: every user with read permission on the pool can see this.")]
pub struct Args {
    /// Path of the pool
    pool: PathBuf,

    /// Name of the object
    name: OsString,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    access: ReadAccess,
}

/// Prints the object's description.
pub fn run(args: &Args) -> Result<()> {
    let object = describe::one(&open_to_read(&args.pool, &args.access)?, args.name.as_bytes())?;
    if args.json {
        output::print_json(&object, true)
    } else {
        output::print(&object.to_text(&args.pool.display().to_string()))
    }
}
