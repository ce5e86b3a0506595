//! The broker of a pool: grants write access to processes that may only read it.
//!
//! The kernel protects a pool from other users by the mode of its file and of its shared memory. A
//! reader has read-only descriptors, and nothing it does, by mistake or on purpose, reaches the
//! media. The broker runs as a user with write permission, listens at a Unix socket, and sends
//! three descriptors (`SCM_RIGHTS`) to a process that knows the *key*:
//!
//! | descriptor | how it is made |
//! |---|---|
//! | the pool file | opened anew for each client: locks belong to the open file, and each client needs its own |
//! | the segment | the broker's: nothing relies on whose its lock is, which only keeps the file from being removed |
//! | the pins | the broker's |
//!
//! With these the client is a writer like any other, and does not need the broker any more: it
//! commits, locks and recovers together with the other writers, even after the broker has ended or
//! was killed. Access that was granted cannot be revoked.
//!
//! # Keys
//! The broker keeps a salt and `SHA-256(salt ‖ label ‖ key)`, in memory only, and compares them in
//! constant time. A client sends its key only to a broker that runs as the pool's owner or as root
//! (`SO_PEERCRED`).
//!
//! # One broker per pool
//! A broker keeps a byte of the pool file locked (`membership`), so a pool has at most one broker,
//! and a socket that a dead broker left at the path can be removed.
//!
//! ```no_run
//! use std::os::fd::AsFd;
//! use aquifer_pool::{AccessKey, Broker, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The owner's process.
//! let key = AccessKey::create_file("data.pool.key")?;
//! let options = Pool::options().segment_mode(0o644);
//! let broker = Broker::bind(&options.open("data.pool")?, &key, &options)?;
//! let (stop, _until_dropped) = std::io::pipe()?;
//! broker.serve(stop.as_fd(), &|asked| eprintln!("{asked}"))?;
//! # Ok(())
//! # }
//!
//! // Another user's process.
//! # fn other() -> Result<(), Box<dyn std::error::Error>> {
//! let reader = Pool::options().read_only(true).open("data.pool")?;
//! let key = AccessKey::from_file("data.pool.key")?;
//! let writer = reader.grant_access(&key, &Pool::options())?;
//! assert!(writer.is_writable());
//! # Ok(())
//! # }
//! ```

mod client;
mod key;
mod message;

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_sys::local_socket::{Connection, Listener, Peer};

pub(crate) use self::client::{Granted, ask};
pub use self::key::AccessKey;
use self::key::KeyHash;
use self::message::{Answer, Request};
pub use crate::access_error::AccessError;
use crate::error::{PoolError, Result};
use crate::membership::{Byte, HeldByte};
use crate::options::PoolOptions;
use crate::pool::Pool;

/// The timeout for a client's request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Client threads at one time. Beyond that the accepting thread answers, and further clients wait.
const MOST_AT_ONCE: usize = 32;

/// The default path of the socket of a pool's broker.
pub fn socket_beside(pool: &Path) -> PathBuf {
    let mut path = pool.as_os_str().to_owned();
    path.push(".socket");
    path.into()
}

fn socket_of(pool: &Path, options: &PoolOptions) -> PathBuf {
    options.broker_socket.clone().unwrap_or_else(|| socket_beside(pool))
}

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

/// The broker of a pool, listening. See the module's documentation. Dropping it removes its socket.
#[derive(Debug)]
pub struct Broker {
    pool: Pool,
    listener: Listener,
    socket: SocketFile,
    key: KeyHash,
    _only_one: HeldByte,
}

