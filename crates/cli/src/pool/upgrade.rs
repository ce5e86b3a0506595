//! `aquifer pool upgrade`.

use std::path::PathBuf;

use anyhow::Result;
use aquifer::Pool;
use serde::Serialize;

use crate::access::ReadAccess;
use crate::output;

/// Arguments of `aquifer pool upgrade`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer pool upgrade data.pool           convert a pool that an earlier program made
  aquifer pool upgrade data.pool --json    the same; says whether there was anything to convert

No process may have the pool open. It opens at once afterwards if it was closed cleanly, however many files it has, and \
can contain named pipes, sockets and devices. Earlier programs refuse it then, and there is no way back. New pools have \
the newest form; those under 4 MiB save nothing when they are closed. After a crash or Ctrl-C, the pool has either form.")]
pub struct Args {
    /// Path of the pool
    path: PathBuf,

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
    was_upgraded: bool,
}

/// Converts the pool.
pub fn run(args: &Args) -> Result<()> {
    let was_upgraded = Pool::upgrade(&args.path, &args.access.options())?;
    let path = args.path.display().to_string();
    if args.json {
        return output::print_json(&Report { path, was_upgraded }, true);
    }
    output::print(&match was_upgraded {
        true => format!("upgraded {path}; earlier programs can no longer open it\n"),
        false => format!("{path} has the newest form already\n"),
    })
}
