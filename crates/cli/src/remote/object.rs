//! An object being read from one end to the other, from its store, or from a tier that keeps what is downloaded.
//!
//! What the tier lacks is downloaded into it, a window at a time, and then read from there: as by any other device with a tier,
//! once for all processes of the node.

use std::io;
use std::ops::Range;

use aquifer::device::Device;
use aquifer::remote::store::RemoteReader;
use aquifer::remote::{RemoteDevice, RemoteError, RemoteOptions, RemoteStore};

use crate::output;

/// Bytes downloaded into a tier before any of them are read.
const WINDOW_BYTES: u64 = 16 << 20;

/// An object, of the version that was opened.
pub enum ObjectReader {
    Store(RemoteReader),
    Tier(Box<TierReader>),
}

pub struct TierReader {
    device: RemoteDevice,
    len_bytes: u64,
    /// What follows the window.
    rest: Range<u64>,
    window: Vec<u8>,
    /// How much of the window was handed out.
    done_bytes: usize,
    /// Whether the tier takes what is downloaded.
    keeps: bool,
}

/// How objects are opened with a tier.
pub struct TierWay {
    /// Options with a tier.
    pub options: RemoteOptions,
    /// The URL, of an HTTP server's object: with its query.
    pub http: Option<String>,
}

impl ObjectReader {
    /// Opens an object; with the tier if there is one, and if it keeps such objects.
    pub fn open(
        store: &RemoteStore,
        key: &str,
        tier: Option<&TierWay>,
    ) -> Result<ObjectReader, RemoteError> {
        if let Some(way) = tier {
            let url = way.http.clone().unwrap_or_else(|| store.url_of(key));
            let device = way.options.clone().open(&url)?;
            // Without a strong ETag nothing is kept, and a store's reader has more requests in flight.
            let is_kept = device
                .etag()
                .is_some_and(|etag| !matches!(etag, "" | "\"\"") && !etag.starts_with("W/"));
            if let (true, Ok(len_bytes)) = (is_kept, device.len_bytes()) {
                let (rest, window) = (0..len_bytes, vec![]);
                let reader =
                    TierReader { device, len_bytes, rest, window, done_bytes: 0, keeps: true };
                return Ok(ObjectReader::Tier(Box::new(reader)));
            }
        }
        store.read(key).map(ObjectReader::Store)
    }

    pub fn len_bytes(&self) -> u64 {
        match self {
            ObjectReader::Store(reader) => reader.len_bytes(),
            ObjectReader::Tier(reader) => reader.len_bytes,
        }
    }

    /// Where the next byte comes from.
    pub fn position(&self) -> u64 {
        match self {
            ObjectReader::Store(reader) => reader.position(),
            ObjectReader::Tier(reader) => {
                reader.rest.start - (reader.window.len() - reader.done_bytes) as u64
            }
        }
    }

    /// Reads these bytes next, as far as the object has them.
    pub fn set_range(&mut self, range: Range<u64>) {
        match self {
            ObjectReader::Store(reader) => reader.set_range(range),
            ObjectReader::Tier(reader) => reader.set_range(range),
        }
    }
}

impl io::Read for ObjectReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            ObjectReader::Store(reader) => reader.read(buffer),
            ObjectReader::Tier(reader) => reader.read(buffer),
        }
    }
}

impl TierReader {
    fn set_range(&mut self, range: Range<u64>) {
        self.window.clear();
        self.done_bytes = 0;
        let end = range.end.min(self.len_bytes);
        self.rest = range.start.min(end)..end;
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.done_bytes == self.window.len() {
            self.advance()?;
        }
        let left = &self.window[self.done_bytes..];
        let len_bytes = left.len().min(buffer.len());
        buffer[..len_bytes].copy_from_slice(&left[..len_bytes]);
        self.done_bytes += len_bytes;
        Ok(len_bytes)
    }

    /// Reads the next window.
    fn advance(&mut self) -> io::Result<()> {
        let start = self.rest.start;
        let end = self.rest.end.min(start + WINDOW_BYTES);
        (self.window, self.done_bytes) = (vec![], 0);
        if self.keeps {
            match self.device.warm(start..end, |_, _| {}) {
                // A tier that is smaller than a window: else all would be downloaded twice.
                Ok(warmed) => self.keeps = warmed.unstored_bytes == 0,
                Err(error) if matches!(*error, RemoteError::Tier { .. }) => {
                    output::warn(&format!("{error}; going on without it"));
                    self.keeps = false;
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        let mut window = vec![0; (end - start) as usize];
        let mut at = 0;
        while at < window.len() {
            let read = self.device.read_at(start + at as u64, &mut window[at..]);
            match read.map_err(io::Error::other)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => at += read,
            }
        }
        (self.window, self.rest.start) = (window, end);
        Ok(())
    }
}
