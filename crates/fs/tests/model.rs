//! Every file operation, against the kernel: random sequences run on a pool and on a directory in
//! memory (tmpfs); both must return the same results, error numbers included, and end with the same
//! tree.
//!
//! The kernel is the model because programs expect its behaviour, including which of two errors is
//! returned. There are few names, so that they collide. Everything happens deep inside a chain of
//! directories, because `..` of a pool's root is that root, but `..` of a directory of the machine
//! leaves it: no path here, even through 40 symbolic links, gets that far up.
//!
//! A program of its own: a process has one panic hook, which is silent while sequences shrink.

mod scratch;

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aquifer_fs::{
    FallocateMode, File, FileTimes, Files, FsError, RenameMode, SetMode, SpecialFile,
};
use aquifer_pool::Pool;
use aquifer_testkit::campaign::{seed, steps};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags,
};
use scratch::soundness::assert_sound;
use scratch::{Scratch, names};

const POOL_BYTES: u64 = 8 << 20;
/// How deep the names lie: deeper than any path can climb.
const DEPTH: usize = 100;
const HANDLES: usize = 4;

/// How a file is opened: read, write, append, truncate, create, create_new, no_follow.
type Flags = [bool; 7];

#[derive(Debug, Clone)]
enum Operation {
    Open { handle: usize, path: String, flags: Flags, mode: u32 },
    Close { handle: usize },
    Write { handle: usize, offset: u64, len: usize, byte: u8 },
    Read { handle: usize, offset: u64, len: usize },
    SetLen { handle: usize, len: u64 },
    Allocate { handle: usize, how: u8, offset: u64, len: u64 },
    SyncHandle { handle: usize },
    ChangeHandle { handle: usize, mode: u32 },
    CreateDir { path: String },
    RemoveDir { path: String },
    RemoveFile { path: String },
    Rename { from: String, to: String, mode: RenameMode },
    HardLink { from: String, to: String },
    Symlink { target: String, path: String },
    Special { path: String, how: u8, mode: u32 },
    ReadLink { path: String },
    ReadDir { path: String },
    Permissions { path: String, mode: u32 },
    Owner { path: String, uid: Option<u32>, gid: Option<u32> },
    Times { path: String, accessed: Option<i32>, modified: Option<i32> },
    SetAttribute { path: String, name: String, len: usize, mode: SetMode },
    Attribute { path: String, name: String },
    RemoveAttribute { path: String, name: String },
    Metadata { path: String, follows: bool },
    Sync,
    Checkpoint,
    Reopen,
}

fn path() -> impl Strategy<Value = String> {
    let name = select(vec!["a", "b", "c", "a", "b", "c", "a", "b", ".", ".."]);
    let end = select(vec!["", "", "", "", "", "", "", "", "/", "/.", "/.."]);
    let short =
        (prop::collection::vec(name, 1..4), end).prop_map(|(names, end)| names.join("/") + end);
    prop_oneof![
        40 => short,
        1 => Just("n".repeat(255)),
        1 => Just("n".repeat(256)),
        1 => Just(String::new()),
        1 => Just(format!("a/{}", "n".repeat(256))),
        1 => Just(format!("./{}a", "/".repeat(3000))),
        1 => Just(format!("./{}a", "/".repeat(4094))),
    ]
}

/// Offsets in files: around the ends of pages and of files, and far away.
fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..20_000u64,
        3 => (0..8u64, 0..3u64).prop_map(|(page, near)| (page * 4096 + near).saturating_sub(1)),
        1 => 100_000..300_000u64,
    ]
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![1 => Just(0u64), 4 => 1..200u64, 4 => 1..20_000u64, 2 => select(vec![4096u64, 8192])]
}

fn flags() -> impl Strategy<Value = Flags> {
    let likely = select(vec![
        [true, false, false, false, false, false, false],
        [true, true, false, false, false, false, false],
        [true, true, false, false, true, false, false],
        [true, true, false, false, true, false, false],
        [true, true, false, true, true, false, false],
        [true, false, true, false, true, false, false],
        [true, true, false, false, true, true, false],
        [false, true, false, true, false, false, false],
        [true, false, false, false, false, false, true],
    ]);
    prop_oneof![4 => likely, 1 => any::<Flags>()]
}

