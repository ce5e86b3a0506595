//! `aquifer object list`.

use std::path::PathBuf;

use anyhow::Result;
use aquifer_sys::units::Bytes;
use serde::Serialize;

use super::describe::{self, Object};
use super::open_to_read;
use crate::access::ReadAccess;
use crate::output;

/// Arguments of `aquifer object list`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer object list data.pool
  aquifer object list data.pool --json | jq -r '.objects[].name'

States: D detached, R attached for reading, W attached for writing, P a commit is being written, C a commit is \
durable in the log, but not yet at its place. Processes that opened the pool read-only are not listed.")]
pub struct Args {
    /// Path of the pool
    pool: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    access: ReadAccess,
}

#[derive(Serialize)]
struct Report {
    objects: Vec<Object>,
    /// Damaged slots, whose objects cannot be shown.
    damaged_inodes: u64,
}

/// Prints the list.
pub fn run(args: &Args) -> Result<()> {
    let pool = open_to_read(&args.pool, &args.access)?;
    let objects = describe::all(&pool)?;
    let damaged_inodes = pool.pool().info()?.damaged_inodes;
    if args.json {
        return output::print_json(&Report { objects, damaged_inodes }, true);
    }
    if damaged_inodes > 0 {
        let slots = output::several(damaged_inodes, "slot");
        output::warn(&format!("{slots} damaged and not shown; see `aquifer pool check`"));
    }
    if objects.is_empty() {
        let pool = args.pool.display();
        return output::print(&format!(
            "no objects in {pool}; create one with `aquifer object create`\n"
        ));
    }
    let header = ["name", "size", "address", "state", "keys", "attached by"];
    let mut lines = vec![header.map(str::to_owned)];
    lines.extend(objects.iter().map(|object| {
        [
            object.shown_name().to_owned(),
            Bytes(object.size_bytes).to_string(),
            format!("{:#x}", object.address),
            object.state.to_string(),
            object.shown_keys().to_owned(),
            object.shown_holders(),
        ]
    }));
    output::print(&output::columns(&lines))
}
