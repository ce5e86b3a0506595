//! Media: the file or device under a pool, and how bytes written to it become durable.
//!
//! # The model
//! All domains are used through the same five operations, so that the code above is written once
//! and a recording medium can enumerate the possible states after a crash:
//!
//! | operation | `PageCache` | `Dax` | `Volatile` | after it |
//! |---|---|---|---|---|
//! | [`write_at`](Media::write_at) | `pwrite` | stores | stores | visible to every process; may or may not reach the media, in any order |
//! | [`write_back`](Media::write_back) | `sync_file_range` | cache-line flush | nothing | handed to the media; may or may not be there yet |
//! | [`flush`](Media::flush) | device flush | store fence | nothing | everything handed over before is durable |
//! | [`write_durable`](Media::write_durable) | `pwritev2(RWF_DSYNC)` | non-temporal stores, fence | stores | *these* bytes are durable; others may not be |
//! | [`read_at`](Media::read_at) | `pread` | loads | loads | |
//!
//! A crash tears writes at sectors (512 bytes) in `PageCache`, at 8 bytes in `Dax`.
//!
//! # Errors
//! A failed `write_back` or `flush` is final for the bytes it covered: the kernel may have marked
//! the pages clean, so success of a retry proves nothing. A failed `write_durable` may be repeated
//! with the same bytes at the same place: it writes them again.
//!
//! `EBADF` says that the program has closed a descriptor of the media, and nothing else: then the pool
//! does not fail, but this handle of it ends
//! ([`PoolError::LocksLost`](crate::PoolError::LocksLost)). A file system's own `EBADF` is reported as
//! `EIO`.
//!
//! # Forms
//! | form | domains | what it is |
//! |---|---|---|
//! | [`FileMedia`] | `PageCache` | a file on a disk, or a block device, through the page cache |
//! | [`MappedMedia`] | `Dax`, `Volatile` | a file or device whose bytes are memory |
//!
//! [`open`] and [`create`] choose the form and detect the domain.
//!
//! ```
//! use aquifer_pool::media::{ByteRange, create};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! let media = create(&directory.path().join("file"), 1 << 20, None)?;
//! // SAFETY: no pool is open on these media, so nothing refers to their bytes.
//! unsafe { media.write_at(8192, b"text")? }; //                         visible
//! media.write_back(&[ByteRange { offset_bytes: 8192, len_bytes: 4 }])?; // handed over
//! media.flush()?; //                                                    durable
//! // SAFETY: as above.
//! unsafe { media.write_durable(0, b"text")? }; //                       durable by itself
//! # Ok(())
//! # }
//! ```

mod access;
mod create;
mod descriptors;
mod file;
pub(crate) mod lock_file;
mod mapped;
mod new_file;
mod open;
mod rewritten;
mod windows;

pub use aquifer_format::ByteRange;
pub use create::{CreateOptions, create};
pub use file::FileMedia;
pub use mapped::MappedMedia;
pub use open::{OpenError, OpenOptions, open};
pub use windows::WriteWindows;

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use aquifer_vm::WriteWindow;
use aquifer_vm::file_mapping::FileMapping;

/// What makes bytes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PersistenceDomain {
    /// Cache-line flush and fence: persistent memory, accessed without the page cache.
    Dax,
    /// Range write-back and a device flush: a file on a disk.
    PageCache,
    /// Nothing: files in memory survive a process, not a power cut.
    Volatile,
}

impl PersistenceDomain {
    /// The largest unit, in bytes, that a crash never tears.
    pub fn atomic_bytes(self) -> usize {
        match self {
            PersistenceDomain::PageCache => 512,
            PersistenceDomain::Dax | PersistenceDomain::Volatile => 8,
        }
    }
}

impl fmt::Display for PersistenceDomain {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            PersistenceDomain::Dax => "dax",
            PersistenceDomain::PageCache => "page-cache",
            PersistenceDomain::Volatile => "volatile",
        })
    }
}

