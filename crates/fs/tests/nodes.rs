//! Inodes without paths, against the kernel's directory descriptors: random sequences run on a pool
//! by [`Nodes`], and on a directory in memory (tmpfs) by `openat` and its relatives, with `O_PATH`
//! descriptors in place of nodes. Both must return the same results, error numbers included.
//!
//! A program of its own: a process has one panic hook, which is silent while sequences shrink.

mod scratch;

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use aquifer_fs::node::{Caller, Cookie, NewNode, Node, Nodes, SetAttributes};
use aquifer_fs::{File, FileTimes, Files, FsError, RenameMode, SetMode, SpecialFile};
use aquifer_pool::Pool;
use aquifer_testkit::campaign::{seed, steps};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, Stat, Timespec, Timestamps,
    Uid, XattrFlags,
};
use rustix::io::Errno;
use scratch::Scratch;
use scratch::soundness::assert_sound;
use std::mem::MaybeUninit;

const SLOTS: usize = 5;

/// The slots hold inodes, the first the top directory.
#[derive(Debug, Clone)]
enum Operation {
    Lookup { at: usize, name: String, into: usize },
    Make { at: usize, name: String, kind: u8, mode: u32 },
    Create { at: usize, name: String, is_new: bool, truncates: bool, mode: u32, into: usize },
    Unnamed { at: usize, mode: u32, into: usize },
    Link { of: usize, at: usize, name: String },
    Unlink { at: usize, name: String },
    RemoveDir { at: usize, name: String },
    Rename { at: usize, name: String, to: usize, to_name: String, mode: RenameMode },
    Permissions { of: usize, mode: u32 },
    Owner { of: usize, uid: Option<u32>, gid: Option<u32> },
    Times { of: usize, accessed: Option<i32>, modified: Option<i32> },
    Length { of: usize, len: u64 },
    Write { of: usize, offset: u64, byte: u8 },
    ReadLink { of: usize },
    SetAttribute { of: usize, name: &'static str, len: usize, mode: SetMode },
    RemoveAttribute { of: usize, name: &'static str },
    ReadDir { of: usize, plus: bool },
    Forget { of: usize },
    Reopen,
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        30 => select(vec!["a", "b", "c"]).prop_map(str::to_owned),
        1 => Just("n".repeat(255)),
        1 => Just("n".repeat(256)),
    ]
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let slot = || 0..SLOTS;
    let place = || (prop_oneof![2 => Just(0), 3 => 0..SLOTS], name());
    let into = || 1..SLOTS;
    let mode = || (0..0o1000u32).prop_map(|mode| mode | 0o700);
    let looked_up = prop_oneof![
        10 => name(),
        1 => Just(".".to_owned()),
        1 => Just("..".to_owned()),
        1 => Just(String::new()),
    ];
    let set_mode = select(vec![SetMode::Any, SetMode::Any, SetMode::Create, SetMode::Replace]);
    let attribute = || select(vec!["user.a", "user.b"]);
    let time = || prop::option::of(any::<i32>());
    let rename_mode = select(vec![
        RenameMode::Replace,
        RenameMode::Replace,
        RenameMode::NoReplace,
        RenameMode::Exchange,
        RenameMode::Whiteout,
        RenameMode::WhiteoutNoReplace,
    ]);
    let names = prop_oneof![
        8 => (slot(), looked_up, into()).prop_map(|(at, name, into)| Lookup { at, name, into }),
        8 => (place(), 0..6u8, mode())
            .prop_map(|((at, name), kind, mode)| Make { at, name, kind, mode }),
        4 => (place(), any::<bool>(), any::<bool>(), mode(), into()).prop_map(
            |((at, name), is_new, truncates, mode, into)| Create {
                at, name, is_new, truncates, mode, into
            }
        ),
        1 => (slot(), mode(), into()).prop_map(|(at, mode, into)| Unnamed { at, mode, into }),
        4 => (slot(), place()).prop_map(|(of, (at, name))| Link { of, at, name }),
        4 => place().prop_map(|(at, name)| Unlink { at, name }),
        3 => place().prop_map(|(at, name)| RemoveDir { at, name }),
        8 => (place(), place(), rename_mode).prop_map(|((at, name), (to, to_name), mode)| {
            Rename { at, name, to, to_name, mode }
        }),
    ];
    let attributes = prop_oneof![
        2 => (slot(), mode(), any::<bool>()).prop_map(|(of, mode, has_bit)| {
            Permissions { of, mode: mode | if has_bit { 0o2000 } else { 0 } }
        }),
        1 => (slot(), prop::option::of(0..3u32), prop::option::of(0..3u32))
            .prop_map(|(of, uid, gid)| Owner { of, uid, gid }),
        1 => (slot(), time(), time())
            .prop_map(|(of, accessed, modified)| Times { of, accessed, modified }),
        2 => (slot(), 0..20_000u64).prop_map(|(of, len)| Length { of, len }),
        2 => (slot(), 0..20_000u64, any::<u8>())
            .prop_map(|(of, offset, byte)| Write { of, offset, byte }),
        1 => slot().prop_map(|of| ReadLink { of }),
        2 => (slot(), attribute(), 0..2000usize, set_mode)
            .prop_map(|(of, name, len, mode)| SetAttribute { of, name, len, mode }),
        1 => (slot(), attribute()).prop_map(|(of, name)| RemoveAttribute { of, name }),
        2 => (slot(), any::<bool>()).prop_map(|(of, plus)| ReadDir { of, plus }),
        2 => into().prop_map(|of| Forget { of }),
        1 => Just(Reopen),
    ];
    prop_oneof![3 => names, 1 => attributes]
}

/// The result of an operation: a description, or an error number.
type Answer = Result<String, i32>;

fn of_pool<T>(outcome: Result<T, FsError>, say: impl FnOnce(T) -> String) -> Answer {
    outcome.map(say).map_err(|error| error.errno())
}

fn of_kernel<T>(outcome: Result<T, Errno>, say: impl FnOnce(T) -> String) -> Answer {
    outcome.map(say).map_err(|error| error.raw_os_error())
}

fn done<T>(_: T) -> String {
    "done".to_owned()
}

fn after_1970(seconds: i32) -> SystemTime {
    let distance = Duration::from_secs(seconds.unsigned_abs().into());
    if seconds < 0 { SystemTime::UNIX_EPOCH - distance } else { SystemTime::UNIX_EPOCH + distance }
}

/// An inode of both.
struct Item {
    node: Node,
    /// Keeps the inode of the pool, as the descriptor keeps the kernel's. Not there for directories
    /// that were removed.
    _held: File,
    fd: OwnedFd,
    /// Whether it was made without a name, so that the kernel lets it have one.
    is_unnamed: bool,
}

impl Item {
    fn stat(&self) -> Stat {
        rustix::fs::statat(&self.fd, "", AtFlags::EMPTY_PATH).unwrap()
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat().st_mode)
    }

