//! Writing an object: in one request if it is short, else in parts of which several are in flight.
//!
//! # Visibility
//! An object appears when all of it has arrived, in one step. An upload that is dropped, or fails, is aborted, so the
//! server drops its parts. If the process is killed, the parts of a multipart upload stay at the server, invisible; a rule
//! of the bucket can remove those of a certain age.
//!
//! # Memory
//! Parts have 8 MiB, or as much as is necessary for an object of the announced length to have at most 10,000 parts,
//! which is the limit of S3. At most 64 MiB of them are in flight, or two parts, and one is being filled.
//!
//! # Lost answers
//! An answer may be lost, and what it would have said been done: the object is there, and the next attempt of the request
//! finds it there, or finds that the upload is over. So uploads in parts, and objects that are to be created only if there is none,
//! carry a random number in their metadata, `aquiferupload`. After a failure of the last request, an object that has it and the
//! right length was written by this upload. An equal object of another writer does not have it: of two writers that
//! create the same object one fails, whatever their bytes are.
//!
//! # Checks
//! A request is signed with the SHA-256 of its body, unless requests are anonymous, and S3 compares it. When the object is
//! complete, its length and ETag are requested and compared with what was written.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::{
    Attribute, Attributes, GetOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult,
};

use super::pace::Pace;
use super::runner::Pending;
use super::{Shared, in_time};
use crate::RemoteError;
use crate::location::{Location, Scheme};
use crate::options::Cancel;

const SMALLEST_PART_BYTES: u64 = 8 << 20;
/// Lengths of parts are multiples of this.
const PART_STEP_BYTES: u64 = 1 << 20;
const MOST_PARTS: u64 = 10_000;
const IN_FLIGHT_BYTES: u64 = 64 << 20;
/// The least time for completing an object: S3 may take minutes to put many parts together.
pub(super) const COMPLETION_LIMIT: Duration = Duration::from_secs(600);
/// The name of the metadata that tell whose object it is.
const MARK: Attribute = Attribute::Metadata(std::borrow::Cow::Borrowed("aquiferupload"));
/// An abort waits no longer than this, nor than the timeout.
const ABORT_LIMIT: Duration = Duration::from_secs(10);

/// An object being written; from [`RemoteStore::upload`](crate::RemoteStore::upload). Aborted if it is dropped before
/// [`Upload::finish`].
pub struct Upload {
    shared: Arc<Shared>,
    location: Location,
    replaces: bool,
    /// None where answers are not lost.
    mark: Option<String>,
    part_bytes: usize,
    buffer: Vec<u8>,
    /// Bytes in parts that were started.
    sent_bytes: u64,
    multipart: Option<Box<dyn MultipartUpload>>,
    parts: VecDeque<Pending<Duration>>,
    pace: Pace,
}

/// An object that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// Its length.
    pub len_bytes: u64,
    /// Its ETag, if the server sent one.
    pub etag: Option<String>,
}

impl Upload {
    pub(super) fn new(
        shared: Arc<Shared>,
        location: Location,
        len_bytes: u64,
        replaces: bool,
    ) -> Result<Upload, RemoteError> {
        let mark = aquifer_sys::random::next_u64().map_err(|source| {
            let (url, what) = (location.shown.clone(), "cannot get random bytes");
            RemoteError::System { url, what, source }
        })?;
        let mark = (location.scheme != Scheme::File).then(|| format!("{mark:016x}"));
        let part_bytes = part_bytes(len_bytes);
        let most = (IN_FLIGHT_BYTES / part_bytes).max(2) as usize;
        Ok(Upload {
            pace: Pace::new(most.min(shared.options.in_flight), shared.options.timeout),
            shared,
            location,
            replaces,
            mark,
            part_bytes: part_bytes as usize,
            buffer: vec![],
            sent_bytes: 0,
            multipart: None,
            parts: VecDeque::new(),
        })
    }

