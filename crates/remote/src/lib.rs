//! Objects of object stores and HTTP servers as read-only devices.
//!
//! [`RemoteDevice`] reads `s3://`, `gs://`, `az://`, `http://`, `https://` and `file://` URLs, by the crate
//! `object_store`, which signs, sends and retries the requests. It is a [`Device`]: a cache maps it, pages it, prefetches
//! from it and visits it as it does a file.
//!
//! # One version
//! Opening pins the object's version: its length and its ETag. Each request asks for that version (`If-Match`), and each
//! answer is compared, because many servers ignore the request: ETag, range, total length and the number of bytes. An
//! object that changed causes [`RemoteError::Changed`], also for bytes that are in the old and the new version alike, and
//! bytes of two versions are never mixed. A server that sends no strong ETag is refused, unless
//! [`RemoteOptions::unversioned`] allows it. Of a `file://` URL the ETag is made of inode, length and time of change, so
//! a change in place within one tick of the file system's clock goes unnoticed.
//!
//! # Threads
//! Each device has one thread, `aquifer-remote`, which makes all requests; the ones for names and local files take
//! threads of their own for a moment. A fault of a mapping waits in its signal handler for an answer from that thread,
//! without allocating, and not longer than the timeout. In a forked child the device starts a thread and connections of
//! its own when it is attached or read.
//!
//! # Snapshots of pools
//! [`publish`] puts pools into object stores, and restores them.
//!
//! # Secrets
//! Errors, `Debug` and statistics contain neither credentials nor the query of a URL, which may be a signature.
//!
//! ```
//! use aquifer_cache::Cache;
//! use aquifer_remote::RemoteDevice;
//!
//! # let file = tempfile::NamedTempFile::new()?;
//! # std::fs::write(file.path(), vec![7; 100_000])?;
//! # let url = format!("file://{}", file.path().display());
//! let device = RemoteDevice::open(&url)?; // or "s3://bucket/key", "https://host/path"
//! let cache = Cache::builder().budget_bytes(8 << 20).build()?;
//! let mapping = cache.map(device)?;
//! assert_eq!(mapping.get::<u8>(99_999)?, 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The first device installs `rustls` with `ring` as the process's provider of TLS, if the program has not installed one.

mod ahead;
mod batch;
mod body;
mod buffers;
mod connection;
mod costs;
mod credentials;
mod engine;
mod error;
mod fetch;
mod location;
mod mailbox;
mod options;
pub mod publish;
mod runtime;
pub mod store;
mod tier;
mod warm;

pub use costs::RemoteStats;
pub use credentials::Credentials;
pub use error::RemoteError;
pub use options::RemoteOptions;
pub use store::RemoteStore;
pub use tier::{Tier, TierError, TierInfo, TierObject, TierVerification};
pub use warm::Warmed;

use std::fmt;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aquifer_device::{Batch, Device, DeviceError, IoOperation};

use buffers::Buffers;
use connection::Connector;
use costs::Costs;
use engine::Engine;
use fetch::Version;
use location::{Location, Scheme};
use tier::{OpenTier, SUB_BLOCK_BYTES};

/// How much longer than the timeout a reader waits for the thread, which enforces it.
const THREAD_LIMIT: Duration = Duration::from_secs(10);

/// An object as a read-only device. See the [crate documentation](crate).
///
/// Every method may be called from any thread.
pub struct RemoteDevice {
    location: Location,
    options: RemoteOptions,
    version: Arc<Version>,
    connector: Connector,
    costs: Arc<Costs>,
    /// A box; replaced in a forked child, which leaks its parent's.
    engine: AtomicPtr<Engine>,
    /// Why the tier could not be opened.
    tier_problem: OnceLock<TierError>,
    /// Made beforehand, for a handler.
    stopped: Arc<RemoteError>,
}

impl RemoteOptions {
    /// Opens the object and pins its version, with a request for its first byte.
    ///
    /// # Errors
    /// See [`RemoteError`]; a timeout bounds the wait.
    pub fn open(self, url: &str) -> Result<RemoteDevice, RemoteError> {
        RemoteDevice::open_with(url, self)
    }
}

impl RemoteDevice {
    /// Opens an object with the default options; see [`RemoteOptions::open`].
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn open(url: &str) -> Result<RemoteDevice, RemoteError> {
        RemoteOptions::default().open(url)
    }

    /// Starts choosing how to open an object.
    pub fn options() -> RemoteOptions {
        RemoteOptions::default()
    }

