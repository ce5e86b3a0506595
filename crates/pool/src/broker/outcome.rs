//! What a broker has decided.

use aquifer_sys::local_socket::Peer;

/// The outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// Access to the pool was granted.
    Granted,
    /// The key was wrong.
    WrongKey,
    /// The request named another pool.
    OtherPool,
    /// The message was not a request, or none arrived.
    NoRequest,
    /// The key was right, but the broker could not grant access.
    Failed(String),
}

/// A request that a broker has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The requesting process, as the kernel reports it.
    pub peer: Peer,
    /// The outcome.
    pub outcome: Outcome,
}

impl std::fmt::Display for Asked {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Peer { pid, uid, gid } = self.peer;
        let outcome = match &self.outcome {
            Outcome::Granted => "granted",
            Outcome::WrongKey => "refused: wrong key",
            Outcome::OtherPool => "refused: asked for another pool",
            Outcome::NoRequest => "refused: no request came",
            Outcome::Failed(reason) => &format!("failed: {reason}"),
        };
        write!(formatter, "process {pid}, user {uid}, group {gid}: {outcome}")
    }
}
