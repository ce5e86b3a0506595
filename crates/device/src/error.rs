//! What can go wrong at a device.

use std::io;

/// The operation an error belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoOperation {
    /// A transfer from the device into memory.
    Read,
    /// A transfer from memory to the device.
    Write,
    /// The barrier that makes writes durable.
    Sync,
    /// Asking for length or alignment.
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

/// An error of a device. Holds no heap memory on the transfer paths, so the fault path may make one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The system refused or failed a transfer.
    #[error("{operation} of {len_bytes} bytes at offset {offset_bytes} failed: {source}")]
    Io {
        /// What was attempted.
        operation: IoOperation,
        /// Start of the transfer.
        offset_bytes: u64,
        /// Its length.
        len_bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// A read ended before the bytes asked for, inside the length the device claims.
    #[error(
        "read of {len_bytes} bytes at offset {offset_bytes} returned only {got_bytes}: the device is \
         shorter than it says, or was truncated meanwhile"
    )]
    ShortRead {
        /// Start of the transfer.
        offset_bytes: u64,
        /// Bytes asked for.
        len_bytes: usize,
        /// Bytes that came.
        got_bytes: usize,
    },
    /// A write ended before its last byte. What is on the device in its place is unknown until it is written again.
    #[error(
        "write of {len_bytes} bytes at offset {offset_bytes} ended after {wrote_bytes}: the device breaks the \
         contract of a batch, in which no write is short; write again, and correct the device"
    )]
    ShortWrite {
        /// Start of the transfer.
        offset_bytes: u64,
        /// Bytes asked for.
        len_bytes: usize,
        /// Bytes that the device says it wrote.
        wrote_bytes: usize,
    },
    /// The device ended a batch without completing a transfer of it.
    #[error(
        "the device returned from a batch without completing the {operation} of {len_bytes} bytes at offset \
         {offset_bytes}: it breaks the contract of `Device::run`; transfer again, and correct the device"
    )]
    Unfinished {
        /// What was asked for.
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
    /// Offset, length or memory not aligned as the device needs.
    #[error(
        "transfer at offset {offset_bytes} of {len_bytes} bytes is not aligned to {alignment_bytes} bytes"
    )]
    Misaligned {
        /// Start of the transfer.
        offset_bytes: u64,
        /// Its length.
        len_bytes: usize,
        /// What the device needs.
        alignment_bytes: usize,
    },
    /// A write to a device opened for reading.
    #[error("the device was opened for reading only; open it writable to write")]
    ReadOnly,
    /// The path cannot serve as a device.
    #[error("{path}: {reason}")]
    Unsuitable {
        /// The path as given.
        path: String,
        /// Why, and what to do.
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
