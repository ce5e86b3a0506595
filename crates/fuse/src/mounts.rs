//! Pools that are mounted, whichever process serves them, and how such a mount ends.
//!
//! Nothing here asks a server, which may not answer: the kernel's table of mounts tells what is
//! mounted where. Whether the pool of a mount is closed tells a socket whose name begins with the number
//! of the connection ([`announce`]): its keeper listens there, answers nothing, and closes it behind the
//! pool. So it does not matter what the path of the pool is by then. The kernel gives the number to the
//! next mount at once, perhaps before that: so the name has a random part, and [`unmount`] connects before it
//! unmounts. Where there is none, for a process that
//! serves a mount by itself, the pool tells which processes have it open.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquifer_pool::Pool;
use aquifer_sys::credentials;
use aquifer_sys::local_socket::{self, Connection, Listener};
use aquifer_sys::mount;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::fusermount;

/// The type of the file system, as the kernel shows it.
const KIND: &[u8] = b"fuse.aquifer";
/// How long to wait before the pool is looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long to wait for sockets of keepers whose queues are full.
const CONNECT: Duration = Duration::from_secs(1);

/// A pool that is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MountedPool {
    /// What was mounted: the path of the pool, unless [`MountOptions::source`](crate::MountOptions)
    /// says otherwise.
    pub source: PathBuf,
    /// Where.
    pub directory: PathBuf,
    /// Whether nothing can be changed there.
    pub read_only: bool,
    /// The number of the connection, in `/sys/fs/fuse/connections`.
    pub connection: u32,
    /// How many requests have no answer yet; `None` where the kernel does not show it to this user.
    pub waiting: Option<u64>,
    /// The user that has mounted it.
    user: Option<u32>,
}

/// What became of a mount that a directory does not show any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unmounted {
    /// The processes that served it have closed the pool.
    Closed,
    /// It is mounted at another directory too, and goes on there.
    Elsewhere,
    /// Nothing was waited for, as it is not known which process serves it: one that does so by itself
    /// ([`Mount`](crate::Mount)), of a pool that is shared, or that the source of the mount does not
    /// name; or a keeper in another network namespace.
    NotWaited,
}

/// Why a pool is still mounted, or still open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnmountError {
    /// Nothing to unmount.
    #[error("no pool is mounted at {}", path.display())]
    NotMounted {
        /// The directory.
        path: PathBuf,
    },
    /// Programs use it.
    #[error("{} is in use: a program has a file of it open, or works in a directory of it", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// The system refuses it.
    #[error("cannot unmount {}: {source}", path.display())]
    Refused {
        /// The directory.
        path: PathBuf,
        /// The system's error, or that of `fusermount3`.
        source: io::Error,
    },
    /// It is unmounted, and its server has the pool open: it writes to it, or programs still use
    /// what was unmounted lazily.
    #[error("unmounted, but after {} s the process that served it still has {} open: it writes to it, or the mount is used, or shown in another mount namespace", waited.as_secs(), pool.display())]
    StillOpen {
        /// The pool.
        pool: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
    /// The table of mounts.
    #[error("cannot read /proc/self/mountinfo: {0}")]
    Table(#[source] io::Error),
}

/// The pools that are mounted in this process's mount namespace, in the order in which they were
/// mounted.
///
/// # Errors
/// Those of reading `/proc/self/mountinfo`.
pub fn mounts() -> io::Result<Vec<MountedPool>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mut found: Vec<_> = table.split(|&byte| byte == b'\n').filter_map(parse).collect();
    for mounted in &mut found {
        let path = format!("/sys/fs/fuse/connections/{}/waiting", mounted.connection);
        let waiting = std::fs::read_to_string(path).ok();
        mounted.waiting = waiting.and_then(|count| count.trim().parse().ok());
    }
    Ok(found)
}

/// What the name of the socket of a mount's keeper begins with.
fn socket_prefix(connection: u32) -> String {
    format!("aquifer-mount-{connection}-")
}

/// Lets [`unmount`] wait until this is dropped. `None` where that is not possible.
pub(crate) fn announce(connection: u32) -> Option<Listener> {
    let name =
        format!("{}{:x}", socket_prefix(connection), RandomState::new().hash_one(connection));
    Listener::bind_name(name.as_bytes()).ok()
}

/// Returns `true` if a keeper of this process's user keeps connections of processes of that user: any
/// process can connect, and only these users can unmount.
pub(crate) fn may_wait(user: u32) -> bool {
    user == 0 || user == credentials::effective().uid
}

/// Connections to the keeper of a mount. Another one may not have closed its pool yet, whose mount had
/// the same number. Any process could take such a name, so those of other users do not count. Nor does
/// a keeper that does not keep this process's connection: see [`may_wait`].
fn keepers_of(mounted: &MountedPool) -> Vec<Connection> {
    let own = credentials::effective().uid;
    if own != 0 && Some(own) != mounted.user {
        return Vec::new();
    }
    let prefix = socket_prefix(mounted.connection);
    let names = local_socket::names_beginning(prefix.as_bytes()).unwrap_or_default();
    let is_keeper = |connection: &Connection| {
        connection.peer().is_ok_and(|peer| Some(peer.uid) == mounted.user)
    };
    let connections = connect_all(names, CONNECT, Connection::connect_name);
    connections.into_iter().filter(is_keeper).collect()
}

