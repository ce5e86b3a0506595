//! One range of the object, as the version that was opened, or a typed error.
//!
//! `object_store` makes and retries the requests. It asks with `If-Match`, but many servers ignore that, and a
//! cache in between may answer by itself. So each answer is compared: its ETag, its range, the object's length, and
//! the number of bytes of its body. Bytes reach a caller only when all of them agree.

use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use object_store::client::{HttpError, HttpErrorKind};
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt};
use tokio::sync::Semaphore;

use crate::body::Body;
use crate::buffers::Buffers;
use crate::connection::{Notes, Seen, TooLong};
use crate::costs::Costs;
use crate::credentials::NoCredentials;
use crate::location::{Location, Scheme};
use crate::{RemoteError, RemoteOptions};

/// An answer that takes so many times as long as usual is late.
const LATE_FACTOR: u32 = 4;

const REDIRECTS: &str = "the server redirects; open the URL that it leads to: a URL with a query, or with a \
     `user_agent` of the caller's, is followed within its server only, and none from https to http or more than ten times";

pub(crate) const TOO_LONG: &str = "it is longer than any answer to such a request; check that the URL or endpoint is that of an object store";

/// The version of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Version {
    pub len_bytes: u64,
    pub etag: Option<String>,
    /// Seconds; 0 if the server sends none.
    pub modified: i64,
}

impl Version {
    fn of(meta: &ObjectMeta) -> Version {
        Version {
            len_bytes: meta.size,
            etag: meta.e_tag.clone(),
            modified: meta.last_modified.timestamp(),
        }
    }

    pub fn strong_etag(&self) -> Option<&String> {
        let is_strong =
            |etag: &&String| !matches!(etag.as_str(), "" | "\"\"") && !etag.starts_with("W/");
        self.etag.as_ref().filter(is_strong)
    }

    fn check(&self, answer: &Version) -> Result<(), &'static str> {
        if self.etag != answer.etag {
            return Err("its ETag differs");
        }
        if self.len_bytes != answer.len_bytes {
            return Err("its length differs");
        }
        // Beside a strong ETag the date tells nothing, and replicas of a store may differ in it.
        if self.strong_etag().is_none() && self.modified != answer.modified {
            return Err("its date differs");
        }
        Ok(())
    }
}

/// Makes the requests of a device, in one process.
pub(crate) struct Fetcher {
    store: Arc<dyn ObjectStore>,
    location: Location,
    pub timeout: Duration,
    unversioned: bool,
    is_hedging: bool,
    places: Semaphore,
    buffers: Arc<Buffers>,
    costs: Arc<Costs>,
}

