//! Local sockets between processes of one machine, with paths, which carry messages and
//! descriptors.
//!
//! They are of type `SOCK_SEQPACKET`: connection-oriented, with messages that arrive whole or not
//! at all. A descriptor that is sent (`SCM_RIGHTS`) arrives as another descriptor of the *same*
//! open file description, which shares its locks and its offset: to give the receiver a separate
//! description, send a descriptor that was [reopened](crate::io::reopen).
//!
//! Calls block no longer than their timeout, and writing to a closed connection raises no signal.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use crate::check;

/// Maximum number of descriptors per message.
pub const MAX_DESCRIPTORS: usize = 8;

const CONTROL_BYTES: usize = 64;
const _: () = assert!(
    // SAFETY: arithmetic.
    unsafe { libc::CMSG_SPACE((MAX_DESCRIPTORS * size_of::<libc::c_int>()) as u32) as usize }
        <= CONTROL_BYTES
);

/// A buffer for control messages.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

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
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: takes three numbers.
    let socket = check(unsafe { libc::socket(libc::AF_UNIX, kind, 0) }.into())?;
    // SAFETY: just made, so nothing else owns the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(socket as libc::c_int) })
}

/// Returns the socket address of a path, and its length.
fn address_of(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all-zero is a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    // With a terminating NUL.
    if bytes.is_empty() || bytes.contains(&0) || bytes.len() >= address.sun_path.len() {
        let most = address.sun_path.len() - 1;
        let reason = format!("the path of a socket has 1 to {most} bytes, and no NUL");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let len_bytes = offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
    Ok((address, len_bytes as libc::socklen_t))
}

impl Listener {
    /// Listens at a path that does not exist yet. A process that may write to the socket file may
    /// connect: the umask determines its permissions until the caller changes them.
    ///
    /// # Errors
    /// `EADDRINUSE` if the path exists; [`io::ErrorKind::InvalidInput`] if the path is too long.
    pub fn bind(path: &Path) -> io::Result<Listener> {
        const WAITING: libc::c_int = 64;
        let (address, len_bytes) = address_of(path)?;
        let listener = Listener(socket()?);
        // SAFETY: an address of this length, which outlives the call.
        let bound =
            unsafe { libc::bind(listener.0.as_raw_fd(), (&raw const address).cast(), len_bytes) };
        check(bound.into())?;
        // SAFETY: takes two numbers.
        check(unsafe { libc::listen(listener.0.as_raw_fd(), WAITING) }.into())?;
        Ok(listener)
    }

    /// Returns the next connection; `None` if `stop` became readable (or its other end was closed)
    /// first.
    pub fn accept(&self, stop: BorrowedFd<'_>) -> io::Result<Option<Connection>> {
        loop {
            let poll =
                |file: libc::c_int| libc::pollfd { fd: file, events: libc::POLLIN, revents: 0 };
            let mut files = [poll(stop.as_raw_fd()), poll(self.0.as_raw_fd())];
            // SAFETY: two structures that outlive the call.
            match check(unsafe { libc::poll(files.as_mut_ptr(), 2, -1) }.into()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                polled => polled?,
            };
            if files[0].revents != 0 {
                return Ok(None);
            }
            let (nobody, flags) = (std::ptr::null_mut(), libc::SOCK_CLOEXEC);
            // SAFETY: requests no address.
            let accepted =
                unsafe { libc::accept4(self.0.as_raw_fd(), nobody, std::ptr::null_mut(), flags) };
            match check(accepted.into()) {
                // The client gave up before it was accepted.
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::EINTR | libc::ECONNABORTED | libc::EAGAIN)
                    ) => {}
                accepted => {
                    let socket = accepted? as libc::c_int;
                    // SAFETY: just made, so nothing else owns the descriptor.
                    return Ok(Some(Connection(unsafe { OwnedFd::from_raw_fd(socket) })));
                }
            }
        }
    }
}

impl Connection {
    /// Connects to the listener at a path.
    ///
    /// # Errors
    /// `ENOENT` if the path does not exist, `ECONNREFUSED` if no process listens there any more,
    /// `EPROTOTYPE` if the socket is of another type; `EAGAIN` if the listener's backlog is full
    /// for longer than `timeout`.
    pub fn connect(path: &Path, timeout: Duration) -> io::Result<Connection> {
        let (address, len_bytes) = address_of(path)?;
        let connection = Connection(socket()?);
        connection.set_timeout(timeout)?;
        // SAFETY: an address of this length, which outlives the call.
        let connected = unsafe {
            libc::connect(connection.0.as_raw_fd(), (&raw const address).cast(), len_bytes)
        };
        check(connected.into())?;
        Ok(connection)
    }

