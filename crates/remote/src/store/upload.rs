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
//! # Checks
//! A request is signed with the SHA-256 of its body, unless requests are anonymous, and S3 compares it. When the object is
//! complete, its length and ETag are requested and compared with what was written.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::{
    MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions,
    PutPayload,
};

use super::pace::Pace;
use super::runner::Pending;
use super::{Shared, in_time};
use crate::RemoteError;
use crate::location::Location;

const SMALLEST_PART_BYTES: u64 = 8 << 20;
/// Lengths of parts are multiples of this.
const PART_STEP_BYTES: u64 = 1 << 20;
const MOST_PARTS: u64 = 10_000;
const IN_FLIGHT_BYTES: u64 = 64 << 20;
/// An abort waits no longer than this, nor than the timeout.
const ABORT_LIMIT: Duration = Duration::from_secs(10);

/// An object being written; from [`RemoteStore::upload`](crate::RemoteStore::upload). Aborted if it is dropped before
/// [`Upload::finish`].
pub struct Upload {
    shared: Arc<Shared>,
    location: Location,
    replaces: bool,
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
    ) -> Upload {
        let part_bytes = part_bytes(len_bytes);
        let most = (IN_FLIGHT_BYTES / part_bytes).max(2) as usize;
        Upload {
            pace: Pace::new(most.min(shared.options.in_flight), shared.options.timeout),
            shared,
            location,
            replaces,
            part_bytes: part_bytes as usize,
            buffer: vec![],
            sent_bytes: 0,
            multipart: None,
            parts: VecDeque::new(),
        }
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
    /// See [`RemoteError`]. If the connection broke off while the upload was being completed, the object may be there
    /// nevertheless.
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
            let (etag, len_bytes) = (self.complete()?, self.sent_bytes);
            shared.runner.spawn(checked(store, at, timeout, len_bytes, etag))
        } else {
            let bytes = Bytes::from(std::mem::take(&mut self.buffer));
            let len_bytes = bytes.len() as u64;
            let mode = if self.replaces { PutMode::Overwrite } else { PutMode::Create };
            shared.runner.spawn(async move {
                let options = PutOptions { mode, ..PutOptions::default() };
                let put = store.put_opts(&at.path, PutPayload::from(bytes), options);
                let put = in_time(&at, 0..len_bytes, timeout, put).await;
                let etag = put.map_err(of_missing_bucket)?.e_tag;
                checked(store, at, timeout, len_bytes, etag).await
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
        let store = match self.replaces {
            true => self.shared.store.clone(),
            false => self.shared.new_only.clone(),
        };
        let path = self.location.path.clone();
        let begun = self.shared.start(self.location.clone(), 0..0, async move {
            store.put_multipart_opts(&path, PutMultipartOptions::default()).await
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

    /// Completes a multipart upload. Not cancelled halfway: whether the object is there would be unknown.
    fn complete(&mut self) -> Result<Option<String>, RemoteError> {
        if !self.buffer.is_empty() {
            self.send_part()?;
        }
        while !self.parts.is_empty() {
            self.receive()?;
        }
        self.check_absent()?;
        let mut multipart = self.multipart.take().expect("begun");
        let (location, timeout) = (self.location.clone(), self.shared.options.timeout);
        let completed = self.shared.runner.spawn(async move {
            let completed = in_time(&location, 0..0, timeout, multipart.complete()).await;
            if completed.is_err() {
                abort(multipart, timeout).await;
            }
            Ok(completed.map_err(of_missing_upload)?.e_tag)
        });
        completed.wait(&self.location.shown, None)
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
