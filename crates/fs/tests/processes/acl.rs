//! Access control lists, against the kernel: random lists, modes and umasks, on a directory in
//! memory (tmpfs).

use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aquifer_check::{CheckOptions, Severity, check};
use aquifer_fs::{
    ACCESS_ACL, Acl, AclEntry, AclTag, DEFAULT_ACL, FallocateMode, Files, FsError, SetMode,
    SpecialFile,
};
use aquifer_pool::Pool;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use rustix::fs::{CWD, FileType, Mode, OFlags, XattrFlags};

pub const ROLES: &[aquifer_testkit::child::Role] = &[("access control lists", as_by_the_kernel)];

/// The lists name users and groups below this.
const IDS: u32 = 4;

/// A directory on a file system with access control lists, in a user namespace that has the users
/// and groups of these tests.
fn scene() -> Option<tempfile::TempDir> {
    let directory = aquifer_testkit::scratch::in_memory();
    let mut tags = vec![AclTag::Owner];
    tags.extend((0..IDS).map(AclTag::User));
    tags.push(AclTag::OwningGroup);
    tags.extend((0..IDS).map(AclTag::Group));
    tags.extend([AclTag::Mask, AclTag::Other]);
    let probe = Acl::new(tags.into_iter().map(|tag| entry(tag, 5)).collect()).unwrap().encode();
    match rustix::fs::setxattr(directory.path(), DEFAULT_ACL, &probe, XattrFlags::empty()) {
        Ok(()) => {
            rustix::fs::removexattr(directory.path(), DEFAULT_ACL).unwrap();
            Some(directory)
        }
        Err(error) => {
            println!("skipped: no access control lists with these users can be set: {error}");
            None
        }
    }
}

fn entry(tag: AclTag, permissions: u16) -> AclEntry {
    AclEntry { tag, permissions }
}

/// Entries that are valid, or nearly.
fn random_entries(rng: &mut Rng) -> Vec<AclEntry> {
    let mut entries = vec![entry(AclTag::Owner, 0)];
    let [users, groups] = [0, 0].map(|_: u8| if rng.chance(0.4) { rng.below(3) } else { 0 });
    entries.extend((0..users).map(|_| entry(AclTag::User(rng.below(u64::from(IDS)) as u32), 0)));
    entries.push(entry(AclTag::OwningGroup, 0));
    entries.extend((0..groups).map(|_| entry(AclTag::Group(rng.below(u64::from(IDS)) as u32), 0)));
    if users + groups > 0 || rng.chance(0.3) {
        entries.push(entry(AclTag::Mask, 0));
    }
    entries.push(entry(AclTag::Other, 0));
    entries.iter_mut().for_each(|entry| entry.permissions = rng.below(8) as u16);
    entries
}

