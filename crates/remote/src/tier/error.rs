//! Errors of a tier.

use std::io;
use std::path::{Path, PathBuf};

/// An error of a tier's directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// Another user could read or change it.
    #[error("{}: not used as a tier: {reason}", path.display())]
    NotPrivate {
        /// The directory, or a file in it.
        path: PathBuf,
        /// The problem, and a remedy.
        reason: &'static str,
    },
    /// A file of the tier is not one, or a crash has damaged it.
    #[error("{}: damaged: {reason}; remove it, it is only a copy", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: &'static str,
    },
    /// Another process holds a lock for longer than any work under it takes.
    #[error("{}: locked by a process that does not go on; continue or end it", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// The system refused an operation.
    #[error("{}: {what}: {source}", path.display())]
    System {
        /// The directory, or a file in it.
        path: PathBuf,
        /// What was attempted.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl TierError {
    pub(super) fn system(path: &Path, what: &'static str, source: io::Error) -> TierError {
        TierError::System { path: path.to_owned(), what, source }
    }

    /// The disk, or the user's part of it, is full.
    pub(super) fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, TierError::System { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }

    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, TierError::System { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}
