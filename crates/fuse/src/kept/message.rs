//! Messages between the processes of a mount.

use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

#[cfg(doc)]
use aquifer_pool::Pool;
use aquifer_sys::local_socket::{Connection, MAX_DESCRIPTORS};

use super::Program;
use crate::options::{Cache, MountOptions};
use crate::pool_fs::{LockOwner, OpenOwner, OwnerName};

/// The longest message.
const MOST_BYTES: usize = 128 << 10;

/// The bytes of a message that only carries descriptors.
pub(super) const FILES: &[u8] = b"files";

/// What one process tells another. Each is sent whole; descriptors follow in messages of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// To a keeper: what to mount. With the device, and unless it is mounted already, the mount.
    Keep(Plan),
    /// To a server: the same. With the memory of the mount, [the pool](Pool::files_to_pass), and so
    /// many descriptions of the device.
    Serve(Plan, u64),
    /// To a helper: unmount it.
    Unmount { plan: Plan, lazily: bool },
    /// It works.
    Ready,
    /// It does not.
    Failed(String),
    /// From a server: what was mounted is so no more, or the connection was ended otherwise.
    Ended { is_unmounted: bool },
    /// From a server: it needs more pins. And the answer: those that there are, are listed.
    Pins,
    /// From a server: keep the descriptor that comes with it, of locks of this owner; without one, that
    /// which is kept is of these open files now. And to a server: what is kept.
    KeepLocks(OpenOwner),
    /// From a server: close it.
    DropLocks(LockOwner),
    /// To a process that tells the kernel to drop pages. With a description of the device.
    Notify,
    /// To such a process: those of this inode.
    DropPages(u64),
    /// To a server: so many messages about locks that are kept follow.
    Locks(u64),
}

/// What a keeper is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// For messages: the servers get the files of the pool, and whatever happens to this name does not
    /// concern them.
    pub pool: PathBuf,
    pub directory: PathBuf,
    /// The number of the connection, in `/sys/fs/fuse/connections`.
    pub connection: u32,
    /// [`options_to_word`].
    pub options: u64,
    /// How long servers may do nothing, in milliseconds.
    pub patience_ms: u64,
    pub program: Program,
    pub segment_directory: Option<PathBuf>,
    pub segment_mode: Option<u32>,
    /// `true` if the mount follows, and the directory that is to show it.
    pub is_detached: bool,
    /// Whether a descriptor follows whose end is that of the mount.
    pub has_lifeline: bool,
}

/// The options that a server needs, as a word.
pub(super) fn options_to_word(options: &MountOptions) -> u64 {
    let is = |cache| options.cache == cache;
    let flags = [is(Cache::WriteThrough), options.read_only, options.xattrs, is(Cache::Shared)];
    (0..).zip(flags).map(|(bit, is_set)| u64::from(is_set) << bit).sum()
}

/// The reverse.
pub(super) fn options_of_word(word: u64) -> MountOptions {
    let is_set = |bit: u32| word >> bit & 1 != 0;
    let cache = match (is_set(0), is_set(3)) {
        (false, false) => Cache::WriteBack,
        (true, _) => Cache::WriteThrough,
        (false, true) => Cache::Shared,
    };
    MountOptions::new().cache(cache).read_only(is_set(1)).xattrs(is_set(2))
}

fn put_owner(parts: Parts, owner: LockOwner) -> Parts {
    let (kind, name) = match owner.name {
        OwnerName::OpenFile(fh) => (0, fh),
        OwnerName::Address(address) => (1, address),
    };
    parts.word(owner.node).word(kind).word(name)
}

fn take_owner(rest: &mut Rest<'_>) -> Option<LockOwner> {
    let (node, kind, name) = (rest.word()?, rest.word()?, rest.word()?);
    let name = if kind == 0 { OwnerName::OpenFile(name) } else { OwnerName::Address(name) };
    Some(LockOwner { node, name })
}

/// Parts of a message, each with its length.
#[derive(Default)]
struct Parts(Vec<u8>);

impl Parts {
    fn bytes(mut self, part: &[u8]) -> Parts {
        self.0.extend((part.len() as u32).to_le_bytes());
        self.0.extend(part);
        self
    }

    fn path(self, path: &Path) -> Parts {
        self.bytes(path.as_os_str().as_bytes())
    }

    fn word(self, word: u64) -> Parts {
        self.bytes(&word.to_le_bytes())
    }

    fn list(self, list: &[OsString]) -> Parts {
        list.iter().fold(self.word(list.len() as u64), |parts, one| parts.bytes(one.as_bytes()))
    }
}

/// The rest of a message.
struct Rest<'b>(&'b [u8]);

