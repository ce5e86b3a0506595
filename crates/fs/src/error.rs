//! What can go wrong with files.

use std::path::PathBuf;

use aquifer_pool::PoolError;

/// The result of an operation on files.
pub type Result<T> = std::result::Result<T, FsError>;

/// An operation on files that failed.
///
/// Each has the error number that the same call of the operating system would give: [`FsError::errno`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsError {
    /// Nothing has this name.
    #[error("{path}: there is nothing of this name", path = path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// Something has this name.
    #[error("{path}: something of this name is there already", path = path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// The name is longer than 255 bytes, or the path than 4,095.
    #[error("{path}: the name is too long; a name has at most 255 bytes, a path 4,095", path = path.display())]
    NameTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The name cannot be one: empty, or with a NUL in it.
    #[error("{path}: this cannot be a name: {reason}", path = path.display())]
    BadName {
        /// The path.
        path: PathBuf,
        /// Why not.
        reason: &'static str,
    },
    /// So many names of one hash are in a directory that no more fit.
    #[error("a directory has no room for this name; another name will do")]
    TooManyCollisions,
    /// The metadata of a file does not fit together.
    #[error(
        "{structure} is damaged ({reason}); run `aquifer pool check` and restore what it names from a backup"
    )]
    Damaged {
        /// Which structure.
        structure: String,
        /// What is wrong.
        reason: String,
    },
    /// The pool cannot do it.
    #[error(transparent)]
    Pool(#[from] PoolError),
}