fn mode() -> impl Strategy<Value = u32> {
    // No mode that would deny access to an ordinary user: only the kernel's directory would enforce
    // it.
    (0..0o1000u32).prop_map(|mode| mode | 0o700)
}

fn rename_mode() -> impl Strategy<Value = RenameMode> {
    select(vec![
        RenameMode::Replace,
        RenameMode::Replace,
        RenameMode::Replace,
        RenameMode::NoReplace,
        RenameMode::Exchange,
        RenameMode::Whiteout,
        RenameMode::WhiteoutNoReplace,
    ])
}

fn attribute_name() -> impl Strategy<Value = String> {
    prop_oneof![
        20 => select(vec!["user.a", "user.b", "user.c"]).prop_map(str::to_owned),
        1 => select(vec!["", "user.", "nowhere.a"]).prop_map(str::to_owned),
        1 => Just(format!("user.{}", "n".repeat(250))),
        1 => Just(format!("user.{}", "n".repeat(251))),
    ]
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let handle = || 0..HANDLES;
    let owner = || prop::option::of(0..3u32);
    let time = || prop::option::of(any::<i32>());
    let set_mode = select(vec![SetMode::Any, SetMode::Any, SetMode::Create, SetMode::Replace]);
    let attribute_len = prop_oneof![8 => 0..300usize, 1 => 300..5000usize];
    let content = prop_oneof![
        8 => (handle(), path(), flags(), mode())
            .prop_map(|(handle, path, flags, mode)| Open { handle, path, flags, mode }),
        1 => handle().prop_map(|handle| Close { handle }),
        10 => (handle(), offset(), length(), any::<u8>()).prop_map(|(handle, offset, len, byte)| {
            Write { handle, offset, len: len as usize, byte }
        }),
        3 => (handle(), offset(), length())
            .prop_map(|(handle, offset, len)| Read { handle, offset, len: len as usize }),
        4 => (handle(), offset()).prop_map(|(handle, len)| SetLen { handle, len }),
        6 => (handle(), 0..4u8, offset(), length())
            .prop_map(|(handle, how, offset, len)| Allocate { handle, how, offset, len }),
        1 => handle().prop_map(|handle| SyncHandle { handle }),
        1 => (handle(), mode()).prop_map(|(handle, mode)| ChangeHandle { handle, mode }),
    ];
    let tree = prop_oneof![
        4 => path().prop_map(|path| CreateDir { path }),
        2 => path().prop_map(|path| RemoveDir { path }),
        3 => path().prop_map(|path| RemoveFile { path }),
        6 => (path(), path(), rename_mode()).prop_map(|(from, to, mode)| Rename { from, to, mode }),
        3 => (path(), path()).prop_map(|(from, to)| HardLink { from, to }),
        3 => (path(), path()).prop_map(|(target, path)| Symlink { target, path }),
        3 => (path(), 0..6u8, mode()).prop_map(|(path, how, mode)| Special { path, how, mode }),
        1 => path().prop_map(|path| ReadLink { path }),
        1 => path().prop_map(|path| ReadDir { path }),
    ];
    let other = prop_oneof![
        2 => (path(), mode()).prop_map(|(path, mode)| Permissions { path, mode }),
        1 => (path(), owner(), owner()).prop_map(|(path, uid, gid)| Owner { path, uid, gid }),
        1 => (path(), time(), time())
            .prop_map(|(path, accessed, modified)| Times { path, accessed, modified }),
        3 => (path(), attribute_name(), attribute_len, set_mode)
            .prop_map(|(path, name, len, mode)| SetAttribute { path, name, len, mode }),
        1 => (path(), attribute_name()).prop_map(|(path, name)| Attribute { path, name }),
        2 => (path(), attribute_name()).prop_map(|(path, name)| RemoveAttribute { path, name }),
        2 => (path(), any::<bool>()).prop_map(|(path, follows)| Metadata { path, follows }),
        1 => Just(Sync),
        1 => Just(Checkpoint),
        1 => Just(Reopen),
    ];
    prop_oneof![10 => content, 10 => tree, 4 => other]
}

/// The result of an operation: a description, or an error number.
type Answer = Result<String, i32>;

fn of_pool<T>(outcome: Result<T, FsError>, say: impl FnOnce(T) -> String) -> Answer {
    outcome.map(say).map_err(|error| error.errno())
}

