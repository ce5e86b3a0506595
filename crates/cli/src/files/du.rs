//! `aquifer du`: the space that trees of a pool use.

use std::collections::HashSet;

use anyhow::Result;
use aquifer_sys::units::Bytes;
use serde::Serialize;

use super::entry::as_json;
use super::failure::Failures;
use super::walk::{Step, Walk};
use super::{PATHS_HELP, Place, Pools, place};
use crate::access::ReadAccess;
use crate::output;

/// Arguments of `aquifer du`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true, after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Trees and files
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/PATH")]
    places: Vec<Place>,

    /// Show only the total of each argument
    #[arg(short, long, conflicts_with_all = ["all", "max_depth"])]
    summarize: bool,

    /// Also show files, not only directories
    #[arg(short, long)]
    all: bool,

    /// Show directories down to this depth; 0 is the same as --summarize
    #[arg(short = 'd', long, value_name = "N")]
    max_depth: Option<u64>,

    /// Show sizes like 1.5 MiB [default: in KiB]
    #[arg(short, long)]
    human_readable: bool,

    /// Show sizes in bytes
    #[arg(short, long, conflicts_with = "human_readable")]
    bytes: bool,

    /// Count lengths of files, including holes, instead of allocated pages
    #[arg(long)]
    apparent_size: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    access: ReadAccess,

    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

const EXAMPLES: &str = "\
Examples:
  aquifer du -sh data.pool:/ data.pool:/logs
  aquifer du -h -d 1 data.pool:/
  aquifer du --json data.pool:/ | jq '.sizes[-1].bytes'

A file with several names is counted once. Directories themselves use slots of metadata, which `aquifer pool info` shows.";

#[derive(Serialize)]
struct Size {
    /// The path in the pool; escaped if it is not UTF-8.
    path: String,
    name_is_utf8: bool,
    bytes: u64,
    #[serde(skip)]
    place: Vec<u8>,
}

#[derive(Serialize)]
struct Report {
    sizes: Vec<Size>,
}

/// Prints the sizes.
pub fn run(args: &Args) -> Result<()> {
    let mut pools = Pools::to_read(&args.access);
    let mut failures = Failures::default();
    let mut sizes = Vec::new();
    for start in &args.places {
        let measured = measure(args, &mut pools, start, &mut sizes, &mut failures);
        failures.note(measured)?;
        if !args.json {
            print(args, &sizes)?;
            sizes.clear();
        }
    }
    if args.json {
        output::print_json(&Report { sizes }, true)?;
    }
    failures.end()
}

fn measure(
    args: &Args,
    pools: &mut Pools,
    start: &Place,
    sizes: &mut Vec<Size>,
    failures: &mut Failures,
) -> Result<()> {
    let files = pools.files(start)?;
    let mut seen = HashSet::new();
    // Parent directories of the current entry, with the bytes counted so far.
    let mut above: Vec<(Place, u64)> = Vec::new();
    let max_depth = if args.summarize { 0 } else { args.max_depth.unwrap_or(u64::MAX) };
    for step in Walk::new(&files, start, u64::MAX) {
        let (place, bytes, depth, is_directory) = match step {
            Ok(Step::Meet { place, metadata, .. }) if metadata.is_dir() => {
                above.push((place, 0));
                continue;
            }
            Ok(Step::Meet { place, metadata, depth }) => {
                let is_first = metadata.nlink() < 2 || seen.insert(metadata.ino());
                let bytes = match args.apparent_size {
                    _ if !is_first => continue,
                    true => metadata.len(),
                    false => metadata.allocated_bytes(),
                };
                (place, bytes, depth, false)
            }
            Ok(Step::Leave { depth }) => {
                let Some((place, bytes)) = above.pop() else { continue };
                (place, bytes, depth, true)
            }
            Err(error) => {
                failures.note(Err(error))?;
                continue;
            }
        };
        if let Some((_, sum)) = above.last_mut() {
            *sum += bytes;
        }
        if depth == 0 || ((is_directory || args.all) && depth <= max_depth) {
            let (path, name_is_utf8) = as_json(&path_bytes(&place));
            sizes.push(Size { path, name_is_utf8, bytes, place: place.to_bytes() });
        }
    }
    Ok(())
}

fn path_bytes(place: &Place) -> Vec<u8> {
    use std::os::unix::ffi::OsStrExt;

    place.path().as_os_str().as_bytes().to_vec()
}

fn print(args: &Args, sizes: &[Size]) -> Result<()> {
    let mut text = String::new();
    for size in sizes {
        let shown = match (args.human_readable, args.bytes) {
            (true, _) => Bytes(size.bytes).to_string(),
            (_, true) => size.bytes.to_string(),
            _ => size.bytes.div_ceil(1024).to_string(),
        };
        text.push_str(&format!("{shown}\t{}\n", output::escaped(&size.place)));
    }
    output::print(&text)
}
