//! Reading an object from one end to the other: requests ahead of the reader, in order, in bounded memory.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::Shared;
use super::pace::Pace;
use super::runner::Pending;
use crate::RemoteError;
use crate::body::Body;
use crate::fetch::{Fetcher, Version};

/// Shorter requests would cost more of their places' time in latency.
const SMALLEST_PIECE_BYTES: u64 = 1 << 20;
/// Most bytes of answers under way, of those that have arrived and wait for their turn, and of the one being handed out.
pub(super) const AHEAD_BYTES: u64 = 64 << 20;

/// An object being read, of the version that was opened; from [`RemoteStore::read`](crate::RemoteStore::read).
///
/// Many requests are in flight ahead of the reader, with at most 64 MiB of answers. Each answer is compared with the
/// version, as those of a [`RemoteDevice`](crate::RemoteDevice) are.
pub struct RemoteReader {
    shared: Arc<Shared>,
    fetcher: Arc<Fetcher>,
    version: Arc<Version>,
    /// The first byte not requested yet, and the end.
    ahead: Range<u64>,
    under_way: VecDeque<Piece>,
    current: Current,
    pace: Pace,
}

/// A request under way.
struct Piece {
    range: Range<u64>,
    pending: Pending<(Body, Duration)>,
}

/// The answer that is being handed out.
#[derive(Default)]
struct Current {
    body: Body,
    len_bytes: usize,
    done_bytes: usize,
}

impl RemoteReader {
    /// Of an object that was opened, with its first bytes and their number.
    pub(super) fn new(
        shared: Arc<Shared>,
        fetcher: Arc<Fetcher>,
        (version, body, len_bytes): (Version, Body, usize),
    ) -> RemoteReader {
        RemoteReader {
            fetcher,
            ahead: len_bytes as u64..version.len_bytes,
            version: Arc::new(version),
            under_way: VecDeque::new(),
            current: Current { body, len_bytes, done_bytes: 0 },
            pace: Pace::new(shared.options.in_flight, shared.options.timeout),
            shared,
        }
    }

    /// The object's length.
    pub fn len_bytes(&self) -> u64 {
        self.version.len_bytes
    }

    /// The object's ETag, if the server sent one.
    pub fn etag(&self) -> Option<&str> {
        self.version.etag.as_deref()
    }

    /// When the object was written, to the second, if the server tells.
    pub fn modified(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(self.version.modified.max(0) as u64)
    }

    /// Where the next byte comes from.
    pub fn position(&self) -> u64 {
        let unread = (self.current.len_bytes - self.current.done_bytes) as u64;
        self.ahead.start - self.under_way_bytes() - unread
    }

    /// Reads these bytes next, as far as the object has them.
    pub fn set_range(&mut self, range: Range<u64>) {
        self.under_way.clear();
        self.current = Current::default();
        let end = range.end.min(self.version.len_bytes);
        self.ahead = range.start.min(end)..end;
    }

    /// Reads the next bytes: as many as fit, fewer only if there are no more, or if more have not arrived.
    ///
    /// # Errors
    /// See [`RemoteError`]. A later call may repeat the request.
    pub fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, RemoteError> {
        if buffer.is_empty() {
            return Ok(0);
        }
        if self.current.done_bytes == self.current.len_bytes && !self.receive()? {
            return Ok(0);
        }
        let current = &mut self.current;
        let len_bytes = buffer.len().min(current.len_bytes - current.done_bytes);
        for (at, part) in current.body.parts(current.done_bytes, len_bytes) {
            buffer[at..at + part.len()].copy_from_slice(part);
        }
        current.done_bytes += len_bytes;
        self.shared.delivered(len_bytes);
        Ok(len_bytes)
    }

    /// Waits for the next answer; false at the end.
    fn receive(&mut self) -> Result<bool, RemoteError> {
        self.current = Current::default();
        self.request();
        let Some(piece) = self.under_way.pop_front() else { return Ok(false) };
        let range = piece.range.clone();
        let answer = piece.pending.wait(self.fetcher.shown(), self.shared.cancel());
        let (body, took) = answer.inspect_err(|_| {
            // What follows was requested for this place.
            self.under_way.clear();
            self.ahead.start = range.start;
        })?;
        self.pace.answered(took);
        self.current =
            Current { body, len_bytes: (range.end - range.start) as usize, done_bytes: 0 };
        // While these bytes are used.
        self.request();
        Ok(true)
    }

    fn under_way_bytes(&self) -> u64 {
        self.under_way.iter().map(|piece| piece.range.end - piece.range.start).sum()
    }

    /// Starts the requests that are allowed.
    fn request(&mut self) {
        let costs = &self.shared.costs;
        let largest = self.shared.options.largest_request_bytes as u64;
        let piece_bytes = costs.merged_bytes().max(SMALLEST_PIECE_BYTES).min(largest);
        let held_bytes = self.current.len_bytes as u64;
        while !self.ahead.is_empty()
            && self.under_way.len() < self.pace.allowed()
            && held_bytes + self.under_way_bytes() + piece_bytes <= AHEAD_BYTES
        {
            let end = self.ahead.end.min(self.ahead.start + piece_bytes);
            let range = self.ahead.start..end;
            self.ahead.start = end;
            let (fetcher, version) = (self.fetcher.clone(), self.version.clone());
            let wanted = range.clone();
            let pending = self.shared.runner.spawn(async move {
                let start = Instant::now();
                let body = fetcher.fetch(wanted, &version).await?;
                Ok((body, start.elapsed()))
            });
            self.under_way.push_back(Piece { range, pending });
        }
    }
}

impl io::Read for RemoteReader {
    /// See [`RemoteReader::fill`]; the error wraps a [`RemoteError`].
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.fill(buffer).map_err(io::Error::other)
    }
}

impl std::fmt::Debug for RemoteReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteReader")
            .field("url", &self.fetcher.shown())
            .field("position", &self.position())
            .field("len_bytes", &self.len_bytes())
            .finish_non_exhaustive()
    }
}