fn of_kernel<T>(outcome: std::io::Result<T>, say: impl FnOnce(T) -> String) -> Answer {
    outcome.map(say).map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
}

fn of_rustix<T>(outcome: rustix::io::Result<T>, say: impl FnOnce(T) -> String) -> Answer {
    outcome.map(say).map_err(|error| error.raw_os_error())
}

fn done<T>(_: T) -> String {
    "done".to_owned()
}

fn sum(bytes: &[u8]) -> String {
    format!("{} bytes, {:?}", bytes.len(), aquifer_pool::format::checksum(&[bytes]))
}

fn after_1970(seconds: i32) -> SystemTime {
    let distance = Duration::from_secs(seconds.unsigned_abs().into());
    if seconds < 0 { SystemTime::UNIX_EPOCH - distance } else { SystemTime::UNIX_EPOCH + distance }
}

fn spec(seconds: Option<i32>) -> Timespec {
    match seconds {
        Some(seconds) => Timespec { tv_sec: seconds.into(), tv_nsec: 0 },
        None => Timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT },
    }
}

/// A pool and a kernel directory to which the same operations were applied.
struct Both {
    scratch: Scratch,
    files: Option<Files>,
    kernel: PathBuf,
    prefix: PathBuf,
    handles: [Option<(File, std::fs::File)>; HANDLES],
    is_root: bool,
    has_attributes: bool,
    is_tmpfs: bool,
}

impl Both {
    fn new() -> Both {
        let options = Pool::options().inodes(2047);
        let scratch = Scratch::with_pool(POOL_BYTES, &options);
        let kernel = scratch.directory.path().join("tree");
        let prefix = PathBuf::from(vec!["p"; DEPTH].join("/"));
        std::fs::create_dir_all(kernel.join(&prefix)).unwrap();
        // As the root of a pool, regardless of the umask.
        std::fs::set_permissions(&kernel, PermissionsExt::from_mode(0o755)).unwrap();
        let files = scratch.open();
        files.create_dir_all(&prefix).unwrap();
        let has_attributes =
            rustix::fs::setxattr(&kernel, "user.probe", b"", XattrFlags::empty()).is_ok();
        let is_tmpfs = rustix::fs::statfs(&kernel).is_ok_and(|fs| fs.f_type as u64 == 0x0102_1994);
        if has_attributes {
            rustix::fs::removexattr(&kernel, "user.probe").unwrap();
        }
        Both {
            scratch,
            files: Some(files),
            kernel,
            prefix,
            handles: Default::default(),
            is_root: rustix::process::geteuid().is_root(),
            has_attributes,
            is_tmpfs,
        }
    }

    fn files(&self) -> &Files {
        self.files.as_ref().unwrap()
    }

    /// The same path in the pool and in the kernel's directory. An empty path stays empty; a path
    /// of the maximum length or more is that long for both.
    fn paths(&self, path: &str) -> (PathBuf, PathBuf) {
        if path.is_empty() {
            return Default::default();
        }
        // Not `join`, which treats a leading slash specially.
        let inside = |start: &Path| PathBuf::from(format!("{}/{path}", start.display()));
        (inside(&self.prefix), inside(&self.kernel.join(&self.prefix)))
    }

    fn run(&mut self, operation: &Operation) -> (Answer, Answer) {
        use Operation::*;
        match operation {
            Open { .. } | Close { .. } | Write { .. } | Read { .. } | SetLen { .. } => {
                self.run_on_handle(operation)
            }
            Allocate { .. } | SyncHandle { .. } | ChangeHandle { .. } => {
                self.run_on_handle(operation)
            }
            Sync | Checkpoint | Reopen => {
                self.run_on_pool(operation);
                (Ok(String::new()), Ok(String::new()))
            }
            _ => self.run_on_path(operation),
        }
    }

    fn run_on_pool(&mut self, operation: &Operation) {
        match operation {
            Operation::Sync => self.files().sync().unwrap(),
            Operation::Checkpoint => self.files().pool().checkpoint().unwrap(),
            _ => {
                self.handles = Default::default();
                self.files = None;
                self.scratch.assert_clean();
                self.files = Some(self.scratch.open());
            }
        }
    }

