//! Why there is no access.

use std::io;
use std::path::{Path, PathBuf};

/// Access was not had from a pool's broker, or a broker could not begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// Nobody listens at the socket.
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
    /// The broker is that of another pool.
    #[error("the broker at {} is that of another pool than {}", socket.display(), pool.display())]
    OtherPool {
        /// The socket.
        socket: PathBuf,
        /// The pool that was wanted.
        pool: PathBuf,
    },
    /// Who listens is neither the pool's owner nor root, and was told nothing.
    #[error(
        "user {uid} listens at {}, and the pool belongs to user {owner}: the key was not sent; ask the owner",
        socket.display()
    )]
    NotTheOwner {
        /// The socket.
        socket: PathBuf,
        /// Who listens.
        uid: u32,
        /// Whose the pool is.
        owner: u32,
    },
    /// The broker knows the key, and could not hand the pool out.
    #[error("the broker at {} cannot give access: {reason}", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// What it says.
        reason: String,
    },
    /// What came back is no answer of a broker.
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
    /// The pool has a broker already.
    #[error("{} has a broker already: one is enough", path.display())]
    BrokerRuns {
        /// The pool.
        path: PathBuf,
    },
    /// Something else is where the socket is to be.
    #[error("{} is in use, or is no socket; choose another path (`--socket`)", socket.display())]
    SocketTaken {
        /// The socket.
        socket: PathBuf,
    },
    /// A key is none that can be used.
    #[error("the key{} cannot be used: {problem}", path_text(path.as_deref()))]
    BadKey {
        /// The file it comes from.
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
