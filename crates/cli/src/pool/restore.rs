//! `aquifer pool restore`, and `aquifer pool snapshots`.

use std::path::PathBuf;

use anyhow::Result;
use aquifer::remote::publish::{Progress, RestoreOptions, SnapshotInfo, SnapshotStore};
use aquifer_sys::units::Bytes;
use serde::Serialize;

use crate::remote::StoreArgs;
use crate::{output, progress, remote};

/// Arguments of `aquifer pool restore`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", remote::PREFIX_HELP))]
pub struct Args {
    /// Prefix in an object store
    url: String,

    /// File to create
    path: PathBuf,

    /// Number of the snapshot [default: the newest]
    #[arg(long, value_name = "N")]
    snapshot: Option<u64>,

    /// Replace an existing file; its content is lost
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    remote: StoreArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  aquifer pool snapshots s3://bucket/data                             list the snapshots
  aquifer pool restore s3://bucket/data data.pool                     restore the newest
  aquifer pool restore s3://bucket/data data.pool --snapshot 42       restore that one
  aquifer pool restore s3://bucket/data data.pool --force             in place of an existing file

All bytes are verified. The file appears at its path when it is complete and durable; if interrupted, the command leaves nothing, or \
a file `.aquifer-….new` where the file system has no unnamed files. Free space of the pool is a hole of the file. An HTTP server is \
read as well, if the snapshot is named.";

/// The JSON output.
#[derive(Serialize)]
struct Report<'a> {
    path: String,
    url: &'a str,
    snapshot: u64,
    uuid: String,
    size_bytes: u64,
    written_bytes: u64,
    received_bytes: u64,
}

/// Restores the pool.
pub fn run(args: &Args) -> Result<()> {
    let store = SnapshotStore::open_with(&args.url, &args.remote.options(&args.url)?)?;
    let mut options = RestoreOptions::default().overwrite(args.force);
    if let Some(snapshot) = args.snapshot {
        options = options.snapshot(snapshot);
    }
    let bar = progress::Bytes::new("restoring");
    let restored = store.restore_with_progress(&args.path, &options, &mut |at| {
        if let Progress::Bytes { done, all } = at {
            bar.at(done, all);
        }
    })?;
    drop(bar);
    let path = args.path.display().to_string();
    if args.json {
        let report = Report {
            path,
            url: &args.url,
            snapshot: restored.snapshot,
            uuid: restored.uuid.to_string(),
            size_bytes: restored.pool_bytes,
            written_bytes: restored.written_bytes,
            received_bytes: restored.received_bytes,
        };
        return output::print_json(&report, true);
    }
    output::print(&format!(
        "restored snapshot {} of {} to {path}: {} of {} in use\n",
        restored.snapshot,
        args.url,
        Bytes(restored.written_bytes),
        Bytes(restored.pool_bytes),
    ))
}

/// Arguments of `aquifer pool snapshots`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{SNAPSHOTS_EXAMPLES}\n\n{}", remote::PREFIX_HELP))]
pub struct SnapshotsArgs {
    /// Prefix in an object store
    url: String,

    #[command(flatten)]
    remote: StoreArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const SNAPSHOTS_EXAMPLES: &str = "\
Examples:
  aquifer pool snapshots s3://bucket/data             list the snapshots, oldest first
  aquifer pool snapshots s3://bucket/data --json      the same as JSON

Snapshots whose entry is damaged are named on standard error, and make the command fail after it has listed the others.";

/// The JSON output.
#[derive(Serialize)]
struct Listing<'a> {
    url: &'a str,
    snapshots: Vec<SnapshotReport>,
}

#[derive(Serialize)]
struct SnapshotReport {
    snapshot: u64,
    uuid: String,
    created_ns: u64,
    size_bytes: u64,
    used_bytes: u64,
    stored_bytes: u64,
    chunk_bytes: u64,
}

impl From<&SnapshotInfo> for SnapshotReport {
    fn from(of: &SnapshotInfo) -> SnapshotReport {
        SnapshotReport {
            snapshot: of.snapshot,
            uuid: of.uuid.to_string(),
            created_ns: of.created_ns,
            size_bytes: of.pool_bytes,
            used_bytes: of.used_bytes,
            stored_bytes: of.stored_bytes,
            chunk_bytes: of.chunk_bytes,
        }
    }
}

/// Lists the snapshots that can be read, and fails if there are others.
pub fn list(args: &SnapshotsArgs) -> Result<()> {
    let store = SnapshotStore::open_with(&args.url, &args.remote.options(&args.url)?)?;
    let mut failures = Vec::new();
    let snapshots = store.snapshots_despite(&mut |failure| failures.push(failure))?;
    print_list(args, &snapshots, failures.is_empty())?;
    let last = failures.pop();
    for failure in failures {
        output::warn(&failure.to_string());
    }
    last.map_or(Ok(()), |last| Err(last.into()))
}

fn print_list(args: &SnapshotsArgs, snapshots: &[SnapshotInfo], is_all: bool) -> Result<()> {
    if args.json {
        let snapshots = snapshots.iter().map(SnapshotReport::from).collect();
        return output::print_json(&Listing { url: &args.url, snapshots }, true);
    }
    let Some(first) = snapshots.first() else {
        let none = format!("{} has no snapshots\n", args.url);
        return if is_all { output::print(&none) } else { Ok(()) };
    };
    let titles = ["snapshot", "published", "pool", "in use"].map(str::to_owned);
    let line = |of: &SnapshotInfo| {
        [
            of.snapshot.to_string(),
            output::moment(of.created_ns),
            Bytes(of.pool_bytes).to_string(),
            Bytes(of.used_bytes).to_string(),
        ]
    };
    let lines: Vec<_> = std::iter::once(titles).chain(snapshots.iter().map(line)).collect();
    output::print(&format!("pool {}\n{}", first.uuid, output::columns(&lines)))
}