fn random_acl(rng: &mut Rng) -> Acl {
    Acl::new(random_entries(rng)).unwrap()
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 4096];
    match rustix::fs::lgetxattr(path, name, &mut value) {
        Ok(len) => Some(value[..len].to_vec()),
        Err(rustix::io::Errno::NODATA) => None,
        Err(error) => panic!("{path:?}: {error}"),
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// A value as a program may pass it: often damaged.
fn random_value(rng: &mut Rng) -> Vec<u8> {
    let mut entries = random_entries(rng);
    if rng.chance(0.5) {
        let [one, other] = [0, 0].map(|_: u8| rng.below(entries.len() as u64) as usize);
        match rng.below(6) {
            0 => entries.swap(one, other),
            1 => drop(entries.remove(one)),
            2 => entries.insert(one, entries[other]),
            3 => entries[one].permissions = 8 << rng.below(13),
            4 => entries[one].tag = AclTag::User(u32::MAX),
            _ => entries.clear(),
        }
    }
    // An unchecked list: encoded by parts.
    let mut value = 2u32.to_le_bytes().to_vec();
    for entry in entries {
        let (tag, id) = match entry.tag {
            AclTag::Owner => (1u16, rng.below(3) as u32),
            AclTag::User(id) => (2, id),
            AclTag::OwningGroup => (4, u32::MAX),
            AclTag::Group(id) => (8, id),
            AclTag::Mask => (16, 7),
            AclTag::Other => (32, u32::MAX),
        };
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&entry.permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    if rng.chance(0.1) {
        let at = rng.below(value.len() as u64) as usize;
        value[at] ^= 1 << rng.below(8);
    }
    if rng.chance(0.1) {
        value.truncate(rng.below(value.len() as u64 + 1) as usize);
    }
    value
}

#[test]
fn values_are_read_as_by_the_kernel() {
    let Some(directory) = scene() else { return };
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let first = seed(0);
    for seed in first..first + 3000 * steps(1) as u64 {
        let value = random_value(&mut Rng::new(seed));
        let before = mode(&file) & !0o777;
        let kernel = rustix::fs::setxattr(&file, ACCESS_ACL, &value, XattrFlags::empty());
        let ours = Acl::decode(&value);
        let errno = ours.as_ref().map(drop).map_err(|error| error.errno());
        assert_eq!(errno, kernel.map_err(|error| error.raw_os_error()), "AQUIFER_SEED={seed}");
        let Ok(ours) = ours else { continue };
        // What it says no more than the mode does is not kept.
        let kept = ours.as_ref().filter(|acl| !acl.is_trivial()).map(Acl::encode);
        assert_eq!(attribute(&file, ACCESS_ACL), kept, "AQUIFER_SEED={seed}");
        if let Some(ours) = ours {
            assert_eq!(mode(&file), before | ours.to_mode(), "AQUIFER_SEED={seed}");
        }
    }
}

#[test]
fn setting_the_mode_changes_the_list() {
    let Some(directory) = scene() else { return };
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let first = seed(0);
    for seed in first..first + 1000 * steps(1) as u64 {
        let mut rng = Rng::new(seed);
        let mut acl = random_acl(&mut rng);
        rustix::fs::setxattr(&file, ACCESS_ACL, &acl.encode(), XattrFlags::empty()).unwrap();
        let new = rng.below(0o1000) as u32;
        rustix::fs::chmodat(CWD, &file, Mode::from_raw_mode(new), rustix::fs::AtFlags::empty())
            .unwrap();
        acl.set_mode(new);
        assert_eq!(acl.to_mode(), new);
        assert_eq!(mode(&file), new);
        let kept = (!acl.is_trivial()).then(|| acl.encode());
        assert_eq!(attribute(&file, ACCESS_ACL), kept, "AQUIFER_SEED={seed}");
    }
}

#[test]
fn new_entries_inherit_as_by_the_kernel() {
    let Some(directory) = scene() else { return };
    let first = seed(0);
    for seed in first..first + 500 * steps(1) as u64 {
        let mut rng = Rng::new(seed);
        let parent = directory.path().join(format!("{seed}"));
        std::fs::create_dir(&parent).unwrap();
        let default = random_acl(&mut rng);
        rustix::fs::setxattr(&parent, DEFAULT_ACL, &default.encode(), XattrFlags::empty()).unwrap();
        // The umask of the test, whatever it is, does not count.
        let asked = rng.below(0o1000) as u32;
        let raw = Mode::from_raw_mode(asked);
        let [file, fifo, subdirectory]: [PathBuf; 3] =
            ["file", "fifo", "directory"].map(|name| parent.join(name));
        let flags = OFlags::CREATE | OFlags::WRONLY;
        drop(rustix::fs::openat(CWD, &file, flags, raw).unwrap());
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, raw, 0).unwrap();
        rustix::fs::mkdirat(CWD, &subdirectory, raw).unwrap();
        std::os::unix::fs::symlink("target", parent.join("link")).unwrap();
        let (access, new) = default.inherit(asked);
        for path in [&file, &fifo, &subdirectory] {
            assert_eq!(mode(path), new, "AQUIFER_SEED={seed} {path:?}");
            let access = access.as_ref().map(Acl::encode);
            assert_eq!(attribute(path, ACCESS_ACL), access, "AQUIFER_SEED={seed} {path:?}");
            let own = (path == &subdirectory).then(|| default.encode());
            assert_eq!(attribute(path, DEFAULT_ACL), own, "AQUIFER_SEED={seed} {path:?}");
        }
    }
}

/// The user and groups of the unprivileged thread.
const USER: u32 = 1000;
const GROUPS: [u32; 3] = [100, 200, 300];

/// A pool and a directory of the kernel, to which the same is done by the same thread.
struct Both {
    rng: Rng,
    files: Files,
    kernel: PathBuf,
    is_root: bool,
}

fn errno<T>(outcome: Result<T, FsError>) -> Result<(), i32> {
    outcome.map(drop).map_err(|error| error.errno())
}

fn of_kernel<T>(outcome: std::io::Result<T>) -> Result<(), i32> {
    outcome.map(drop).map_err(|error| error.raw_os_error().unwrap())
}

fn of_rustix<T>(outcome: rustix::io::Result<T>) -> Result<(), i32> {
    outcome.map(drop).map_err(|error| error.raw_os_error())
}

impl Both {
    fn mode(&mut self) -> u32 {
        let special = if self.rng.chance(0.4) { self.rng.below(8) as u32 * 0o1000 } else { 0 };
        special | self.rng.below(0o1000) as u32
    }

    fn step(&mut self) -> (String, Result<(), i32>, Result<(), i32>) {
        let names = ["a", "b", "c", "d", "d/a", "d/b", "d/d", "d/d/a", "link"];
        let name = names[self.rng.below(names.len() as u64) as usize];
        let (pool, kernel) = (format!("/{name}"), self.kernel.join(name));
        let (mode, what) = (self.mode(), self.rng.below(13));
        let files = &self.files;
        let permissions = || PermissionsExt::from_mode(mode);
        let text = format!("{what} {name} {mode:o}");
        let raw = Mode::from_raw_mode(mode);
        let (theirs, ours) = match what {
            0 | 1 => {
                let theirs = std::fs::OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(mode)
                    .open(&kernel);
                let mut options = files.options();
                options.write(true).create_new(true).mode(mode);
                (of_kernel(theirs), errno(options.open(&pool)))
            }
            2 => (
                of_rustix(rustix::fs::mkdirat(CWD, &kernel, raw)),
                errno(files.dir_builder().mode(mode).create(&pool)),
            ),
            3 => (
                of_rustix(rustix::fs::mknodat(CWD, &kernel, FileType::Fifo, raw, 0)),
                errno(files.create_special(&pool, SpecialFile::Fifo, mode)),
            ),
            4 | 5 => (
                of_kernel(std::fs::set_permissions(&kernel, permissions())),
                errno(files.set_permissions(&pool, permissions())),
            ),
            6 => {
                let group = GROUPS[self.rng.below(3) as usize];
                let theirs = std::os::unix::fs::lchown(&kernel, None, Some(group));
                (of_kernel(theirs), errno(files.lchown(&pool, None, Some(group))))
            }
            7 => {
                let theirs = std::os::unix::fs::lchown(&kernel, None, None);
                (of_kernel(theirs), errno(files.lchown(&pool, None, None)))
            }
            8 | 9 => {
                let list = if self.rng.chance(0.5) { ACCESS_ACL } else { DEFAULT_ACL };
                let value = random_value(&mut self.rng);
                let flags = XattrFlags::empty();
                let theirs = of_rustix(rustix::fs::setxattr(&kernel, list, &value, flags));
                let ours = errno(files.set_attribute(&pool, list, &value, SetMode::Any));
                return (format!("{text} {list} {value:?}"), theirs, ours);
            }
            10 => {
                let list = if self.rng.chance(0.5) { ACCESS_ACL } else { DEFAULT_ACL };
                let theirs = of_rustix(rustix::fs::removexattr(&kernel, list));
                (theirs, errno(files.remove_attribute(&pool, list)))
            }
            11 => {
                let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
                let theirs = std::fs::OpenOptions::new()
                    .write(true)
                    .custom_flags(flags)
                    .open(&kernel)
                    .and_then(
                        |mut file| {
                            if name == "a" { file.write_all(b"x") } else { file.set_len(5) }
                        },
                    );
                // Access is enforced by the kernel only.
                if theirs.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EACCES)) {
                    return (text, Ok(()), Ok(()));
                }
                let mut options = files.options();
                options.write(true).custom_flags(libc::O_NOFOLLOW);
                let ours = options.open(&pool).and_then(|file| match name {
                    "a" => file.write_all_at(b"x", 0),
                    "b" => file.allocate(FallocateMode::ZeroRange, 0, 5),
                    _ => file.set_len(5),
                });
                (of_kernel(theirs), errno(ours))
            }
            _ => {
                let theirs =
                    std::fs::remove_file(&kernel).or_else(|_| std::fs::remove_dir(&kernel));
                let ours = files.remove_file(&pool).or_else(|_| files.remove_dir(&pool));
                (theirs.map_err(|_| 0), ours.map_err(|_| 0))
            }
        };
        (text, theirs, ours)
    }

    fn compare(&self, text: &str) {
        let mut left = vec![PathBuf::new()];
        while let Some(path) = left.pop() {
            let (pool, kernel) = (Path::new("/").join(&path), self.kernel.join(&path));
            let theirs = std::fs::symlink_metadata(&kernel).unwrap();
            let ours = self.files.symlink_metadata(&pool).unwrap();
            let [one, other] = [ours.mode(), theirs.mode()].map(|mode| mode & 0o177_7777);
            assert_eq!(format!("{one:o}"), format!("{other:o}"), "{path:?} after {text}");
            assert_eq!((ours.uid(), ours.gid()), (theirs.uid(), theirs.gid()), "{path:?} {text}");
            for list in [ACCESS_ACL, DEFAULT_ACL] {
                if ours.is_symlink() {
                    continue;
                }
                let own = match self.files.attribute(&pool, list) {
                    Err(FsError::NoAttribute { .. }) => None,
                    value => Some(value.unwrap()),
                };
                assert_eq!(own, attribute(&kernel, list), "{list} of {path:?} after {text}");
            }
            if ours.is_dir() {
                for entry in self.files.read_dir(&pool).unwrap() {
                    left.push(path.join(entry.unwrap().file_name()));
                }
            }
        }
    }

    /// Gives the owner access to all directories, which only the kernel enforces.
    fn open_directories(&self) {
        for path in ["", "d", "d/d"] {
            let (pool, kernel) = (Path::new("/").join(path), self.kernel.join(path));
            let Ok(metadata) = std::fs::symlink_metadata(&kernel) else { continue };
            if metadata.is_dir() && metadata.mode() & 0o700 != 0o700 {
                let mode = PermissionsExt::from_mode(metadata.mode() | 0o700);
                std::fs::set_permissions(&kernel, mode).unwrap();
                let mode = PermissionsExt::from_mode(metadata.mode() | 0o700);
                self.files.set_permissions(&pool, mode).unwrap();
            }
        }
    }
}

