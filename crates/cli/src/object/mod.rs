//! `aquifer object`: the persistent objects of a pool.
//!
//! `list`, `info` and `dump` open the pool read-only. The others open it for writing; other
//! programs may have it open at the same time.

mod create;
mod describe;
mod destroy;
mod dump;
mod info;
mod keys;
mod list;
mod resize;

use std::path::Path;

use anyhow::Result;
use aquifer::Objects;

use crate::access::ReadAccess;

/// Arguments of `aquifer object`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  aquifer object create data.pool graph --size 64M      create an object, all zero
  aquifer object list data.pool                         list the objects and their users
  aquifer object dump data.pool graph --range ..256     print the first bytes of an object

The help of `create` and `dump` explains how to pass keys without revealing them to other users.";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Create an object, all zero
    Create(create::Args),
    /// List the objects of a pool
    List(list::Args),
    /// Show one object, and the processes that have it attached
    Info(info::Args),
    /// Grow or shrink an object
    Resize(resize::Args),
    /// Destroy an object
    Destroy(destroy::Args),
    /// Print the bytes of an object
    Dump(dump::Args),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Create(args) => create::run(args),
        Command::List(args) => list::run(args),
        Command::Info(args) => info::run(args),
        Command::Resize(args) => resize::run(args),
        Command::Destroy(args) => destroy::run(args),
        Command::Dump(args) => dump::run(args),
    }
}

/// The objects of a pool opened read-only.
fn open_to_read(path: &Path, access: &ReadAccess) -> Result<Objects> {
    Ok(Objects::new(access.options().open(path)?))
}
