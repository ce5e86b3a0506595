//! Regular files and block devices, accessed by direct I/O.
//!
//! # Descriptors
//! A direct device holds two: one opened with `O_DIRECT` for all aligned transfers, and (regular
//! files only) a buffered one, opened together with it, with three uses: transferring the tail of a
//! transfer whose length is no multiple of the alignment, continuing where a file system accepts
//! `O_DIRECT` at open but refuses it at the first transfer, and [`Device::page_cache_file`]. The
//! kernel keeps both coherent: a direct read first writes dirty cached pages back, a direct write
//! invalidates the cached pages it covers. One `fdatasync` makes writes through either durable.
//!
//! # Invariants
//! * `alignment_bytes` is fixed at open, even if direct I/O is disabled later.
//! * `direct` only ever changes from true to false.
//! * The length is queried each time: files grow and shrink. A write past the current end is
//!   refused and does not extend the file; only a concurrent truncation can still be undone by a
//!   write, since the kernel offers no write that does not extend.
//! * [`Device::read_at`] and [`Device::write_at`] only make system calls: no lock, no allocation.

mod open;
mod sync;
mod system;
mod transfer;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use open::{Direct, FileOptions};
pub(crate) use transfer::{Begun, Leg, Transfer, finish_blocking};

use crate::queue::{self, Engine};
use crate::{Batch, Device, DeviceError, DeviceIdentity, IoOperation, Request};
use sync::SyncGate;

/// A regular file or block device.
///
/// ```
/// use aquifer_device::{Device, Direct, FileDevice};
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data");
/// # std::fs::write(&path, [1u8; 4096])?;
/// let device = FileDevice::options().direct(Direct::Never).open(&path)?;
/// assert_eq!(device.len_bytes()?, 4096);
/// assert!(device.access_path().starts_with("buffered (asked for)"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FileDevice {
    state: Arc<FileState>,
}

/// The state that a device shares with the threads that transfer for it.
#[derive(Debug)]
pub(crate) struct FileState {
    name: String,
    kind: Kind,
    identity: DeviceIdentity,
    main: OwnedFd,
    /// The second descriptor of a direct regular file.
    buffered: Option<OwnedFd>,
    is_writable: bool,
    alignment_bytes: usize,
    direct: AtomicBool,
    may_give_up_direct: bool,
    /// The reason why `main` is not direct, if it is not.
    buffered_because: Option<&'static str>,
    engine: Engine,
    gate: SyncGate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Regular,
    BlockDevice,
}

impl FileDevice {
    /// Opens `path` for reading, by direct I/O where the file system allows it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DeviceError> {
        Self::options().open(path)
    }

    /// Returns options for opening: writable, direct or not, with or without io_uring.
    pub fn options() -> FileOptions {
        FileOptions::default()
    }

    /// Returns whether transfers currently bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.state.is_direct()
    }
}

impl FileState {
    pub(crate) fn is_direct(&self) -> bool {
        // Relaxed: a thread that still reads true makes one more direct attempt and is refused
        // again.
        self.direct.load(Ordering::Relaxed)
    }

    /// Falls back to buffered I/O after a direct transfer failed with `EINVAL`. False: the caller's
    /// arguments were invalid.
    fn give_up_direct(&self) -> bool {
        if self.may_give_up_direct {
            self.direct.store(false, Ordering::Relaxed);
        }
        self.may_give_up_direct
    }

    fn descriptor(&self, leg: Leg) -> BorrowedFd<'_> {
        match &self.buffered {
            Some(buffered) if !leg.is_direct => buffered.as_fd(),
            _ => self.main.as_fd(),
        }
    }

    /// Returns the raw descriptor that a leg uses, for a ring entry.
    pub(crate) fn raw_descriptor(&self, leg: Leg) -> RawFd {
        self.descriptor(leg).as_raw_fd()
    }

    pub(crate) fn engine(&self) -> Engine {
        self.engine
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        let len_bytes = match self.kind {
            Kind::Regular => system::status(self.main.as_fd()).map(|status| status.len_bytes),
            Kind::BlockDevice => aquifer_sys::io::block_device_len_bytes(self.main.as_fd()),
        };
        len_bytes.map_err(|source| DeviceError::Io {
            operation: IoOperation::Inspect,
            offset_bytes: 0,
            len_bytes: 0,
            source,
        })
    }

    fn transfer(&self, request: &Request) -> Result<usize, DeviceError> {
        match Transfer::begin(self, request) {
            Begun::Ended(result) => result,
            Begun::Going(transfer) => finish_blocking(self, transfer),
        }
    }
}

impl Device for FileDevice {
    fn name(&self) -> &str {
        &self.state.name
    }

    /// The file's identity, independent of its path: several devices of one file are equal.
    fn identity(&self) -> DeviceIdentity {
        self.state.identity
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.state.len_bytes()
    }

    fn alignment_bytes(&self) -> usize {
        self.state.alignment_bytes
    }

    fn is_writable(&self) -> bool {
        self.state.is_writable
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.state.transfer(&Request {
            operation: IoOperation::Read,
            offset_bytes,
            memory: buffer.as_mut_ptr(),
            len_bytes: buffer.len(),
            tag: 0,
        })
    }

    fn write_at(&self, offset_bytes: u64, buffer: &[u8]) -> Result<(), DeviceError> {
        let request = Request {
            operation: IoOperation::Write,
            offset_bytes,
            // Only read from, as the operation is a write.
            memory: buffer.as_ptr().cast_mut(),
            len_bytes: buffer.len(),
            tag: 0,
        };
        self.state.transfer(&request).map(|_| ())
    }

    fn writes_are_signal_safe(&self) -> bool {
        true
    }

    /// Runs one `fdatasync`, shared by callers that arrive while another runs. The first failure is
    /// final: every later call returns the same error until the file is reopened, because the
    /// kernel may have marked pages clean that it could not write.
    fn sync(&self) -> Result<(), DeviceError> {
        let state = &self.state;
        state.gate.run(|| system::sync_data(state.main.as_fd())).map_err(|errno| DeviceError::Io {
            operation: IoOperation::Sync,
            offset_bytes: 0,
            len_bytes: 0,
            source: io::Error::from_raw_os_error(errno),
        })
    }

    fn run(&self, batch: &mut dyn Batch, depth: usize) {
        queue::run(&self.state, batch, depth);
    }

    fn queue_depth(&self) -> usize {
        self.state.engine.queue_depth()
    }

    fn page_cache_file(&self) -> Option<BorrowedFd<'_>> {
        match (self.state.kind, &self.state.buffered) {
            (Kind::Regular, Some(buffered)) => Some(buffered.as_fd()),
            (Kind::Regular, None) => Some(self.state.main.as_fd()),
            (Kind::BlockDevice, _) => None,
        }
    }

    fn access_path(&self) -> String {
        let state = &self.state;
        let engine = state.engine.describe();
        match state.buffered_because {
            Some(reason) => format!("buffered ({reason}), {engine}"),
            None if state.is_direct() => format!("direct, {engine}"),
            None => format!("buffered (direct transfers refused by the file system), {engine}"),
        }
    }
}
