//! `aquifer put`: copies files and trees into a pool or an object store.

use std::ffi::OsString;

use anyhow::Result;

use super::PATHS_HELP;
use super::copying::{CopyArgs, HELP, STORE_HELP};
use super::operands::Operands;
use super::spot::{self, Spot};
use super::transfer::{self, Ways};
use crate::access::Access;
use crate::remote;

/// Arguments of `aquifer put`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "aquifer put [OPTIONS] <SOURCE>... <POOL:/DEST|URL>")]
#[command(after_help = format!("{EXAMPLES}\n\n{HELP}\n\n{STORE_HELP}\n\n{PATHS_HELP}\n\n{}", remote::HELP))]
pub struct Args {
    /// Files and trees to copy, of the machine or of one object store, for an object store also of one pool; and last the
    /// target directory, or the name of the copy
    #[arg(required = true, num_args = 1.., value_names = NAMES)]
    operands: Vec<OsString>,

    #[command(flatten)]
    copy: CopyArgs,

    #[command(flatten)]
    access: Access,

    #[cfg(feature = "remote")]
    #[command(flatten)]
    remote: remote::RemoteArgs,
}

const NAMES: [&str; 2] = ["SOURCE", "POOL:/DEST|URL"];

const EXAMPLES: &str = "\
Examples:
  aquifer put notes.txt data.pool:/                   copy a file, under its own name
  aquifer put notes.txt data.pool:/today              under another name
  aquifer put -r photos music data.pool:/media        copy trees into a directory
  aquifer put -r photos/. data.pool:/photos           copy the content of a directory
  aquifer put rows.bin s3://bucket/                   upload a file, under its own name
  aquifer put -r data.pool:/photos s3://bucket/2026/  upload a tree of a pool, as 2026/photos/…
  aquifer put -r s3://bucket/photos data.pool:/       copy objects into a pool";

/// Copies, and makes the copy durable.
pub fn run(args: &Args) -> Result<()> {
    let ways = Ways {
        copy: &args.copy,
        access: args.access.clone(),
        #[cfg(feature = "remote")]
        remote: &args.remote,
    };
    let operands = Operands { command: "put", names: NAMES, all: &args.operands };
    let (sources, destination) = operands.divide(spot::url_or_path, spot::url_or_place)?;
    // In front of a pool they are files, as they always were.
    let to_store = !matches!(destination, Spot::Pool(_));
    let sources: Vec<Spot> =
        sources.into_iter().map(|spot| if to_store { spot.or_place() } else { spot }).collect();
    transfer::run(&ways, &sources, &destination)
}