impl Fetcher {
    /// Makes the requests of an object in a store that is open.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        location: Location,
        options: &RemoteOptions,
        costs: Arc<Costs>,
        buffers: Arc<Buffers>,
    ) -> Fetcher {
        Fetcher {
            store,
            location,
            timeout: options.timeout,
            unversioned: options.unversioned,
            is_hedging: options.hedge,
            buffers,
            places: Semaphore::new(options.in_flight),
            costs,
        }
    }

    /// The object's URL, for messages.
    pub fn shown(&self) -> &str {
        &self.location.shown
    }

    /// Finds the object's version.
    pub async fn open(&self) -> Result<Version, RemoteError> {
        // Not by HEAD: a signature may allow GET only, and so it is known that ranges work.
        let first = 0..1;
        let notes = Notes::default();
        let opened = async {
            if self.location.scheme == Scheme::File {
                return self.store.head(&self.location.path).await.map(|meta| Version::of(&meta));
            }
            match self.get(Some(first.clone()), None, &notes).await {
                Ok(answer) => Ok(Version::of(&answer.meta)),
                // Nothing satisfies a range of an empty object.
                Err(_) if is_empty(&seen(&notes)) => {
                    self.get(None, None, &notes).await.map(|answer| Version::of(&answer.meta))
                }
                Err(error) => Err(error),
            }
        };
        let version = match tokio::time::timeout(self.timeout, opened).await {
            Ok(Ok(version)) => version,
            // About the object, and not the byte that was asked for.
            Ok(Err(error)) => return Err(self.classify(0..0, &error, &seen(&notes), None)),
            // Also where the machine or a function is slow to supply credentials.
            Err(_) => return Err(self.timed_out(0..0, seen(&notes).status)),
        };
        if version.strong_etag().is_none() && !self.unversioned {
            return Err(RemoteError::Unversioned { url: self.location.shown.clone() });
        }
        Ok(version)
    }

    /// Reads a range that is not empty and inside the object.
    pub async fn fetch(&self, range: Range<u64>, version: &Version) -> Result<Body, RemoteError> {
        let mut outcome = Outcome { costs: &self.costs, has_failed: true };
        let notes = Notes::default();
        let fetched = self.fetch_in_time(range.clone(), version, &notes);
        let result = match tokio::time::timeout(self.timeout, fetched).await {
            Ok(result) => result,
            Err(_) => Err(self.timed_out(range, seen(&notes).status)),
        };
        outcome.has_failed = result.is_err();
        result
    }

    /// Waits for a place and memory, and reads; a second time if the answer is late and there is room for another one.
    async fn fetch_in_time(
        &self,
        range: Range<u64>,
        version: &Version,
        notes: &Notes,
    ) -> Result<Body, RemoteError> {
        let wanted = range.end - range.start;
        let _place = self.places.acquire().await.expect("never closed");
        let _memory = self.buffers.take(wanted).await;
        let first = pin!(self.attempt(range.clone(), version, notes));
        if !self.is_hedging {
            return first.await;
        }
        let late = pin!(tokio::time::sleep(self.costs.expected(wanted) * LATE_FACTOR));
        let first = match select(first, late).await {
            Either::Left((result, _)) => return result,
            Either::Right(((), first)) => first,
        };
        let Some((_place, _memory)) =
            self.places.try_acquire().ok().zip(self.buffers.try_take(wanted))
        else {
            return first.await;
        };
        self.costs.hedged_ranges.fetch_add(1, Ordering::Relaxed);
        let notes = Notes::default();
        let second = pin!(self.attempt(range, version, &notes));
        match select(first, second).await {
            Either::Left((Err(_), second)) => second.await,
            Either::Right((Err(_), first)) => first.await,
            Either::Left((result, _)) | Either::Right((result, _)) => result,
        }
    }

    async fn attempt(
        &self,
        range: Range<u64>,
        version: &Version,
        notes: &Notes,
    ) -> Result<Body, RemoteError> {
        let _under_way = self.costs.begin();
        let failed = |error| self.classify(range.clone(), &error, &seen(notes), Some(version));
        let changed = |what| RemoteError::Changed {
            url: self.location.shown.clone(),
            range: range.clone(),
            what,
        };
        let wrong = |reason| RemoteError::BadAnswer {
            url: self.location.shown.clone(),
            range: range.clone(),
            reason,
        };
        let answer = self.get(Some(range.clone()), Some(version), notes).await.map_err(failed)?;
        version.check(&Version::of(&answer.meta)).map_err(changed)?;
        let wanted = range.end - range.start;
        let mut bytes = BytesMut::new();
        let mut whole = None;
        let mut got = 0;
        let mut stream = answer.into_stream();
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(failed)?;
            got += piece.len() as u64;
            // Relaxed: a counter.
            self.costs.received_bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
            if got > wanted {
                return Err(wrong("its body is longer than the range"));
            }
            if piece.len() as u64 == wanted {
                whole = Some(piece);
                continue;
            }
            // One buffer: each small piece would keep the larger one that it was cut from.
            bytes.reserve((wanted - got) as usize + piece.len());
            bytes.extend_from_slice(&piece);
        }
        if got < wanted {
            return Err(wrong("its body is shorter than the range"));
        }
        // A file can be changed in place, while it is read.
        if self.location.scheme == Scheme::File {
            let now = self.store.head(&self.location.path).await.map_err(failed)?;
            version.check(&Version::of(&now)).map_err(changed)?;
        }
        let seen = seen(notes);
        // The library continues a body that broke off with another answer, of which it compares range and ETag only.
        if let Some((_, len_bytes)) = seen.content_range {
            let last = Version {
                len_bytes,
                etag: seen.etag,
                modified: seen.modified.unwrap_or(version.modified),
            };
            version.check(&last).map_err(changed)?;
        }
        if seen.attempts == 1 {
            self.costs.learn_latency(seen.latency);
        }
        Ok(Body::of(whole.unwrap_or_else(|| bytes.freeze())))
    }

    async fn get(
        &self,
        range: Option<Range<u64>>,
        version: Option<&Version>,
        notes: &Notes,
    ) -> object_store::Result<object_store::GetResult> {
        let mut options = GetOptions {
            range: range.map(GetRange::Bounded),
            // A weak ETag matches nothing.
            if_match: version.and_then(|version| version.strong_etag().cloned()),
            ..GetOptions::default()
        };
        options.extensions.insert(notes.clone());
        self.store.get_opts(&self.location.path, options).await
    }

    pub fn timed_out(&self, range: Range<u64>, status: Option<u16>) -> RemoteError {
        RemoteError::TimedOut {
            url: self.location.shown.clone(),
            range,
            timeout: self.timeout,
            status,
        }
    }

    /// Names a failure, from the library's error and what was seen on the connection.
    fn classify(
        &self,
        range: Range<u64>,
        error: &object_store::Error,
        seen: &Seen,
        version: Option<&Version>,
    ) -> RemoteError {
        use object_store::Error;
        let url = self.location.shown.clone();
        let changed = |what| RemoteError::Changed { url: url.clone(), range: range.clone(), what };
        if cause::<NoCredentials>(error).is_some() {
            return unavailable(&self.location, range, error, seen, self.timeout);
        }
        match (error, seen.status) {
            (Error::NotFound { .. }, _) => return RemoteError::NotFound { url, range },
            (Error::PermissionDenied { .. } | Error::Unauthenticated { .. }, status) => {
                return RemoteError::Denied { url, range, status: status.unwrap_or(403) };
            }
            (Error::Precondition { .. }, _) | (_, Some(412)) => {
                return changed("it does not match the ETag that was requested");
            }
            (_, Some(416)) if version.is_some() => {
                return changed("it ends before the range");
            }
            (_, Some(200)) if version.is_some() || seen.content_range.is_none() => {
                return RemoteError::RangesIgnored { url, range };
            }
            _ => {}
        }
        if let (Some(version), Some(206)) = (version, seen.status) {
            if seen.etag != version.etag {
                return changed("its ETag differs");
            }
            if let Some((_, total)) = seen.content_range
                && total != version.len_bytes
            {
                return changed("its length differs");
            }
        }
        if let (None, None, Some(206)) = (http_kind(error), seen.failure, seen.status) {
            return RemoteError::BadAnswer {
                url,
                range,
                reason: "its range is not the one requested, or its headers are malformed",
            };
        }
        unavailable(&self.location, range, error, seen, self.timeout)
    }
}

