//! Errors of access to a pool through its [broker](crate::broker).

use std::io;
use std::path::{Path, PathBuf};

/// A broker did not grant access to a pool, or could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// No process listens at the socket.
    #[error(
        "no broker listens at {} ({source}); start one with `aquifer pool serve`, or name its socket",
        socket.display()
    )]
    NoBroker {
        /// The socket.
        socket: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The key is not the broker's.
    #[error("the broker at {} does not take this key", socket.display())]
    WrongKey {
        /// The socket.
        socket: PathBuf,
    },
    /// The broker serves another pool.
    #[error("the broker at {} is that of another pool than {}", socket.display(), pool.display())]
    OtherPool {
        /// The socket.
        socket: PathBuf,
        /// The pool that was wanted.
        pool: PathBuf,
    },
    /// The listening process runs neither as the pool's owner nor as root; it was sent nothing.
    #[error(
        "user {uid} listens at {}, and the pool belongs to user {owner}: the key was not sent; ask the owner",
        socket.display()
    )]
    NotTheOwner {
        /// The socket.
        socket: PathBuf,
        /// The user that listens.
        uid: u32,
        /// The pool's owner.
        owner: u32,
    },
    /// The key was right, but the broker could not grant access.
    #[error("the broker at {} cannot give access: {reason}", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// The broker's reason.
        reason: String,
    },
    /// The answer is not that of a broker of this version.
    #[error("what listens at {} is no broker of this version: {problem}", socket.display())]
    NoAnswer {
        /// The socket.
        socket: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The broker ended before the pool was open.
    #[error("the broker of {} ended before the pool was open; ask again", path.display())]
    Ended {
        /// The pool.
        path: PathBuf,
    },
    /// The pool already has a broker.
    #[error("{} has a broker already: one is enough", path.display())]
    BrokerRuns {
        /// The pool.
        path: PathBuf,
    },
    /// Another file or a live socket is at the socket's path.
    #[error("{} is in use, or is no socket; choose another path (`--socket`)", socket.display())]
    SocketTaken {
        /// The socket.
        socket: PathBuf,
    },
    /// A key cannot be used.
    #[error("the key{} cannot be used: {problem}", path_text(path.as_deref()))]
    BadKey {
        /// The file with the key.
        path: Option<PathBuf>,
        /// What is wrong with it.
        problem: String,
    },
    /// The system refused.
    #[error("cannot {action} {}: {source}", socket.display())]
    System {
        /// What was being done.
        action: &'static str,
        /// The socket.
        socket: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl AccessError {
    pub(crate) fn ended(pool: &Path) -> AccessError {
        AccessError::Ended { path: pool.to_path_buf() }
    }
}

fn path_text(path: Option<&Path>) -> String {
    path.map(|path| format!(" in {}", path.display())).unwrap_or_default()
}