/// The name of a socket in the file system.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode: another process may have replaced the socket before it is removed.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    fn identity(path: &Path) -> Option<(u64, u64)> {
        std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && self.identity == Self::identity(&self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Broker {
    /// Listens for processes that want to write to `pool`, which is open for writing and shared. A
    /// process that may read its shared memory ([`PoolOptions::segment_mode`]) may connect. Of the
    /// options, only [`PoolOptions::broker_socket`] is used.
    ///
    /// # Errors
    /// [`AccessError::BrokerRuns`], [`AccessError::SocketTaken`], [`AccessError::System`];
    /// [`PoolError::ReadOnly`] if the pool was opened for reading, [`PoolError::Parameter`] if it
    /// is not shared.
    pub fn bind(pool: &Pool, key: &AccessKey, options: &PoolOptions) -> Result<Broker> {
        let handle = &pool.core().handle;
        handle.check_writable()?;
        let path = handle.media.path();
        if handle.segment_id.is_nil() {
            return Err(PoolError::Parameter {
                what: "the way the pool is opened",
                value: "exclusive".to_owned(),
                reason: "a broker shares it",
            });
        }
        let socket = socket_of(path, options);
        let path_of_socket = socket.clone();
        let failed = |action: &'static str| {
            let socket = path_of_socket.clone();
            move |source| AccessError::System { action, socket, source }
        };
        let only_one = HeldByte::try_take(handle.media.file(), Byte::Broker)
            .map_err(failed("lock the pool for"))?;
        let Some(_only_one) = only_one else {
            return Err(AccessError::BrokerRuns { path: path.to_path_buf() }.into());
        };
        let listener = listen(&socket)?;
        let identity = SocketFile::identity(&socket);
        let socket = SocketFile { path: socket, identity };
        let mode = mode_of(handle.segment.file().expect("the pool is shared"))
            .map_err(failed("ask for the mode of"))?;
        // Connecting to a socket requires write permission.
        let mode = mode | (mode & 0o444) >> 1;
        std::fs::set_permissions(&socket.path, Permissions::from_mode(mode))
            .map_err(failed("set the mode of"))?;
        Ok(Broker { pool: pool.clone(), listener, socket, key: KeyHash::new(key)?, _only_one })
    }

    /// The path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket.path
    }

    /// Answers requests until `stop` becomes readable or its other end is closed; then finishes the
    /// requests that have begun, and returns. Calls `told` for each request, from several threads.
    ///
    /// # Errors
    /// [`AccessError::System`] if the socket fails.
    pub fn serve(&self, stop: BorrowedFd<'_>, told: &(dyn Fn(&Asked) + Sync)) -> Result<()> {
        let at_once = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            loop {
                let connection = match self.listener.accept(stop) {
                    Ok(Some(connection)) => connection,
                    Ok(None) => return Ok(()),
                    Err(error) if is_want_of_memory(&error) => {
                        // Retry until descriptors or memory are free: the connection stays pending.
                        std::thread::sleep(Duration::from_millis(100));
                        continue;
                    }
                    Err(source) => {
                        let socket = self.socket.path.clone();
                        return Err(
                            AccessError::System { action: "accept at", socket, source }.into()
                        );
                    }
                };
                // Relaxed: the limit need not be exact.
                let busy = at_once.fetch_add(1, Relaxed);
                let at_once = &at_once;
                let work = move || {
                    if let Some(asked) = self.answer(&connection) {
                        told(&asked);
                    }
                    at_once.fetch_sub(1, Relaxed);
                };
                if busy >= MOST_AT_ONCE {
                    work();
                } else {
                    let thread = std::thread::Builder::new().name("aquifer-broker".to_owned());
                    // If no thread can be started, the connection is closed, which rejects the
                    // client.
                    if thread.spawn_scoped(scope, work).is_err() {
                        at_once.fetch_sub(1, Relaxed);
                    }
                }
            }
        })
    }

    /// Answers one request. `None` if the client has closed the connection.
    fn answer(&self, connection: &Connection) -> Option<Asked> {
        connection.set_timeout(PATIENCE).ok()?;
        let peer = connection.peer().ok()?;
        let outcome = match Request::receive(connection) {
            Ok(request) => self.decide(&request),
            Err(_) => Outcome::NoRequest,
        };
        let outcome = match outcome {
            Outcome::Granted => self.grant(connection),
            refused => {
                // A client that does not wait for the answer does not need it.
                let _ = Answer::refusal(&refused).send(connection, &[]);
                refused
            }
        };
        Some(Asked { peer, outcome })
    }

    fn decide(&self, request: &Request) -> Outcome {
        if request.pool.is_some_and(|uuid| uuid != self.pool.uuid()) {
            Outcome::OtherPool
        } else if !self.key.fits(&request.key) {
            Outcome::WrongKey
        } else if let Err(error) = self.pool.core().handle.check_writable() {
            Outcome::Failed(error.to_string())
        } else {
            Outcome::Granted
        }
    }

    /// Sends the descriptors.
    fn grant(&self, connection: &Connection) -> Outcome {
        let answer = Answer::granted(self.pool.uuid(), self.pool.core().handle.segment_id);
        let opened = self.pool.files_to_pass().map_err(|error| error.to_string());
        let sent = opened.and_then(|files| {
            let files = files.each_ref().map(AsFd::as_fd);
            answer.send(connection, &files).map_err(|error| error.to_string())
        });
        match sent {
            Ok(()) => Outcome::Granted,
            Err(error) => {
                let failed = Outcome::Failed(error);
                let _ = Answer::refusal(&failed).send(connection, &[]);
                failed
            }
        }
    }
}

/// Listens at a path that is free, or has the socket of a broker that has ended.
fn listen(path: &Path) -> Result<Listener> {
    let failed = |source| AccessError::System { action: "listen at", socket: path.into(), source };
    let error = match Listener::bind(path) {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    if error.raw_os_error() != Some(libc::EADDRINUSE) {
        return Err(failed(error).into());
    }
    let is_socket =
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let refused = || Connection::connect(path, PATIENCE).err().and_then(|e| e.raw_os_error());
    if !is_socket || refused() != Some(libc::ECONNREFUSED) {
        return Err(AccessError::SocketTaken { socket: path.into() }.into());
    }
    std::fs::remove_file(path).map_err(failed)?;
    Ok(Listener::bind(path).map_err(failed)?)
}

fn mode_of(file: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(std::fs::File::from(file.try_clone_to_owned()?).metadata()?.mode() & 0o777)
}

fn is_want_of_memory(error: &io::Error) -> bool {
    let codes = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}