const UNSIGNED: &str = "no request was sent, as there are no credentials: neither the options nor the environment have any, \
    and the machine supplies none; set them, or `anonymous` for an object that anyone may read";

/// Whether a request that failed was not even attempted: the library asks the machine for credentials where it was given none.
fn is_unsigned(location: &Location, seen: &Seen) -> bool {
    seen.attempts == 0 && matches!(location.scheme, Scheme::S3 | Scheme::Gcs | Scheme::Azure)
}

/// A failure that no particular answer explains.
pub(crate) fn unavailable(
    location: &Location,
    range: Range<u64>,
    error: &object_store::Error,
    seen: &Seen,
    timeout: Duration,
) -> RemoteError {
    let (url, status) = (location.shown.clone(), seen.status);
    if let Some(&NoCredentials(reason)) = cause(error) {
        return RemoteError::NoCredentials { url, range, reason };
    }
    if is_too_long(error) {
        return RemoteError::BadAnswer { url, range, reason: TOO_LONG };
    }
    if is_unsigned(location, seen) {
        return RemoteError::NoCredentials { url, range, reason: UNSIGNED };
    }
    let reason = match (http_kind(error).or(seen.failure), status) {
        (Some(HttpErrorKind::Timeout), _) if is_lost(error) => "the connection broke off",
        (Some(HttpErrorKind::Timeout), _) => {
            return RemoteError::TimedOut { url, range, timeout, status };
        }
        (Some(HttpErrorKind::Connect), _) => "no connection to the server",
        (Some(_), _) => "the connection broke off",
        (None, Some(300..400)) if location.scheme == Scheme::Http => REDIRECTS,
        (None, Some(300..400)) => "the server redirects; check endpoint and region",
        (None, Some(400..500)) => "the server refused the request",
        (None, Some(_)) => "the server failed",
        (None, None) if location.scheme == Scheme::File => "the file could not be read or written",
        (None, None) => "no request was sent; check the credentials",
    };
    RemoteError::Unavailable { url, range, reason, status }
}

/// The failure of the connection among the causes of an error.
pub(crate) fn http_kind(error: &object_store::Error) -> Option<HttpErrorKind> {
    cause(error).map(HttpError::kind)
}

/// Whether the system has given up a connection: no packet was answered, for a time that is not the caller's timeout.
pub(crate) fn is_lost(error: &object_store::Error) -> bool {
    let system = cause::<std::io::Error>(error).and_then(std::io::Error::raw_os_error);
    system == Some(rustix::io::Errno::TIMEDOUT.raw_os_error())
}

