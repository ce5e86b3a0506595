//! Why a mount fails.

use std::io;
use std::path::PathBuf;

use crate::fusermount::FusermountError;

/// Why a pool could not be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The device of FUSE cannot be opened.
    #[error("cannot open /dev/fuse: {0}")]
    Device(#[source] io::Error),
    /// The kernel does not mount it.
    #[error("cannot mount at {}: {source}", path.display())]
    Mount {
        /// Where.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// `fusermount3` does not mount it.
    #[error(transparent)]
    Fusermount(#[from] FusermountError),
    /// The kernel and this program have no common protocol.
    #[error("the kernel's FUSE is too old, it takes Linux 5.15: {0}")]
    Protocol(#[source] io::Error),
    /// Other processes may change the pool, which the kernel would not notice.
    #[error(
        "the pool was not opened as its sole writer (PoolOptions::sole), so files could change unseen; Cache::Shared permits that"
    )]
    NotSole,
    /// Threads or memory for the server.
    #[error("cannot start serving: {0}")]
    Start(#[source] io::Error),
    /// Another process of the mount says why.
    #[error("{0}")]
    Refused(String),
    /// It was mounted, and no process can serve it any more.
    #[error("the mount has ended: {0}")]
    Ended(String),
    /// The mount would hide what its own server needs.
    #[error("{} is below {}, which the mount would hide; mount it elsewhere", path.display(), directory.display())]
    Hidden {
        /// The pool, the program, or the directory of the shared memory.
        path: PathBuf,
        /// The directory.
        directory: PathBuf,
    },
    /// The pool.
    #[error(transparent)]
    Pool(#[from] aquifer_fs::FsError),
}
