//! The descriptors of a file device, and which of them a transfer uses.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_sys::high_fd::HeldFile;

use super::sync::SyncGate;
use super::system;
use crate::{DeviceError, DeviceIdentity, IoOperation};

/// The state that a device shares with the threads that transfer for it.
#[derive(Debug)]
pub(super) struct FileState {
    pub name: String,
    pub kind: Kind,
    pub identity: DeviceIdentity,
    pub main: HeldFile,
    /// The second descriptor of a direct regular file.
    pub buffered: Option<HeldFile>,
    pub is_writable: bool,
    pub alignment_bytes: usize,
    pub direct: AtomicBool,
    pub may_give_up_direct: bool,
    /// The reason why `main` is not direct, if it is not.
    pub buffered_because: Option<&'static str>,
    pub gate: SyncGate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Regular,
    BlockDevice,
}

impl FileState {
    pub fn is_direct(&self) -> bool {
        // Relaxed: a thread that still reads true makes one more direct attempt and is refused
        // again.
        self.direct.load(Ordering::Relaxed)
    }

    /// Falls back to buffered I/O after a direct transfer failed with `EINVAL`. False: the caller's
    /// arguments were invalid.
    pub fn give_up_direct(&self) -> bool {
        if self.may_give_up_direct {
            self.direct.store(false, Ordering::Relaxed);
        }
        self.may_give_up_direct
    }

    /// Returns the descriptor for direct or buffered calls.
    pub fn descriptor(&self, is_direct: bool) -> BorrowedFd<'_> {
        match &self.buffered {
            Some(buffered) if !is_direct => buffered.as_fd(),
            _ => self.main.as_fd(),
        }
    }

    pub fn len_bytes(&self) -> Result<u64, DeviceError> {
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
}
