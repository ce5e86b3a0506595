//! Errors of devices.

use std::io;
use std::sync::Arc;

/// The operation an error belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoOperation {
    /// A transfer from the device into memory.
    Read,
    /// A transfer from memory to the device.
    Write,
    /// The barrier that makes writes durable.
    Sync,
    /// Querying length or alignment.
    Inspect,
}

impl std::fmt::Display for IoOperation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            IoOperation::Read => "read",
            IoOperation::Write => "write",
            IoOperation::Sync => "sync",
            IoOperation::Inspect => "inspect",
        })
    }
}

/// An error of a device. Errors of transfers hold no heap memory, so the fault path may create
/// them; [`DeviceError::Other`] shares memory that another thread allocated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The system refused or failed a transfer.
    #[error("{operation} of {len_bytes} bytes at offset {offset_bytes} failed: {source}")]
    Io {
        /// The failed operation.
        operation: IoOperation,
        /// Start of the transfer.
        offset_bytes: u64,
        /// Its length.
        len_bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// A read returned less than requested, inside the length that the device reports.
    #[error(
        "read of {len_bytes} bytes at offset {offset_bytes} returned only {got_bytes}: the device is \
         shorter than it says, or was truncated meanwhile"
    )]
    ShortRead {
        /// Start of the transfer.
        offset_bytes: u64,
        /// Bytes requested.
        len_bytes: usize,
        /// Bytes returned.
        got_bytes: usize,
    },
    /// A write ended before its last byte. The device's content in the range is unknown until it is
    /// rewritten.
    #[error(
        "write of {len_bytes} bytes at offset {offset_bytes} ended after {wrote_bytes}: the device breaks the \
         contract of a batch, in which no write is short; write again, and correct the device"
    )]
    ShortWrite {
        /// Start of the transfer.
        offset_bytes: u64,
        /// Bytes requested.
        len_bytes: usize,
        /// Bytes that the device reported as written.
        wrote_bytes: usize,
    },
    /// The device ended a batch without completing a transfer of it.
    #[error(
        "the device returned from a batch without completing the {operation} of {len_bytes} bytes at offset \
         {offset_bytes}: it breaks the contract of `Device::run`; transfer again, and correct the device"
    )]
    Unfinished {
        /// The requested operation.
        operation: IoOperation,
        /// Start of the transfer.
        offset_bytes: u64,
        /// Its length.
        len_bytes: usize,
    },
    /// A range outside the device.
    #[error("range {offset_bytes}+{len_bytes} lies outside the device of {device_bytes} bytes")]
    OutOfBounds {
        /// Start of the range.
        offset_bytes: u64,
        /// Its length.
        len_bytes: usize,
        /// The device's length.
        device_bytes: u64,
    },
    /// Offset, length or memory not aligned as the device requires.
    #[error(
        "transfer at offset {offset_bytes} of {len_bytes} bytes is not aligned to {alignment_bytes} bytes"
    )]
    Misaligned {
        /// Start of the transfer.
        offset_bytes: u64,
        /// Its length.
        len_bytes: usize,
        /// The alignment that the device requires.
        alignment_bytes: usize,
    },
    /// A write to a device opened for reading.
    #[error("the device was opened for reading only; open it writable to write")]
    ReadOnly,
    /// A failure that the device describes by an error of its own.
    #[error("{operation} of {len_bytes} bytes at offset {offset_bytes} failed: {source}")]
    Other {
        /// The failed operation.
        operation: IoOperation,
        /// Start of the transfer.
        offset_bytes: u64,
        /// Its length.
        len_bytes: usize,
        /// The device's own error. In a transfer that may be in a fault handler, it is cloned and not made.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The path cannot serve as a device.
    #[error("{path}: {reason}")]
    Unsuitable {
        /// The path as given.
        path: String,
        /// The reason, and what to do.
        reason: String,
    },
    /// Opening failed.
    #[error("cannot open {path}: {source}")]
    Open {
        /// The path as given.
        path: String,
        /// The system's error.
        source: io::Error,
    },
}
