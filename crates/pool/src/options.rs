//! How to create and open a pool.

use std::path::PathBuf;
use std::time::Duration;

use crate::media::{self, PersistenceDomain, WriteWindows};
use crate::mutant::Mutant;

/// By how much the head is raised at a time: a gigabyte, or up to the end of a smaller pool.
pub(crate) const FRESH_STEP_PAGES: u64 = 1 << 18;

/// What a writer is to other writers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Company {
    /// It joins them.
    Among,
    /// It keeps them out, and tells them this.
    Sole(String),
    /// It belongs to the sole writer that has this nonce.
    Beside(u64),
    /// It changes no files.
    Passive,
}

/// How to create or open a pool: as [`std::fs::OpenOptions`], from
/// [`Pool::options`](crate::Pool::options). Each setter takes the options and returns them.
///
/// ```
/// use aquifer_pool::Pool;
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// let pool = Pool::options().log_bytes(1 << 20).create(&path, 16 << 20)?;
/// let reader = Pool::options().read_only(true).open(&path)?;
/// assert!(pool.is_writable() && !reader.is_writable());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct PoolOptions {
    pub(crate) read_only: bool,
    pub(crate) exclusive: bool,
    pub(crate) company: Company,
    pub(crate) domain: Option<PersistenceDomain>,
    pub(crate) write_windows: WriteWindows,
    pub(crate) broker_socket: Option<PathBuf>,
    pub(crate) check: bool,
    pub(crate) stall_timeout: Duration,
    pub(crate) segment_mode: u32,
    pub(crate) segment_directory: Option<PathBuf>,
    pub(crate) zero_bytes_per_second: u64,
    pub(crate) inodes: Option<u64>,
    pub(crate) log_bytes: Option<u64>,
    pub(crate) overwrite: bool,
    pub(crate) mode: u32,
    pub(crate) media_is_used: bool,
    pub(crate) background: bool,
    /// The features of a new pool; by default those that it has room for.
    pub(crate) features: Option<u64>,
    // The rest is for tests and repairs.
    /// The life that the media are taken to be in, for tests of power cuts.
    pub(crate) boot: Option<u64>,
    /// A deliberate mistake, which tests must detect.
    pub(crate) mutant: Option<Mutant>,
    /// By how many pages the first fresh page is raised at a time.
    pub(crate) fresh_step_pages: u64,
    /// Opens a pool for writing even if its link counts are wrong, to recount them.
    pub(crate) repairs: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        PoolOptions {
            read_only: false,
            exclusive: false,
            company: Company::Among,
            domain: None,
            write_windows: WriteWindows::None,
            broker_socket: None,
            check: false,
            stall_timeout: Duration::from_secs(10),
            segment_mode: 0o600,
            segment_directory: None,
            zero_bytes_per_second: 256 << 20,
            inodes: None,
            log_bytes: None,
            overwrite: false,
            mode: 0o600,
            media_is_used: false,
            background: true,
            features: None,
            boot: None,
            mutant: None,
            fresh_step_pages: FRESH_STEP_PAGES,
            repairs: false,
        }
    }
}

/// For opening a pool, and for the handle that creating one returns.
impl PoolOptions {
    /// Opens for reading only. Off by default.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Keeps all other processes out, and needs no shared memory. Off by default.
    pub fn exclusive(mut self, exclusive: bool) -> Self {
        self.exclusive = exclusive;
        self
    }

    /// Keeps other writers out as long as the pool is open, and tells them why: for a server that must
    /// know that files change only through it. Others get [`PoolError::SoleWriter`], with the note,
    /// which says what to do; it is cut at 256 bytes. If there is a writer, opening fails with
    /// [`PoolError::HasWriters`]. Readers are let in, and so are writers that change no files
    /// ([`PoolOptions::passive`]) or belong to this one ([`PoolOptions::beside`]). It replaces both, and
    /// has no effect on a handle that only reads.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// use aquifer_pool::{Pool, PoolError};
    ///
    /// let pool = Pool::options().sole("mounted at /mnt; unmount it").open(&path)?;
    /// assert!(matches!(Pool::open(&path), Err(PoolError::SoleWriter { .. })));
    /// let nonce = pool.sole_nonce().expect("it is the sole writer");
    /// let second = Pool::options().beside(nonce).open(&path)?;
    /// let reader = Pool::options().read_only(true).open(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [`PoolError::SoleWriter`]: crate::PoolError::SoleWriter
    /// [`PoolError::HasWriters`]: crate::PoolError::HasWriters
    pub fn sole(mut self, note: impl Into<String>) -> Self {
        self.company = Company::Sole(note.into());
        self
    }

    /// Opens the pool for writing beside the sole writer that has this
    /// [nonce](crate::Pool::sole_nonce): for another process of the same server. Once that writer is
    /// gone, opening fails with [`PoolError::Parameter`](crate::PoolError::Parameter); a handle that
    /// has joined it before stays, and counts as a writer among others.
    pub fn beside(mut self, nonce: u64) -> Self {
        self.company = Company::Beside(nonce);
        self
    }

    /// Opens the pool only to keep it open, or to make it durable: changes of files and objects, stores
    /// to their bytes, and what announces them ([`InodeUse::Writable`](crate::InodeUse), exclusive locks
    /// of inodes) fail with [`PoolError::ReadOnly`](crate::PoolError::ReadOnly), and no
    /// [sole writer](PoolOptions::sole) keeps this handle out, or is kept out by it. Off by default.
    pub fn passive(mut self, passive: bool) -> Self {
        if passive {
            self.company = Company::Passive;
        } else if self.company == Company::Passive {
            self.company = Company::Among;
        }
        self
    }