fn random_steps(seed: u64, pool: &Path, kernel: PathBuf) {
    let files = Files::open(pool).unwrap();
    files.symlink("a", "/link").unwrap();
    std::os::unix::fs::symlink("a", kernel.join("link")).unwrap();
    let is_root = rustix::process::geteuid().is_root();
    let mut both = Both { rng: Rng::new(seed), files, kernel, is_root };
    for step in 0..400 {
        let (text, theirs, ours) = both.step();
        let text = format!("AQUIFER_SEED={seed}, step {step}: {text}, root {}", both.is_root);
        assert_eq!(ours, theirs, "{text}");
        both.open_directories();
        both.compare(&text);
    }
}

/// A thread with other credentials than the process: only raw system calls do that.
fn become_user() {
    // SAFETY: these change the credentials of this thread alone, and read `GROUPS`.
    let outcomes = unsafe {
        [
            libc::syscall(libc::SYS_setgroups, 2, GROUPS[1..].as_ptr()),
            libc::syscall(libc::SYS_setresgid, GROUPS[0], GROUPS[0], GROUPS[0]),
            libc::syscall(libc::SYS_setresuid, USER, USER, USER),
        ]
    };
    assert_eq!(outcomes, [0; 3]);
}

#[test]
fn everything_follows_as_by_the_kernel() {
    aquifer_testkit::child::succeeds("access control lists");
}

