//! How to open a pool.

use std::path::PathBuf;
use std::time::Duration;

use crate::media::{self, PersistenceDomain, WriteWindows};
use crate::mutant::Mutant;

/// How to open a pool.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// Opens for reading only.
    pub read_only: bool,
    /// Keeps all other processes out, and needs no shared memory.
    pub exclusive: bool,
    /// Treats the media as this domain, whatever they are: for tests.
    pub domain: Option<PersistenceDomain>,
    /// Protects the media against stray stores of this process, if it opens them for writing.
    pub write_windows: WriteWindows,
    /// The socket of the pool's [broker](crate::broker); by default beside the pool. See
    /// [`Pool::open_granted`](crate::Pool::open_granted).
    pub broker_socket: Option<PathBuf>,
    /// How long to wait for a process that holds a lock, or has begun a commit, and makes no
    /// progress (it was stopped, or hangs). Then the call fails with
    /// [`PoolError::Stalled`](crate::PoolError::Stalled), which names that process.
    pub stall_timeout: Duration,
    /// Permissions of the shared memory. A process that opens the pool for writing needs to read
    /// and write it, one that opens it for reading while a writer has it open needs to read it.
    pub segment_mode: u32,
    /// The directory in which the first process creates the shared memory; `/dev/shm` by default.
    /// Processes that join search it, `/dev/shm` and the pool's own directory. So containers that
    /// share the pool's directory and not `/dev/shm` find each other without further configuration
    /// if the first process has named the pool's directory.
    ///
    /// The directory should be in memory, or on a disk with a file system that reserves the blocks
    /// it allocates (ext4, XFS; not NFS). There the kernel writes shared memory back as it does
    /// every file, which costs some writes a minute and preserves nothing: after a restart of the
    /// machine the leftover files are removed.
    ///
    /// After all processes were killed, the next one should name the directory as well, unless it
    /// is one of the two that are always searched: a process that does not find the shared memory
    /// cannot know that no bytes were lost, and then changes that were not durable are lost.
    pub segment_directory: Option<PathBuf>,
    /// How many bytes of free pages are zeroed per second in the background; 0 turns this off. An
    /// allocation that needs zeros and finds none zeroes pages itself.
    pub zero_bytes_per_second: u64,
    /// How many bytes of free pages to keep zeroed in the background. Pages that were never used
    /// count.
    pub zeroed_bytes: u64,
    /// Treats this as the life that the media are in: for tests of power cuts.
    #[doc(hidden)]
    pub boot: Option<u64>,
    /// Makes a deliberate mistake, in builds for the tests that must detect it.
    #[doc(hidden)]
    pub mutant: Option<Mutant>,
    /// Runs checkpoints and zeroing in the background. Without it, checkpoints run when the log is
    /// full.
    #[doc(hidden)]
    pub background: bool,
    /// Opens a pool for writing even if its link counts are wrong, to recount them.
    #[doc(hidden)]
    pub repairs: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            read_only: false,
            exclusive: false,
            domain: None,
            write_windows: WriteWindows::None,
            broker_socket: None,
            stall_timeout: Duration::from_secs(10),
            segment_mode: 0o600,
            segment_directory: None,
            zero_bytes_per_second: 256 << 20,
            zeroed_bytes: 1 << 30,
            boot: None,
            mutant: None,
            background: true,
            repairs: false,
        }
    }
}

impl OpenOptions {
    /// The corresponding options for the media.
    pub(crate) fn media(&self) -> media::OpenOptions {
        let options =
            media::OpenOptions::new().writable(!self.read_only).write_windows(self.write_windows);
        self.domain.into_iter().fold(options, media::OpenOptions::domain)
    }
}
