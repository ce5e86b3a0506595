//! Keeping a pool open, so that other processes join it.
//!
//! The first process that opens a pool reads its state from the media, and the last one writes it
//! back. While any process has it open for writing, others only join. So a process that does nothing
//! else makes all others start fast, however often they come and go.
//!
//! A pool that has failed stays read-only while any process has it open. So such a process must not
//! go on then: [`keep`] ends.

use std::fs::Metadata;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use aquifer::Pool;
use aquifer_sys::credentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How often [`keep`] looks at the pool.
const LOOK_SECONDS: i64 = 1;
/// How long to wait for a service manager that takes no messages now.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(1);

/// Keeps a pool open until `ending` is readable. What processes that have left did is durable when
/// this returns.
///
/// # Errors
/// The pool can be changed no more, which is noticed within a second
/// ([`Pool::check_usable`]): the caller then closes it, so that a process that opens it next can
/// recover it. Or the last changes cannot be made durable.
pub fn keep(pool: &Pool, ending: BorrowedFd<'_>) -> Result<()> {
    let look = Timespec { tv_sec: LOOK_SECONDS, tv_nsec: 0 };
    loop {
        pool.check_usable()?;
        // Processes that only read cannot do it, and compare all names until then. Whatever fails: the
        // next look is another try.
        let _ = pool.index_names();
        let mut ended = [PollFd::from_borrowed_fd(ending, PollFlags::IN)];
        match poll(&mut ended, Some(&look)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            waited => {
                waited.context("cannot wait for signals")?;
                break;
            }
        }
    }
    // Closing the pool reports no errors.
    pool.sync_data()?;
    pool.checkpoint()?;
    Ok(())
}

/// The mode of the shared memory of a pool in a file with this metadata: processes that may read the
/// pool may read it. The memory belongs to this process's group, so it is closed to groups if the
/// pool has another group.
pub fn shared_mode(metadata: &Metadata) -> u32 {
    let same_group = metadata.gid() == credentials::effective().gid;
    let others = if same_group { 0o044 } else { 0o004 };
    0o600 | metadata.mode() & others
}

/// Tells the service manager that started this process that it is ready, if one waits for that
/// (`sd_notify`: the socket that `NOTIFY_SOCKET` names). Waits at most a second until the manager
/// takes it.
///
/// # Errors
/// The system's errors. They are no reason to end: the pool is open.
pub fn notify_ready() -> io::Result<()> {
    let socket = std::env::var_os("NOTIFY_SOCKET").unwrap_or_default();
    let address = match socket.as_bytes() {
        [] => return Ok(()),
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(Path::new(std::ffi::OsStr::from_bytes(path)))?,
    };
    let own = UnixDatagram::unbound()?;
    own.set_write_timeout(Some(NOTIFY_TIMEOUT))?;
    own.send_to_addr(b"READY=1\n", &address).map(drop)
}
