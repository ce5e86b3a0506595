//! Local sockets between processes of one machine, with paths or names, which carry messages and
//! descriptors. Names are those of a network namespace, and free when their socket is closed.
//!
//! They are of type `SOCK_SEQPACKET`: connection-oriented, with messages that arrive whole or not
//! at all. A descriptor that is sent (`SCM_RIGHTS`) arrives as another descriptor of the *same*
//! open file description, which shares its locks and its offset: to give the receiver a separate
//! description, send a descriptor that was [reopened](crate::io::reopen).
//!
//! Calls block no longer than their timeout, and writing to a closed connection raises no signal.

use std::collections::BTreeSet;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::check;

/// Maximum number of descriptors per message.
pub const MAX_DESCRIPTORS: usize = 8;

/// Room for the control message of a message with descriptors.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// The credentials of the peer process, as of when the connection was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The process ID in the caller's PID namespace; 0 if the process is not visible there.
    pub pid: u32,
    /// Its user ID.
    pub uid: u32,
    /// Its group ID.
    pub gid: u32,
}

/// A socket that listens at a path.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// One connection.
#[derive(Debug)]
pub struct Connection(OwnedFd);

fn socket() -> io::Result<OwnedFd> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    Ok(net::socket_with(AddressFamily::UNIX, kind, flags, None)?)
}