/// Connects to these sockets, as far as that is possible `within` some time. Those with full queues, which
/// other users may have made, are waited for in turns that grow, so that they hold up no others.
fn connect_all<C>(
    mut names: BTreeSet<Vec<u8>>,
    within: Duration,
    connect: impl Fn(&[u8], Duration) -> io::Result<C>,
) -> Vec<C> {
    const FIRST_TURN: Duration = Duration::from_millis(1);
    let until = Instant::now() + within;
    let (mut connections, mut turn) = (Vec::new(), Duration::ZERO);
    loop {
        names.retain(|name| match connect(name, turn) {
            Ok(connection) => {
                connections.push(connection);
                false
            }
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        });
        if names.is_empty() || !turn.is_zero() && Instant::now() >= until {
            return connections;
        }
        turn = (turn * 2).max(FIRST_TURN);
    }
}

/// Unmounts the pool that a directory shows, and waits until the processes that served it have closed
/// it: then everything that was written is in the pool, and other processes can open it. With
/// `lazily`, also while programs use it: the directory is empty then, and the mount ends with its
/// last use.
///
/// # Errors
/// [`UnmountError`].
pub fn unmount(directory: &Path, lazily: bool, wait: Duration) -> Result<Unmounted, UnmountError> {
    let all = mounts().map_err(UnmountError::Table)?;
    let mut path = resolve(directory);
    let is_there = |path: &Path| all.iter().any(|mounted| mounted.directory == path);
    if !is_there(&path)
        && let Ok(link) = std::fs::read_link(&path)
    {
        // It was mounted through the link.
        path = resolve(&path.parent().map(|above| above.join(&link)).unwrap_or(link));
    }
    let mut here = all.iter().filter(|mounted| mounted.directory == path);
    // The last one usually hides the others.
    let last = here.clone().next_back();
    let shown = mount::device_number(&path).ok();
    let mounted = here.find(|mounted| shown == Some((0, mounted.connection))).or(last);
    let Some(mounted) = mounted else { return Err(UnmountError::NotMounted { path }) };
    let keepers = keepers_of(mounted);
    let mut before = if keepers.is_empty() { writers_of(&mounted.source) } else { HashSet::new() };
    if may_have_others(&mounted.source, &before) {
        before.clear();
    }
    remove(&path, mounted.connection, lazily)?;
    let is_elsewhere =
        all.iter().filter(|other| other.connection == mounted.connection).count() > 1;
    if is_elsewhere {
        Ok(Unmounted::Elsewhere)
    } else if !keepers.is_empty() {
        wait_for(&keepers, mounted, wait)
    } else if before.is_empty() {
        Ok(Unmounted::NotWaited)
    } else {
        wait_until_closed(&mounted.source, &before, wait).map(|()| Unmounted::Closed)
    }
}

/// Waits until keepers have closed their sockets, and their pools before.
fn wait_for(
    keepers: &[Connection],
    mounted: &MountedPool,
    wait: Duration,
) -> Result<Unmounted, UnmountError> {
    let start = Instant::now();
    let is_closed =
        |keeper: &Connection| keeper.is_closed_within(wait.saturating_sub(start.elapsed()));
    if keepers.iter().all(is_closed) {
        return Ok(Unmounted::Closed);
    }
    Err(UnmountError::StillOpen { pool: mounted.source.clone(), waited: wait })
}

/// Unmounts what this connection serves, at this directory or where that has been moved to.
pub(crate) fn remove_wherever(
    path: &Path,
    connection: u32,
    lazily: bool,
) -> Result<(), UnmountError> {
    let all = mounts().unwrap_or_default();
    let now = all.iter().rfind(|mounted| mounted.connection == connection);
    remove(now.map_or(path, |mounted| &mounted.directory), connection, lazily)
}

/// Unmounts what this connection serves at a directory; what else is mounted there is left alone.
pub(crate) fn remove(path: &Path, connection: u32, lazily: bool) -> Result<(), UnmountError> {
    let path = || path.to_path_buf();
    if !mount::device_number(&path()).is_ok_and(|number| number == (0, connection)) {
        return Err(UnmountError::NotMounted { path: path() });
    }
    let removed = match mount::remove(&path(), lazily) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            fusermount::unmount(&path(), lazily).map_err(|helper| helper.into_io(error))
        }
        removed => removed,
    };
    removed.map_err(|source| match source.raw_os_error() {
        Some(libc::EBUSY) => UnmountError::Busy { path: path() },
        _ => UnmountError::Refused { path: path(), source },
    })
}

