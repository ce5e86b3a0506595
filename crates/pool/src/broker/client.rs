//! The client side: requests access from a broker.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use aquifer_sys::local_socket::Connection;
use uuid::Uuid;

use super::key::AccessKey;
use super::message::{Answer, Request, Status};
use super::socket::socket_of;
use crate::access_error::AccessError;
use crate::error::Result;
use crate::open::recovery::Shared;
use crate::options::PoolOptions;

/// What a broker has granted.
pub(crate) struct Granted {
    /// The pool file, open for writing, in an open file that no other process shares.
    pub file: OwnedFd,
    pub shared: Shared,
}

/// Asks the broker of the pool at `path`, which has this `metadata`, for write access.
pub(crate) fn ask(
    path: &Path,
    metadata: &Metadata,
    pool: Option<Uuid>,
    key: &AccessKey,
    options: &PoolOptions,
) -> Result<Granted> {
    let socket = socket_of(path, options);
    let no_answer = |error: io::Error| {
        let problem = match error.kind() {
            io::ErrorKind::WouldBlock => "it says nothing".to_owned(),
            io::ErrorKind::UnexpectedEof => "it closes the connection".to_owned(),
            _ => error.to_string(),
        };
        AccessError::NoAnswer { socket: socket.clone(), problem }
    };
    let other_pool = || AccessError::OtherPool { socket: socket.clone(), pool: path.into() };

    // A timeout of zero would mean no limit.
    let timeout = options.stall_timeout.max(Duration::from_millis(1));
    let connection = Connection::connect(&socket, timeout).map_err(|source| {
        let socket = socket.clone();
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ECONNREFUSED) => AccessError::NoBroker { socket, source },
            _ => AccessError::System { action: "connect to", socket, source },
        }
    })?;
    let (uid, owner) = (connection.peer().map_err(no_answer)?.uid, metadata.uid());
    if uid != owner && uid != 0 {
        return Err(AccessError::NotTheOwner { socket, uid, owner }.into());
    }
    Request::send(pool, key, &connection).map_err(no_answer)?;
    let (answer, files) = Answer::receive(&connection).map_err(no_answer)?;
    match answer.status {
        Status::Granted => {}
        Status::WrongKey => return Err(AccessError::WrongKey { socket }.into()),
        Status::OtherPool => return Err(other_pool().into()),
        Status::NoRequest => {
            return Err(no_answer(io::Error::other("it does not understand the request")).into());
        }
        Status::Failed => {
            return Err(AccessError::Refused { socket, reason: answer.reason }.into());
        }
    }
    let Ok([file, segment, pins]) = <[OwnedFd; 3]>::try_from(files) else {
        return Err(no_answer(io::Error::other("it sends other descriptors than agreed")).into());
    };
    let file = File::from(file);
    let found = file.metadata().map_err(no_answer)?;
    if identity(&found) != identity(metadata) {
        return Err(other_pool().into());
    }
    let shared = Shared { segment_id: Some(answer.segment_id), segment, pins };
    Ok(Granted { file: file.into(), shared })
}

/// Identifies a file, or a device by its number.
fn identity(metadata: &Metadata) -> (u64, u64, u64) {
    match metadata.rdev() {
        0 => (metadata.dev(), metadata.ino(), 0),
        device => (0, 0, device),
    }
}
