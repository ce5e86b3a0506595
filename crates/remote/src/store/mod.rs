//! Whole objects of a bucket: read from one end to the other, listed, and written.
//!
//! A [`RemoteStore`] has one thread and one set of connections for all objects of a bucket. Its readers and uploads keep
//! several requests in flight, in bounded memory ([`RemoteReader`], [`Upload`]). `aquifer cat`, `put` and `get` are made
//! of it.
//!
//! ```
//! use std::io::Read;
//! use aquifer_remote::RemoteStore;
//!
//! # let directory = tempfile::tempdir()?;
//! # let url = format!("file://{}/", directory.path().display());
//! let store = RemoteStore::open(&url)?; // or "s3://bucket/", "gs://bucket/prefix/"
//! let key = format!("{}/a/greeting", store.key());
//! let mut upload = store.upload(&key, 5, false)?;
//! upload.write(b"hello")?;
//! upload.finish()?;
//!
//! let mut text = String::new();
//! store.read(&key)?.read_to_string(&mut text)?;
//! assert_eq!(text, "hello");
//! assert_eq!(store.list(store.key())?[0].key, key);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub(crate) mod pace;
mod reader;
mod runner;
mod upload;

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};

use crate::body::Body;
use crate::buffers::Buffers;
use crate::connection::{Connector, NOTES, Notes, Seen};
use crate::costs::Costs;
use crate::fetch::{Fetcher, Version, seen, unavailable};
use crate::location::{Location, Scheme};
use crate::options::Cancel;
use crate::{RemoteError, RemoteOptions, RemoteStats};

pub use reader::RemoteReader;
pub(crate) use runner::received;
use runner::{Pending, Runner};
pub use upload::{Finishing, Upload, Written};

/// The objects of a bucket, or one object of an HTTP server. See the [module documentation](self).
///
/// Keys are not percent-encoded, other than in URLs. Every method may be called from any thread, and waits. In a forked
/// child all fail with [`RemoteError::Stopped`].
#[derive(Clone)]
pub struct RemoteStore {
    shared: Arc<Shared>,
}

struct Shared {
    location: Location,
    options: RemoteOptions,
    connector: Connector,
    costs: Arc<Costs>,
    buffers: Arc<Buffers>,
    store: Arc<dyn ObjectStore>,
    /// For uploads in parts, made when they are needed: without a condition, and such that complete only if there is no
    /// object of the name.
    in_parts: [OnceLock<Arc<dyn ObjectStore>>; 2],
    runner: Runner,
}

/// An object, from a listing or by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteObject {
    /// Its key.
    pub key: String,
    /// Its length.
    pub len_bytes: u64,
    /// Its ETag, if the server sent one.
    pub etag: Option<String>,
    /// When it was written, if the server tells.
    pub modified: SystemTime,
}

pub(crate) const LISTED_AGAIN: &str = "its listing begins again instead of ending; check that the endpoint is that of an object store";

/// Finds out that a listing has no end, because the server ignores which page it is asked for.
#[derive(Default)]
pub(crate) struct FirstListed(Option<Path>);

impl FirstListed {
    pub fn comes_again(&mut self, listed: &Path) -> bool {
        match &self.0 {
            Some(first) => first == listed,
            None => {
                self.0 = Some(listed.clone());
                false
            }
        }
    }
}

impl RemoteObject {
    fn of(meta: ObjectMeta) -> RemoteObject {
        RemoteObject {
            key: meta.location.to_string(),
            len_bytes: meta.size,
            etag: meta.e_tag,
            modified: meta.last_modified.into(),
        }
    }
}

impl RemoteOptions {
    /// Opens the store of a URL, of an object, of what has a common prefix, or of a whole bucket: `s3://bucket/key`,
    /// `s3://bucket/prefix/`, `s3://bucket`. Nothing is requested yet.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn store(self, url: &str) -> Result<RemoteStore, RemoteError> {
        RemoteStore::open_with(url, self)
    }
}