/// Waits until none of these writers has the pool open. Those that came later use it for something
/// else.
fn wait_until_closed(
    pool: &Path,
    before: &HashSet<u32>,
    wait: Duration,
) -> Result<(), UnmountError> {
    let start = Instant::now();
    let ends: Vec<_> = before.iter().filter_map(|pid| end_of(*pid)).collect();
    loop {
        // Usually they end. To look at the pool while they close it would be a use of it, which leaves
        // work to its next opener, so it is rare.
        let until = LOOK_AGAIN.min(wait.saturating_sub(start.elapsed()));
        if has_come(&ends, until) || writers_of(pool).is_disjoint(before) {
            return Ok(());
        }
        if start.elapsed() >= wait {
            return Err(UnmountError::StillOpen { pool: pool.to_path_buf(), waited: wait });
        }
    }
}

/// What becomes readable at the end of a process.
fn end_of(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Waits for all ends, or as long.
fn has_come(ends: &[OwnedFd], wait: Duration) -> bool {
    let until = Instant::now() + wait;
    ends.iter().all(|end| {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        poll(&mut [PollFd::new(end, PollFlags::IN)], left.as_ref()).is_ok_and(|come| come > 0)
    }) && !ends.is_empty()
}

/// The processes that have a pool open for writing, as numbered here; none where that cannot be
/// told.
fn writers_of(pool: &Path) -> HashSet<u32> {
    // A name that is no path at all is relative to no directory either.
    if !pool.is_absolute() {
        return HashSet::new();
    }
    let options = Pool::options().read_only(true).background(false);
    let info = options.open(pool).and_then(|pool| pool.info());
    info.map_or_else(|_| HashSet::new(), |info| info.processes.into_iter().collect())
}

/// Whether a pool that these processes have open may be open for writing in others at the same time.
fn may_have_others(pool: &Path, writers: &HashSet<u32>) -> bool {
    // Without a writer, opening it could take as long as a recovery.
    !writers.is_empty() && Pool::options().background(false).open(pool).is_ok()
}

/// The path as the table of mounts has it. The directory itself is not looked at: that would ask
/// its server.
fn resolve(directory: &Path) -> PathBuf {
    let absolute = std::path::absolute(directory).unwrap_or_else(|_| directory.to_path_buf());
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            parent.canonicalize().unwrap_or_else(|_| parent.to_path_buf()).join(name)
        }
        // `/`, or a path that ends with `..`.
        _ => absolute.canonicalize().unwrap_or(absolute),
    }
}

/// One line of the table, if it is about a pool.
fn parse(line: &[u8]) -> Option<MountedPool> {
    let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    // Optional fields end with a dash.
    let end = fields.iter().position(|&field| field == b"-")?;
    let (kind, source) = (fields.get(end + 1)?, fields.get(end + 2)?);
    let device = std::str::from_utf8(fields.get(2)?).ok()?;
    let is_set =
        |field: &[u8], wanted: &[u8]| field.split(|&byte| byte == b',').any(|it| it == wanted);
    (*kind == KIND).then_some(())?;
    let options = std::str::from_utf8(fields.get(end + 3)?).unwrap_or_default();
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id="));
    Some(MountedPool {
        source: unescape(source),
        directory: unescape(fields.get(4)?),
        read_only: is_set(fields.get(5)?, b"ro") || is_set(fields.get(end + 3)?, b"ro"),
        connection: device.split_once(':')?.1.parse().ok()?,
        waiting: None,
        user: user.and_then(|user| user.parse().ok()),
    })
}

/// The kernel writes blanks and backslashes as octal numbers of three digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.first_chunk::<3>().filter(|_| first == b'\\');
        let code = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &behind[3..];
            }
            None => {
                bytes.push(first);
                rest = behind;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_mounts_tells_pools_with_any_name() {
        let line = br"36 28 0:52 /pool /mnt/a\040b rw,nosuid,nodev shared:7 - fuse.aquifer /srv/x\054y\134z.pool ro,user_id=7,group_id=0";
        let found = parse(line).unwrap();
        assert_eq!(found.directory, Path::new("/mnt/a b"));
        assert_eq!(found.source, Path::new(r"/srv/x,y\z.pool"));
        assert_eq!((found.connection, found.read_only, found.user), (52, true, Some(7)));
        for other in
            [&b"36 28 0:52 / /mnt rw - fuse.other /x rw"[..], b"", b"36 28", b"1 2 3 4 5 6 -"]
        {
            assert_eq!(parse(other), None);
        }
    }

    #[test]
    fn sockets_with_full_queues_hold_up_no_others() {
        let connect = |name: &[u8], wait: Duration| {
            if name == b"full" {
                std::thread::sleep(wait);
            } else if !wait.is_zero() {
                // Its queue has room for a process that waits.
                return Ok(());
            }
            Err(io::ErrorKind::WouldBlock.into())
        };
        let names = [&b"full"[..], b"keeper"].map(<[u8]>::to_vec);
        assert_eq!(connect_all(names.into(), CONNECT, connect).len(), 1);
    }

    #[test]
    fn what_is_no_pool_is_not_unmounted() {
        let none = tempfile::tempdir().unwrap();
        for path in [none.path(), Path::new("/"), Path::new("/proc"), &none.path().join("absent")] {
            let unmounted = unmount(path, true, Duration::ZERO);
            assert!(matches!(unmounted, Err(UnmountError::NotMounted { .. })), "{unmounted:?}");
        }
    }
}
