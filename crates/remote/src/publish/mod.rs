//! Snapshots of pools in object stores.
//!
//! ```text
//!   PREFIX/log/00000000000000000042       an entry: a snapshot (manifest), or a collection of garbage
//!   PREFIX/tables/ab/ab…ef-41             4,096 chunks of a snapshot: hash, epoch and length of each
//!   PREFIX/chunks/cd/cd…09-41             the pages of 1 MiB of the pool that are in use and not zero
//! ```
//!
//! A chunk is named by the SHA-256 of its object, and so is a table, which names chunks; an entry of the log names
//! tables and has a checksum of its own. So every byte that is restored is verified against the entry. `docs/format.md`
//! describes the objects.
//!
//! # The log
//! Publishers share nothing but the store, may be slow, paused for days or killed anywhere, and have clocks of their
//! own. What they agree on is a log: entry *n* + 1 is created by a conditional put (`If-None-Match: *`) that fails if it
//! exists. Entries are of two kinds:
//!
//! * A *snapshot* lists the objects that it needs.
//! * A *collection* removes snapshots before it, except for those that it lists, and condemns each object whose *epoch*
//!   is before its *cutoff* and that none of these needs. The cutoff never decreases.
//!
//! The epoch of an object, a part of its name, is the head of the log that its publisher had read before it uploaded the
//! object. The snapshots that are *live* are those that the last collection lists, and all behind it. Entries that are
//! neither live nor the last collection are deleted, and so are the condemned objects, by the publisher that has made
//! the collection, whenever it gets to it.
//!
//! A publisher reads the log up to its head *h*. It takes for granted the objects of the newest live snapshot, and
//! those of an epoch from the cutoff to *h* that it has uploaded itself or found in a listing, such as what a publisher
//! has left that failed. Everything else it uploads, in epoch *h*. Then it appends its snapshot at *h* + 1. If another entry is
//! there, it starts over.
//!
//! # Why no snapshot loses an object
//! *No live snapshot needs a condemned object.* By induction over the log: a snapshot at *h* + 1 needs objects of a
//! snapshot that is live at *h*, and objects of an epoch from the cutoff on. Collections at or before *h* have condemned
//! neither. Later ones condemn only what no snapshot that they keep needs, and all snapshots before them were
//! known to them, because positions are taken in order. It does not matter which publisher has uploaded an object, nor
//! how that one ended: an object that was there once is there until it is condemned. *Only condemned objects are deleted*, whenever that is: a condemned
//! object is named by an epoch before the cutoff, so no publisher uploads it again for a snapshot behind the
//! collection, and the same bytes get another name.
//!
//! So nothing depends on clocks, on leases or on a publisher being alive. The grace period only spares the uploads of
//! publishers under way, which would otherwise upload again.
//!
//! *Positions that are used twice.* A publisher that was paused may create an entry at a position whose entry a
//! collection has removed. That collection, or a later one, is in the log, so no reader of it takes the entry for
//! live. The publisher itself looks once more after it has created an entry: a snapshot that is not live is
//! published again, and a collection that is not the last one deletes nothing.
//!
//! This needs a store whose conditional puts are atomic, and whose reads and listings show what was written before. S3,
//! Google Cloud Storage, Azure and a local file system are such stores, and NFS is not. A server that ignores the
//! condition is found before anything is published, and each entry is read back after it was created.
//!
//! # Example
//! ```
//! use aquifer_remote::publish::{PublishOptions, RestoreOptions, SnapshotStore};
//!
//! # let directory = tempfile::tempdir()?;
//! # let (pool, copy) = (directory.path().join("a.pool"), directory.path().join("b.pool"));
//! # drop(aquifer_pool::Pool::create(&pool, 4 << 20)?);
//! # let url = format!("file://{}/snapshots", directory.path().display());
//! let store = SnapshotStore::open(&url)?; // or "s3://bucket/prefix"
//! let published = store.publish(&pool, &PublishOptions::default())?;
//! let restored = store.restore(&copy, &RestoreOptions::default().snapshot(published.snapshot))?;
//! assert_eq!(restored.snapshot, published.snapshot);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod depot;
mod error;
mod frozen;
#[cfg(test)]
mod interleavings;
mod layout;
mod log;
mod paced;
mod restore;
mod send;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_pool::{Pool, PoolOptions};