impl<'b> Rest<'b> {
    fn bytes(&mut self) -> Option<&'b [u8]> {
        let (len, rest) = self.0.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        self.0 = rest;
        Some(part)
    }

    fn text(&mut self) -> Option<OsString> {
        self.bytes().map(|bytes| OsString::from_vec(bytes.to_vec()))
    }

    fn path(&mut self) -> Option<PathBuf> {
        self.text().map(PathBuf::from)
    }

    fn word(&mut self) -> Option<u64> {
        self.bytes()?.try_into().map(u64::from_le_bytes).ok()
    }

    fn list(&mut self) -> Option<Vec<OsString>> {
        let len = self.word()?;
        (0..len).map(|_| self.text()).collect()
    }
}

impl Plan {
    fn put(&self, parts: Parts) -> Parts {
        let Plan { pool, directory, options, program, .. } = self;
        let flags = u64::from(self.is_detached) | u64::from(self.has_lifeline) << 1;
        let pairs = program.environment.iter().flat_map(|(name, value)| [name, value]);
        let environment: Vec<_> = pairs.cloned().collect();
        let segment_directory = self.segment_directory.iter().map(|path| path.clone().into());
        let segment_directory: Vec<OsString> = segment_directory.collect();
        let parts = parts.path(pool).path(directory).word(self.connection.into());
        let parts = parts.word(*options).word(self.patience_ms).word(flags);
        let parts = parts.word(self.segment_mode.map_or(0, |mode| u64::from(mode) + 1));
        let parts = parts.list(&segment_directory).path(&program.path).list(&program.keeper);
        parts.list(&program.server).list(&environment)
    }

    fn take(rest: &mut Rest<'_>) -> Option<Plan> {
        let (pool, directory) = (rest.path()?, rest.path()?);
        let (connection, options, patience_ms) = (rest.word()?, rest.word()?, rest.word()?);
        let (flags, segment_mode) = (rest.word()?, rest.word()?);
        let segment_directory = rest.list()?.into_iter().next().map(PathBuf::from);
        let (path, keeper, server) = (rest.path()?, rest.list()?, rest.list()?);
        let environment = rest.list()?;
        let pairs = environment.as_chunks().0.iter().cloned();
        let environment = pairs.map(|[name, value]| (name, value)).collect();
        Some(Plan {
            pool,
            directory,
            connection: connection.try_into().ok()?,
            options,
            patience_ms,
            program: Program { path, keeper, server, environment },
            segment_directory,
            segment_mode: segment_mode.checked_sub(1).and_then(|mode| mode.try_into().ok()),
            is_detached: flags & 1 != 0,
            has_lifeline: flags & 2 != 0,
        })
    }
}

impl Message {
    pub fn to_bytes(&self) -> Vec<u8> {
        let kind = |kind: u64| Parts::default().word(kind);
        let parts = match self {
            Message::Keep(plan) => plan.put(kind(1)),
            Message::Serve(plan, devices) => plan.put(kind(2)).word(*devices),
            Message::Unmount { plan, lazily } => plan.put(kind(3)).word((*lazily).into()),
            Message::Ready => kind(4),
            Message::Failed(why) => {
                // It comes through, however long the error is.
                kind(5).bytes(&why.as_bytes()[..why.len().min(4096)])
            }
            Message::Ended { is_unmounted } => kind(6).word((*is_unmounted).into()),
            Message::Pins => kind(7),
            Message::KeepLocks(OpenOwner { owner, open }) => {
                let open: Vec<u8> = open.iter().flat_map(|fh| fh.to_le_bytes()).collect();
                put_owner(kind(8), *owner).bytes(&open)
            }
            Message::DropLocks(owner) => put_owner(kind(9), *owner),
            Message::Notify => kind(11),
            Message::DropPages(number) => kind(12).word(*number),
            Message::Locks(count) => kind(10).word(*count),
        };
        parts.0
    }

    fn from_bytes(bytes: &[u8]) -> Option<Message> {
        let mut rest = Rest(bytes);
        let message = match rest.word()? {
            1 => Message::Keep(Plan::take(&mut rest)?),
            2 => Message::Serve(Plan::take(&mut rest)?, rest.word()?),
            3 => Message::Unmount { plan: Plan::take(&mut rest)?, lazily: rest.word()? != 0 },
            4 => Message::Ready,
            5 => Message::Failed(String::from_utf8_lossy(rest.bytes()?).into_owned()),
            6 => Message::Ended { is_unmounted: rest.word()? != 0 },
            7 => Message::Pins,
            8 => {
                let owner = take_owner(&mut rest)?;
                let open = rest.bytes()?.as_chunks().0.iter().copied().map(u64::from_le_bytes);
                Message::KeepLocks(OpenOwner { owner, open: open.collect() })
            }
            9 => Message::DropLocks(take_owner(&mut rest)?),
            11 => Message::Notify,
            12 => Message::DropPages(rest.word()?),
            10 => Message::Locks(rest.word()?),
            _ => return None,
        };
        Some(message)
    }