/// Whether an answer was cut because it has no end in sight.
pub(crate) fn is_too_long(error: &object_store::Error) -> bool {
    cause::<TooLong>(error).is_some()
}

/// The cause of a type among those of an error.
fn cause<E: std::error::Error + 'static>(error: &object_store::Error) -> Option<&E> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

pub(crate) fn seen(notes: &Notes) -> Seen {
    notes.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Whether the answer to a request for the first byte is that of an empty object.
fn is_empty(seen: &Seen) -> bool {
    match seen.status {
        // Some servers leave out the length.
        Some(416) => seen.content_range.as_ref().is_none_or(|(_, total)| *total == 0),
        // nginx sends all of nothing.
        Some(200) => seen.content_length == Some(0),
        _ => false,
    }
}

/// Counts a range when it ends, also if it is given up.
struct Outcome<'a> {
    costs: &'a Costs,
    has_failed: bool,
}

impl Drop for Outcome<'_> {
    fn drop(&mut self) {
        self.costs.ranges.fetch_add(1, Ordering::Relaxed);
        self.costs.failed_ranges.fetch_add(u64::from(self.has_failed), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_callers_timeout_is_reported_as_it() {
        let location = Location::parse("https://host/key").unwrap();
        let timeout = Duration::from_secs(3600);
        let named = |source: std::io::Error| {
            let source = Box::new(HttpError::new(HttpErrorKind::Timeout, source));
            let error = object_store::Error::Generic { store: "S3", source };
            unavailable(&location, 0..1, &error, &Seen::default(), timeout)
        };
        let lost = named(rustix::io::Errno::TIMEDOUT.into());
        assert!(matches!(lost, RemoteError::Unavailable { .. }), "{lost}");
        let late = named(std::io::ErrorKind::TimedOut.into());
        assert!(matches!(late, RemoteError::TimedOut { .. }), "{late}");
    }

    /// A file's bytes come in pieces of 8 KiB.
    #[test]
    fn a_body_is_one_piece() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), (0..100_000).map(|at| at as u8).collect::<Vec<_>>()).unwrap();
        let location = Location::parse(&format!("file://{}", file.path().display())).unwrap();
        let options = RemoteOptions::default();
        let costs = Arc::new(Costs::new(&options));
        let buffers = Arc::new(Buffers::new(1 << 20));
        let connector = crate::connection::Connector::default();
        let store = location.store(&options, connector).unwrap();
        let fetcher = Fetcher::new(store, location, &options, costs, buffers);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let body = runtime.block_on(async {
            let version = fetcher.open().await.unwrap();
            fetcher.fetch(10..90_000, &version).await.unwrap()
        });
        let pieces: Vec<_> = body.parts(0, 89_990).map(|(_, piece)| piece).collect();
        assert_eq!((pieces.len(), pieces[0].len()), (1, 89_990));
        assert!(pieces[0].iter().zip(10..).all(|(&byte, at)| byte == at as u8));
    }

    /// With free places.
    #[test]
    fn a_second_request_takes_no_memory_that_is_not_free() {
        use aquifer_testkit::object_server::{Answer, Server};

        const LEN: u64 = 4 << 10;
        let server = Server::new(vec![7; 100_000]);
        let url = format!("{}/{}", server.endpoint(), aquifer_testkit::object_server::PATH);
        let location = Location::parse(&url).unwrap();
        let options = RemoteOptions::default().hedge(true);
        // Proxies of the environment do not reach this server.
        let options = options.config("proxy_url", "http://127.0.0.1:1");
        let options = options.config("proxy_excludes", "127.0.0.1");
        let costs = Arc::new(Costs::new(&options));
        let buffers = Arc::new(Buffers::new(crate::buffers::SMALLEST_BUFFER_BYTES));
        crate::connection::install_crypto();
        let connector = crate::connection::Connector::default();
        let store = location.store(&options, connector).unwrap();
        let fetcher = Fetcher::new(store, location, &options, costs.clone(), buffers.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let version = fetcher.open().await.unwrap();
            // Of half the memory, all but one request's.
            let others = buffers.take(crate::buffers::SMALLEST_BUFFER_BYTES as u64 / 2 - LEN).await;
            let usual = costs.expected(LEN);
            server.plan(move |_| Answer::Late(usual * LATE_FACTOR * 3));
            fetcher.fetch(0..LEN, &version).await.unwrap();
            assert_eq!((costs.stats(0).hedged_ranges, server.asked().len()), (0, 1));
            drop(others);
        });
    }
}
