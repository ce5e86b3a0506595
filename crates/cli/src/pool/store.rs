//! Snapshots in an object store, for the commands that use them.

use anyhow::Result;
use aquifer::remote::publish::SnapshotStore;

use crate::remote::StoreArgs;

/// The help text after the examples.
pub const HELP: &str = "\
URL is the prefix of all objects: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY, with the snapshots of \
one pool. Credentials come from the environment (AWS_…, GOOGLE_…, AZURE_…), from a web identity, or from the instance.";

/// Opens the store of snapshots at a URL.
pub fn open(args: &StoreArgs, url: &str) -> Result<SnapshotStore> {
    Ok(SnapshotStore::open_with(url, &args.options(url))?)
}