/// Returns the socket address of a path.
fn address_of(path: &Path) -> io::Result<SocketAddrUnix> {
    /// With the terminating NUL, the length of `sun_path`.
    const MOST_BYTES: usize = 107;
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.contains(&0) || bytes.len() > MOST_BYTES {
        let reason = format!("the path of a socket has 1 to {MOST_BYTES} bytes, and no NUL");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    Ok(SocketAddrUnix::new(path)?)
}

/// The names that begin like this of sockets of any process of this network namespace.
///
/// # Errors
/// Those of reading `/proc/net/unix`.
pub fn names_beginning(prefix: &[u8]) -> io::Result<BTreeSet<Vec<u8>>> {
    let table = std::fs::read("/proc/net/unix")?;
    let names = table.split(|&byte| byte == b'\n').filter_map(|line| {
        // The kernel shows an abstract name with this instead of the NUL that it begins with.
        let name = line.split(|&byte| byte == b' ').next_back()?.strip_prefix(b"@")?;
        name.starts_with(prefix).then(|| name.to_vec())
    });
    Ok(names.collect())
}

impl Listener {
    /// Listens at a name that is free in this network namespace, to which any process of it may connect.
    ///
    /// # Errors
    /// `EADDRINUSE` if another socket has the name; [`io::ErrorKind::InvalidInput`] if it is too long.
    pub fn bind_name(name: &[u8]) -> io::Result<Listener> {
        Listener::bind_address(&SocketAddrUnix::new_abstract_name(name)?)
    }

    /// Listens at a path that does not exist yet. A process that may write to the socket file may
    /// connect: the umask determines its permissions until the caller changes them.
    ///
    /// # Errors
    /// `EADDRINUSE` if the path exists; [`io::ErrorKind::InvalidInput`] if the path is too long.
    pub fn bind(path: &Path) -> io::Result<Listener> {
        Listener::bind_address(&address_of(path)?)
    }

    fn bind_address(address: &SocketAddrUnix) -> io::Result<Listener> {
        const WAITING: i32 = 64;
        let listener = Listener(socket()?);
        net::bind(&listener.0, address)?;
        net::listen(&listener.0, WAITING)?;
        Ok(listener)
    }

    /// Returns the next connection; `None` if there is none at present. For a listener with one user:
    /// another one may take the connection, and then this waits.
    ///
    /// # Errors
    /// Those of `accept`.
    pub fn accept_now(&self) -> io::Result<Option<Connection>> {
        let mut files = [PollFd::new(&self.0, PollFlags::IN)];
        if retry_on_intr(|| poll(&mut files, Some(&Timespec::default())))? == 0 {
            return Ok(None);
        }
        match net::accept_with(&self.0, SocketFlags::CLOEXEC) {
            Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => Ok(None),
            accepted => Ok(Some(Connection(accepted?))),
        }
    }

    /// Returns the next connection; `None` if `stop` became readable (or its other end was closed)
    /// first.
    pub fn accept(&self, stop: BorrowedFd<'_>) -> io::Result<Option<Connection>> {
        loop {
            let mut files =
                [PollFd::new(&stop, PollFlags::IN), PollFd::new(&self.0, PollFlags::IN)];
            retry_on_intr(|| poll(&mut files, None))?;
            if !files[0].revents().is_empty() {
                return Ok(None);
            }
            match net::accept_with(&self.0, SocketFlags::CLOEXEC) {
                // The client gave up before it was accepted.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => {}
                accepted => return Ok(Some(Connection(accepted?))),
            }
        }
    }
}

impl Connection {
    /// Two ends of one connection, the second to be given to a child.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn pair() -> io::Result<(Connection, OwnedFd)> {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (own, other) = net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        Ok((Connection(own), other))
    }

    /// The end that this process got as its standard input.
    ///
    /// # Errors
    /// `ENOTSOCK` if that is something else.
    pub fn from_stdin() -> io::Result<Connection> {
        let stdin = io::stdin();
        if net::sockopt::socket_type(&stdin)? != SocketType::SEQPACKET {
            return Err(io::Error::from_raw_os_error(libc::ENOTSOCK));
        }
        Ok(Connection(rustix::io::fcntl_dupfd_cloexec(&stdin, 3)?))
    }

    /// Waits until the peer has closed its end.
    ///
    /// # Errors
    /// Those of `poll`.
    pub fn wait_for_end(&self) -> io::Result<()> {
        let mut files = [PollFd::new(&self.0, PollFlags::empty())];
        retry_on_intr(|| poll(&mut files, None))?;
        Ok(())
    }

    /// Whether the peer has closed its end, or was a listener that was closed before it accepted this.
    pub fn is_closed(&self) -> bool {
        self.is_closed_within(Duration::ZERO)
    }

    /// As [`Connection::is_closed`], or does it before so much time has passed.
    pub fn is_closed_within(&self, wait: Duration) -> bool {
        let until = Instant::now() + wait.min(Duration::from_secs(i32::MAX as u64));
        let mut files = [PollFd::new(&self.0, PollFlags::empty())];
        let closed = retry_on_intr(|| {
            let left = until.saturating_duration_since(Instant::now());
            poll(&mut files, Timespec::try_from(left).ok().as_ref())
        });
        closed.is_ok_and(|closed| closed > 0)
    }

    /// Connects to the listener at a path.
    ///
    /// # Errors
    /// `ENOENT` if the path does not exist, `ECONNREFUSED` if no process listens there any more,
    /// `EPROTOTYPE` if the socket is of another type; `EAGAIN` if the listener's backlog is full
    /// for longer than `timeout`.
    pub fn connect(path: &Path, timeout: Duration) -> io::Result<Connection> {
        Connection::connect_address(&address_of(path)?, timeout)
    }

    /// As [`Connection::connect`], to a listener with a name.
    ///
    /// # Errors
    /// `ECONNREFUSED` if no listener has the name; `EPROTOTYPE`, `EAGAIN` as for a path.
    pub fn connect_name(name: &[u8], timeout: Duration) -> io::Result<Connection> {
        Connection::connect_address(&SocketAddrUnix::new_abstract_name(name)?, timeout)
    }

    fn connect_address(address: &SocketAddrUnix, timeout: Duration) -> io::Result<Connection> {
        let connection = Connection(socket()?);
        connection.set_timeout(timeout)?;
        net::connect(&connection.0, address)?;
        Ok(connection)
    }

    /// Sets how long a call on this connection blocks at most: after that it fails with `EAGAIN`.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        // Zero would mean no limit.
        let limit = timeout.clamp(Duration::from_micros(1), Duration::from_secs(i32::MAX as u64));
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&self.0, direction, Some(limit))?;
        }
        Ok(())
    }

    /// Returns the credentials of the peer.
    pub fn peer(&self) -> io::Result<Peer> {
        // Not rustix's call: its process IDs cannot be 0, which the kernel returns for a peer
        // outside of this PID namespace.
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len_bytes = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: a structure of this length, which outlives the call.
        let asked = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len_bytes,
            )
        };
        check(asked.into())?;
        Ok(Peer { pid: u32::try_from(found.pid).unwrap_or(0), uid: found.uid, gid: found.gid })
    }

    /// Sends one non-empty message, and with it descriptors, which stay open here.
    pub fn send(&self, message: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(message, files, SendFlags::NOSIGNAL)
    }

    /// As [`Connection::send`], but does not wait for a peer that does not read: returns false, and sends
    /// nothing, where there is no room.
    ///
    /// # Errors
    /// `EPIPE` if the peer has closed its end, `ECONNRESET` if it has not read all before;
    /// `ETOOMANYREFS` if too many descriptors of this user are on their way.
    pub fn try_send(&self, message: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<bool> {
        match self.send_with(message, files, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            sent => sent.map(|()| true),
        }
    }

    fn send_with(
        &self,
        message: &[u8],
        files: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        assert!(!message.is_empty() && files.len() <= MAX_DESCRIPTORS);
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let has_room = files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files));
        assert!(has_room, "the room for the most descriptors");
        let bytes = [IoSlice::new(message)];
        retry_on_intr(|| net::sendmsg(&self.0, &bytes, &mut control, flags))?;
        Ok(())
    }

    /// Receives one message into `buffer`, and the descriptors that come with it. The returned
    /// length is 0 when the peer has closed the connection.
    ///
    /// # Errors
    /// `EMSGSIZE` if the message is longer than the buffer or carries more than [`MAX_DESCRIPTORS`]
    /// descriptors; those received are closed again.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [IoSliceMut::new(buffer)];
        let mut receive = || {
            retry_on_intr(|| {
                net::recvmsg(&self.0, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC)
            })
        };
        let received = match receive() {
            // The peer has ended without having received all. The kernel says so once, before what the
            // peer has sent.
            Err(Errno::CONNRESET) => receive(),
            received => received,
        }?;
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                files.extend(sent);
            }
        }
        let is_cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        // Alignment may leave room for one more.
        if is_cut || files.len() > MAX_DESCRIPTORS {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        Ok((received.bytes, files))
    }
}