/// The operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MediaOperation {
    /// Opening or mapping it.
    Open,
    /// Reading.
    Read,
    /// Writing, not durably.
    Write,
    /// Writing durably.
    WriteDurable,
    /// Handing written bytes to the media.
    WriteBack,
    /// Waiting for the media.
    Flush,
    /// Changing its length.
    Resize,
    /// Locking.
    Lock,
}

impl fmt::Display for MediaOperation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            MediaOperation::Open => "open",
            MediaOperation::Read => "read",
            MediaOperation::Write => "write",
            MediaOperation::WriteDurable => "write durably",
            MediaOperation::WriteBack => "write back",
            MediaOperation::Flush => "flush",
            MediaOperation::Resize => "resize",
            MediaOperation::Lock => "lock",
        })
    }
}

/// The media failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {len_bytes} bytes at offset {offset_bytes} of {}: {source}", path.display())]
pub struct MediaError {
    /// What failed.
    pub operation: MediaOperation,
    /// The file or device.
    pub path: PathBuf,
    /// The first byte concerned.
    pub offset_bytes: u64,
    /// The number of bytes concerned.
    pub len_bytes: u64,
    /// The system's error.
    #[source]
    pub source: io::Error,
}

impl MediaError {
    /// Returns a function that wraps the system's error of an operation.
    fn at(
        path: &Path,
        operation: MediaOperation,
        range: ByteRange,
    ) -> impl Fn(io::Error) -> MediaError {
        move |source| MediaError {
            operation,
            path: path.to_path_buf(),
            offset_bytes: range.offset_bytes,
            len_bytes: range.len_bytes,
            source,
        }
    }
}

/// Refuses a range that is not completely inside of `len_bytes`.
fn check_inside(range: ByteRange, len_bytes: u64) -> io::Result<()> {
    match range.offset_bytes.checked_add(range.len_bytes) {
        Some(end_bytes) if end_bytes <= len_bytes => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("it ends at {len_bytes}; was it cut short?"),
        )),
    }
}

/// The error of writing to media that were opened for reading.
fn opened_for_reading() -> io::Error {
    io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "it was opened for reading only")
}

