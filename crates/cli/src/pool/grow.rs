//! `aquifer pool grow`.

use std::io;
use std::path::PathBuf;

use anyhow::{Error, Result, anyhow};
use aquifer::pool::media::MediaError;
use aquifer::{Pool, PoolError};
use aquifer_sys::units::Bytes;
use serde::Serialize;

use super::undo::Undo;
use crate::access::ReadAccess;
use crate::{output, progress};

/// Arguments of `aquifer pool grow`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer pool grow data.pool --size 2G      to a total length of 2 GiB, entirely allocated
  aquifer pool grow /dev/pmem0 --size 2G     after the device has become longer

No process may have the pool open. After a crash or Ctrl-C, the pool has its old length or the new one. Pools cannot \
shrink.")]
pub struct Args {
    /// Path of the pool
    path: PathBuf,

    /// New total length, for example 2G (K, M, G and T are powers of 1024)
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    size: Bytes,

    #[command(flatten)]
    access: ReadAccess,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The JSON output.
#[derive(Serialize)]
struct Report {
    path: String,
    previous_size_bytes: u64,
    size_bytes: u64,
}

/// Grows the pool and prints its new size.
pub fn run(args: &Args) -> Result<()> {
    let before = args.access.open(&args.path)?.layout();
    let undo = Undo::new(&args.path, false);
    let bar = progress::Bytes::new("allocating and zeroing");
    let grown = Pool::grow(&args.path, args.size.0, &args.access.options(), &mut |done, all| {
        bar.at(done, all);
        undo.ends_if_interrupted(&bar);
    });
    drop(bar);
    let old = before.len_bytes();
    let more = Bytes(args.size.0.saturating_sub(old));
    let new = grown.map_err(|error| explain(error, more))?.len_bytes();
    let path = args.path.display();
    if args.json {
        let path = path.to_string();
        let report = Report { path, previous_size_bytes: old, size_bytes: new };
        return output::print_json(&report, true);
    }
    output::print(&match new - old.min(new) {
        0 => format!("{path} already has {}\n", Bytes(new)),
        more => {
            format!("grew {path} from {} to {}: {} more\n", Bytes(old), Bytes(new), Bytes(more))
        }
    })
}

/// Adds the length and a remedy to the system's error for missing space.
fn explain(error: PoolError, more: Bytes) -> Error {
    match error {
        PoolError::Media(MediaError { source, path, .. }) if is_want_of_room(&source) => anyhow!(
            "{}: cannot grow by {more}: {source}; free space or huge pages, or grow it by less",
            path.display()
        ),
        error => error.into(),
    }
}

fn is_want_of_room(error: &io::Error) -> bool {
    let codes = [libc::ENOSPC, libc::EDQUOT, libc::ENOMEM, libc::EFBIG];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}