    fn open(&mut self, handle: usize, path: &str, flags: Flags, mode: u32) -> (Answer, Answer) {
        let [read, write, append, truncate, create, create_new, no_follow] = flags;
        let (pool, kernel) = self.paths(path);
        // The kernel can open pipes and devices.
        let follows = |path: &Path| std::fs::metadata(path).map(|of| of.file_type());
        if follows(&kernel)
            .is_ok_and(|of| of.is_fifo() || of.is_char_device() || of.is_block_device())
        {
            return (Ok(String::new()), Ok(String::new()));
        }
        let ours = self
            .files()
            .options()
            .read(read)
            .write(write)
            .append(append)
            .truncate(truncate)
            .create(create)
            .create_new(create_new)
            .custom_flags(if no_follow { libc::O_NOFOLLOW } else { 0 })
            .mode(mode)
            .open(pool);
        let theirs = std::fs::OpenOptions::new()
            .read(read)
            .write(write)
            .append(append)
            .truncate(truncate)
            .create(create)
            .create_new(create_new)
            .custom_flags(if no_follow { libc::O_NOFOLLOW } else { 0 })
            .mode(mode)
            .open(kernel);
        match (ours, theirs) {
            (Ok(ours), Ok(theirs)) => {
                self.handles[handle] = Some((ours, theirs));
                (Ok(String::new()), Ok(String::new()))
            }
            (ours, theirs) => (of_pool(ours, done), of_kernel(theirs, done)),
        }
    }

    fn run_on_handle(&mut self, operation: &Operation) -> (Answer, Answer) {
        use Operation::*;
        let nothing = (Ok(String::new()), Ok(String::new()));
        match *operation {
            Open { handle, ref path, flags, mode } => return self.open(handle, path, flags, mode),
            Close { handle } => {
                self.handles[handle] = None;
                return nothing;
            }
            _ => {}
        }
        let both = |handle: usize| self.handles[handle].as_ref();
        let outcome = match *operation {
            Write { handle, offset, len, byte } => both(handle).map(|(ours, theirs)| {
                let bytes = vec![byte; len];
                let written = |count: usize| count.to_string();
                let ours = ours.write_at(&bytes, offset);
                (of_pool(ours, written), of_kernel(theirs.write_at(&bytes, offset), written))
            }),
            Read { handle, offset, len } => both(handle).map(|(ours, theirs)| {
                let (mut one, mut other) = (vec![1; len], vec![2; len]);
                let ours = ours.read_at(&mut one, offset);
                let theirs = theirs.read_at(&mut other, offset);
                (of_pool(ours, |got| sum(&one[..got])), of_kernel(theirs, |got| sum(&other[..got])))
            }),
            SetLen { handle, len } => both(handle).map(|(ours, theirs)| {
                (of_pool(ours.set_len(len), done), of_kernel(theirs.set_len(len), done))
            }),
            Allocate { handle, how, offset, len } => {
                both(handle).map(|(ours, theirs)| allocate(ours, theirs, how, offset, len))
            }
            SyncHandle { handle } => both(handle).map(|(ours, theirs)| {
                (of_pool(ours.sync_all(), done), of_kernel(theirs.sync_all(), done))
            }),
            ChangeHandle { handle, mode } => both(handle).map(|(ours, theirs)| {
                let permissions = std::fs::Permissions::from_mode(mode);
                let theirs = theirs.set_permissions(permissions.clone());
                (of_pool(ours.set_permissions(permissions), done), of_kernel(theirs, done))
            }),
            _ => unreachable!("not on a handle"),
        };
        outcome.unwrap_or(nothing)
    }