    fn open_with(url: &str, options: RemoteOptions) -> Result<RemoteDevice, RemoteError> {
        let location = Location::parse(url)?;
        let connector = Connector::default();
        let costs = Arc::new(Costs::new(&options));
        let buffers = Arc::new(Buffers::new(options.buffer_bytes));
        let engine = Engine::start(&location, &options, connector.clone(), costs.clone(), buffers)?;
        let version = Arc::new(engine.open(options.cancel.as_ref())?);
        let device = RemoteDevice {
            stopped: Arc::new(RemoteError::Stopped { url: location.shown.clone() }),
            location,
            options,
            version,
            connector,
            costs,
            engine: AtomicPtr::new(Box::into_raw(Box::new(engine))),
            tier_problem: OnceLock::new(),
        };
        let engine = device.engine()?;
        engine.serve(device.version.clone(), device.open_tier(engine));
        Ok(device)
    }

    fn open_tier(&self, engine: &Engine) -> Option<OpenTier> {
        let etag = self.version.strong_etag()?;
        let tier = self.options.tier.as_ref().filter(|_| self.location.scheme != Scheme::File)?;
        let opened = OpenTier::open(tier, engine.name_in_tier(), etag, self.version.len_bytes);
        opened.map_err(|error| self.tier_problem.set(error)).ok()
    }

    /// Counters and estimates since the device was opened.
    pub fn stats(&self) -> RemoteStats {
        // Relaxed: a counter.
        let mut stats = self.costs.stats(self.connector.requests.load(Ordering::Relaxed));
        let engine = self.engine().ok();
        let problem = engine.and_then(|engine| engine.tier()?.problem());
        stats.tier_problem = problem.or(self.tier_problem.get()).map(TierError::to_string);
        stats
    }

    /// The ETag of the version that was opened, if the server sent one.
    pub fn etag(&self) -> Option<&str> {
        self.version.etag.as_deref()
    }

