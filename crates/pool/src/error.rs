//! What can go wrong with a pool.

use std::io;
use std::path::PathBuf;

use crate::broker::AccessError;
use crate::format::FormatError;
use crate::media::{MediaError, OpenError, PersistenceDomain};

/// What can go wrong with a pool. None of these changes the pool, except where it is said.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The media failed.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// What lies at the path cannot be the media of a pool, or could not be made.
    #[error(transparent)]
    NotOpened(#[from] OpenError),
    /// Access to the pool could not be had from its broker, or be given by one.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The pool could not be opened.
    #[error("cannot open {}: {reason}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
        /// The system's error, if there was one.
        #[source]
        source: Option<io::Error>,
    },
    /// The file is not a pool.
    #[error("{} is not a pool; make one with `aquifer pool create`", path.display())]
    NotAPool {
        /// The file.
        path: PathBuf,
    },
    /// The pool was made by another version.
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
        /// Which structure.
        structure: String,
        /// How.
        #[source]
        error: FormatError,
    },
    /// The log lacks records that were acknowledged.
    #[error(
        "{}: the log ends at {end_lsn}, but a later record proves that it was durable up to {acknowledged_lsn}: \
         the media lost bytes; `aquifer pool check` shows what is there, opening for reading still works",
        path.display()
    )]
    DamagedLog {
        /// The file.
        path: PathBuf,
        /// Where the readable part ends.
        end_lsn: u64,
        /// How far it was durable.
        acknowledged_lsn: u64,
    },
    /// The pool cannot be written here.
    #[error("{} can only be read here ({reason}); open it for reading", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: &'static str,
    },
    /// Another process has the pool for itself, or has it open where it is wanted exclusively.
    #[error(
        "{} is open elsewhere, for writing or for reading, and one of the two needs it alone; close it there, or wait",
        path.display()
    )]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// This process uses the open file of these media for a pool already.
    #[error(
        "this process has a pool open on these media of {}, or makes one, through the same open file, which cannot be shared; \
         clone that handle, close it first, or open the file anew",
        path.display()
    )]
    MediaInUse {
        /// The file.
        path: PathBuf,
    },
    /// Other processes have the pool open, and this one cannot reach what they share.
    #[error(
        "{} is open in processes whose shared memory cannot be reached from here ({reason}); run in the same \
         container (the same /dev/shm) and as the same user as they do, or have the first of them put it beside the pool \
         (`segment_directory`)",
        path.display()
    )]
    BusyElsewhere {
        /// The file.
        path: PathBuf,
        /// What was tried.
        reason: String,
    },
    /// Other processes have the pool open, and what they share may be another user's making.
    #[error(
        "the shared memory of {} belongs to user {uid} and lies on a file system that records no birth times, so it cannot be told who \
         made it; close the pool everywhere, and open it with shared memory in another directory (`segment_directory`)",
        path.display()
    )]
    UnknownSegment {
        /// The pool.
        path: PathBuf,
        /// Whose the shared memory is.
        uid: u32,
    },
    /// There is no room left for data.
    #[error(
        "the pool is full: {wanted_pages} contiguous pages were wanted, the longest free range has \
         {largest_free_pages}; destroy what is not needed, or `aquifer pool grow`"
    )]
    Full {
        /// Pages wanted.
        wanted_pages: u64,
        /// Pages of the longest free range.
        largest_free_pages: u64,
    },
    /// This process has as many ranges of pages reserved as it can have at a time.
    #[error(
        "{limit} ranges of pages are reserved in this process, as many as can be; use some before others are reserved"
    )]
    TooManyReservations {
        /// How many.
        limit: usize,
    },
    /// One change frees or exchanges more ranges of pages than can be remembered.
    #[error(
        "this would free up to {freed} ranges of pages and exchange {moved} at once, and {most_freed} and {most_moved} can be; do it in \
         parts, or defragment the files first"
    )]
    TooManyRuns {
        /// How many it may free.
        freed: usize,
        /// How many one change can.
        most_freed: usize,
        /// How many it gives to another file.
        moved: usize,
        /// How many one change can.
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
    /// More pins are set than there is room for.
    #[error(
        "{limit} pins are set in all processes together, which is the limit; drop views that are no longer used"
    )]
    TooManyPins {
        /// The limit.
        limit: usize,
    },
    /// Views keep so much that was freed that no more can be.
    #[error(
        "{held_runs} freed ranges of pages are kept by views that are still open, and there is room to remember no more of \
         them; drop old views, or end the processes that have them"
    )]
    TooMuchPinned {
        /// How many ranges.
        held_runs: u64,
    },
    /// A process that holds something this one needs does not run.
    #[error("{}", stalled_text(*.pid, .what))]
    Stalled {
        /// The process, as the namespace it runs in numbers it.
        pid: u32,
        /// What it holds.
        what: &'static str,
    },
    /// The inode is locked by somebody else.
    #[error("inode {number} is in use {by}", by = holder_text(*.holder))]
    Locked {
        /// The inode.
        number: u64,
        /// The process that holds it, if it is known.
        holder: Option<u32>,
    },
    /// This handle has locked the inode already.
    #[error("inode {number} is in use through this handle already")]
    AlreadyLocked {
        /// The inode.
        number: u64,
    },
    /// The system did not lock a file, or not let it be asked about.
    #[error("inode {inode} cannot be locked: {source}")]
    CannotLock {
        /// The number of its inode.
        inode: u64,
        /// The system's error: `EINTR` if waiting for the lock was ended by a signal.
        #[source]
        source: io::Error,
    },
    /// Too many processes have the pool open.
    #[error("{limit} processes have the pool open, which is the limit")]
    TooManyProcesses {
        /// The limit.
        limit: usize,
    },
    /// A parameter makes no sense.
    #[error("{what} cannot be {value}: {reason}")]
    Parameter {
        /// Which one.
        what: &'static str,
        /// Its value.
        value: String,
        /// Why not.
        reason: &'static str,
    },
    /// The shared memory could not be made.
    #[error("{0}; or open the pool exclusively, which needs none")]
    SharedMemory(#[source] aquifer_sys::shared_memory::SharedMemoryError),
    /// A lock in shared memory could not be made or taken.
    #[error("a lock of the pool cannot be used ({0}); close the pool everywhere and open it again")]
    Mutex(#[source] io::Error),
    /// The calling process is a fork of the one that opened the pool.
    #[error("this process is a fork of the one that opened the pool; open it again in the child")]
    Forked,
    /// The persistence domain that was asked for is not there.
    #[error("{} cannot be used as {wanted}: {reason}", path.display())]
    Domain {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        wanted: PersistenceDomain,
        /// Why not.
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
    let process = match pid {
        0 => "a process".to_owned(),
        pid => format!("process {pid}"),
    };
    format!(
        "{process} holds {what} of the pool and does not go on (stopped?); continue it or end it"
    )
}

fn holder_text(holder: Option<u32>) -> String {
    match holder {
        Some(pid) => format!("by process {pid}"),
        None => "elsewhere".to_owned(),
    }
}

/// The result of an operation on a pool.
pub type Result<T> = std::result::Result<T, PoolError>;
