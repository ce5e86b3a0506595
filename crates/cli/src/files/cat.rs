//! `aquifer cat`: prints files of a pool to standard output.

use std::io::Write;

use anyhow::{Context, Result};

use super::failure::{At, Failures};
use super::{PATHS_HELP, Place, Pools, place};
use crate::access::ReadAccess;
use crate::output::CANNOT_WRITE;

/// Arguments of `aquifer cat`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Files to print, one after the other
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/PATH")]
    places: Vec<Place>,

    #[command(flatten)]
    access: ReadAccess,
}

const EXAMPLES: &str = "\
Examples:
  aquifer cat data.pool:/logs/today
  aquifer cat data.pool:/part1 data.pool:/part2 > whole";

/// Bytes copied at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Prints the files.
pub fn run(args: &Args) -> Result<()> {
    let mut pools = Pools::to_read(&args.access);
    let mut failures = Failures::default();
    let mut buffer = vec![0; CHUNK_BYTES];
    for place in &args.places {
        let printed = print(&mut pools, place, &mut buffer);
        failures.note(printed)?;
    }
    failures.end()
}

fn print(pools: &mut Pools, place: &Place, buffer: &mut [u8]) -> Result<()> {
    let file = pools.files(place)?.open_file(place.path()).at(place)?;
    let mut output = std::io::stdout().lock();
    let mut offset_bytes = 0;
    loop {
        let got = file.read_at(buffer, offset_bytes).at(place)?;
        if got == 0 {
            return output.flush().context(CANNOT_WRITE);
        }
        output.write_all(&buffer[..got]).context(CANNOT_WRITE)?;
        offset_bytes += got as u64;
    }
}
