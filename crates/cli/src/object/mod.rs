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
  aquifer object create data.pool graph --size 64M      a new object, all zero
  aquifer object list data.pool                         those there are, and who has them attached
  aquifer object dump data.pool graph --range ..256     the first bytes of one

How keys are given without showing them to others is in the help of `create` and `dump`.";

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Create an object, all zero
    Create(create::Args),
    /// Show all objects of a pool
    List(list::Args),
    /// Show what one object is, and who has it attached
    Info(info::Args),
    /// Make an object larger or smaller
    Resize(resize::Args),
    /// Destroy an object
    Destroy(destroy::Args),
    /// Show the bytes of an object
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
    Ok(Objects::open(path, &access.options())?)
}
