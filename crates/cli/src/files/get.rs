//! `aquifer get`: copies files and trees out of a pool or an object store.

use std::ffi::OsString;

use anyhow::Result;

use super::PATHS_HELP;
use super::copying::{CopyArgs, HELP, STORE_HELP};
use super::operands::Operands;
use super::spot;
use super::transfer::{self, Ways};
use crate::access::ReadAccess;
use crate::remote;

/// Arguments of `aquifer get`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "aquifer get [OPTIONS] <POOL:/SOURCE|URL>... <DEST>")]
#[command(after_help = format!("{EXAMPLES}\n\n{HELP}\n\n{STORE_HELP}\n\n{PATHS_HELP}\n\n{}", remote::HELP))]
pub struct Args {
    /// Files and trees to copy, all from one pool or one object store; and last the target directory, or the name of the
    /// copy: of the machine, of a pool or of an object store
    #[arg(required = true, num_args = 1.., value_names = NAMES)]
    operands: Vec<OsString>,

    #[command(flatten)]
    copy: CopyArgs,

    #[command(flatten)]
    access: ReadAccess,

    #[cfg(feature = "remote")]
    #[command(flatten)]
    remote: remote::RemoteArgs,
}

const NAMES: [&str; 2] = ["POOL:/SOURCE|URL", "DEST"];

const EXAMPLES: &str = "\
Examples:
  aquifer get data.pool:/today .                      copy a file, under its own name
  aquifer get data.pool:/today notes.txt              under another name
  aquifer get -r data.pool:/photos /backup            copy a tree into a directory
  aquifer get -r data.pool:/ everything               copy all files of a pool
  aquifer get s3://bucket/rows.bin .                  download an object, under its own name
  aquifer get -rT s3://bucket/photos photos           download what is below a prefix, as `photos`
  aquifer get --anonymous s3://public/rows data.pool:/rows

`aquifer cat` writes a file or an object to standard output.";

/// Copies the files.
pub fn run(args: &Args) -> Result<()> {
    let ways = Ways {
        copy: &args.copy,
        access: args.access.to_write(),
        #[cfg(feature = "remote")]
        remote: &args.remote,
    };
    let operands = Operands { command: "get", names: NAMES, all: &args.operands };
    let (sources, destination) = operands.divide(spot::url_or_place, spot::url_or_path)?;
    transfer::run(&ways, &sources, &destination.or_place())
}
