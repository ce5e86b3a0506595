//! The server side: checks keys, and passes descriptors on.

use std::any::Any;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_sys::io::reopen;
use aquifer_sys::local_socket::{Connection, Listener};

use super::key::{AccessKey, KeyHash};
use super::message::{Answer, Request};
use super::outcome::{Asked, Outcome};
use super::socket::socket_of;
use crate::access_error::AccessError;
use crate::error::{PoolError, Result};
use crate::media::OpenError;
use crate::metadata::core::Core;
use crate::options::PoolOptions;
use crate::shared::membership::{Byte, HeldByte};

/// The timeout for a client's request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Client threads at one time. Beyond that the accepting thread answers, and further clients wait.
const MOST_AT_ONCE: usize = 32;

/// The broker of a pool, listening. See the module's documentation. Dropping it removes its socket.
#[derive(Debug)]
pub struct Broker {
    core: Arc<Core>,
    /// Keeps the pool open.
    _keeps_open: Arc<dyn Any + Send + Sync>,
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
    /// As [`Broker::bind`], of the pool that `keeps_open` keeps open.
    pub(crate) fn bind_to(
        core: Arc<Core>,
        keeps_open: Arc<dyn Any + Send + Sync>,
        key: &AccessKey,
        options: &PoolOptions,
    ) -> Result<Broker> {
        let handle = &core.handle;
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
        let key = KeyHash::new(key)?;
        Ok(Broker { core, _keeps_open: keeps_open, listener, socket, key, _only_one })
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
        if request.pool.is_some_and(|uuid| uuid != self.core.handle.uuid) {
            Outcome::OtherPool
        } else if !self.key.fits(&request.key) {
            Outcome::WrongKey
        } else if let Err(error) = self.core.handle.check_writable() {
            Outcome::Failed(error.to_string())
        } else {
            Outcome::Granted
        }
    }

    /// Sends the descriptors.
    fn grant(&self, connection: &Connection) -> Outcome {
        let answer = Answer::granted(self.core.handle.uuid, self.core.handle.segment_id);
        let opened = files_to_pass(&self.core).map_err(|error| error.to_string());
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

/// Descriptors of the pool file, of the segment and of the pins.
pub(crate) fn files_to_pass(core: &Core) -> Result<[OwnedFd; 3]> {
    core.handle.members.check_process()?;
    core.handle.members.check_kept_now()?;
    core.handle.check_writable()?;
    let failed = |source| OpenError::of(core.handle.media.path(), source);
    let file = reopen(core.handle.media.file(), libc::O_RDWR).map_err(failed)?;
    let [Some(segment), Some(pins)] = [core.handle.segment.file(), core.pins.places.file()] else {
        return Err(PoolError::Parameter {
            what: "the pool to pass on",
            value: core.handle.media.path().display().to_string(),
            reason: "this process has it for itself",
        });
    };
    let again = |file: BorrowedFd<'_>| file.try_clone_to_owned().map_err(failed);
    Ok([file, again(segment)?, again(pins)?])
}