    /// Sends it, and descriptors behind it.
    pub fn send(&self, to: &Connection, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        to.send(&self.to_bytes(), &[])?;
        files.chunks(MAX_DESCRIPTORS).try_for_each(|files| to.send(FILES, files))
    }

    /// Receives the next one; `None` at the end of the connection, however it came.
    pub fn receive(from: &Connection) -> io::Result<Option<Message>> {
        Ok(Message::receive_with(from)?.map(|(message, _)| message))
    }

    /// As well, and the descriptor that was sent with it.
    pub fn receive_with(from: &Connection) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
        let mut buffer = vec![0; MOST_BYTES];
        match from.receive(&mut buffer) {
            Ok((0, _)) => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => Ok(None),
            Ok((len, mut files)) => match Message::from_bytes(&buffer[..len]) {
                None => Err(io::Error::new(io::ErrorKind::InvalidData, "not a message of a mount")),
                Some(message) => Ok(Some((message, files.pop()))),
            },
            Err(error) => Err(error),
        }
    }
}

/// Receives the descriptors behind a message.
pub(super) fn receive_files(from: &Connection, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut files = Vec::new();
    while files.len() < count {
        let (len, more) = from.receive(&mut [0; 16])?;
        if len == 0 || more.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        files.extend(more);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (one, other) = Connection::pair().unwrap();
        let other = Connection::from(other);
        let list = |texts: &[&str]| texts.iter().map(OsString::from).collect::<Vec<_>>();
        let program = Program {
            path: "/bin/it".into(),
            keeper: list(&["keeper", ""]),
            server: list(&["server"]),
            environment: vec![("A".into(), "b".into()), ("C".into(), "".into())],
        };
        let (pool, directory) = (PathBuf::from("/p"), PathBuf::from("/mnt/a b"));
        let options = options_to_word(&MountOptions::new().cache(Cache::WriteThrough));
        let plan = Plan {
            pool,
            directory,
            connection: 7,
            options,
            patience_ms: 30_000,
            program,
            segment_directory: Some("/dev/shm/x".into()),
            segment_mode: Some(0),
            is_detached: true,
            has_lifeline: false,
        };
        let other_plan = Plan {
            segment_directory: None,
            segment_mode: None,
            is_detached: false,
            has_lifeline: true,
            ..plan.clone()
        };
        let owner = LockOwner { node: 3, name: OwnerName::Address(u64::MAX) };
        let other_owner = LockOwner { name: OwnerName::OpenFile(7), ..owner };
        for message in [
            Message::Keep(plan.clone()),
            Message::Serve(other_plan, 16),
            Message::Unmount { plan, lazily: true },
            Message::Ready,
            Message::Failed("why".to_owned()),
            Message::Ended { is_unmounted: true },
            Message::Pins,
            Message::KeepLocks(OpenOwner { owner, open: vec![5, u64::MAX] }),
            Message::KeepLocks(OpenOwner { owner: other_owner, open: vec![] }),
            Message::DropLocks(owner),
            Message::DropLocks(other_owner),
            Message::Notify,
            Message::DropPages(9),
            Message::Locks(2),
        ] {
            message.send(&one, &[]).unwrap();
            assert_eq!(Message::receive(&other).unwrap(), Some(message.clone()));
            // Cut anywhere, it is none; and no panic.
            let bytes = message.to_bytes();
            (0..bytes.len()).for_each(|len| assert_eq!(Message::from_bytes(&bytes[..len]), None));
        }
        drop(one);
        assert_eq!(Message::receive(&other).unwrap(), None);
        let again = options_of_word(options);
        assert_eq!(options_to_word(&again), options);
        assert!(again.xattrs && !again.read_only);
    }

    #[test]
    fn descriptors_follow_their_message() {
        let (one, other) = Connection::pair().unwrap();
        let other = Connection::from(other);
        let file = std::fs::File::open("/dev/null").unwrap();
        let files: Vec<_> = (0..17).map(|_| std::os::fd::AsFd::as_fd(&file)).collect();
        Message::Ready.send(&one, &files).unwrap();
        assert_eq!(Message::receive(&other).unwrap(), Some(Message::Ready));
        assert_eq!(receive_files(&other, 17).unwrap().len(), 17);
        drop(one);
        assert!(receive_files(&other, 1).is_err());
    }
}