pub use error::PublishError;
pub use restore::{RestoreOptions, Restored};

use crate::RemoteOptions;
use depot::Depot;
use frozen::Frozen;
use layout::{LARGEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES};
use log::Collected;

const DEFAULT_CHUNK_BYTES: u32 = 1 << 20;
const DEFAULT_GRACE: Duration = Duration::from_secs(86_400);
/// How often to try to remove snapshots because another publisher was faster.
const MOST_COLLECTIONS: usize = 10;
/// Most bytes of chunks in memory.
const MOST_MEMORY_BYTES: u64 = 128 << 20;

/// The snapshots of a pool below a prefix of an object store.
///
/// Calls block, and make their requests in a runtime of the calling thread. Any number of publishers and readers may
/// use a prefix at the same time.
pub struct SnapshotStore {
    depot: Depot,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// Its number. Later ones are higher.
    pub snapshot: u64,
    /// The uuid of its pool.
    pub uuid: uuid::Uuid,
    /// When it was published, in nanoseconds since 1970, by the publisher's clock.
    pub created_ns: u64,
    /// The length of the pool.
    pub pool_bytes: u64,
    /// Bytes of the pool that are in use and not zero.
    pub used_bytes: u64,
    /// Bytes of the objects that it needs; snapshots share them.
    pub stored_bytes: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

/// How to publish a pool.
///
/// ```
/// use std::time::Duration;
/// use aquifer_remote::publish::PublishOptions;
///
/// let options = PublishOptions::default().keep(7).grace(Duration::from_secs(3600));
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct PublishOptions {
    freeze: bool,
    reread: bool,
    keep: Option<usize>,
    grace: Duration,
    chunk_bytes: u32,
    segment_directory: Option<PathBuf>,
}

impl Default for PublishOptions {
    fn default() -> Self {
        PublishOptions {
            freeze: false,
            reread: false,
            keep: None,
            grace: DEFAULT_GRACE,
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            segment_directory: None,
        }
    }
}

impl PublishOptions {
    /// Waits for processes that have the pool open for writing, instead of failing with [`PublishError::InUse`]. Off by
    /// default. In either case processes that open it for writing while it is published get
    /// [`PoolError::Busy`](aquifer_pool::PoolError::Busy).
    pub fn freeze(mut self, freeze: bool) -> Self {
        self.freeze = freeze;
        self
    }

    /// Reads all of the pool and sends all of it, also what is in the store already. Off by default: no process can change
    /// a pool without raising its generation, by a random number. But another program can, and a failing disk; and
    /// objects that were damaged or deleted in the store are replaced only by this.
    pub fn reread(mut self, reread: bool) -> Self {
        self.reread = reread;
        self
    }

    /// Then removes all snapshots but the newest `snapshots`, at least one, and deletes what no other needs. By default
    /// all stay.
    pub fn keep(mut self, snapshots: usize) -> Self {
        self.keep = Some(snapshots.max(1));
        self
    }

    /// For how long uploads of publishers that may be under way are spared, by the store's clock; a day by default. A
    /// publisher that takes longer than that and is overtaken by a collection uploads again: no snapshot is damaged
    /// by too short a time.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Bytes of a chunk, a power of two from 64 KiB to 64 MiB; 1 MiB by default. Of a chunk in which one page has
    /// changed, all is sent. Snapshots share chunks only of the same size.
    pub fn chunk_bytes(mut self, bytes: u32) -> Self {
        self.chunk_bytes = bytes;
        self
    }

    /// The directory with the shared memory of the pool's processes, if they were given one:
    /// [`PoolOptions::segment_directory`].
    pub fn segment_directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.segment_directory = Some(directory.into());
        self
    }

    fn check(&self) -> Result<(), PublishError> {
        let bytes = self.chunk_bytes;
        let is_size = (SMALLEST_CHUNK_BYTES..=LARGEST_CHUNK_BYTES).contains(&bytes);
        if is_size && bytes.is_power_of_two() {
            return Ok(());
        }
        Err(PublishError::Parameter {
            what: "the size of chunks",
            value: format!("{bytes} bytes"),
            reason: "it is a power of two from 64 KiB to 64 MiB",
        })
    }
}

