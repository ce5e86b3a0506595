//! Errors of mapped files.

use std::io;
use std::path::{Path, PathBuf};

use aquifer_vm::VmError;

/// The error of an operation on a mapped file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The file cannot be opened, or its status read.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file was opened, and cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file of unknown length exceeds the limit.
    #[error("{} gave {limit_bytes} bytes and did not end; read it in pieces", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Most bytes that are read.
        limit_bytes: u64,
    },
    /// The file is of a kind that cannot be mapped.
    #[error("{} is {kind}, which cannot be mapped; {advice}", path.display())]
    NotMappable {
        /// The file.
        path: PathBuf,
        /// Its kind.
        kind: &'static str,
        /// What to do instead.
        advice: &'static str,
    },
    /// The range ends behind the end of the file, or starts behind its own end.
    #[error(
        "bytes {start} to {end} of {} are no range of it: it has {len_bytes}; ask for its length first, \
         or for an open range",
        path.display()
    )]
    Range {
        /// The file.
        path: PathBuf,
        /// First byte requested.
        start: u64,
        /// The byte behind the last one requested.
        end: u64,
        /// Its length.
        len_bytes: u64,
    },
    /// The range lies outside of a view.
    #[error(
        "bytes {start} to {end} are outside of the view, which has {len_bytes}; map a larger range, or grow it"
    )]
    OutsideView {
        /// First byte requested.
        start: u64,
        /// The byte behind the last one requested.
        end: u64,
        /// Length of the view.
        len_bytes: u64,
    },
    /// The process has no room for more mappings.
    #[error(
        "{} cannot be mapped: {used} mappings are in use of {limit} that may be (half of vm.max_map_count); \
         drop views, or raise the limit with `sysctl vm.max_map_count`",
        path.display()
    )]
    TooManyMappings {
        /// The file.
        path: PathBuf,
        /// Mappings in use.
        used: usize,
        /// The limit.
        limit: usize,
    },
    /// The addresses could not be reserved, or the fault handler not installed.
    #[error(transparent)]
    Memory(#[from] VmError),
    /// The system refused to map it.
    #[error("cannot map {len_bytes} bytes of {}: {source}", path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// Bytes to be mapped.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The system does not map the file shared and writable: its file system cannot, or the file is
    /// sealed. A private mapping works.
    #[error(
        "{} cannot be mapped shared and writable: {source}; map it with Stores::Private",
        path.display()
    )]
    SharedRefused {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Bytes of the file could not be accessed.
    #[error("cannot access byte {offset_bytes} of {}: {cause}", path.display())]
    Fault {
        /// The file.
        path: PathBuf,
        /// The first byte of the file that is known to be missing.
        offset_bytes: u64,
        /// The cause.
        cause: FaultCause,
    },
    /// A thread could not be started.
    #[error("cannot start a thread of the mapper: {0}")]
    Thread(#[source] io::Error),
    /// The view was made for reading only.
    #[error("{} was mapped for reading; map it with FileAccess::Write to change it", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
    },
    /// Stores could not be written to the file, or not made durable. They are still in the view,
    /// and count as not flushed, except with [`FlushCause::Gone`].
    #[error(
        "cannot flush bytes {} to {} of {}: {cause}; {advice}",
        range.start,
        range.end,
        path.display(),
        advice = cause.advice()
    )]
    Flush {
        /// The file.
        path: PathBuf,
        /// The first bytes of the file that failed. Later ones may have failed as well.
        range: std::ops::Range<u64>,
        /// The cause.
        cause: FlushCause,
    },
    /// The addresses reserved for the view are too few.
    #[error(
        "the view of {} cannot grow to {len_bytes} bytes: its addresses end after {capacity_bytes}; flush it, drop it, \
         make the file longer, and map it again",
        path.display()
    )]
    GrowBeyond {
        /// The file.
        path: PathBuf,
        /// Length requested.
        len_bytes: u64,
        /// The longest possible view.
        capacity_bytes: u64,
    },
    /// The file could not be extended. Its length is unchanged.
    #[error("cannot make {} long enough for a view of {len_bytes} bytes: {source}", path.display())]
    Grow {
        /// The file.
        path: PathBuf,
        /// Length requested.
        len_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Blocks could not be reserved for the view ([`ViewOptions::allocate`](crate::ViewOptions::allocate)).
    #[error(
        "cannot reserve blocks for bytes {} to {} of {}: {source}; make room, or map it without `allocate`",
        range.start,
        range.end,
        path.display()
    )]
    Allocate {
        /// The file.
        path: PathBuf,
        /// Bytes of the file.
        range: std::ops::Range<u64>,
        /// The system's error.
        source: io::Error,
    },
    /// The mapper belongs to the parent of this forked process.
    #[error("this process is a fork of the one that made the mapper; make a new one in the child")]
    Forked,
}

/// Why bytes of a file could not be accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultCause {
    /// The file was truncated.
    #[error("the file ends before it; it was cut short after it was mapped")]
    Truncated,
    /// The device or the network failed.
    #[error("the system could not read it: {}", io::Error::from_raw_os_error(*.0))]
    Io(i32),
    /// The file system has no space left for a hole that was stored to.
    #[error("there is no room for it on the file system; make room, and store again")]
    NoSpace,
    /// The file cannot be reopened to find out: it was removed or replaced, or no descriptors are
    /// left.
    #[error("why is not known, as its path does not lead to it any more; map it again")]
    OutOfReach,
    /// The bytes were readable when checked again: a transient failure, here or in another thread.
    #[error("it could not be read a moment ago; read again")]
    Passing,
}

/// Why stores could not be flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlushCause {
    /// The file was truncated. Stores behind its end are lost.
    #[error("the file ends before")]
    Truncated,
    /// The file system or the quota has no space left.
    #[error("there is no room for it on the file system")]
    NoSpace,
    /// The bytes could not be written.
    #[error("the system could not write: {}", io::Error::from_raw_os_error(*.0))]
    Io(i32),
    /// They were written, and the device may have lost them.
    #[error("the device may have lost it: {}", io::Error::from_raw_os_error(*.0))]
    Lost(i32),
    /// The page cache held them, without a copy in this process, and the device may have lost them.
    /// Every later flush of this shared view fails as well.
    #[error("the device may have lost it, and the view has no copy of it: {}", io::Error::from_raw_os_error(*.0))]
    Gone(i32),
}

impl FlushCause {
    fn advice(&self) -> &'static str {
        match self {
            FlushCause::Truncated => "map it again, or make it longer",
            FlushCause::NoSpace => "make room, and flush again",
            FlushCause::Gone(_) => {
                "map the file again and store it again, elsewhere if the device keeps failing"
            }
            FlushCause::Io(_) | FlushCause::Lost(_) => {
                "flush again, which writes all of it again; if that fails too, write it elsewhere"
            }
        }
    }

    pub(crate) fn of_write(error: &io::Error) -> FlushCause {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => FlushCause::NoSpace,
            errno => FlushCause::Io(errno.unwrap_or(libc::EIO)),
        }
    }

    pub(crate) fn of_sync(error: &io::Error) -> FlushCause {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => FlushCause::NoSpace,
            errno => FlushCause::Lost(errno.unwrap_or(libc::EIO)),
        }
    }
}

/// The result of operations on mapped files.
pub type Result<T> = std::result::Result<T, MapError>;

impl MapError {
    pub(crate) fn open(path: &Path) -> impl FnOnce(io::Error) -> MapError + '_ {
        |source| MapError::Open { path: path.to_owned(), source }
    }
}