    /// Sets how long a call on this connection blocks at most: after that it fails with `EAGAIN`.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let limit = libc::timeval {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
            // Zero would mean no limit.
            tv_usec: libc::suseconds_t::from(timeout.subsec_micros()).max(1),
        };
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            // SAFETY: a structure of this length, which outlives the call.
            let set = unsafe {
                libc::setsockopt(
                    self.0.as_raw_fd(),
                    libc::SOL_SOCKET,
                    option,
                    (&raw const limit).cast(),
                    size_of::<libc::timeval>() as libc::socklen_t,
                )
            };
            check(set.into())?;
        }
        Ok(())
    }

    /// Returns the credentials of the peer.
    pub fn peer(&self) -> io::Result<Peer> {
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
        assert!(!message.is_empty() && files.len() <= MAX_DESCRIPTORS);
        let numbers: Vec<libc::c_int> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let mut control = Control([0; CONTROL_BYTES]);
        let mut bytes =
            libc::iovec { iov_base: message.as_ptr().cast_mut().cast(), iov_len: message.len() };
        let mut header = header(&mut bytes, &mut control);
        let numbers_bytes = size_of_val(numbers.as_slice()) as u32;
        // SAFETY: arithmetic.
        let space_bytes = unsafe { libc::CMSG_SPACE(numbers_bytes) };
        header.msg_controllen = if numbers.is_empty() { 0 } else { space_bytes as _ };
        if !numbers.is_empty() {
            // SAFETY: the header's control memory is long enough, and aligned, for one message.
            let first = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
            // SAFETY: as above; the length is arithmetic.
            unsafe {
                (*first).cmsg_level = libc::SOL_SOCKET;
                (*first).cmsg_type = libc::SCM_RIGHTS;
                (*first).cmsg_len = libc::CMSG_LEN(numbers_bytes) as _;
            }
            // SAFETY: as above.
            let data = unsafe { libc::CMSG_DATA(first) };
            // SAFETY: room for the numbers, asserted above.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    numbers.as_ptr().cast::<u8>(),
                    data,
                    numbers_bytes as usize,
                );
            }
        }
        loop {
            // SAFETY: the header and all it points to outlive the call.
            let sent =
                unsafe { libc::sendmsg(self.0.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) };
            match check(sent as libc::c_long) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent.map(drop),
            }
        }
    }

    /// Receives one message into `buffer`, and the descriptors that come with it. The returned
    /// length is 0 when the peer has closed the connection.
    ///
    /// # Errors
    /// `EMSGSIZE` if the message is longer than the buffer or carries more than [`MAX_DESCRIPTORS`]
    /// descriptors; those received are closed again.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut control = Control([0; CONTROL_BYTES]);
        let mut bytes = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut header = header(&mut bytes, &mut control);
        let len_bytes = loop {
            // SAFETY: the header and all it points to outlive the call.
            let received = unsafe {
                libc::recvmsg(self.0.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC)
            };
            match check(received as libc::c_long) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => break received?,
            }
        };
        let files = descriptors_of(&header);
        if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        Ok((len_bytes, files))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns a header of one message with room for control messages.
fn header(bytes: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: all-zero is a valid header.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = bytes;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = CONTROL_BYTES as _;
    header
}

/// Takes ownership of the descriptors that the kernel stored in the control buffer.
fn descriptors_of(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut files = Vec::new();
    // SAFETY: the kernel filled in the control buffer.
    let mut at = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !at.is_null() {
        // SAFETY: a control message inside that buffer.
        let (level, kind, len) = unsafe { ((*at).cmsg_level, (*at).cmsg_type, (*at).cmsg_len) };
        if level == libc::SOL_SOCKET && kind == libc::SCM_RIGHTS {
            // SAFETY: arithmetic.
            let data_bytes = len - unsafe { libc::CMSG_LEN(0) } as usize;
            for index in 0..data_bytes / size_of::<libc::c_int>() {
                // SAFETY: as above.
                let data = unsafe { libc::CMSG_DATA(at) }.cast::<libc::c_int>();
                // SAFETY: inside the message's data.
                let number = unsafe { data.add(index).read_unaligned() };
                // SAFETY: the kernel just made it for this process, so nothing else owns it.
                files.push(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
        // SAFETY: as above.
        at = unsafe { libc::CMSG_NXTHDR(header, at) };
    }
    files
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
        assert_eq!(said, b"xx", "and nobody keeps it open");
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
    fn what_is_too_long_is_an_error_and_leaves_nothing_open() {
        let (one, other) = pair();
        let (mut reading, writing) = io::pipe().unwrap();
        one.send(&[7; 100], &[writing.as_fd()]).unwrap();
        drop(writing);
        let error = other.receive(&mut [0; 99]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
        assert_eq!(io::Read::read(&mut reading, &mut [0]).unwrap(), 0, "nobody has it open");
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