/// What publishing has done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The snapshot's number.
    pub snapshot: u64,
    /// The uuid of its pool.
    pub uuid: uuid::Uuid,
    /// The length of the pool.
    pub pool_bytes: u64,
    /// Bytes of the pool that are in use and not zero.
    pub used_bytes: u64,
    /// Bytes read from the pool.
    pub read_bytes: u64,
    /// Bytes of chunks and tables that were sent, also in vain because of another publisher.
    pub sent_bytes: u64,
    /// How many chunks were sent.
    pub sent_chunks: u64,
    /// How many snapshots were removed.
    pub removed_snapshots: u64,
    /// How many objects were deleted.
    pub deleted_objects: u64,
}

/// What publishing or restoring is doing, for a caller that shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Waits for processes that have the pool open for writing; those that are known.
    Waiting(Vec<u32>),
    /// Bytes of the pool that are read and sent, or received and written, of all that are in use.
    Bytes {
        /// So far.
        done: u64,
        /// Of these.
        all: u64,
    },
    /// Deletes what no snapshot needs.
    Collecting,
}

impl SnapshotStore {
    /// Opens a prefix of a bucket or a directory, with the default options.
    ///
    /// # Errors
    /// [`PublishError::Url`]. No request is made.
    pub fn open(url: &str) -> Result<SnapshotStore, PublishError> {
        Self::open_with(url, &RemoteOptions::default())
    }

    /// Opens a prefix with the options of requests: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
    /// `file:///directory`; `https://host/path` only to restore from.
    ///
    /// # Errors
    /// [`PublishError::Url`]. No request is made.
    pub fn open_with(url: &str, options: &RemoteOptions) -> Result<SnapshotStore, PublishError> {
        Ok(SnapshotStore { depot: Depot::open(url, options)? })
    }

    /// Publishes a pool: [`SnapshotStore::publish_with_progress`].
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn publish(
        &self,
        pool: impl AsRef<Path>,
        options: &PublishOptions,
    ) -> Result<Published, PublishError> {
        self.publish_with_progress(pool, options, &mut |_| {})
    }

