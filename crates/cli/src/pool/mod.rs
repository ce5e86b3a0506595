//! `aquifer pool`: creates, inspects, verifies, grows, keeps, serves, publishes and restores pools.
//!
//! `info` and `check` open the pool read-only, so they work on a pool that is in use and on one
//! without write permission.

mod check;
mod create;
mod grow;
mod info;
mod keep;
#[cfg(feature = "remote")]
mod publish;
#[cfg(feature = "remote")]
mod restore;
mod serve;
mod undo;

use std::fmt::Display;

use anyhow::Result;
use aquifer::PersistenceDomain;
use aquifer::pool::media::ByteRange;
use aquifer_sys::units::Bytes;
use serde::{Serialize, Serializer};

/// Arguments of `aquifer pool`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}{STORES}"))]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  aquifer pool create data.pool --size 1G       create a pool in a new file
  aquifer pool info data.pool                   show its properties and use of space
  aquifer pool check data.pool                  verify it
  aquifer pool grow data.pool --size 2G         make it longer
  aquifer pool keep data.pool                   keep it open, so that commands start faster
  aquifer pool serve data.pool                  give processes that have its key write access";
#[cfg(feature = "remote")]
const STORES: &str = "
  aquifer pool publish data.pool s3://bucket/data      keep a snapshot of it in an object store
  aquifer pool restore s3://bucket/data data.pool      make a pool of the newest snapshot";
#[cfg(not(feature = "remote"))]
use crate::remote::ABSENT as STORES;

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Create a pool in a new file or on a device
    Create(create::Args),
    /// Show a pool's properties, its use of space, and the processes that write to it
    Info(info::Args),
    /// Verify a pool, explain the findings, and repair what can be repaired without loss
    Check(check::Args),
    /// Make a pool longer
    Grow(grow::Args),
    /// Keep a pool open, so that processes that open it only join
    Keep(keep::Args),
    /// Give write access to processes of other users that have the key
    Serve(serve::Args),
    #[cfg(feature = "remote")]
    /// Publish a snapshot of a pool to an object store
    Publish(publish::Args),
    #[cfg(feature = "remote")]
    /// Restore a pool from a snapshot in an object store
    Restore(restore::Args),
    #[cfg(feature = "remote")]
    /// List the snapshots of a pool in an object store
    Snapshots(restore::SnapshotsArgs),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Create(args) => create::run(args),
        Command::Info(args) => info::run(args),
        Command::Check(args) => check::run(args),
        Command::Grow(args) => grow::run(args),
        Command::Keep(args) => keep::run(args),
        Command::Serve(args) => serve::run(args),
        #[cfg(feature = "remote")]
        Command::Publish(args) => publish::run(args),
        #[cfg(feature = "remote")]
        Command::Restore(args) => restore::run(args),
        #[cfg(feature = "remote")]
        Command::Snapshots(args) => restore::list(args),
    }
}

/// The format version, as shown in all output.
pub fn format_note() -> String {
    format!("format version {}", aquifer::pool::format::FORMAT_VERSION)
}

/// A domain, and how bytes become durable in it.
pub fn explain_domain(domain: PersistenceDomain) -> String {
    let how = match domain {
        PersistenceDomain::Dax => "persistent memory, durable by cache-line flush and fence",
        PersistenceDomain::PageCache => "durable by write-back and a flush of the device",
        PersistenceDomain::Volatile => "memory: survives processes, but not a power cut",
    };
    format!("{domain} ({how})")
}

/// A part of the pool file.
#[derive(Serialize)]
pub struct Part {
    offset_bytes: u64,
    len_bytes: u64,
}

impl From<ByteRange> for Part {
    fn from(range: ByteRange) -> Part {
        Part { offset_bytes: range.offset_bytes, len_bytes: range.len_bytes }
    }
}

impl Part {
    /// Its length and start.
    pub fn to_text(&self) -> String {
        format!("{} at {:#x}", Bytes(self.len_bytes), self.offset_bytes)
    }
}

/// Serializes a value as its text.
pub fn as_text<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}