    /// Treats the media as this domain, whatever they are: for tests. Detected by default.
    pub fn domain(mut self, domain: PersistenceDomain) -> Self {
        self.domain = Some(domain);
        self
    }

    /// Protects the media against stray stores of this process, if it opens them for writing. They
    /// are not protected by default.
    pub fn write_windows(mut self, write_windows: WriteWindows) -> Self {
        self.write_windows = write_windows;
        self
    }

    /// Reads and checks all metadata when the pool is opened by its first process, also after a
    /// clean close, as after a crash: inconsistencies that a forged checksum hides are found before
    /// anything is changed. Off by default: each page of metadata is checked when it is first used.
    pub fn check(mut self, check: bool) -> Self {
        self.check = check;
        self
    }

    /// The socket of the pool's [broker](crate::broker); by default beside the pool. See
    /// [`open_granted`](PoolOptions::open_granted).
    pub fn broker_socket(mut self, broker_socket: impl Into<PathBuf>) -> Self {
        self.broker_socket = Some(broker_socket.into());
        self
    }

    /// How long to wait for a process that holds a lock, or has begun a commit, and makes no
    /// progress (it was stopped, or hangs); 10 s by default. Then the call fails with
    /// [`PoolError::Stalled`](crate::PoolError::Stalled), which names that process.
    pub fn stall_timeout(mut self, stall_timeout: Duration) -> Self {
        self.stall_timeout = stall_timeout;
        self
    }

    /// Permissions of the shared memory; 0o600 by default. A process that opens the pool for
    /// writing needs to read and write it, one that opens it for reading while a writer has it open
    /// needs to read it.
    pub fn segment_mode(mut self, segment_mode: u32) -> Self {
        self.segment_mode = segment_mode;
        self
    }

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
    pub fn segment_directory(mut self, segment_directory: impl Into<PathBuf>) -> Self {
        self.segment_directory = Some(segment_directory.into());
        self
    }

    /// How many bytes of free pages are zeroed per second in the background; 256 MiB by default, 0
    /// turns this off. An allocation that needs zeros and finds none zeroes pages itself.
    pub fn zero_bytes_per_second(mut self, zero_bytes_per_second: u64) -> Self {
        self.zero_bytes_per_second = zero_bytes_per_second;
        self
    }

    /// Whether this handle may start threads, each when it is first needed: one makes checkpoints
    /// once the log is half full, one zeroes free pages, and one reports progress to other threads
    /// and processes while a call of this handle waits for the media. On by default.
    ///
    /// Without them, checkpoints run when the log is full and allocations zero what they need; and
    /// a call that waits for the media for longer than the
    /// [`stall_timeout`](PoolOptions::stall_timeout) of those that wait for it makes these fail with
    /// [`PoolError::Stalled`](crate::PoolError::Stalled).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// use aquifer_pool::Pool;
    ///
    /// let pool = Pool::options().background(false).open(&path)?;
    /// pool.sync()?; // in this thread
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }
}

/// For creating a pool.
impl PoolOptions {
    /// How many slots the pool has for inodes and their parts: an object takes one; a file takes
    /// one, and its name a tenth. By default one for each 16 KiB, at most 131,072. Each takes 512
    /// bytes on media, and once read or changed, as much memory while the pool is open.
    pub fn inodes(mut self, inodes: u64) -> Self {
        self.inodes = Some(inodes);
        self
    }

    /// Length of the log; by default a quarter of the pool, between 64 KiB and 128 MiB.
    pub fn log_bytes(mut self, log_bytes: u64) -> Self {
        self.log_bytes = Some(log_bytes);
        self
    }

    /// Whether an existing file that is not empty is overwritten. Off by default.
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// The permissions of a new file, minus the process's umask. 0o600 by default.
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }

    /// For [`create_on`](PoolOptions::create_on): whether the media may contain anything but zeros.
    /// Then only pages that are zeroed later are taken to be zero. Off by default.
    pub fn media_is_used(mut self, media_is_used: bool) -> Self {
        self.media_is_used = media_is_used;
        self
    }
}

/// For tests of this crate and those above it.
#[cfg(feature = "mutants")]
impl PoolOptions {
    /// Treats this as the life that the media are in: for tests of power cuts.
    pub fn boot(mut self, boot: u64) -> Self {
        self.boot = Some(boot);
        self
    }

    /// Makes a deliberate mistake, which the tests must detect.
    pub fn mutant(mut self, mutant: Option<Mutant>) -> Self {
        self.mutant = mutant;
        self
    }

    /// Creates the pool with exactly these features.
    pub fn features(mut self, features: u64) -> Self {
        self.features = Some(features);
        self
    }

    /// Raises the first fresh page by this many pages at a time, instead of by a gigabyte: pools of
    /// tests are smaller.
    pub fn fresh_step_pages(mut self, fresh_step_pages: u64) -> Self {
        self.fresh_step_pages = fresh_step_pages;
        self
    }
}

impl PoolOptions {
    /// The corresponding options to open a pool alone and convert it.
    pub(crate) fn to_convert(&self) -> PoolOptions {
        PoolOptions {
            exclusive: true,
            background: false,
            segment_directory: self.segment_directory.clone(),
            ..PoolOptions::default()
        }
    }

    /// The corresponding options to open media.
    pub(crate) fn to_open_media(&self) -> media::OpenOptions {
        let options =
            media::OpenOptions::new().writable(!self.read_only).write_windows(self.write_windows);
        self.domain.into_iter().fold(options, media::OpenOptions::domain)
    }

    /// The corresponding options to create media.
    pub(crate) fn to_create_media(&self) -> media::CreateOptions {
        let options = media::CreateOptions::new()
            .overwrite(self.overwrite)
            .mode(self.mode)
            .write_windows(self.write_windows);
        self.domain.into_iter().fold(options, media::CreateOptions::domain)
    }
}