    /// Publishes a pool as a new snapshot, of which only new chunks are sent. The pool is read while no process has it
    /// open for writing ([`PublishOptions::freeze`]); one that was not closed cleanly is recovered first, which takes
    /// permission to write to it. `progress` is called from time to time.
    ///
    /// The snapshot is there in full or not at all, whenever this process is killed. What it has sent by then the next
    /// publisher does not send again, unless a collection has come in between; a later collection deletes it if no snapshot
    /// needs it.
    ///
    /// # Errors
    /// See [`PublishError`]. After any of them all snapshots that were there can be restored, and the new one is either
    /// there or not.
    pub fn publish_with_progress(
        &self,
        pool: impl AsRef<Path>,
        options: &PublishOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Published, PublishError> {
        options.check()?;
        if self.depot.is_http {
            return Err(PublishError::Unsuitable {
                url: self.depot.shown.clone(),
                reason: "an HTTP server is only read; publish to s3://, gs://, az:// or file://",
            });
        }
        let pool_options = options.segment_directory.iter();
        let pool_options = pool_options.fold(Pool::options(), PoolOptions::segment_directory);
        let frozen = Frozen::new(pool.as_ref(), &pool_options, &mut |writers| {
            progress(Progress::Waiting(writers.to_vec()));
            options.freeze
        })?;
        let content =
            std::sync::Arc::new(send::Content::of(frozen, options.chunk_bytes, options.reread));
        block_on(&self.depot, async {
            self.depot.check_conditions().await?;
            let mut published = self.depot.publish(&content, now_ns(), None, progress).await?;
            if let Some(keep) = options.keep {
                progress(Progress::Collecting);
                match self.collect(keep, options.grace).await {
                    Ok(collected) => {
                        published.removed_snapshots = collected.snapshots;
                        published.deleted_objects = collected.objects;
                    }
                    Err(source) => {
                        let source = Box::new(source);
                        return Err(PublishError::NotCollected { published, source });
                    }
                }
            }
            Ok(published)
        })
    }

    async fn collect(&self, keep: usize, grace: Duration) -> Result<Collected, PublishError> {
        let grace_s = i64::try_from(grace.as_secs()).unwrap_or(i64::MAX);
        for _ in 0..MOST_COLLECTIONS {
            let collected = self.depot.collect(keep, grace_s, now_ns(), nonce()?, None).await?;
            if let Some(collected) = collected {
                return Ok(collected);
            }
        }
        let url = self.depot.shown.clone();
        Err(PublishError::Contended { url, attempts: MOST_COLLECTIONS })
    }

    /// The snapshots that there are, oldest first: [`SnapshotStore::snapshots_despite`], unless anything fails.
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn snapshots(&self) -> Result<Vec<SnapshotInfo>, PublishError> {
        let mut first = None;
        let snapshots = self.snapshots_despite(&mut |failure| {
            first.get_or_insert(failure);
        })?;
        first.map_or(Ok(snapshots), Err)
    }

    /// The snapshots that there are, oldest first. Entries of the log that are damaged, or of a later program, are left out
    /// and passed to `failed`. If the newest or the last collection is one of these, all snapshots whose entries are there
    /// are listed, also those of which a collection may have deleted chunks.
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn snapshots_despite(
        &self,
        failed: &mut dyn FnMut(PublishError),
    ) -> Result<Vec<SnapshotInfo>, PublishError> {
        self.depot.check_there()?;
        block_on(&self.depot, async {
            let positions = match self.depot.view().await {
                Ok(view) => view.live,
                Err(PublishError::Damaged { .. } | PublishError::Later { .. }) => self
                    .depot
                    .positions()
                    .await?
                    .into_iter()
                    .map(|(position, _)| position)
                    .collect(),
                Err(error) => return Err(error),
            };
            let mut snapshots = Vec::new();
            for position in positions {
                let entry = match self.depot.entry(position).await {
                    // One that is gone was removed meanwhile.
                    Ok(None) => continue,
                    Ok(Some(entry)) => entry,
                    Err(failure @ (PublishError::Damaged { .. } | PublishError::Later { .. })) => {
                        failed(failure);
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                let layout::Body::Snapshot(snapshot) = &entry.body else { continue };
                snapshots.push(SnapshotInfo {
                    snapshot: position,
                    uuid: entry.uuid,
                    created_ns: entry.created_ns,
                    pool_bytes: snapshot.state.len_bytes,
                    used_bytes: snapshot.pages * layout::PAGE_BYTES,
                    stored_bytes: snapshot.stored_bytes,
                    chunk_bytes: snapshot.chunk_bytes.into(),
                });
            }
            Ok(snapshots)
        })
    }

    /// Restores a snapshot to a new file: [`SnapshotStore::restore_with_progress`].
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn restore(
        &self,
        path: impl AsRef<Path>,
        options: &RestoreOptions,
    ) -> Result<Restored, PublishError> {
        self.restore_with_progress(path, options, &mut |_| {})
    }

    /// Restores a snapshot to a new file, which appears at its path when it is complete, verified and durable. Free space
    /// of the pool is a hole. `progress` is called from time to time.
    ///
    /// # Errors
    /// See [`PublishError`]. After any of them what was at the path is there unchanged, except for that of a directory
    /// that cannot be synced, which says that the pool is restored.
    pub fn restore_with_progress(
        &self,
        path: impl AsRef<Path>,
        options: &RestoreOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Restored, PublishError> {
        block_on(&self.depot, self.depot.restore(path.as_ref(), options, progress))
    }
}

impl std::fmt::Debug for SnapshotStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SnapshotStore").field("url", &self.depot.shown).finish_non_exhaustive()
    }
}

fn block_on<T>(
    depot: &Depot,
    work: impl Future<Output = Result<T, PublishError>>,
) -> Result<T, PublishError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|source| crate::RemoteError::System {
        url: depot.shown.clone(),
        what: "cannot start a runtime",
        source,
    })?;
    let done = runtime.block_on(work);
    // Look-ups of names may take long, and nothing waits for them any more.
    runtime.shutdown_background();
    done
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

fn nonce() -> Result<u64, PublishError> {
    aquifer_sys::random::next_u64().map_err(|source| PublishError::File {
        action: "get random bytes from",
        path: "/dev/urandom".into(),
        source,
    })
}