    /// A directory that was removed is gone from a pool, and an empty shell in the kernel.
    fn is_removed_directory(&self) -> bool {
        self.kind() == FileType::Directory && self.stat().st_nlink == 0
    }

    /// A path to the same inode, for calls that take no descriptor of this kind.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd()).into()
    }
}

/// A pool and a kernel directory to which the same operations were applied.
struct Both {
    items: [Option<Item>; SLOTS],
    nodes: Option<Nodes>,
    caller: Caller,
    scratch: Scratch,
    is_root: bool,
    has_attributes: bool,
}

fn open_path(at: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(at, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

impl Both {
    fn new() -> Both {
        let scratch = Scratch::with_pool(4 << 20, &Pool::options().inodes(1023));
        let kernel = scratch.directory.path().join("tree/top");
        std::fs::create_dir_all(&kernel).unwrap();
        let files = scratch.open();
        files.create_dir("/top").unwrap();
        let (nodes, caller) = (files.nodes(), files.caller());
        let node = nodes.lookup(nodes.root().unwrap(), b"top").unwrap().node();
        let held = nodes.hold(node).unwrap();
        let fd = rustix::fs::open(&kernel, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let top = Item { node, _held: held, fd, is_unnamed: false };
        let probe = rustix::fs::setxattr(&kernel, "user.probe", b"", XattrFlags::empty());
        if probe.is_ok() {
            rustix::fs::removexattr(&kernel, "user.probe").unwrap();
        }
        Both {
            items: std::array::from_fn(|_| None),
            nodes: Some(nodes),
            caller,
            scratch,
            is_root: rustix::process::geteuid().is_root(),
            has_attributes: probe.is_ok(),
        }
        .with(0, top)
    }

    fn with(mut self, slot: usize, item: Item) -> Both {
        self.items[slot] = Some(item);
        self
    }

    fn nodes(&self) -> &Nodes {
        self.nodes.as_ref().unwrap()
    }

    fn files(&self) -> &Files {
        self.nodes().files()
    }

    fn item(&self, slot: usize) -> Option<&Item> {
        self.items[slot].as_ref()
    }

    /// Keeps an inode that both have found.
    fn keep(&mut self, slot: usize, node: Node, fd: OwnedFd, is_unnamed: bool) {
        let held = self.nodes().hold(node).unwrap();
        self.items[slot] = Some(Item { node, _held: held, fd, is_unnamed });
    }

    fn run(&mut self, operation: &Operation) -> Option<(Answer, Answer)> {
        use Operation::*;
        match operation {
            Lookup { at, name, into } => {
                let item = self.item(*at)?;
                // Nothing above the top is compared.
                let top = self.item(0)?.node;
                let is_above = name == ".." && item.node == top;
                let is_gone = item.is_removed_directory();
                let ours = self.nodes().lookup(item.node, name.as_bytes());
                if is_gone {
                    // An empty name is refused before.
                    let error = ours.unwrap_err();
                    let is_right = matches!(error, FsError::Stale { .. }) || name.is_empty();
                    assert!(is_right, "{error}");
                    return None;
                }
                let theirs = open_path(&item.fd, name);
                if let (Ok(ours), Ok(theirs), false) = (&ours, &theirs, is_above) {
                    let fd = theirs.try_clone().unwrap();
                    let node = ours.node();
                    self.keep(*into, node, fd, false);
                }
                Some((of_pool(ours, done), of_kernel(theirs, done)))
            }
            Create { at, name, is_new, truncates, mode, into } => {
                let item = self.item(*at)?;
                let mut how = self.files().options();
                how.read(true).write(true).create(true).mode(*mode);
                how.create_new(*is_new).truncate(*truncates);
                let ours = self.nodes().create(item.node, name.as_bytes(), &how, &self.caller);
                if item.is_removed_directory() {
                    assert!(matches!(ours.unwrap_err(), FsError::Stale { .. }));
                    return None;
                }
                let mut flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                flags.set(OFlags::EXCL, *is_new);
                flags.set(OFlags::TRUNC, *truncates);
                let mode = Mode::from_raw_mode(*mode);
                let theirs = rustix::fs::openat(&item.fd, name, flags, mode);
                if let (Ok(ours), Ok(_)) = (&ours, &theirs) {
                    let fd = open_path(&item.fd, name).unwrap();
                    let node = ours.node();
                    self.keep(*into, node, fd, false);
                }
                Some((of_pool(ours, done), of_kernel(theirs, done)))
            }
            Unnamed { at, mode, into } => {
                let item = self.item(*at)?;
                let mut how = self.files().options();
                how.read(true).write(true).mode(*mode);
                let ours = self.nodes().create_unnamed(item.node, &how, &self.caller, |_| Ok(()));
                if item.is_removed_directory() {
                    assert!(matches!(ours.unwrap_err(), FsError::Stale { .. }));
                    return None;
                }
                let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
                let mode = Mode::from_raw_mode(*mode);
                let theirs = rustix::fs::openat(&item.fd, ".", flags, mode);
                if let (Ok(ours), Ok(theirs)) = (&ours, &theirs) {
                    let fd = theirs.try_clone().unwrap();
                    let node = ours.node();
                    self.keep(*into, node, fd, true);
                }
                Some((of_pool(ours, done), of_kernel(theirs, done)))
            }
            Forget { of } => {
                self.items[*of] = None;
                None
            }
            Reopen => {
                // Inodes without names go with their last handle: only those with names come back.
                for slot in 1..SLOTS {
                    if self.item(slot).is_some_and(|item| item.stat().st_nlink == 0) {
                        self.items[slot] = None;
                    }
                }
                let kept = self.items.each_mut().map(Option::take);
                let kept = kept.map(|item| item.map(|item| (item.node, item.fd)));
                self.nodes = None;
                self.scratch.assert_clean();
                self.nodes = Some(self.scratch.open().nodes());
                for (slot, item) in kept.into_iter().enumerate() {
                    let Some((node, fd)) = item else { continue };
                    self.keep(slot, node, fd, false);
                }
                None
            }
            Link { of, at, name } => {
                let (item, directory) = (self.item(*of)?, self.item(*at)?);
                if item.stat().st_nlink == 0 && !item.is_unnamed {
                    // A pool gives a removed file its name back while it is open; Linux does not.
                    return None;
                }
                let ours = self.nodes().link(item.node, directory.node, name.as_bytes());
                if item.is_removed_directory() || directory.is_removed_directory() {
                    assert!(matches!(ours.unwrap_err(), FsError::Stale { .. }));
                    return None;
                }
                let follow = AtFlags::SYMLINK_FOLLOW;
                let theirs = rustix::fs::linkat(CWD, item.path(), &directory.fd, name, follow);
                let is_linked = theirs.is_ok();
                let answer = (
                    of_pool(ours, |of| of.nlink().to_string()),
                    of_kernel(theirs, |()| item.stat().st_nlink.to_string()),
                );
                if is_linked && let Some(item) = &mut self.items[*of] {
                    item.is_unnamed = false;
                }
                Some(answer)
            }
            Make { .. } | Unlink { .. } | RemoveDir { .. } | Rename { .. } => {
                self.rename(operation)
            }
            _ => self.set(operation),
        }
    }

    fn rename(&self, operation: &Operation) -> Option<(Answer, Answer)> {
        use Operation::*;
        let nodes = self.nodes();
        let (mut is_gone, ours, theirs): (_, Answer, _);
        match operation {
            Make { at, name, kind, mode } => {
                let item = self.item(*at)?;
                is_gone = item.is_removed_directory();
                let perm = Mode::from_raw_mode(*mode);
                let (new, made) = match kind {
                    0 | 1 => (NewNode::directory(*mode), rustix::fs::mkdirat(&item.fd, name, perm)),
                    2 => (
                        NewNode::file(*mode),
                        rustix::fs::mknodat(&item.fd, name, FileType::RegularFile, perm, 0),
                    ),
                    3 => (
                        NewNode::special(SpecialFile::Socket, *mode),
                        rustix::fs::mknodat(&item.fd, name, FileType::Socket, perm, 0),
                    ),
                    4 => (
                        NewNode::special(SpecialFile::CharDevice(0), *mode),
                        rustix::fs::mknodat(&item.fd, name, FileType::CharacterDevice, perm, 0),
                    ),
                    _ => (NewNode::symlink(b"t"), rustix::fs::symlinkat("t", &item.fd, name)),
                };
                let made_by_us = nodes.make(item.node, name.as_bytes(), &new, &self.caller);
                ours = of_pool(made_by_us, |of| describe(&of));
                theirs = of_kernel(made, |()| {
                    let at = AtFlags::SYMLINK_NOFOLLOW;
                    describe_kernel(&rustix::fs::statat(&item.fd, name, at).unwrap())
                });
            }
            Unlink { at, name } | RemoveDir { at, name } => {
                let item = self.item(*at)?;
                is_gone = item.is_removed_directory();
                let is_directory = matches!(operation, RemoveDir { .. });
                let fd = open_path(&item.fd, name);
                let removed = if is_directory {
                    nodes.remove_dir(item.node, name.as_bytes(), |_| Ok(false))
                } else {
                    nodes.unlink(item.node, name.as_bytes(), |_| Ok(false))
                };
                ours = of_pool(removed, |removed| removed.links.to_string());
                let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                theirs = of_kernel(rustix::fs::unlinkat(&item.fd, name, flags), |()| {
                    let left = rustix::fs::statat(fd.unwrap(), "", AtFlags::EMPTY_PATH).unwrap();
                    left.st_nlink.to_string()
                });
            }
            Rename { at, name, to, to_name, mode } => {
                let (from, to) = (self.item(*at)?, self.item(*to)?);
                is_gone = from.is_removed_directory();
                is_gone |= to.is_removed_directory();
                let flags = match mode {
                    RenameMode::Replace => RenameFlags::empty(),
                    RenameMode::NoReplace => RenameFlags::NOREPLACE,
                    RenameMode::Exchange => RenameFlags::EXCHANGE,
                    RenameMode::Whiteout => RenameFlags::WHITEOUT,
                    RenameMode::WhiteoutNoReplace => RenameFlags::WHITEOUT | RenameFlags::NOREPLACE,
                };
                let names = ((from.node, name.as_bytes()), (to.node, to_name.as_bytes()));
                let by = self.files().caller();
                ours = of_pool(nodes.rename(names.0, names.1, *mode, &by, |_| Ok(false)), done);
                theirs = of_kernel(
                    rustix::fs::renameat_with(&from.fd, name, &to.fd, to_name, flags),
                    done,
                );
            }
            _ => unreachable!("not on names"),
        }
        if is_gone {
            assert_eq!(ours, Err(libc::ESTALE));
            return None;
        }
        Some((ours, theirs))
    }

    fn set(&self, operation: &Operation) -> Option<(Answer, Answer)> {
        use Operation::*;
        let nodes = self.nodes();
        let set = |node, what: SetAttributes| of_pool(nodes.set(node, &what, &self.caller), done);
        let (Permissions { of, .. }
        | Owner { of, .. }
        | Times { of, .. }
        | Length { of, .. }
        | Write { of, .. }
        | ReadLink { of }
        | SetAttribute { of, .. }
        | RemoveAttribute { of, .. }
        | ReadDir { of, .. }) = operation
        else {
            unreachable!("not on one inode")
        };
        let item = self.item(*of)?;
        let (node, kind) = (item.node, item.kind());
        let is_gone = item.is_removed_directory();
        let (ours, theirs) = match operation {
            // Bits that run a file as another user: elsewhere.
            Permissions { mode, .. } if kind == FileType::Directory || mode & 0o7000 == 0 => {
                // A symbolic link of Linux has none.
                if kind == FileType::Symlink {
                    return None;
                }
                let bits = Mode::from_raw_mode(*mode);
                let theirs = rustix::fs::chmodat(CWD, item.path(), bits, AtFlags::empty());
                (set(node, SetAttributes::new().mode(*mode)), of_kernel(theirs, done))
            }
            Owner { uid, gid, .. } if self.is_root => {
                let owner = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                let theirs =
                    rustix::fs::chownat(&item.fd, "", owner.0, owner.1, AtFlags::EMPTY_PATH);
                (set(node, SetAttributes::new().owner(*uid, *gid)), of_kernel(theirs, done))
            }
            Times { accessed, modified, .. } => {
                let spec = |seconds: Option<i32>| Timespec {
                    tv_sec: seconds.unwrap_or(0).into(),
                    tv_nsec: if seconds.is_some() { 0 } else { libc::UTIME_OMIT },
                };
                let times =
                    Timestamps { last_access: spec(*accessed), last_modification: spec(*modified) };
                let theirs = rustix::fs::utimensat(&item.fd, "", &times, AtFlags::EMPTY_PATH);
                let mut times = FileTimes::new();
                times = accessed.map_or(times, |time| times.set_accessed(after_1970(time)));
                times = modified.map_or(times, |time| times.set_modified(after_1970(time)));
                (set(node, SetAttributes::new().times(times)), of_kernel(theirs, done))
            }
            Length { len, .. } if kind != FileType::Symlink => {
                let file = std::fs::OpenOptions::new().write(true).open(item.path());
                let theirs = file.and_then(|file| file.set_len(*len));
                let theirs = theirs.map(done).map_err(|error| error.raw_os_error().unwrap());
                (set(node, SetAttributes::new().len(*len)), theirs)
            }
            Write { offset, byte, .. } if kind == FileType::RegularFile => {
                let bytes = [*byte; 3000];
                let ours = nodes.open(node, self.files().options().write(true));
                let ours = ours.and_then(|file| file.write_at(&bytes, *offset));
                let theirs = std::fs::OpenOptions::new().write(true).open(item.path()).unwrap();
                let theirs = theirs.write_at(&bytes, *offset).unwrap();
                (of_pool(ours, |len| len.to_string()), Ok(theirs.to_string()))
            }
            ReadLink { .. } => {
                let ours = nodes.read_link(node);
                let theirs = rustix::fs::readlinkat(&item.fd, "", Vec::new());
                // Of a descriptor that is no link Linux says that there is nothing of that name.
                let theirs = theirs.map_err(|error| match error {
                    Errno::NOENT => Errno::INVAL,
                    error => error,
                });
                (
                    of_pool(ours, |target| format!("{target:?}")),
                    of_kernel(theirs, |target| format!("{:?}", target.to_bytes())),
                )
            }
            // Linux has none of users for symbolic links.
            SetAttribute { name, len, mode, .. }
                if self.has_attributes && kind != FileType::Symlink =>
            {
                let (value, flags) = (
                    vec![*len as u8; *len],
                    match mode {
                        SetMode::Any => XattrFlags::empty(),
                        SetMode::Create => XattrFlags::CREATE,
                        SetMode::Replace => XattrFlags::REPLACE,
                    },
                );
                let theirs = rustix::fs::setxattr(item.path(), *name, &value, flags);
                let name = name.as_bytes();
                let ours = nodes.set_attribute(node, name, &value, *mode, &self.caller);
                (of_pool(ours, done), of_kernel(theirs, done))
            }
            RemoveAttribute { name, .. } if self.has_attributes && kind != FileType::Symlink => {
                let theirs = rustix::fs::removexattr(item.path(), *name);
                let ours = nodes.remove_attribute(node, name.as_bytes(), &self.caller);
                (of_pool(ours, done), of_kernel(theirs, done))
            }
            ReadDir { plus, .. } => {
                let ours = listed(nodes, node, *plus);
                let theirs = match kind {
                    FileType::Directory if is_gone => Err(libc::ESTALE),
                    FileType::Directory => Ok(listed_by_kernel(&item.fd)),
                    _ => Err(libc::ENOTDIR),
                };
                (
                    of_pool(ours, |names| format!("{names:?}")),
                    theirs.map(|names| format!("{names:?}")),
                )
            }
            _ => return None,
        };
        if is_gone {
            assert_eq!(ours, Err(libc::ESTALE));
            return None;
        }
        Some((ours, theirs))
    }

    /// Compares all inodes that are held.
    fn compare(&self) {
        assert_sound(self.files().pool());
        for item in self.items.iter().flatten() {
            let ours = self.nodes().metadata(item.node);
            if item.is_removed_directory() {
                assert!(matches!(ours.unwrap_err(), FsError::Stale { .. }));
                continue;
            }
            let ours = ours.unwrap();
            assert_eq!(ours.node(), item.node);
            assert_eq!(describe(&ours), describe_kernel(&item.stat()));
            if ours.is_file() {
                let file = self.nodes().open(item.node, self.files().options().read(true)).unwrap();
                let mut content = vec![0; ours.len() as usize];
                file.read_exact_at(&mut content, 0).unwrap();
                assert!(content == std::fs::read(item.path()).unwrap(), "it has other bytes");
            }
            if self.has_attributes && !ours.is_symlink() {
                for name in ["user.a", "user.b"] {
                    let mut value = [0; 4096];
                    let theirs = rustix::fs::getxattr(item.path(), name, &mut value).ok();
                    let ours = self.nodes().attribute(item.node, name.as_bytes()).ok();
                    assert!(ours.as_deref() == theirs.map(|len| &value[..len]), "{name}");
                }
            }
        }
    }
}

fn describe(of: &aquifer_fs::Metadata) -> String {
    let len = if of.is_dir() { 0 } else { of.len() };
    let mode = if of.is_symlink() { libc::S_IFLNK } else { of.mode() };
    format!("{mode:o} {}:{} {len} bytes, {} links", of.uid(), of.gid(), of.nlink())
}

fn describe_kernel(of: &Stat) -> String {
    let kind = FileType::from_raw_mode(of.st_mode);
    let len = if kind == FileType::Directory { 0 } else { of.st_size };
    let mode = if kind == FileType::Symlink { libc::S_IFLNK } else { of.st_mode };
    format!("{mode:o} {}:{} {len} bytes, {} links", of.st_uid, of.st_gid, of.st_nlink)
}

type Listed = Vec<(Vec<u8>, char)>;

/// All names of a directory, and what they are, sorted; with the numbers checked.
fn listed(nodes: &Nodes, directory: Node, plus: bool) -> Result<Listed, FsError> {
    let mut found = Vec::new();
    let mut all = Vec::new();
    let each = |_: Cookie, entries: &[aquifer_fs::node::NodeEntry]| {
        all.extend(entries.to_vec());
        std::ops::ControlFlow::Continue(())
    };
    if plus {
        nodes.read_dir_plus(directory, Cookie::START, each)?;
    } else {
        nodes.read_dir(directory, Cookie::START, each)?;
    }
    for entry in all {
        let now = nodes.lookup(directory, &entry.name)?;
        assert_eq!((now.ino(), now.file_type()), (entry.number, entry.file_type));
        assert_eq!(entry.metadata, plus.then_some(now));
        let kind = match entry.file_type {
            kind if kind.is_dir() => 'd',
            kind if kind.is_symlink() => 'l',
            _ => '-',
        };
        found.push((entry.name, kind));
    }
    found.sort();
    Ok(found)
}

fn listed_by_kernel(directory: &OwnedFd) -> Listed {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(directory, ".", flags, Mode::empty()).unwrap();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(fd, &mut buffer);
    let mut found = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry.unwrap();
        let kind = match entry.file_type() {
            FileType::Directory => 'd',
            FileType::Symlink => 'l',
            _ => '-',
        };
        found.push((entry.file_name().to_bytes().to_vec(), kind));
    }
    found.sort();
    found
}

fn run(operations: &[Operation]) {
    let mut both = Both::new();
    for operation in operations {
        if let Some((ours, theirs)) = both.run(operation) {
            assert_eq!(ours, theirs, "{operation:?}: ours and the kernel's answer");
        }
        both.compare();
    }
    // Nothing leaks: without names and handles there is as much room as in a new pool.
    both.items = std::array::from_fn(|_| None);
    both.files().remove_dir_all("top").unwrap();
    both.files().pool().checkpoint().unwrap();
    let info = both.files().pool().info().unwrap();
    assert_eq!(info.free_slots, info.layout.slots() - 2, "all but the head and the root are free");
    both.nodes = None;
    both.scratch.assert_clean();
}

#[test]
fn nodes_do_what_the_kernel_does_with_descriptors() {
    let seed = seed(1);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        cases: steps(40) as u32,
        failure_persistence: None,
        max_shrink_iters: 400,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let sequences = prop::collection::vec(operation(), 1..100);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = runner.run(&sequences, |operations| {
        std::panic::catch_unwind(|| run(&operations)).map_err(|reason| {
            let text = reason.downcast_ref::<String>().cloned();
            TestCaseError::fail(text.unwrap_or_else(|| "it panicked".to_owned()))
        })
    });
    std::panic::set_hook(hook);
    match outcome {
        Err(TestError::Fail(reason, operations)) => {
            panic!("AQUIFER_SEED={seed}: {reason}\nafter {operations:#?}")
        }
        outcome => outcome.unwrap(),
    }
}

#[test]
fn an_inode_that_cannot_be_read_is_not_gone() {
    use std::sync::Arc;

    use aquifer_crashkit::{CrashMedia, Fault, Trigger};
    use aquifer_pool::media::{MediaOperation, PersistenceDomain};

    let disk = PersistenceDomain::PageCache;
    let options = || Pool::options().background(false);
    let fresh = Arc::new(CrashMedia::new(4 << 20, disk).unwrap());
    let files = Files::new(options().create_on(fresh.clone()).unwrap());
    let made = (0..64).map(|number| files.create_file(format!("/{number}")).unwrap().node());
    let node = made.collect::<Vec<_>>()[63];
    drop(files);
    // What was closed in order is read when it is needed.
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), disk).unwrap());
    let files = Files::new(options().open_on(media.clone()).unwrap());
    media.fail(Fault::io_error(Trigger::on(MediaOperation::Read).lasting()));
    let nodes = files.nodes();
    for error in [nodes.numbered(node.number).unwrap_err(), nodes.metadata(node).unwrap_err()] {
        assert!(matches!(error, FsError::Pool(_)), "{error:?}");
        assert_eq!(error.errno(), libc::EIO, "{error}");
    }
    media.clear_faults();
    assert_eq!(nodes.numbered(node.number).unwrap(), node);
    assert_eq!(nodes.metadata(node).unwrap().nlink(), 1);
    // A number that is free, and one of another inode, are stale.
    files.remove_file("/63").unwrap();
    for gone in [nodes.numbered(node.number), nodes.metadata(node).map(|found| found.node())] {
        assert!(matches!(gone, Err(FsError::Stale { .. })), "{gone:?}");
    }
}
