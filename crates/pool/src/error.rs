//! Errors of pools.

use std::io;
use std::path::PathBuf;

use crate::access_error::AccessError;
use crate::format::{FormatError, StructureError};
use crate::media::{MediaError, OpenError, PersistenceDomain};

/// An error of a pool. None of these changes the pool, unless documented.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The media failed.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The program has closed a file descriptor of this handle, or made it another file's. Nothing
    /// is changed through this handle any more. For other processes it is as if this one had died.
    #[error(
        "this program has closed file descriptors that belong to the open pool; open the pool after closing \
         descriptors, and close none that the program has not opened"
    )]
    LocksLost,
    /// The file at the path cannot be the media of a pool, or could not be created.
    #[error(transparent)]
    NotOpened(#[from] OpenError),
    /// The broker did not grant access to the pool, or could not.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The pool could not be opened.
    #[error("cannot open {}: {reason}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The reason, and what to do.
        reason: String,
        /// The system's error, if there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// The file is not a pool.
    #[error("{} is not a pool; make one with `aquifer pool create`", path.display())]
    NotAPool {
        /// The file.
        path: PathBuf,
    },
    /// The pool was created by another version.
    #[error(
        "{} has format version {found}; this program reads version {}: copy what is in it with the program it was made with",
        path.display(),
        crate::format::FORMAT_VERSION
    )]
    FutureVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The pool uses features that this program does not know.
    #[error(
        "{} uses features {bits:#x} that this program does not know: a later program made it; use that program",
        path.display()
    )]
    LaterFeatures {
        /// The file.
        path: PathBuf,
        /// The unknown features, one bit for each.
        bits: u64,
    },
    /// The file is shorter than the pool in it.
    #[error(
        "{} has {found_bytes} bytes, but the pool in it has {expected_bytes}: it was cut short; restore it from a copy",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its length.
        found_bytes: u64,
        /// The pool's length.
        expected_bytes: u64,
    },
    /// A structure of the pool is damaged.
    #[error(
        "{}: {structure} is damaged: {error}; `aquifer pool check` shows everything that is",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damaged structure.
        structure: String,
        /// The damage.
        #[source]
        error: FormatError,
    },
    /// A directory, a file table or a chain of bytes is damaged, or cannot be changed as requested.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// The log lacks records that were acknowledged.
    #[error(
        "{}: the log ends at {end_lsn}, but a later record proves that it was durable up to {acknowledged_lsn}: \
         the media lost bytes; `aquifer pool check` shows what is there, opening for reading still works",
        path.display()
    )]
    DamagedLog {
        /// The file.
        path: PathBuf,
        /// The end of the readable part.
        end_lsn: u64,
        /// The position up to which the log was durable.
        acknowledged_lsn: u64,
    },
    /// The pool cannot be written here.
    #[error("{} can only be read here ({reason}); open it for reading", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: &'static str,
    },
    /// Another process has the pool open exclusively, or has it open while exclusive access is
    /// requested.
    #[error(
        "{} is open elsewhere, for writing or for reading, and one of the two needs it alone; close it there, or wait",
        path.display()
    )]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// A writer keeps other writers out: see [`PoolOptions::sole`](crate::PoolOptions::sole).
    #[error("only {} may write to {}{}", process_text(*.pid), path.display(), note_text(.note))]
    SoleWriter {
        /// The file.
        path: PathBuf,
        /// The process, as numbered in its own PID namespace; 0 if its shared memory cannot be
        /// reached from here.
        pid: u32,
        /// What it says: why, and what to do.
        note: String,
    },
    /// Others may not write to the pool at the same time as this writer, and one does
    /// ([`PoolOptions::sole`](crate::PoolOptions::sole)).
    #[error(
        "{} has {} open for writing, and this needs to be the only writer; end it, or wait",
        process_text(*.pid),
        path.display()
    )]
    HasWriters {
        /// The file.
        path: PathBuf,
        /// One such process, as numbered in its own PID namespace.
        pid: u32,
    },
    /// This process already uses the open file description of these media for a pool.
    #[error(
        "this process has a pool open on these media of {}, or makes one, through the same open file, which cannot be shared; \
         clone that handle, close it first, or open the file anew",
        path.display()
    )]
    MediaInUse {
        /// The file.
        path: PathBuf,
    },
    /// Other processes have the pool open, and this one cannot reach their shared memory.
    #[error(
        "{} is open in processes whose shared memory cannot be reached from here ({reason}); run in the same \
         container (the same /dev/shm) and as the same user as they do, or have the first of them put it beside the pool \
         (`segment_directory`)",
        path.display()
    )]
    BusyElsewhere {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// Other processes have the pool open, and their shared memory may have been created by another
    /// user.
    #[error(
        "the shared memory of {} belongs to user {uid} and lies on a file system that records no birth times, so it cannot be told who \
         made it; close the pool everywhere, and open it with shared memory in another directory (`segment_directory`)",
        path.display()
    )]
    UnknownSegment {
        /// The pool.
        path: PathBuf,
        /// The owner of the shared memory.
        uid: u32,
    },
    /// There is no room left for data.
    #[error(
        "the pool is full: {wanted_pages} contiguous pages were wanted, the longest free range has \
         {largest_free_pages}; destroy what is not needed, or `aquifer pool grow`"
    )]
    Full {
        /// Requested pages.
        wanted_pages: u64,
        /// Pages of the longest free range.
        largest_free_pages: u64,
    },
    /// This process has as many ranges of pages reserved as it can hold at a time.
    #[error(
        "{limit} ranges of pages are reserved in this process, as many as can be; use some before others are reserved"
    )]
    TooManyReservations {
        /// The limit.
        limit: usize,
    },
    /// One change frees or exchanges more ranges of pages than can be noted.
    #[error(
        "this would free up to {freed} ranges of pages and exchange {moved} at once, and {most_freed} and {most_moved} can be; do it in \
         parts, or defragment the files first"
    )]
    TooManyRuns {
        /// How many it may free.
        freed: usize,
        /// How many one change can free.
        most_freed: usize,
        /// How many it moves to another file.
        moved: usize,
        /// How many one change can move.
        most_moved: usize,
    },
    /// All slots are in use.
    #[error(
        "all {slots} inodes of the pool are in use; destroy some, or make a pool with more (`--inodes`)"
    )]
    NoFreeInode {
        /// How many there are.
        slots: u64,
    },
    /// A record is longer than the log can hold.
    #[error(
        "{len_bytes} bytes do not fit into a log of {log_bytes} bytes; make a pool with a larger log (`--log`)"
    )]
    TooLargeForLog {
        /// Length of the record.
        len_bytes: u64,
        /// Length of the log.
        log_bytes: u64,
    },
    /// Writing the log or the data failed earlier, for this or another process.
    #[error(
        "the pool takes no more writes since {what} failed ({source}); what was in flight then is either there or \
         not; close the pool everywhere, look at the disk, and open it again"
    )]
    Failed {
        /// What failed.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// All processes together have as many pins as there is room for.
    #[error(
        "{limit} pins are set in all processes together, which is the limit; drop views that are no longer used"
    )]
    TooManyPins {
        /// The limit.
        limit: usize,
    },
    /// Views keep so many freed ranges that no more can be noted.
    #[error(
        "{held_runs} freed ranges of pages are kept by views that are still open, and there is room to remember no more of \
         them; drop old views, or end the processes that have them"
    )]
    TooMuchPinned {
        /// How many ranges.
        held_runs: u64,
    },
    /// A process that holds something this one needs makes no progress.
    #[error("{}", stalled_text(*.pid, .what))]
    Stalled {
        /// The process, as numbered in its own PID namespace.
        pid: u32,
        /// What it holds.
        what: &'static str,
    },
    /// Another handle or process has the inode locked.
    #[error("inode {number} is in use {by}", by = holder_text(*.holder))]
    Locked {
        /// The inode.
        number: u64,
        /// The process that holds it, if known.
        holder: Option<u32>,
    },
    /// This handle has already locked the inode.
    #[error("inode {number} is in use through this handle already")]
    AlreadyLocked {
        /// The inode.
        number: u64,
    },
    /// The system did not lock a file, or did not allow a query of its locks.
    #[error("inode {inode} cannot be locked: {source}")]
    CannotLock {
        /// The number of its inode.
        inode: u64,
        /// The system's error: `EINTR` if a signal interrupted the wait for the lock.
        #[source]
        source: io::Error,
    },
    /// Too many processes have the pool open.
    #[error("{limit} processes have the pool open, which is the limit")]
    TooManyProcesses {
        /// The limit.
        limit: usize,
    },
    /// A parameter is invalid.
    #[error("{what} cannot be {value}: {reason}")]
    Parameter {
        /// The parameter.
        what: &'static str,
        /// Its value.
        value: String,
        /// The reason.
        reason: &'static str,
    },
    /// The shared memory could not be created.
    #[error("{0}; or open the pool exclusively, which needs none")]
    SharedMemory(#[source] aquifer_sys::shared_memory::SharedMemoryError),
    /// A lock in shared memory could not be created or taken.
    #[error("a lock of the pool cannot be used ({0}); close the pool everywhere and open it again")]
    Mutex(#[source] io::Error),
    /// The calling process is a fork of the one that opened the pool.
    #[error("this process is a fork of the one that opened the pool; open it again in the child")]
    Forked,
    /// The requested persistence domain is not available.
    #[error("{} cannot be used as {wanted}: {reason}", path.display())]
    Domain {
        /// The file.
        path: PathBuf,
        /// The requested domain.
        wanted: PersistenceDomain,
        /// The reason.
        reason: &'static str,
    },
}

fn stalled_text(pid: u32, what: &str) -> String {
    if pid == std::process::id() {
        return format!(
            "this process ({pid}) holds {what} of the pool and does not go on: finish or drop what another thread of it, \
             or another handle, has begun"
        );
    }
    format!(
        "{} holds {what} of the pool and does not go on (stopped?); continue it or end it",
        process_text(pid)
    )
}

fn process_text(pid: u32) -> String {
    match pid {
        0 => "a process".to_owned(),
        pid => format!("process {pid}"),
    }
}

fn note_text(note: &str) -> String {
    if note.is_empty() { "; end it, or wait".to_owned() } else { format!(": {note}") }
}

fn holder_text(holder: Option<u32>) -> String {
    match holder {
        Some(pid) => format!("by process {pid}"),
        None => "elsewhere".to_owned(),
    }
}

/// The result of an operation on a pool.
pub type Result<T> = std::result::Result<T, PoolError>;

impl PoolError {
    /// Whether it says that the program has closed a descriptor of the pool.
    pub(crate) fn is_of_closed_file(&self) -> bool {
        matches!(self, PoolError::Media(error) if error.source.raw_os_error() == Some(libc::EBADF))
    }
}