/// Sends all of these bytes through a connected local socket of any type, which may block or not,
/// before a time.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`]; `EPIPE` if the other end was closed.
pub fn send_all(socket: BorrowedFd<'_>, bytes: &[u8], until: Instant) -> io::Result<()> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut left = bytes;
    while !left.is_empty() {
        match net::send(socket, left, flags) {
            Ok(sent) => left = &left[sent..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, until)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Fills a buffer from a connected local socket of any type, before a time.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`]; [`io::ErrorKind::UnexpectedEof`] if the other end was closed.
pub fn receive_exact(socket: BorrowedFd<'_>, buffer: &mut [u8], until: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        match net::recv(socket, &mut buffer[filled..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((received, _)) => filled += received,
            Err(Errno::INTR) => {}
            // A peer that ended with unread messages.
            Err(Errno::CONNRESET) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, until)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits until a call on a socket would not block.
fn wait(socket: BorrowedFd<'_>, event: PollFlags, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
    }
    // The kernel's time has fewer bits.
    let left = left.min(Duration::from_secs(i32::MAX as u64));
    let limit = Timespec::try_from(left).expect("fewer than 2³¹ seconds");
    let mut files = [PollFd::new(&socket, event)];
    match poll(&mut files, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl From<OwnedFd> for Connection {
    /// Of a descriptor of a socket of this type.
    fn from(socket: OwnedFd) -> Connection {
        Connection(socket)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// Two ends of a connection.
    fn pair() -> (Connection, Connection) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        let one = Connection::connect(&path, PATIENCE).unwrap();
        let (never, _open) = io::pipe().unwrap();
        let other = listener.accept(never.as_fd()).unwrap().unwrap();
        other.set_timeout(PATIENCE).unwrap();
        (one, other)
    }

    #[test]
    fn messages_and_descriptors_arrive_whole() {
        use std::io::{Read, Write};
        let (one, other) = pair();
        let (mut reading, writing) = io::pipe().unwrap();
        one.send(b"first", &[writing.as_fd(), writing.as_fd()]).unwrap();
        drop(writing);
        one.send(b"second", &[]).unwrap();
        let mut buffer = [0; 64];
        let (len_bytes, files) = other.receive(&mut buffer).unwrap();
        assert_eq!((&buffer[..len_bytes], files.len()), (&b"first"[..], 2));
        for file in files {
            std::fs::File::from(file).write_all(b"x").unwrap();
        }
        let mut said = Vec::new();
        reading.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"xx", "and no process keeps it open");
        let (len_bytes, files) = other.receive(&mut buffer).unwrap();
        assert_eq!((&buffer[..len_bytes], files.len()), (&b"second"[..], 0));
        let peer = other.peer().unwrap();
        assert_eq!((peer.pid, peer.uid), (std::process::id(), crate::credentials::effective().uid));
        drop(one);
        assert_eq!(other.receive(&mut buffer).unwrap().0, 0);
        let gone = other.send(b"third", &[]).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::EPIPE), "and no signal");
    }

    #[test]
    fn a_pair_sees_the_end_of_its_peer() {
        let (one, other) = Connection::pair().unwrap();
        let other = Connection::from(other);
        one.send(b"first", &[]).unwrap();
        let mut buffer = [0; 8];
        assert_eq!(other.receive(&mut buffer).unwrap().0, 5);
        assert!(!one.is_closed() && !other.is_closed());
        let waiting = std::thread::spawn(move || {
            other.wait_for_end().unwrap();
            other
        });
        drop(one);
        assert!(waiting.join().unwrap().is_closed());
    }

    #[test]
    fn what_is_not_read_is_not_waited_for() {
        let (one, other) = pair();
        let message = [7; 1000];
        let sent = (0..1 << 20).take_while(|_| one.try_send(&message, &[]).unwrap()).count();
        assert!((1..1 << 20).contains(&sent));
        let mut buffer = [0; 1000];
        (0..sent).for_each(|_| assert_eq!(other.receive(&mut buffer).unwrap().0, 1000));
        assert!(one.try_send(&message, &[]).unwrap());
        assert_eq!(other.receive(&mut buffer).unwrap().0, 1000);
        drop(other);
        assert_eq!(one.try_send(&message, &[]).unwrap_err().raw_os_error(), Some(libc::EPIPE));
    }

    #[test]
    fn what_is_too_long_is_an_error_and_leaves_nothing_open() {
        let (one, other) = pair();
        let (mut reading, writing) = io::pipe().unwrap();
        one.send(&[7; 100], &[writing.as_fd()]).unwrap();
        drop(writing);
        let error = other.receive(&mut [0; 99]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
        assert_eq!(io::Read::read(&mut reading, &mut [0]).unwrap(), 0, "no process has it open");
    }

    #[test]
    fn calls_with_a_limit_take_sockets_of_any_type() {
        use std::os::unix::net::UnixStream;
        let soon = || Instant::now() + Duration::from_millis(1);
        let (one, other) = UnixStream::pair().unwrap();
        let mut buffer = [0; 8];
        let error = receive_exact(other.as_fd(), &mut buffer, soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let later = Instant::now() + PATIENCE;
        send_all(one.as_fd(), b"four", later).unwrap();
        send_all(one.as_fd(), b"more", later).unwrap();
        receive_exact(other.as_fd(), &mut buffer, later).unwrap();
        assert_eq!(&buffer, b"fourmore");
        let error = send_all(one.as_fd(), &vec![0; 64 << 20], soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(one);
        let error = receive_exact(other.as_fd(), &mut vec![0; 64 << 20], later).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let error = send_all(other.as_fd(), b"x", later).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE));
        let (one, other) = pair();
        send_all(one.as_fd(), b"eight456", later).unwrap();
        receive_exact(other.as_fd(), &mut buffer, later).unwrap();
        assert_eq!(&buffer, b"eight456");
    }

    #[test]
    fn a_name_is_free_again_when_its_listener_is_closed() {
        let name = format!("aquifer-test-{}", std::process::id());
        let name = name.as_bytes();
        let is_name_bound = || names_beginning(name).unwrap().contains(name);
        assert!(!is_name_bound());
        let listener = Listener::bind_name(name).unwrap();
        assert!(is_name_bound());
        let taken = Listener::bind_name(name).unwrap_err();
        assert_eq!(taken.raw_os_error(), Some(libc::EADDRINUSE));
        let connection = Connection::connect_name(name, PATIENCE).unwrap();
        assert_eq!(connection.peer().unwrap().pid, std::process::id());
        assert!(!connection.is_closed());
        drop(listener);
        assert!(connection.is_closed_within(PATIENCE) && !is_name_bound());
        let refused = Connection::connect_name(name, PATIENCE).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ECONNREFUSED));
    }

    #[test]
    fn what_a_peer_sent_before_its_end_is_received() {
        let (own, peer) = Connection::pair().unwrap();
        let peer = Connection::from(peer);
        own.send(b"not received", &[]).unwrap();
        peer.send(b"last words", &[]).unwrap();
        drop(peer);
        let mut buffer = [0; 16];
        assert_eq!(own.receive(&mut buffer).unwrap().0, 10);
        assert_eq!(own.receive(&mut buffer).unwrap().0, 0);
    }

    #[test]
    fn an_absent_and_a_silent_broker_are_errors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let errno = |path: &Path| Connection::connect(path, PATIENCE).unwrap_err().raw_os_error();
        assert_eq!(errno(&path), Some(libc::ENOENT));
        let listener = Listener::bind(&path).unwrap();
        let taken = Listener::bind(&path).unwrap_err();
        assert_eq!(taken.raw_os_error(), Some(libc::EADDRINUSE));
        let (stop, closed) = io::pipe().unwrap();
        drop(closed);
        assert!(listener.accept(stop.as_fd()).unwrap().is_none());
        let silent = Connection::connect(&path, Duration::from_millis(1)).unwrap();
        let error = silent.receive(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(listener);
        assert_eq!(errno(&path), Some(libc::ECONNREFUSED));
        let long = directory.path().join("x".repeat(200));
        for bad in [&*long, Path::new(""), Path::new("a\0b")] {
            let error = Listener::bind(bad).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        }
    }
}