impl RemoteStore {
    /// Opens the store of a URL with the default options; see [`RemoteOptions::store`].
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn open(url: &str) -> Result<RemoteStore, RemoteError> {
        RemoteOptions::default().store(url)
    }

    pub(crate) fn open_with(url: &str, options: RemoteOptions) -> Result<RemoteStore, RemoteError> {
        let location = Location::parse_store(url)?;
        let runner = Runner::start(&location.shown)?;
        let connector = Connector::default();
        let store = location.store(&options, connector.clone())?;
        let costs = Arc::new(Costs::new(&options));
        // Half of it is for requests under way.
        let buffers = Arc::new(Buffers::new(2 * reader::AHEAD_BYTES as usize));
        let in_parts = Default::default();
        let shared =
            Shared { location, options, connector, costs, buffers, store, in_parts, runner };
        Ok(RemoteStore { shared: Arc::new(shared) })
    }

    /// The key or prefix that the URL names, without slashes around it; empty for a whole bucket, and for HTTP.
    pub fn key(&self) -> &str {
        self.shared.location.path.as_ref()
    }

    /// The key or prefix that another URL names, if that is in this store; and whether it is a prefix: it ends with a
    /// slash, or is a whole bucket.
    ///
    /// # Errors
    /// [`RemoteError::InvalidUrl`].
    pub fn key_of(&self, url: &str) -> Result<Option<(String, bool)>, RemoteError> {
        let (this, other) = (&self.shared.location, Location::parse_store(url)?);
        Ok(other.is_in_store_of(this).then(|| (other.path.to_string(), other.is_prefix())))
    }

    /// Whether the store can be listed and written to: HTTP servers cannot.
    pub fn lists(&self) -> bool {
        self.shared.location.scheme != Scheme::Http
    }

    /// The last part of the name of the object that the URL names; of HTTP as well.
    pub fn name(&self) -> Option<String> {
        self.shared.location.name()
    }

    /// The URL of a key, without its query.
    pub fn url_of(&self, key: &str) -> String {
        let location = self.shared.location.with_key(key);
        location.map_or_else(|_| self.shared.location.shown.clone(), |location| location.shown)
    }

    /// Counters and estimates since the store was opened.
    pub fn stats(&self) -> RemoteStats {
        // Relaxed: a counter.
        self.shared.costs.stats(self.shared.connector.requests.load(Ordering::Relaxed))
    }