    fn run_on_path(&mut self, operation: &Operation) -> (Answer, Answer) {
        use Operation::*;
        let files = self.files();
        match operation {
            CreateDir { path } => {
                let (pool, kernel) = self.paths(path);
                (
                    of_pool(files.create_dir(pool), done),
                    of_kernel(std::fs::create_dir(kernel), done),
                )
            }
            RemoveDir { path } => {
                let (pool, kernel) = self.paths(path);
                (
                    of_pool(files.remove_dir(pool), done),
                    of_kernel(std::fs::remove_dir(kernel), done),
                )
            }
            RemoveFile { path } => {
                let (pool, kernel) = self.paths(path);
                let theirs = std::fs::remove_file(kernel);
                (of_pool(files.remove_file(pool), done), of_kernel(theirs, done))
            }
            Rename { from, to, mode } => {
                let (from, to) = (self.paths(from), self.paths(to));
                let flags = match mode {
                    RenameMode::Replace => RenameFlags::empty(),
                    RenameMode::NoReplace => RenameFlags::NOREPLACE,
                    RenameMode::Exchange => RenameFlags::EXCHANGE,
                    RenameMode::Whiteout => RenameFlags::WHITEOUT,
                    RenameMode::WhiteoutNoReplace => RenameFlags::WHITEOUT | RenameFlags::NOREPLACE,
                };
                let theirs = rustix::fs::renameat_with(CWD, &from.1, CWD, &to.1, flags);
                (of_pool(files.rename_with(from.0, to.0, *mode), done), of_rustix(theirs, done))
            }
            HardLink { from, to } => {
                let (from, to) = (self.paths(from), self.paths(to));
                let theirs = std::fs::hard_link(from.1, to.1);
                (of_pool(files.hard_link(from.0, to.0), done), of_kernel(theirs, done))
            }
            Symlink { target, path } => {
                let (pool, kernel) = self.paths(path);
                let theirs = std::os::unix::fs::symlink(target, kernel);
                (of_pool(files.symlink(target, pool), done), of_kernel(theirs, done))
            }
            Special { path, how, mode } => {
                let (pool, kernel) = self.paths(path);
                let rdev = libc::makedev(250, 70_000 + u32::from(*how));
                // An ordinary user may only make a device that stands for a removed name.
                let (special, kind, rdev) = match how {
                    0 | 1 => (SpecialFile::Socket, FileType::Socket, 0),
                    2 | 3 => (SpecialFile::Fifo, FileType::Fifo, 0),
                    4 if self.is_root => {
                        (SpecialFile::BlockDevice(rdev), FileType::BlockDevice, rdev)
                    }
                    _ if self.is_root => {
                        (SpecialFile::CharDevice(rdev), FileType::CharacterDevice, rdev)
                    }
                    _ => (SpecialFile::CharDevice(0), FileType::CharacterDevice, 0),
                };
                let raw = Mode::from_raw_mode(*mode);
                let theirs = rustix::fs::mknodat(CWD, &kernel, kind, raw, rdev);
                (of_pool(files.create_special(pool, special, *mode), done), of_rustix(theirs, done))
            }
            ReadLink { path } => {
                let (pool, kernel) = self.paths(path);
                let say = |target: PathBuf| format!("{target:?}");
                (of_pool(files.read_link(pool), say), of_kernel(std::fs::read_link(kernel), say))
            }
            ReadDir { path } => {
                let (pool, kernel) = self.paths(path);
                let theirs = std::fs::read_dir(kernel).map(sorted);
                let say = |names| format!("{names:?}");
                (of_pool(names(files, pool), say), of_kernel(theirs, say))
            }
            Metadata { path, follows } => {
                let (pool, kernel) = self.paths(path);
                let (ours, theirs) = if *follows {
                    (files.metadata(pool), std::fs::metadata(kernel))
                } else {
                    (files.symlink_metadata(pool), std::fs::symlink_metadata(kernel))
                };
                (of_pool(ours, |of| describe(&of)), of_kernel(theirs, |of| describe_kernel(&of)))
            }
            _ => self.set_on_path(operation),
        }
    }

