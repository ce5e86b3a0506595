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
//! # Modules
//! Each uses only those before it: `system` makes the calls, `sync` is the barrier, [`state`] holds
//! the descriptors, [`transfer`] performs one request, [`queue`] many, and `open` makes the device.
//!
//! # Invariants
//! * `alignment_bytes` is fixed at open, even if direct I/O is disabled later.
//! * `direct` only ever changes from true to false.
//! * The length is queried each time: files grow and shrink. A write past the current end is
//!   refused and does not extend the file; only a concurrent truncation can still be undone by a
//!   write, since the kernel offers no write that does not extend.
//! * [`Device::read_at`] and [`Device::write_at`] only make system calls: no lock, no allocation.

mod open;
mod queue;
mod state;
mod sync;
mod system;
mod transfer;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

pub use open::{Direct, FileOptions};

use crate::{Batch, Device, DeviceError, DeviceIdentity, IoOperation, Request};
use queue::Engine;
use state::{FileState, Kind};

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
    engine: Engine,
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
        transfer::run(
            &self.state,
            &Request {
                operation: IoOperation::Read,
                offset_bytes,
                memory: buffer.as_mut_ptr(),
                len_bytes: buffer.len(),
                tag: 0,
            },
        )
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
        transfer::run(&self.state, &request).map(|_| ())
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
        self.engine.run(&self.state, batch, depth);
    }

    fn queue_depth(&self) -> usize {
        self.engine.queue_depth()
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
        let engine = self.engine.describe();
        match state.buffered_because {
            Some(reason) => format!("buffered ({reason}), {engine}"),
            None if state.is_direct() => format!("direct, {engine}"),
            None => format!("buffered (direct transfers refused by the file system), {engine}"),
        }
    }
}