    /// Opens an object for reading and pins its version, with a request for its first byte.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn read(&self, key: &str) -> Result<RemoteReader, RemoteError> {
        self.start_reading(key, 0)?.wait()
    }

    /// As [`RemoteStore::read`], without waiting, and with the first bytes, at most the given number of them: so the
    /// requests for many short objects are in flight at once.
    ///
    /// # Errors
    /// If the key is invalid.
    pub fn start_reading(&self, key: &str, first_bytes: u64) -> Result<Opening, RemoteError> {
        let shared = self.shared.clone();
        let location = shared.location.with_key(key)?;
        let (store, costs) = (shared.store.clone(), shared.costs.clone());
        let first_bytes = first_bytes.min(shared.options.largest_request_bytes as u64);
        let buffers = shared.buffers.clone();
        let fetcher = Fetcher::new(store, location, &shared.options, costs, buffers);
        let fetcher = Arc::new(fetcher);
        let opening = fetcher.clone();
        let pending = shared.runner.spawn(async move {
            let version = opening.open().await?;
            let first = 0..first_bytes.min(version.len_bytes);
            let body = match first.is_empty() {
                true => Body::default(),
                false => opening.fetch(first.clone(), &version).await?,
            };
            Ok((version, body, first.end as usize))
        });
        Ok(Opening { shared, fetcher, pending })
    }

    /// Looks an object up by its key; `None` if there is none.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn find(&self, key: &str) -> Result<Option<RemoteObject>, RemoteError> {
        let (location, store) = (self.shared.location.with_key(key)?, self.shared.store.clone());
        let path = location.path.clone();
        let found =
            self.shared.start(location.clone(), 0..0, async move { store.head(&path).await });
        match found.wait(&location.shown, self.shared.cancel()) {
            Ok(meta) => Ok(Some(RemoteObject::of(meta))),
            Err(RemoteError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Lists the objects whose keys begin with a prefix and a slash, in the order of their keys; of an empty prefix, those
    /// of the whole bucket. A prefix that no key has is an empty list.
    ///
    /// # Errors
    /// See [`RemoteError`]; also if a key is one that this crate cannot name, with an empty or a relative segment or a
    /// control character.
    pub fn list(&self, prefix: &str) -> Result<Vec<RemoteObject>, RemoteError> {
        let location = self.shared.location.with_key(prefix)?;
        if location.scheme == Scheme::Http {
            let reason = "an HTTP server lists nothing; name an object";
            return Err(RemoteError::InvalidUrl { url: location.shown, reason });
        }
        let (at, timeout) = (location.clone(), self.shared.options.timeout);
        let mut stream = self.shared.store.list(Some(&location.path));
        let listing = async move {
            let (mut found, mut first) = (vec![], FirstListed::default());
            loop {
                // A page of the listing at a time.
                let next = in_time(&at, 0..0, timeout, async { stream.next().await.transpose() });
                match next.await {
                    Ok(None) => return Ok(found),
                    Ok(Some(meta)) if first.comes_again(&meta.location) => {
                        let (url, reason) = (at.shown, LISTED_AGAIN);
                        return Err(RemoteError::BadAnswer { url, range: 0..0, reason });
                    }
                    Ok(Some(meta)) if meta.location != at.path => {
                        found.push(RemoteObject::of(meta))
                    }
                    // A key that is the prefix and a slash marks a directory.
                    Ok(Some(_)) => {}
                    Err(RemoteError::NotFound { .. }) if at.scheme == Scheme::File => {
                        return Ok(vec![]);
                    }
                    Err(RemoteError::NotFound { url, .. }) => {
                        return Err(RemoteError::NoBucket { url });
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        let listing = self.shared.runner.spawn(listing);
        let mut found = listing.wait(&location.shown, self.shared.cancel())?;
        found.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// Starts writing an object, of which nothing is visible until [`Upload::finish`] succeeds. `len_bytes` is what it
    /// will be long, as far as that is known: it decides the length of the parts. Unless `replaces`, an object of that
    /// name stays, and the upload fails with [`RemoteError::Exists`].
    ///
    /// # Errors
    /// See [`RemoteError`]: an HTTP server cannot be written to.
    pub fn upload(&self, key: &str, len_bytes: u64, replaces: bool) -> Result<Upload, RemoteError> {
        let location = self.shared.location.with_key(key)?;
        let wrong = |reason| Err(RemoteError::InvalidUrl { url: location.shown.clone(), reason });
        if location.scheme == Scheme::Http {
            return wrong("an HTTP server is read-only here; give s3://, gs:// or az://");
        }
        if location.path == Path::ROOT {
            return wrong("names no object");
        }
        Upload::new(self.shared.clone(), location, len_bytes, replaces)
    }
}

/// An object being opened; from [`RemoteStore::start_reading`]. Given up when dropped.
pub struct Opening {
    shared: Arc<Shared>,
    fetcher: Arc<Fetcher>,
    /// The version, and the first bytes with their number.
    pending: Pending<(Version, Body, usize)>,
}

impl Opening {
    /// Waits until it is open.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn wait(self) -> Result<RemoteReader, RemoteError> {
        let opened = self.pending.wait(self.fetcher.shown(), self.shared.cancel())?;
        Ok(RemoteReader::new(self.shared, self.fetcher, opened))
    }
}

impl Shared {
    fn cancel(&self) -> Option<&Cancel> {
        self.options.cancel.as_ref()
    }

    /// What uploads in parts are made with. The library's client ends no request earlier than completing may take; callers
    /// end the others.
    fn in_parts(&self, replaces: bool) -> Result<Arc<dyn ObjectStore>, RemoteError> {
        let kept = &self.in_parts[usize::from(replaces)];
        if let Some(store) = kept.get() {
            return Ok(store.clone());
        }
        let completes_new_only = !replaces && self.location.scheme == Scheme::S3;
        let connector = Connector { completes_new_only, ..self.connector.clone() };
        let timeout = self.options.timeout.max(upload::COMPLETION_LIMIT);
        let store = self.location.store(&self.options.clone().timeout(timeout), connector)?;
        Ok(kept.get_or_init(|| store).clone())
    }

    fn delivered(&self, bytes: usize) {
        // Relaxed: a counter.
        self.costs.delivered_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Starts requests about a range of an object.
    fn start<T: Send + 'static>(
        &self,
        location: Location,
        range: Range<u64>,
        work: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Pending<T> {
        let timeout = self.options.timeout;
        self.runner.spawn(async move { in_time(&location, range, timeout, work).await })
    }
}

/// Runs requests of the library within a timeout, if there is one. Of a failure it returns what was seen, and the error
/// unless the time was over.
pub(crate) async fn noted<T>(
    timeout: Option<Duration>,
    work: impl Future<Output = object_store::Result<T>>,
) -> Result<T, (Option<object_store::Error>, Seen)> {
    let notes = Notes::default();
    let work = NOTES.scope(notes.clone(), work);
    let done = match timeout {
        None => work.await.map_err(Some),
        Some(timeout) => match tokio::time::timeout(timeout, work).await {
            Ok(answered) => answered.map_err(Some),
            Err(_) => Err(None),
        },
    };
    done.map_err(|error| (error, seen(&notes)))
}

/// As [`noted`], and names the failure.
async fn in_time<T>(
    location: &Location,
    range: Range<u64>,
    timeout: Duration,
    work: impl Future<Output = object_store::Result<T>>,
) -> Result<T, RemoteError> {
    noted(Some(timeout), work).await.map_err(|(error, seen)| match error {
        Some(error) => failure(location, range, &error, &seen, timeout),
        None => {
            let (url, status) = (location.shown.clone(), seen.status);
            RemoteError::TimedOut { url, range, timeout, status }
        }
    })
}

fn failure(
    location: &Location,
    range: Range<u64>,
    error: &object_store::Error,
    seen: &Seen,
    timeout: Duration,
) -> RemoteError {
    use object_store::Error;
    let url = location.shown.clone();
    match (error, seen.status) {
        (Error::NotFound { .. }, _) | (_, Some(404)) => RemoteError::NotFound { url, range },
        // Of a listing the library tells only that it failed.
        (Error::PermissionDenied { .. } | Error::Unauthenticated { .. }, status)
        | (_, status @ Some(401 | 403)) => {
            RemoteError::Denied { url, range, status: status.unwrap_or(403) }
        }
        (Error::AlreadyExists { .. } | Error::Precondition { .. }, _) | (_, Some(412)) => {
            RemoteError::Exists { url }
        }
        (Error::InvalidPath { .. }, _) => RemoteError::BadAnswer {
            url,
            range,
            reason: "it has a key with an empty or a relative segment, or a control character",
        },
        (Error::NotImplemented { .. } | Error::NotSupported { .. }, status) => {
            let reason = "the store does not offer this; check its configuration";
            RemoteError::Unavailable { url, range, reason, status }
        }
        _ => unavailable(location, range, error, seen, timeout),
    }
}

impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteStore")
            .field("url", &self.shared.location.shown)
            .finish_non_exhaustive()
    }
}
