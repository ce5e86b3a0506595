//! The tier: a directory on a local disk that keeps what devices have downloaded, for all processes of a node, and over
//! restarts.
//!
//! # How it works
//! Of each version of an object there is one sparse file, with a *proof* for each 4 KiB: a hash over the object's key,
//! the place and the bytes ([`layout`]). A reader copies bytes out and then checks the proof of what it copied. So
//! there is no order that writes have to keep and nothing to recover: bytes that a power cut lost, that a crash left half
//! written, that a disk returns wrongly, or that eviction replaced by a hole while they were read, do not match, and
//! are downloaded again. **Nothing is ever synchronised to the disk.** A tier is disposable: removing the directory loses
//! downloads only.
//!
//! # Sharing
//! There is no server and no owner. Before a download, its sub-blocks are *leased*: locked, as bytes of the file,
//! by open-file-description locks, which end with their holder, also in another container. Other processes wait for
//! the lease and find the bytes, or download themselves if its holder died or takes too long. A lease saves
//! requests; nothing is wrong without it.
//!
//! Locks that a forked child shared would outlive their owner, so a child has none of these files.
//!
//! The budget, an estimate of its use and the clock's hand are in the control file, changed under its lock by
//! openers that are about to write ([`evict`]).
//!
//! # Trust
//! The directory and its files must belong to the caller, with no access for other users; otherwise they are refused
//! ([`directory`]). Processes of the same user are trusted with the bytes: they could write matching proofs.
//!
//! # Failure
//! A full disk makes a tier smaller than its budget: it evicts a part of itself and writes again. A tier that cannot be
//! written then, or for another reason (an I/O error, a limit of file lengths, files removed while in use), is written no
//! more by this device, which says so in its statistics and goes on without. What it holds is still read.
//!
//! A process may be killed anywhere: a block has a state before it has bytes, so eviction finds what it leaves. The
//! `crash` tests enumerate what kills, power cuts and misdirected writes leave.
//!
//! # Locks
//! `leased` of an [`ObjectFile`], then the file's lease locks, which are tried only. The control file's lock, then
//! leases, tried only, by eviction. No lock is waited for without a limit: a process that is stopped with one costs the
//! others the tier ([`TierError::Busy`]), not their progress.

#[cfg(test)]
mod crash;
mod directory;
mod error;
mod evict;
#[cfg(test)]
mod hooks;
mod inspect;
mod layout;
mod object;
#[cfg(test)]
mod odd;
mod open;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use error::TierError;
pub use inspect::{TierInfo, TierObject, TierVerification};
pub(crate) use layout::{SUB_BLOCK_BYTES, digest};
pub(crate) use open::{Obtained, OpenTier, Tally, Terms};

use directory::{ControlFile, Directory};

/// Names the directory of [`Tier::default_path`].
const VARIABLE: &str = "AQUIFER_TIER";

/// A directory on a local disk in which devices keep what they download, shared by the processes of a user on a node; see
/// [`RemoteOptions::tier`](crate::RemoteOptions::tier).
///
/// ```
/// use aquifer_remote::Tier;
///
/// # let directory = tempfile::tempdir()?;
/// let tier = Tier::open(directory.path().join("tier"))?;
/// tier.set_budget_bytes(10 << 30)?;
/// assert_eq!(tier.info()?.objects.len(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tier {
    directory: Directory,
    /// Held open, so that only the first opener counts what is used.
    _present: Arc<ControlFile>,
}

impl Tier {
    /// Opens a tier, making the directory (mode 0700) if it is missing.
    ///
    /// Its budget is what [`Tier::set_budget_bytes`] has set, or else a quarter of what the file system had free when the tier
    /// was made.
    ///
    /// # Errors
    /// [`TierError::NotPrivate`] if other users own or may access the directory; [`TierError::System`].
    pub fn open(path: impl AsRef<Path>) -> Result<Tier, TierError> {
        let directory = Directory::open(path.as_ref())?;
        let _present = Arc::new(control(&directory)?);
        Ok(Tier { directory, _present })
    }

    /// The directory that the environment names: `AQUIFER_TIER`, or `aquifer/tier` in `XDG_CACHE_HOME`, or in
    /// `.cache` in `HOME`; none if no variable is set.
    pub fn default_path() -> Option<PathBuf> {
        let named = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(path) = named(VARIABLE) {
            return Some(path.into());
        }
        let caches = named("XDG_CACHE_HOME").map(PathBuf::from);
        let caches = caches.or_else(|| Some(PathBuf::from(named("HOME")?).join(".cache")));
        Some(caches?.join("aquifer").join("tier"))
    }

    /// The directory, as an absolute path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Sets how many bytes of the disk the tier's files may take, for all processes; what exceeds it is evicted at once,
    /// except for what is being downloaded.
    ///
    /// # Errors
    /// [`TierError`].
    pub fn set_budget_bytes(&self, budget_bytes: u64) -> Result<(), TierError> {
        self.control()?.change(|state| {
            state.budget_bytes = budget_bytes;
            evict::shrink(&self.directory, state, |_| budget_bytes)
        })?
    }

    fn control(&self) -> Result<ControlFile, TierError> {
        control(&self.directory)
    }
}

fn control(directory: &Directory) -> Result<ControlFile, TierError> {
    ControlFile::open(directory, || evict::repair(directory))
}
