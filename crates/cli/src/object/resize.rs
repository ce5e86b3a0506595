//! `aquifer object resize`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::Result;
use aquifer::{Objects, Resized};
use aquifer_sys::units::Bytes;
use serde::Serialize;

use super::describe;
use super::describe::Object;
use super::keys::{self, KeyArgs, ONE_KEY_HELP};
use crate::access::Access;
use crate::output;

/// Arguments of `aquifer object resize`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{ONE_KEY_HELP}"))]
pub struct Args {
    /// Path of the pool
    pool: PathBuf,

    /// Name of the object
    name: OsString,

    /// New length, rounded up to whole pages of 4 KiB; shrinking discards the bytes beyond
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    size: Bytes,

    #[command(flatten)]
    key: KeyArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    access: Access,
}

/// The JSON output.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    name_is_utf8: bool,
    previous_size_bytes: u64,
    size_bytes: u64,
    previous_address: u64,
    address: u64,
    /// Whether plain pointers into it are invalid now.
    has_moved: bool,
}

impl<'a> Report<'a> {
    fn of(before: &'a Object, resized: &Resized) -> Report<'a> {
        Report {
            name: &before.name,
            name_is_utf8: before.name_is_utf8,
            previous_size_bytes: before.size_bytes,
            size_bytes: resized.size_bytes,
            previous_address: resized.previous_address,
            address: resized.address,
            has_moved: resized.has_moved(),
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  aquifer object resize data.pool graph --size 128M
  aquifer object resize data.pool graph --size 128M --key-file ~/.graph.key

Needs the write key, if the object has one. No process may have the object attached. Content and address are kept. If \
the addresses that a larger object needs belong to another object, an object that was created with --relocatable gets \
a new address, and any other is not resized.";

/// Resizes the object, and prints whether it has moved.
pub fn run(args: &Args) -> Result<()> {
    let name = args.name.as_bytes();
    let key = args.key.key()?;
    let objects = Objects::new(args.access.open(&args.pool)?);
    let before = describe::one(&objects, name)?;
    let resized = keys::with(&key).resize(&objects, name, args.size.0).map_err(keys::explain)?;
    if args.json {
        return output::print_json(&Report::of(&before, &resized), true);
    }
    let address = if resized.has_moved() {
        format!(
            "its address changed from {:#x} to {:#x}: plain pointers into it are invalid",
            resized.previous_address, resized.address
        )
    } else {
        format!("its address is {:#x} as before", resized.address)
    };
    let [old, new] = [before.size_bytes, resized.size_bytes].map(Bytes);
    output::print(&format!("resized {} from {old} to {new}; {address}\n", before.shown_name()))
}