    fn set_on_path(&self, operation: &Operation) -> (Answer, Answer) {
        use Operation::*;
        let files = self.files();
        let nothing = (Ok(String::new()), Ok(String::new()));
        match operation {
            Permissions { path, mode } => {
                let (pool, kernel) = self.paths(path);
                let permissions = std::fs::Permissions::from_mode(*mode);
                let theirs = std::fs::set_permissions(kernel, permissions.clone());
                (of_pool(files.set_permissions(pool, permissions), done), of_kernel(theirs, done))
            }
            Owner { path, uid, gid } if self.is_root => {
                let (pool, kernel) = self.paths(path);
                let theirs = std::os::unix::fs::lchown(kernel, *uid, *gid);
                (of_pool(files.lchown(pool, *uid, *gid), done), of_kernel(theirs, done))
            }
            // Without a time the kernel does not even resolve the path.
            Times { accessed: None, modified: None, .. } => nothing,
            Times { path, accessed, modified } => {
                let (pool, kernel) = self.paths(path);
                let (last_access, last_modification) = (spec(*accessed), spec(*modified));
                let times = Timestamps { last_access, last_modification };
                let theirs = rustix::fs::utimensat(CWD, &kernel, &times, AtFlags::SYMLINK_NOFOLLOW);
                let [new_accessed, new_modified] =
                    [*accessed, *modified].map(|t| t.map(after_1970));
                let mut times = FileTimes::new();
                times = new_accessed.map_or(times, |time| times.set_accessed(time));
                times = new_modified.map_or(times, |time| times.set_modified(time));
                let ours = files.set_times_nofollow(&pool, times);
                if ours.is_ok() {
                    let found = files.symlink_metadata(&pool).unwrap();
                    assert!(new_accessed.is_none_or(|time| time == found.accessed().unwrap()));
                    assert!(new_modified.is_none_or(|time| time == found.modified().unwrap()));
                }
                (of_pool(ours, done), of_rustix(theirs, done))
            }
            _ if !self.has_attributes => nothing,
            SetAttribute { path, name, len, mode } => {
                let (pool, kernel) = self.paths(path);
                let (value, flags) = (
                    vec![*len as u8; *len],
                    match mode {
                        SetMode::Any => XattrFlags::empty(),
                        SetMode::Create => XattrFlags::CREATE,
                        SetMode::Replace => XattrFlags::REPLACE,
                    },
                );
                let theirs = rustix::fs::setxattr(&kernel, name.as_str(), &value, flags);
                let ours = files.set_attribute(pool, name, &value, *mode);
                (of_pool(ours, done), of_rustix(theirs, done))
            }
            Attribute { path, name } => {
                let (pool, kernel) = self.paths(path);
                let mut value = vec![0; 64 << 10];
                let theirs = rustix::fs::getxattr(&kernel, name.as_str(), &mut value);
                let ours = files.attribute(pool, name);
                (of_pool(ours, |value| sum(&value)), of_rustix(theirs, |len| sum(&value[..len])))
            }
            RemoveAttribute { path, name } => {
                let (pool, kernel) = self.paths(path);
                let theirs = rustix::fs::removexattr(&kernel, name.as_str());
                (of_pool(files.remove_attribute(pool, name), done), of_rustix(theirs, done))
            }
            _ => nothing,
        }
    }

    /// Compares everything that has a name below a directory, and the open files.
    fn compare(&self, below: &Path) {
        assert_sound(self.files().pool());
        let mut left = vec![below.to_owned()];
        while let Some(path) = left.pop() {
            let (pool, kernel) = (Path::new("/").join(&path), self.kernel.join(&path));
            self.compare_one(&pool, &kernel);
            if !self.files().symlink_metadata(&pool).unwrap().is_dir() {
                continue;
            }
            let ours = names(self.files(), &pool).unwrap();
            assert_eq!(ours, sorted(std::fs::read_dir(&kernel).unwrap()), "the names in {path:?}");
            left.extend(ours.into_iter().map(|name| path.join(name)));
        }
        for (ours, theirs) in self.handles.iter().flatten() {
            let (one, other) = (ours.metadata().unwrap(), theirs.metadata().unwrap());
            assert_eq!(describe(&one), describe_kernel(&other));
            let mut bytes = [vec![1; one.len() as usize + 1], vec![2; one.len() as usize + 1]];
            let got = [
                ours.read_at(&mut bytes[0], 0).map_err(|error| error.errno()),
                theirs.read_at(&mut bytes[1], 0).map_err(|error| error.raw_os_error().unwrap()),
            ];
            assert_eq!(got[0], got[1], "reading an open file");
            let len = got[0].unwrap_or(0);
            assert!(bytes[0][..len] == bytes[1][..len], "an open file has other bytes");
        }
    }

    fn compare_one(&self, pool: &Path, kernel: &Path) {
        let ours = self.files().symlink_metadata(pool).unwrap();
        let theirs = std::fs::symlink_metadata(kernel).unwrap();
        assert_eq!(describe(&ours), describe_kernel(&theirs), "{pool:?}");
        if ours.is_symlink() {
            let target = self.files().read_link(pool).unwrap();
            assert_eq!(target, std::fs::read_link(kernel).unwrap(), "{pool:?}");
            return;
        }
        if self.has_attributes {
            self.compare_attributes(pool, kernel);
        }
        if !ours.is_file() {
            return;
        }
        let content = scratch::read_all(self.files(), pool).unwrap();
        assert!(content == std::fs::read(kernel).unwrap(), "{pool:?} has other bytes");
        if self.is_tmpfs {
            // A quarter more to grow into, and the rest of a page.
            let most = theirs.blocks() * 512 + ours.len() / 4 + 4096;
            assert!(
                ours.allocated_bytes() <= most,
                "{pool:?}: {ours:?} has more than {most} bytes"
            );
        }
    }

