//! `aquifer pool`: pools made, looked into, verified and grown.
//!
//! `info` and `check` open the pool for reading and change nothing, so they work on a pool that is in use and on
//! one that nobody could write to.

mod create;
mod info;

use std::path::Path;

use anyhow::Result;
use aquifer::{OpenOptions, PersistenceDomain, Pool};

/// Arguments of `aquifer pool`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  aquifer pool create data.pool --size 1G       make a pool in a new file
  aquifer pool info data.pool                   what it is, and how full
  aquifer pool info data.pool --json            the same for programs

The format of pools is experimental (version 0): a later version may not read a pool made now.";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Make a pool in a new file, or on a device
    Create(create::Args),
    /// Show what a pool is, how full, and who has it open
    Info(info::Args),
}

/// Does what was asked for.
pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Create(args) => create::run(args),
        Command::Info(args) => info::run(args),
    }
}

/// What follows the version of the format wherever it is shown.
pub fn format_note() -> String {
    format!("experimental format (version {})", aquifer::pool::format::FORMAT_VERSION)
}

/// Opens a pool without changing anything in it.
pub fn open_to_read(path: &Path) -> Result<Pool> {
    Ok(Pool::open(path, &OpenOptions { read_only: true, ..OpenOptions::default() })?)
}

/// A domain, and what makes bytes durable in it.
pub fn explain_domain(domain: PersistenceDomain) -> String {
    let how = match domain {
        PersistenceDomain::Dax => "persistent memory, durable by cache-line flush and fence",
        PersistenceDomain::PageCache => "durable by write-back and a flush of the device",
        PersistenceDomain::Volatile => "memory: survives processes, not a power cut",
    };
    format!("{domain} ({how})")
}
