//! `aquifer pool publish`.
//!
//! Nothing has to be undone when it is interrupted: the snapshot is there or not, and writers are let in when the
//! process ends.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use aquifer::remote::publish::{Progress, PublishError, PublishOptions, Published, SnapshotStore};
use aquifer_sys::units::Bytes;
use serde::Serialize;

use crate::access::ReadAccess;
use crate::remote::StoreArgs;
use crate::{output, progress, remote};

/// Arguments of `aquifer pool publish`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", remote::PREFIX_HELP))]
pub struct Args {
    /// Path of the pool
    path: PathBuf,

    /// Prefix in an object store
    url: String,

    /// Wait until no process has the pool open for writing, instead of failing if one has
    #[arg(long)]
    freeze: bool,

    /// Read the whole pool and send all of it again, in place of what may be damaged or missing in the store
    #[arg(long)]
    reread: bool,

    /// Then remove all snapshots but the newest N, and delete what they do not need
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep: Option<u32>,

    /// With --keep: spare what other publishers have sent that began at most so long ago; they would have to send it
    /// again
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = humantime::parse_duration)]
    grace: Duration,

    /// Length of a chunk, a power of 2 from 64K to 64M; of a chunk in which a page has changed, all is sent
    #[arg(long, value_name = "BYTES", default_value = "1M")]
    chunk_size: Bytes,

    #[command(flatten)]
    remote: StoreArgs,

    #[command(flatten)]
    access: ReadAccess,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  aquifer pool publish data.pool s3://bucket/data              as a new snapshot
  aquifer pool publish data.pool s3://bucket/data --keep 7     and remove all but the newest seven
  aquifer pool publish data.pool s3://bucket/data --freeze     wait until its writers have closed it
  aquifer pool publish data.pool file:///mnt/backup/data       to a directory

Sends what is in use of the pool and not yet in the store, in chunks that snapshots share. While it is published, processes that open the \
pool for writing fail after a second, because it is busy; readers are let in. A pool that was not closed cleanly is recovered first. \
The snapshot is there when the command has succeeded; after Ctrl-C or a crash it is there in full or not at all, and all others are unchanged; the next one sends little of that again. \
Several machines may publish copies of one pool at the same time. `aquifer pool restore` makes a pool of a snapshot.";

/// The JSON output.
#[derive(Serialize)]
struct Report<'a> {
    path: String,
    url: &'a str,
    snapshot: u64,
    uuid: String,
    size_bytes: u64,
    used_bytes: u64,
    read_bytes: u64,
    sent_bytes: u64,
    sent_chunks: u64,
    removed_snapshots: u64,
    deleted_objects: u64,
}

/// Publishes the pool and prints what was sent.
pub fn run(args: &Args) -> Result<()> {
    let store = SnapshotStore::open_with(&args.url, &args.remote.options(&args.url)?)?;
    let chunk_bytes = u32::try_from(args.chunk_size.0).unwrap_or(u32::MAX);
    let mut options = PublishOptions::default()
        .freeze(args.freeze)
        .reread(args.reread)
        .grace(args.grace)
        .chunk_bytes(chunk_bytes);
    if let Some(keep) = args.keep {
        options = options.keep(keep as usize);
    }
    if let Some(directory) = args.access.segment_directory() {
        options = options.segment_directory(directory);
    }
    let bar = progress::Bytes::new("publishing");
    let mut was_told = false;
    let outcome = store.publish_with_progress(&args.path, &options, &mut |at| match at {
        Progress::Waiting(processes) if args.freeze && !was_told => {
            was_told = true;
            bar.aside(|| output::warn(&waiting(&args.path.display().to_string(), &processes)));
        }
        Progress::Bytes { done, all } => bar.at(done, all),
        Progress::Collecting => bar.name("removing old snapshots"),
        _ => {}
    });
    drop(bar);
    match outcome {
        Ok(published) => print(args, &published),
        Err(error) => {
            if let PublishError::NotCollected { published, .. } = &error {
                print(args, published)?;
            }
            Err(error.into())
        }
    }
}

fn print(args: &Args, published: &Published) -> Result<()> {
    let path = args.path.display().to_string();
    let &Published {
        snapshot, pool_bytes, used_bytes, read_bytes, sent_bytes, sent_chunks, ..
    } = published;
    if args.json {
        let report = Report {
            path,
            url: &args.url,
            snapshot,
            uuid: published.uuid.to_string(),
            size_bytes: pool_bytes,
            used_bytes,
            read_bytes,
            sent_bytes,
            sent_chunks,
            removed_snapshots: published.removed_snapshots,
            deleted_objects: published.deleted_objects,
        };
        return output::print_json(&report, true);
    }
    let mut text = format!("published {path} as snapshot {snapshot} of {}\n", args.url);
    text.push_str(&output::columns(&[
        ["in use".to_owned(), Bytes(used_bytes).to_string()],
        [
            "sent".to_owned(),
            format!("{}, {}", Bytes(sent_bytes), output::several(sent_chunks, "chunk")),
        ],
    ]));
    if published.removed_snapshots + published.deleted_objects > 0 {
        text.push_str(&format!(
            "removed {}, deleted {}\n",
            output::several(published.removed_snapshots, "snapshot"),
            output::several(published.deleted_objects, "object"),
        ));
    }
    output::print(&text)
}

fn waiting(path: &str, processes: &[u32]) -> String {
    let list: Vec<String> = processes.iter().map(u32::to_string).collect();
    match &*list {
        [] => format!("{path} is in use; waiting until it is closed"),
        [one] => format!("process {one} uses {path}; waiting until it closes it"),
        many => format!("processes {} use {path}; waiting until they close it", many.join(", ")),
    }
}