/// The file or device under a pool. See the module's documentation for the guarantees of each
/// operation.
///
/// Ranges lie inside [`Media::len_bytes`]; a range outside is an error with
/// [`io::ErrorKind::UnexpectedEof`]. If the file was cut short meanwhile, a write into its last page
/// may succeed: then the next operation that makes bytes durable fails. No operation is ever short. All operations are safe to call
/// from any thread.
pub trait Media: Send + Sync + 'static {
    /// The path, for messages.
    fn path(&self) -> &Path;

    /// The current length.
    fn len_bytes(&self) -> u64;

    /// What makes its bytes durable.
    fn domain(&self) -> PersistenceDomain;

    /// Whether the media can be written.
    fn is_writable(&self) -> bool;

    /// Fills `bytes` from `offset_bytes`.
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<(), MediaError>;

    /// As [`Media::read_at`], if that takes no I/O; returns whether it read. If that cannot be
    /// determined, it reads.
    fn read_resident_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<bool, MediaError> {
        self.read_at(offset_bytes, bytes).map(|()| true)
    }

    /// Writes `bytes`: visible to all processes at once, durable at an unspecified time or never.
    ///
    /// # Safety
    /// Memory mapped from the media may be borrowed as plain references: by a
    /// [lease](https://docs.rs/aquifer-fs) of an immutable file, and by typed values of an attached
    /// object. The caller must ensure that no such reference covers the range: while a pool is open
    /// on the media, only the pool, and the layers above it within the inodes they own, may write.
    unsafe fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError>;

    /// As [`Media::write_at`], with ordinary stores where bytes are stored: for bytes that are soon
    /// rewritten or read.
    ///
    /// # Safety
    /// As for [`Media::write_at`].
    unsafe fn store_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // SAFETY: the caller's guarantee is the same.
        unsafe { self.write_at(offset_bytes, bytes) }
    }

    /// Writes `bytes` and returns when exactly these are durable.
    ///
    /// # Safety
    /// As for [`Media::write_at`].
    unsafe fn write_durable(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError>;

    /// Hands what was written in these ranges to the media: durable after the next [`Media::flush`]
    /// that begins after this has returned.
    fn write_back(&self, ranges: &[ByteRange]) -> Result<(), MediaError>;

    /// A hint that [`Media::write_back`] of this range will come soon: begins it, and does not wait. What
    /// goes wrong is an error of `write_back`.
    fn begin_write_back(&self, _range: ByteRange) {}

    /// Fails if the system has reported, to any program, that it lost bytes of these media since
    /// they were opened here. Does not block, and says nothing of what has still to be written.
    fn check_kept(&self) -> Result<(), MediaError> {
        Ok(())
    }

    /// Makes everything durable that was handed over before.
    fn flush(&self) -> Result<(), MediaError>;

    /// Whether a [`Media::write_durable`] also makes everything durable that was handed over before it
    /// began, as [`Media::flush`] does. If one fails, and that may be for the sake of these other bytes,
    /// [`Media::flush`] and [`Media::check_kept`] fail from then on.
    fn durable_writes_flush(&self) -> bool {
        false
    }

    /// Makes the media longer; new bytes are zero, allocated and durable on return. Does nothing if
    /// they are already that long. After an error the length is as before, unless restoring it
    /// fails, too. The new bytes must not be used before this has returned, though the length may
    /// show earlier.
    fn grow(&self, len_bytes: u64) -> Result<(), MediaError>;

    /// As [`Media::grow`], calling `progress` repeatedly with the number of finished new bytes and
    /// the total.
    fn grow_with_progress(
        &self,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), MediaError> {
        let _ = progress;
        self.grow(len_bytes)
    }

    /// Hints that the cached pages of a range need not be kept. Changes no content.
    fn forget_cached(&self, range: ByteRange) {
        let _ = range;
    }

    /// The descriptor, for private mappings of parts, and to open the file again, for locks. Nothing
    /// may change the file offset of its open file description, which shows that it is still the same.
    fn file(&self) -> BorrowedFd<'_>;

    /// All bytes as memory, mapped shared: for accesses without system calls. `None` if there is no
    /// such mapping; then transfers are used. It may be shorter than the media, after these have
    /// grown.
    ///
    /// Stores through it are visible as by [`Media::write_at`], and are handed over by
    /// [`Media::write_back`]. It is read-only if there are [write windows](Media::write_windows).
    fn mapping(&self) -> Option<&FileMapping> {
        None
    }

    /// Extends [`Media::mapping`] to the length of the media, if possible.
    fn extend_mapping(&self) {}

    /// What guards the bytes against stray stores of this process: never [`WriteWindows::Best`].
    fn write_windows(&self) -> WriteWindows {
        WriteWindows::None
    }

    /// The mapping that all bytes can be stored to; `None` if they can only be written by calls. If
    /// protection keys guard it, it must not be loaded from, and a thread may only store to it
    /// while it has a [window](Media::write_window).
    fn mapping_to_store(&self) -> Option<&FileMapping> {
        None
    }

    /// Lets the calling thread store to all memory that protection keys guard in this process,
    /// until the result is dropped; `None` if these media have no keys. The operations of the media
    /// do not need it.
    fn write_window(&self) -> Option<WriteWindow> {
        None
    }

    /// Whether parts of [`Media::file`] can be mapped by small pages, and `mmap(MAP_PRIVATE)`
    /// copies single ones. False on hugetlbfs (2 MiB at a time) and on device DAX (refused).
    fn maps_privately(&self) -> bool;
}
