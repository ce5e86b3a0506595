//! `aquifer pool grow`.

use std::path::PathBuf;

use anyhow::Result;
use aquifer::Pool;
use aquifer_bench::Bytes;

use super::open_to_read;
use crate::{output, progress};

/// Arguments of `aquifer pool grow`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer pool grow data.pool --size 2G      the pool is 2 GiB long afterwards, all of it allocated
  aquifer pool grow /dev/pmem0 --size 2G     after the device has become longer

Nobody may have the pool open. A crash in the middle leaves the old pool or the new one. Pools do not shrink.")]
pub struct Args {
    /// The pool
    path: PathBuf,

    /// How long it is to be
    #[arg(long, value_name = "BYTES")]
    size: Bytes,
}

/// Makes it longer and says what it has become.
pub fn run(args: &Args) -> Result<()> {
    let before = open_to_read(&args.path)?.layout();
    let bar = progress::Bytes::new("allocating and zeroing");
    let grown = Pool::grow(&args.path, args.size.0, &mut |done, all| bar.at(done, all));
    drop(bar);
    let [old, new] = [before.len_bytes(), grown?.len_bytes()];
    let path = args.path.display();
    output::print(&match new - old.min(new) {
        0 => format!("{path} has {} already\n", Bytes(new)),
        more => {
            format!("grew {path} from {} to {}: {} more\n", Bytes(old), Bytes(new), Bytes(more))
        }
    })
}