    /// Returns this process's engine. Async-signal-safe, except for the first call in a forked child.
    fn engine(&self) -> Result<&Engine, RemoteError> {
        // Acquire: pairs with the release below.
        let current = self.engine.load(Ordering::Acquire);
        // SAFETY: a box, freed only with the device; a parent's is leaked.
        let engine = unsafe { &*current };
        if engine.is_current() {
            return Ok(engine);
        }
        // What the parent's requests had taken at the fork is theirs for good.
        let buffers = Arc::new(Buffers::new(engine.buffers().limit_bytes()));
        self.costs.forget_requests();
        let (connector, costs) = (self.connector.clone(), self.costs.clone());
        let fresh = Engine::start(&self.location, &self.options, connector, costs, buffers)?;
        fresh.serve(self.version.clone(), self.open_tier(&fresh));
        let fresh = Box::into_raw(Box::new(fresh));
        // Release: another thread sees a complete engine. Acquire: this one, if the other was first.
        let swapped =
            self.engine.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire);
        match swapped {
            // SAFETY: as above.
            Ok(_) => Ok(unsafe { &*fresh }),
            Err(first) => {
                // SAFETY: made above, and not shared.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: as above: another thread of this process put it there.
                Ok(unsafe { &*first })
            }
        }
    }

    fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Of the engine that made the latest requests; of a parent's in a child that has made none.
    fn buffers(&self) -> &Buffers {
        // Acquire: pairs with the release in `engine`.
        let current = self.engine.load(Ordering::Acquire);
        // SAFETY: a box, freed only with the device; a parent's is leaked.
        unsafe { &*current }.buffers()
    }

    fn largest_request_bytes(&self) -> usize {
        self.options.largest_request_bytes.min(self.buffers().request_bytes())
    }

    /// Where the piece of a long read ends that begins at `start`, and that a request of at most `most_bytes` can serve.
    fn piece_end(&self, engine: &Engine, start: u64, most_bytes: u64) -> u64 {
        let most_bytes = most_bytes.min(self.largest_request_bytes() as u64);
        // A tier is brought the whole sub-blocks around a piece; two pieces that share one would wait for each other.
        let grain = if engine.tier().is_some() { SUB_BLOCK_BYTES } else { 1 };
        (start - start % grain).saturating_add(most_bytes - most_bytes % grain)
    }

    fn batch_bytes(&self) -> usize {
        self.buffers().batch_bytes()
    }

    fn delivered(&self, bytes: usize) {
        // Relaxed: a counter.
        self.costs.delivered_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn read_from_tier(&self, bytes: usize) {
        // Relaxed: a counter.
        self.costs.tier_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// How many of `len_bytes` at an offset a read returns.
    fn readable_bytes(&self, offset_bytes: u64, len_bytes: usize) -> Result<usize, DeviceError> {
        let device_bytes = self.version.len_bytes;
        match device_bytes.checked_sub(offset_bytes) {
            None => Err(DeviceError::OutOfBounds { offset_bytes, len_bytes, device_bytes }),
            Some(left) => Ok(usize::try_from(left).unwrap_or(usize::MAX).min(len_bytes)),
        }
    }

    /// Reads a range that one request can serve. Allocates nothing.
    fn read_piece(&self, engine: &Engine, start: u64, to: &mut [u8]) -> Result<(), DeviceError> {
        let len_bytes = to.len();
        let copy = |answer: &mailbox::Answer| match answer {
            Ok(body) => {
                for (at, part) in body.parts(0, len_bytes) {
                    to[at..at + part.len()].copy_from_slice(part);
                }
                Ok(())
            }
            Err(error) => Err(error.clone()),
        };
        let limit = self.options.timeout.saturating_add(THREAD_LIMIT);
        match engine.mailbox().read(start..start + len_bytes as u64, limit, copy) {
            Ok(Ok(())) => {
                self.delivered(len_bytes);
                Ok(())
            }
            Ok(Err(error)) => Err(error.of_read(start, len_bytes)),
            Err(mailbox::TooLate) => Err(self.stopped.clone().of_read(start, len_bytes)),
        }
    }
}

fn cannot_start(error: RemoteError, offset_bytes: u64, len_bytes: usize) -> DeviceError {
    Arc::new(error).of_read(offset_bytes, len_bytes)
}

impl Device for RemoteDevice {
    fn name(&self) -> &str {
        &self.location.shown
    }

    /// Returns the length of the version that was opened.
    fn len_bytes(&self) -> Result<u64, DeviceError> {
        // A cache asks when it attaches a device: in a forked child that starts the thread, outside of any handler.
        self.engine().map_err(|error| DeviceError::Other {
            operation: IoOperation::Inspect,
            offset_bytes: 0,
            len_bytes: 0,
            source: Arc::new(error),
        })?;
        Ok(self.version.len_bytes)
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        let readable = self.readable_bytes(offset_bytes, buffer.len())?;
        let engine =
            self.engine().map_err(|error| cannot_start(error, offset_bytes, buffer.len()))?;
        if engine.tier().is_some_and(|tier| tier.read(offset_bytes, &mut buffer[..readable])) {
            self.read_from_tier(readable);
            self.delivered(readable);
            return Ok(readable);
        }
        let (mut start, end) = (offset_bytes, offset_bytes + readable as u64);
        while start < end {
            let piece_end = self.piece_end(engine, start, u64::MAX).min(end);
            let in_buffer = |at| (at - offset_bytes) as usize;
            self.read_piece(engine, start, &mut buffer[in_buffer(start)..in_buffer(piece_end)])?;
            start = piece_end;
        }
        Ok(readable)
    }

    fn write_at(&self, _offset_bytes: u64, _buffer: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    /// Does nothing: nothing is written.
    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn run(&self, batch: &mut dyn Batch, depth: usize) {
        match self.engine() {
            Ok(engine) => batch::run(self, engine, batch, depth),
            Err(error) => {
                let error = Arc::new(error);
                while let Some(request) = batch.next() {
                    let failed = error.clone().of_read(request.offset_bytes, request.len_bytes);
                    batch.complete(request.tag, Err(failed));
                }
            }
        }
    }

    fn claim_buffers(&self, most_bytes: usize) -> usize {
        // Without an engine of this process's there are no requests: a parent's lock may be held for good.
        match self.engine() {
            Ok(engine) => engine.buffers().lower(most_bytes),
            Err(_) => self.buffers().limit_bytes(),
        }
    }

    fn queue_depth(&self) -> usize {
        self.options.in_flight
    }

    /// Those of [`RemoteStats::counters`].
    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.stats().counters()
    }

    fn bytes_in_flight(&self) -> u64 {
        self.batch_bytes() as u64
    }

    fn access_path(&self) -> String {
        "remote (object_store)".to_owned()
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        let engine = *self.engine.get_mut();
        // SAFETY: a box; no reader is left.
        if unsafe { &*engine }.is_current() {
            // SAFETY: as above, and freed once. A parent's is leaked.
            drop(unsafe { Box::from_raw(engine) });
        }
    }
}

impl fmt::Debug for RemoteDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteDevice")
            .field("url", &self.location.shown)
            .field("len_bytes", &self.version.len_bytes)
            .field("etag", &self.version.etag)
            .finish_non_exhaustive()
    }
}

// A device is `Send + Sync` by its parts; the pointer is to an `Engine`, which is.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<Engine>();
};
