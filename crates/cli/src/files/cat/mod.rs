//! `aquifer cat`: prints files of a pool, and objects of object stores, to standard output.

#[cfg(feature = "remote")]
mod object;

use std::io::Write;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use aquifer_sys::units::Bytes;

use super::failure::{At, Failures};
use super::spot::{self, Spot};
use super::{PATHS_HELP, Place, Pools};
use crate::access::ReadAccess;
use crate::output::CANNOT_WRITE;
use crate::remote;

/// Arguments of `aquifer cat`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}\n\n{}", remote::HELP))]
pub struct Args {
    /// Files and objects to print, one after the other
    #[arg(required = true, value_parser = spot::parser(), value_name = "POOL:/PATH|URL")]
    places: Vec<Spot>,

    /// Print only these bytes of each, from START up to END, which is not included. Without START from the beginning,
    /// without END to the end
    #[arg(long, value_name = "START..END", default_value = "..", hide_default_value = true)]
    range: Range,

    #[command(flatten)]
    access: ReadAccess,

    #[cfg(feature = "remote")]
    #[command(flatten)]
    remote: remote::RemoteArgs,
}

const EXAMPLES: &str = "\
Examples:
  aquifer cat data.pool:/logs/today
  aquifer cat data.pool:/part1 data.pool:/part2 > whole
  aquifer cat s3://bucket/table.parquet > table.parquet
  aquifer cat --range 1G..1025M --anonymous s3://public-bucket/large > piece
  aquifer cat --tier /mnt/nvme/tier s3://bucket/large | wc
  aquifer cat --endpoint http://127.0.0.1:9000 --allow-http s3://bucket/key

An object is read by many requests at once, of the version that it has when it is opened: if it changes meanwhile, that is an error.";

/// Bytes copied at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A range of bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Range, String> {
        let Some((start, end)) = text.split_once("..") else {
            return Err("write START..END, for example 4096..8192, 1M.. or ..512".to_owned());
        };
        let bytes = |text: &str, default| match text {
            "" => Ok(default),
            text => text.parse().map(|Bytes(bytes)| bytes),
        };
        let range = Range { start: bytes(start, 0)?, end: bytes(end, u64::MAX)? };
        if range.start > range.end {
            return Err("ends before it starts".to_owned());
        }
        Ok(range)
    }
}

impl Range {
    fn is_all(self) -> bool {
        self == Range { start: 0, end: u64::MAX }
    }

    /// Fails if a file of this length ends before the range.
    fn check(self, len_bytes: u64, shown: &str) -> Result<()> {
        if self.start > len_bytes {
            bail!("{shown}: has {len_bytes} bytes, and byte {} is asked for", self.start);
        }
        Ok(())
    }
}

/// Prints the files.
pub fn run(args: &Args) -> Result<()> {
    let mut pools = Pools::to_read(&args.access);
    #[cfg(feature = "remote")]
    let mut store = None;
    let mut failures = Failures::default();
    let mut buffer = vec![0; CHUNK_BYTES];
    for place in &args.places {
        let printed = match place {
            #[cfg(feature = "remote")]
            Spot::Url(url) => object::print(args, &mut store, url, &mut buffer),
            Spot::Pool(place) => print(&mut pools, place, args.range, &mut buffer),
            Spot::Local(_) => unreachable!("the parser makes none"),
        };
        failures.note(printed)?;
    }
    failures.end()
}

fn print(pools: &mut Pools, place: &Place, range: Range, buffer: &mut [u8]) -> Result<()> {
    let file = pools.files(place)?.open_file(place.path()).at(place)?;
    if !range.is_all() {
        range.check(file.metadata().at(place)?.len(), &place.show())?;
    }
    let mut offset_bytes = range.start;
    write_all(buffer, |buffer| {
        let wanted = (range.end - offset_bytes).min(buffer.len() as u64) as usize;
        let got = file.read_at(&mut buffer[..wanted], offset_bytes).at(place)?;
        offset_bytes += got as u64;
        Ok(got)
    })
}

/// Writes what `read` returns, until that is nothing.
fn write_all(buffer: &mut [u8], mut read: impl FnMut(&mut [u8]) -> Result<usize>) -> Result<()> {
    let mut output = std::io::stdout().lock();
    loop {
        let got = read(buffer)?;
        if got == 0 {
            return output.flush().context(CANNOT_WRITE);
        }
        output.write_all(&buffer[..got]).context(CANNOT_WRITE)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_two_ends_that_may_be_left_out() {
        for (text, start, end) in [
            ("..", 0, u64::MAX),
            ("5..", 5, u64::MAX),
            ("..5", 0, 5),
            ("4K..1M", 4096, 1 << 20),
            ("7..7", 7, 7),
        ] {
            assert_eq!(text.parse(), Ok(Range { start, end }), "{text}");
        }
        for wrong in ["", "5", "5-7", "7..5", "x..", "..1X", "-1..", "1..2..3"] {
            assert!(wrong.parse::<Range>().is_err(), "{wrong}");
        }
    }
}