    fn compare_attributes(&self, pool: &Path, kernel: &Path) {
        let mut list = vec![0; 64 << 10];
        let len = rustix::fs::listxattr(kernel, &mut list).unwrap();
        let mut theirs: Vec<Vec<u8>> = list[..len]
            .split(|byte| *byte == 0)
            .filter(|name| name.starts_with(b"user."))
            .map(<[u8]>::to_vec)
            .collect();
        let mut ours = self.files().attributes(pool).unwrap();
        ours.sort();
        theirs.sort();
        assert_eq!(ours, theirs, "the attributes of {pool:?}");
        for name in ours {
            let mut value = vec![0; 64 << 10];
            let len = rustix::fs::getxattr(kernel, name.as_slice(), &mut value).unwrap();
            let ours = self.files().attribute(pool, &name).unwrap();
            assert!(ours == value[..len], "an attribute of {pool:?}");
        }
    }
}

fn sorted(entries: std::fs::ReadDir) -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    names.sort_unstable_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
    names
}

fn describe(of: &aquifer_fs::Metadata) -> String {
    let len = if of.is_dir() { 0 } else { of.len() };
    let mode = if of.is_symlink() { 0o120777 } else { of.mode() };
    let (uid, gid, rdev) = (of.uid(), of.gid(), of.rdev());
    format!("{mode:o} {uid}:{gid} {len} bytes, {} links, device {rdev:x}", of.nlink())
}

fn describe_kernel(of: &std::fs::Metadata) -> String {
    let len = if of.is_dir() { 0 } else { of.len() };
    let mode = if of.is_symlink() { 0o120777 } else { of.mode() };
    let (uid, gid, rdev) = (of.uid(), of.gid(), of.rdev());
    format!("{mode:o} {uid}:{gid} {len} bytes, {} links, device {rdev:x}", of.nlink())
}

fn allocate(
    ours: &File,
    theirs: &std::fs::File,
    how: u8,
    offset: u64,
    len: u64,
) -> (Answer, Answer) {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (mode, flags) = match how {
        0 => (FallocateMode::Extend, &[FallocateFlags::empty()][..]),
        1 => (FallocateMode::KeepSize, &[FallocateFlags::KEEP_SIZE][..]),
        2 => (FallocateMode::PunchHole, &[punch][..]),
        // tmpfs cannot do it in one call.
        _ => (FallocateMode::ZeroRange, &[punch, FallocateFlags::empty()][..]),
    };
    let kernel =
        flags.iter().try_for_each(|flags| rustix::fs::fallocate(theirs, *flags, offset, len));
    (of_pool(ours.allocate(mode, offset, len), done), of_rustix(kernel, done))
}

fn run(operations: &[Operation]) {
    let mut both = Both::new();
    for operation in operations {
        let (ours, theirs) = both.run(operation);
        assert_eq!(ours, theirs, "{operation:?}: ours and the kernel's answer");
        both.compare(&both.prefix);
    }
    both.compare(Path::new(""));
    // Nothing leaks: without names and handles there is as much room as in a new pool.
    both.handles = Default::default();
    both.files().remove_dir_all("p").unwrap();
    assert_sound(both.files().pool());
    both.files().pool().checkpoint().unwrap();
    let info = both.files().pool().info().unwrap();
    assert_eq!(info.free_slots, info.layout.slots() - 2, "all but the head and the root are free");
    both.files = None;
    both.scratch.assert_clean();
    let files = Files::open(&both.scratch.path).unwrap();
    let space = files.space().unwrap();
    assert_eq!(space.free_bytes, space.total_bytes, "a page was lost");
}

#[test]
fn every_operation_does_what_the_kernel_does() {
    let seed = seed(1);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        cases: steps(25) as u32,
        failure_persistence: None,
        max_shrink_iters: 400,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let sequences = prop::collection::vec(operation(), 1..80);
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