    /// Appends bytes. Waits while as many parts are in flight as may be.
    ///
    /// # Errors
    /// See [`RemoteError`]. The upload has failed then.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), RemoteError> {
        while !bytes.is_empty() {
            // Only now: what fits into one part is written by one request.
            if self.buffer.len() == self.part_bytes {
                self.send_part()?;
            }
            let len_bytes = bytes.len().min(self.part_bytes - self.buffer.len());
            self.buffer.extend_from_slice(&bytes[..len_bytes]);
            bytes = &bytes[len_bytes..];
        }
        Ok(())
    }

    /// Completes the object, which then appears under its name, and checks it.
    ///
    /// # Errors
    /// See [`RemoteError`]. If there was no answer to the last request, and then none to the question whether the object is
    /// there, it may be there nevertheless.
    pub fn finish(self) -> Result<Written, RemoteError> {
        self.start_finishing()?.wait()
    }

    /// As [`Upload::finish`], but an object of one part is written while the caller does something else.
    ///
    /// # Errors
    /// As [`Upload::finish`].
    pub fn start_finishing(mut self) -> Result<Finishing, RemoteError> {
        let (shared, location) = (self.shared.clone(), self.location.clone());
        let (store, timeout) = (shared.store.clone(), shared.options.timeout);
        let at = location.clone();
        let pending = if self.multipart.is_some() {
            let (completed, len_bytes) = (self.complete()?, self.sent_bytes);
            shared.runner.spawn(async move {
                match completed {
                    Last::Answered(etag) => checked(store, at, timeout, len_bytes, etag).await,
                    Last::Found(written) => Ok(written),
                }
            })
        } else {
            let bytes = Bytes::from(std::mem::take(&mut self.buffer));
            let len_bytes = bytes.len() as u64;
            let (mode, mark) = match self.replaces {
                true => (PutMode::Overwrite, None),
                false => (PutMode::Create, self.mark.take()),
            };
            shared.runner.spawn(async move {
                let options =
                    PutOptions { mode, attributes: attributes(&mark), ..PutOptions::default() };
                let put = store.put_opts(&at.path, PutPayload::from(bytes), options);
                let put = in_time(&at, 0..len_bytes, timeout, put).await;
                match of_last_request(put, &store, &at, timeout, len_bytes, &mark).await {
                    Ok(Last::Answered(etag)) => checked(store, at, timeout, len_bytes, etag).await,
                    Ok(Last::Found(written)) => Ok(written),
                    Err(error) => Err(of_missing_bucket(error)),
                }
            })
        };
        Ok(Finishing { shared, location, pending })
    }

    /// Starts sending the buffer, as the next part.
    fn send_part(&mut self) -> Result<(), RemoteError> {
        if self.multipart.is_none() {
            self.multipart = Some(self.begin()?);
        }
        while self.parts.len() >= self.pace.allowed() {
            self.receive()?;
        }
        let bytes =
            Bytes::from(std::mem::replace(&mut self.buffer, Vec::with_capacity(self.part_bytes)));
        let range = self.sent_bytes..self.sent_bytes + bytes.len() as u64;
        self.sent_bytes = range.end;
        let multipart = self.multipart.as_mut().expect("begun above");
        let part = multipart.put_part(PutPayload::from(bytes));
        let (location, timeout) = (self.location.clone(), self.shared.options.timeout);
        self.parts.push_back(self.shared.runner.spawn(async move {
            let start = Instant::now();
            let sent = in_time(&location, range, timeout, part).await;
            sent.map_err(of_missing_upload)?;
            Ok(start.elapsed())
        }));
        Ok(())
    }

    /// Begins a multipart upload. Not cancelled halfway: the server would keep it.
    fn begin(&self) -> Result<Box<dyn MultipartUpload>, RemoteError> {
        self.check_absent()?;
        let store = self.shared.in_parts(self.replaces)?;
        let path = self.location.path.clone();
        let options = PutMultipartOptions {
            attributes: attributes(&self.mark),
            ..PutMultipartOptions::default()
        };
        let begun = self.shared.start(self.location.clone(), 0..0, async move {
            store.put_multipart_opts(&path, options).await
        });
        begun.wait(&self.location.shown, None).map_err(of_missing_bucket)
    }

    /// Waits for the oldest part.
    fn receive(&mut self) -> Result<(), RemoteError> {
        if let Some(part) = self.parts.pop_front() {
            let took = part.wait(&self.location.shown, self.shared.cancel())?;
            self.pace.answered(took);
        }
        Ok(())
    }

    /// Completes a multipart upload. If the caller cancels, there is still the time of another request: else it would be
    /// unknown whether the object is there.
    fn complete(&mut self) -> Result<Last, RemoteError> {
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        while !self.parts.is_empty() {
            self.receive()?;
        }
        self.check_absent()?;
        let mut multipart = self.multipart.take().expect("begun");
        let (location, timeout) = (self.location.clone(), self.shared.options.timeout);
        let (store, len_bytes, mark) =
            (self.shared.store.clone(), self.sent_bytes, self.mark.take());
        let completed = self.shared.runner.spawn(async move {
            let limit = timeout.max(COMPLETION_LIMIT);
            let completed = in_time(&location, 0..0, limit, multipart.complete()).await;
            let last =
                of_last_request(completed, &store, &location, timeout, len_bytes, &mark).await;
            if last.is_err() {
                abort(multipart, timeout).await;
            }
            last.map_err(of_missing_upload)
        });
        let cancel: Option<Cancel> = self.shared.options.cancel.clone().map(|cancel| {
            let since = OnceLock::new();
            let is_late = move || cancel() && since.get_or_init(Instant::now).elapsed() > timeout;
            Arc::new(is_late) as Cancel
        });
        completed.wait(&self.location.shown, cancel.as_ref())
    }

    /// Of a multipart upload only S3 is asked to complete it under the condition that there is no such object; and not
    /// every server follows that. So the name is looked up, before parts are sent and again before it is completed.
    fn check_absent(&self) -> Result<(), RemoteError> {
        if self.replaces {
            return Ok(());
        }
        let (store, path) = (self.shared.store.clone(), self.location.path.clone());
        let found = self
            .shared
            .start(self.location.clone(), 0..0, async move { store.head(&path).await.map(|_| ()) });
        match found.wait(&self.location.shown, self.shared.cancel()) {
            Ok(()) => Err(RemoteError::Exists { url: self.location.shown.clone() }),
            Err(RemoteError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Upload {
    /// Aborts what was begun and not completed.
    fn drop(&mut self) {
        self.parts.clear();
        let Some(multipart) = self.multipart.take() else { return };
        let timeout = self.shared.options.timeout;
        let aborted = self.shared.runner.spawn(async move {
            abort(multipart, timeout).await;
            Ok(())
        });
        // If it fails, there is nothing more to do about it.
        let _ = aborted.wait(&self.location.shown, None);
    }
}

/// An object whose last request is under way; from [`Upload::start_finishing`]. If it is dropped, the object may appear or
/// not.
pub struct Finishing {
    shared: Arc<Shared>,
    location: Location,
    pending: Pending<Written>,
}

impl Finishing {
    /// Waits until the object is written and checked.
    ///
    /// # Errors
    /// As [`Upload::finish`].
    pub fn wait(self) -> Result<Written, RemoteError> {
        self.pending.wait(&self.location.shown, self.shared.cancel())
    }
}

fn part_bytes(len_bytes: u64) -> u64 {
    len_bytes.div_ceil(MOST_PARTS).next_multiple_of(PART_STEP_BYTES).max(SMALLEST_PART_BYTES)
}

fn attributes(mark: &Option<String>) -> Attributes {
    mark.iter().map(|mark| (MARK, mark.clone())).collect()
}

/// What came of the request that makes the object appear.
enum Last {
    /// It was answered, with the object's ETag.
    Answered(Option<String>),
    /// It failed, and the object is there all the same.
    Found(Written),
}

/// Finds out whether the object that was to be written is there after a failure.
async fn of_last_request(
    result: Result<PutResult, RemoteError>,
    store: &Arc<dyn ObjectStore>,
    location: &Location,
    timeout: Duration,
    len_bytes: u64,
    mark: &Option<String>,
) -> Result<Last, RemoteError> {
    let error = match result {
        Ok(put) => return Ok(Last::Answered(put.e_tag)),
        Err(error) => error,
    };
    let Some(mark) = mark else { return Err(error) };
    let head = GetOptions { head: true, ..GetOptions::default() };
    let found = store.get_opts(&location.path, head);
    match in_time(location, 0..0, timeout, found).await {
        Ok(found)
            if found.meta.size == len_bytes
                && found.attributes.get(&MARK).is_some_and(|found| **found == **mark) =>
        {
            Ok(Last::Found(Written { len_bytes, etag: found.meta.e_tag }))
        }
        // The first failure says more.
        _ => Err(error),
    }
}

async fn abort(mut multipart: Box<dyn MultipartUpload>, timeout: Duration) {
    // The upload has failed already, for a reason that says more.
    let _ = tokio::time::timeout(timeout.min(ABORT_LIMIT), multipart.abort()).await;
}

/// Compares what the server has with what was written.
async fn checked(
    store: Arc<dyn ObjectStore>,
    location: Location,
    timeout: Duration,
    len_bytes: u64,
    etag: Option<String>,
) -> Result<Written, RemoteError> {
    let range = 0..len_bytes;
    let url = || location.shown.clone();
    match in_time(&location, range.clone(), timeout, store.head(&location.path)).await {
        // Some may write and not read. The server has confirmed the object.
        Err(RemoteError::Denied { .. }) => {}
        Err(error) => return Err(error),
        Ok(found) if found.size != len_bytes => {
            let reason = "the object is not as long as what was written";
            return Err(RemoteError::BadAnswer { url: url(), range, reason });
        }
        Ok(found) if etag.is_some() && found.e_tag.is_some() && found.e_tag != etag => {
            let what = "it was replaced as soon as it was written";
            return Err(RemoteError::Changed { url: url(), range, what });
        }
        Ok(_) => {}
    }
    Ok(Written { len_bytes, etag })
}

fn of_missing_bucket(error: RemoteError) -> RemoteError {
    match error {
        RemoteError::NotFound { url, .. } => RemoteError::NoBucket { url },
        error => error,
    }
}

fn of_missing_upload(error: RemoteError) -> RemoteError {
    match error {
        RemoteError::NotFound { url, range } => {
            let reason = "the server does not know the upload any more; write the object again";
            RemoteError::Unavailable { url, range, reason, status: Some(404) }
        }
        error => error,
    }
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload")
            .field("url", &self.location.shown)
            .field("sent_bytes", &self.sent_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_object_has_at_most_ten_thousand_parts() {
        assert_eq!(part_bytes(0), 8 << 20);
        assert_eq!(part_bytes(MOST_PARTS * (8 << 20)), 8 << 20);
        assert_eq!(part_bytes(MOST_PARTS * (8 << 20) + 1), 9 << 20);
        for len_bytes in [1u64, 1 << 30, 1 << 37, 5 << 40, (5 << 40) - 1] {
            assert!(len_bytes.div_ceil(part_bytes(len_bytes)) <= MOST_PARTS, "{len_bytes}");
        }
    }
}
