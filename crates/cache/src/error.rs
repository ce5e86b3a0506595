//! Errors, their causes and remedies.

use std::io;

use aquifer_device::DeviceError;
use aquifer_vm::VmError;

/// The reason of [`CacheError::MappedAccess`] for a file that has become shorter.
pub(crate) const TRUNCATED: &str = "the file ends before it; it was truncated after it was mapped";

/// An error of the cache engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// A file could not be opened.
    #[error(transparent)]
    Open {
        /// The device's error, which names the path.
        source: DeviceError,
    },
    /// A budget that is too small or too large.
    #[error(
        "budget of {budget_bytes} bytes: must be between {min_bytes} and {max_bytes} bytes here"
    )]
    Budget {
        /// Bytes requested.
        budget_bytes: u64,
        /// The smallest budget that works with this page size.
        min_bytes: u64,
        /// Physical memory, or the memory cgroup's limit.
        max_bytes: u64,
    },
    /// A page size that is not a power of two from 4 KiB to 64 KiB.
    #[error("page size of {page_bytes} bytes: must be 4096, 8192, 16384, 32768 or 65536")]
    PageSize {
        /// Bytes requested.
        page_bytes: usize,
    },
    /// The device's alignment does not divide the page size.
    #[error(
        "{device}: needs transfers aligned to {alignment_bytes} bytes; choose a page size that is a \
         multiple of it"
    )]
    Alignment {
        /// The device.
        device: String,
        /// The alignment that it needs, in bytes.
        alignment_bytes: usize,
    },
    /// The device is empty.
    #[error("{device}: is empty; give it its length first (a mapping does not grow a file)")]
    Empty {
        /// The device.
        device: String,
    },
    /// The device cannot hold such rows.
    #[error("{device}: {reason}")]
    RowLayout {
        /// The device.
        device: String,
        /// The reason, and a remedy.
        reason: String,
    },
    /// A row outside the device.
    #[error("{device}: row {row} lies outside its {rows} rows")]
    RowOutOfRange {
        /// The device.
        device: String,
        /// The row requested.
        row: u64,
        /// Rows that the device had when it was opened.
        rows: u64,
    },
    /// A range outside the mapping.
    #[error("range {offset_bytes}+{len_bytes} lies outside the mapping of {mapped_bytes} bytes")]
    OutOfBounds {
        /// Start of the range.
        offset_bytes: u64,
        /// Its length.
        len_bytes: u64,
        /// The mapping's length.
        mapped_bytes: u64,
    },
    /// A write through a read-only mapping or device.
    #[error("{device}: mapped for reading only; map it writable to write")]
    ReadOnly {
        /// The device.
        device: String,
    },
    /// A page or a row could not be read from its device. It stays absent; a later access retries.
    #[error("{device}: data at offset {offset_bytes}: {source}")]
    Load {
        /// The device.
        device: String,
        /// Start of the page or row.
        offset_bytes: u64,
        /// The device's error.
        source: DeviceError,
    },
    /// Dirty pages could not be written. They stay dirty; every flush of the range fails until a
    /// later write of them succeeds.
    #[error(
        "{device}: {pages} dirty pages between offsets {offset_bytes} and {end_bytes} could not be \
         written ({source}); they stay dirty, flush again when the cause is gone"
    )]
    WriteBack {
        /// The device.
        device: String,
        /// Start of the first page that failed.
        offset_bytes: u64,
        /// End of the last page that failed.
        end_bytes: u64,
        /// How many pages failed.
        pages: u64,
        /// The first error.
        source: DeviceError,
    },
    /// The device could not make completed writes durable.
    ///
    /// Final: data written since the last successful sync may be lost, and a retry would not
    /// recover it. Every later flush of the same [`Mapping`](crate::Mapping) or
    /// [`Pages`](crate::Pages), and of others that share its pages, fails with this error. Drop
    /// them, open the device again, and check its contents.
    #[error("{device}: sync failed ({source}); writes since the last flush may not be durable")]
    Sync {
        /// The device.
        device: String,
        /// The device's error.
        source: DeviceError,
    },
    /// A query of the device, such as its length, failed.
    #[error("{device}: {source}")]
    Device {
        /// The device.
        device: String,
        /// The device's error.
        source: DeviceError,
    },
    /// The requested backend, or the one that the cache's settings require, cannot serve this
    /// device.
    #[error("{device}: the {backend} backend cannot serve this mapping: {reason}")]
    BackendUnsupported {
        /// The device.
        device: String,
        /// The backend's name.
        backend: &'static str,
        /// The reason, and a remedy.
        reason: String,
    },
    /// Every page in the budget is pinned or cannot be written back, and none is about to become
    /// free.
    #[error(
        "no frame of the budget can be freed: {pinned} pages are pinned, {unwritable} cannot be written \
         back; drop pins, or raise the budget with `resize`"
    )]
    Exhausted {
        /// Pages pinned now.
        pinned: u64,
        /// Dirty pages that could not be written back.
        unwritable: u64,
    },
    /// A page has as many pins as its page word can count.
    #[error("page at offset {offset_bytes} holds {pins} pins already; drop some")]
    TooManyPins {
        /// Start of the page.
        offset_bytes: u64,
        /// The limit.
        pins: u64,
    },
    /// The process already uses the device in a way that cannot share pages with the requested one,
    /// and one of the two may write.
    #[error(
        "{device}: attached already {how}, and one of the two may write: each would overwrite or miss what the \
         other writes; drop one of them first, or use mappings of one cache, of the user backend and of one \
         length, which share their pages"
    )]
    AlreadyAttached {
        /// The device.
        device: String,
        /// The existing use.
        how: &'static str,
    },
    /// With [`serving_thread`](crate::CacheBuilder::serving_thread), a device of a cache uses memory of the same cache: a
    /// thread that serves the fault could wait for the one that it serves.
    #[error(
        "{device}: uses memory of the cache that it is mapped with, or is used so, which a cache with serving threads refuses; \
         map the lower one of the two devices with a cache of its own"
    )]
    UnderItself {
        /// The device.
        device: String,
    },
    /// An arena has no free range of the requested length.
    #[error(
        "no {len_bytes} contiguous bytes are free in the arena, the longest free range has \
         {largest_bytes}; drop vectors, or use a larger device"
    )]
    ArenaFull {
        /// Bytes requested.
        len_bytes: u64,
        /// The longest free range.
        largest_bytes: u64,
    },
    /// The calling process is a fork of the one that the cache belongs to.
    #[error("this process is a fork of the one that made the cache; make a new cache in the child")]
    Forked,
    /// An access inside a kernel-backed mapping failed: the file was truncated or could not be
    /// read.
    #[error("{device}: reading the mapped file failed at offset {offset_bytes}: {reason}")]
    MappedAccess {
        /// The device.
        device: String,
        /// Start of the page.
        offset_bytes: u64,
        /// The cause, as derived from the kernel's signal.
        reason: &'static str,
    },
    /// A cache's statistics cannot be published under this name.
    #[error("publishing statistics as {name:?}: {source}")]
    Publish {
        /// The requested name.
        name: String,
        /// The problem with the name, or the system's error.
        source: io::Error,
    },
    /// An error of address-space or fault-handler setup.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The kernel refused something the engine needs.
    #[error("{what}: {source}")]
    Kernel {
        /// What was attempted.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl CacheError {
    /// Whether an access inside a kernel-backed mapping failed because the file was truncated.
    pub fn is_truncation(&self) -> bool {
        matches!(self, CacheError::MappedAccess { reason, .. } if *reason == TRUNCATED)
    }
}

/// A result of the cache engine.
pub type Result<T> = std::result::Result<T, CacheError>;