fn as_by_the_kernel() {
    let Some(directory) = scene() else { return };
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    // Only this test depends on it.
    rustix::process::umask(Mode::from_raw_mode(0o027));
    let is_root = rustix::process::geteuid().is_root();
    let first = seed(0);
    for seed in first..first + steps(30) as u64 {
        let users = if is_root { &[false, true][..] } else { &[false][..] };
        for &is_user in users {
            let own = directory.path().join(format!("{seed}{is_user}"));
            std::fs::create_dir(&own).unwrap();
            let (pool, kernel) = (own.join("pool"), own.join("tree"));
            drop(Pool::create(&pool, 4 << 20).unwrap());
            std::fs::create_dir(&kernel).unwrap();
            std::fs::set_permissions(&kernel, PermissionsExt::from_mode(0o2755)).unwrap();
            let files = Files::open(&pool).unwrap();
            files.set_permissions("/", PermissionsExt::from_mode(0o2755)).unwrap();
            // A group that the user is in, or not.
            let group = if seed % 2 == 0 { GROUPS[1] } else { 5 };
            let user = is_user.then_some(USER);
            if is_root {
                files.chown("/", user, Some(group)).unwrap();
                for path in [&own, &pool, &kernel] {
                    std::os::unix::fs::chown(path, user, Some(group)).unwrap();
                }
                // The directory loses the bit with its group.
                let mode = std::fs::metadata(&kernel).unwrap().mode();
                assert_eq!(mode & 0o7777, files.metadata("/").unwrap().mode() & 0o7777);
            }
            drop(files);
            let (own_pool, tree) = (pool.clone(), kernel.clone());
            let done = std::thread::spawn(move || {
                if is_user {
                    become_user();
                }
                random_steps(seed, &own_pool, tree);
            });
            done.join().unwrap();
            let report = check(&pool, &CheckOptions::default()).unwrap();
            assert_eq!(report.worst().filter(|worst| *worst > Severity::Note), None, "{report}");
        }
    }
}
