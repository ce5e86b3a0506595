//! The methods of both sides, with the same arguments, on equal trees: one in a pool, one in a
//! directory in memory. Results, kinds of errors and the trees afterwards are equal.

use std::fmt::Debug;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{
    DirBuilderExt, DirEntryExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt,
};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aquifer_fs::{FileTimes, Files};
use aquifer_pool::Pool;

use crate::scratch::Scratch;

/// Files, directories, symbolic links and nothing, in several spellings.
const PATHS: [&str; 20] = [
    "f",
    "d",
    "d/inner",
    "e",
    "none",
    "none/x",
    "f/x",
    "f/",
    "d/",
    "none/",
    "link",
    "link/",
    "dirlink",
    "dirlink/inner",
    "dangling",
    "loop",
    "./f",
    "d/../f",
    "e/.",
    "binary",
];

struct Trees {
    _scratch: Scratch,
    files: Files,
    kernel: PathBuf,
}

/// Runs a call with a path of each tree, and compares what it returns.
macro_rules! same {
    ($trees:expr, $what:expr, $show:expr, |$path:ident| $std:expr, $here:expr) => {{
        let std = {
            let $path = |path: &str| $trees.kernel.join("tree").join(path);
            seen($std.map($show))
        };
        let here = {
            let $path = |path: &str| Path::new("/tree").join(path);
            seen($here.map($show))
        };
        assert_eq!(here, std, "{}", $what);
    }};
}

trait Kind {
    fn kind_of(&self) -> ErrorKind;
}

impl Kind for std::io::Error {
    fn kind_of(&self) -> ErrorKind {
        self.kind()
    }
}

impl Kind for aquifer_fs::FsError {
    fn kind_of(&self) -> ErrorKind {
        self.kind()
    }
}

fn seen<T: Debug, E: Kind>(outcome: Result<T, E>) -> String {
    match outcome {
        Ok(value) => format!("{value:?}"),
        Err(error) => format!("{:?}", error.kind_of()),
    }
}

/// What metadata of both sides have in common. The length of a directory is its own affair.
macro_rules! described {
    () => {
        |it| {
            let len = if it.is_dir() { 0 } else { it.len() };
            let mode = if it.is_symlink() { 0 } else { it.permissions().mode() };
            (it.is_file(), it.file_type().is_dir(), mode, it.nlink(), it.uid(), it.gid(), len)
        }
    };
}

macro_rules! listed {
    () => {
        |entries| {
            let mut names = Vec::new();
            for entry in entries {
                let entry = entry.unwrap();
                let kind = entry.file_type().unwrap();
                let is_same = entry.ino() == entry.metadata().unwrap().ino();
                names.push((entry.file_name(), kind.is_dir(), kind.is_symlink(), is_same));
            }
            names.sort();
            names
        }
    };
}

impl Trees {
    fn new() -> Trees {
        let scratch = Scratch::with_pool(16 << 20, &Pool::options());
        let files = scratch.open();
        let kernel = scratch.directory.path().join("kernel");
        std::fs::create_dir(&kernel).unwrap();
        Trees { _scratch: scratch, files, kernel }
    }

    /// Plants the tree anew on both sides.
    fn plant(&self) {
        let kernel = self.kernel.join("tree");
        let kernel = |path: &str| kernel.join(path);
        let pool = |path: &str| Path::new("/tree").join(path);
        if self.files.exists("/tree").unwrap() {
            std::fs::remove_dir_all(kernel("")).unwrap();
            self.files.remove_dir_all("/tree").unwrap();
        }
        for path in ["", "d", "e"] {
            std::fs::create_dir(kernel(path)).unwrap();
            self.files.create_dir(pool(path)).unwrap();
        }
        for (path, content) in [("f", &b"some text"[..]), ("d/inner", b""), ("binary", b"\xff")] {
            std::fs::write(kernel(path), content).unwrap();
            self.files.write(pool(path), content).unwrap();
        }
        for (target, path) in
            [("f", "link"), ("d", "dirlink"), ("nothing", "dangling"), ("loop", "loop")]
        {
            std::os::unix::fs::symlink(target, kernel(path)).unwrap();
            self.files.symlink(target, pool(path)).unwrap();
        }
    }

    /// Compares the trees.
    fn compare(&self, what: &str) {
        let mut directories = vec![String::new()];
        while let Some(directory) = directories.pop() {
            let what = format!("{what}; then {directory}");
            let names = std::fs::read_dir(self.kernel.join(&directory)).unwrap();
            same!(
                self,
                what,
                listed!(),
                |_path| std::fs::read_dir(self.kernel.join(&directory)),
                self.files.read_dir(Path::new("/").join(&directory))
            );
            for name in names {
                let name = name.unwrap().file_name().into_string().unwrap();
                let path = if directory.is_empty() { name } else { format!("{directory}/{name}") };
                let (kernel, pool) = (self.kernel.join(&path), Path::new("/").join(&path));
                let what = format!("{what}/{path}");
                same!(
                    self,
                    what,
                    described!(),
                    |_path| kernel.symlink_metadata(),
                    self.files.symlink_metadata(&pool)
                );
                if kernel.is_symlink() {
                    same!(
                        self,
                        what,
                        |it| it,
                        |_path| std::fs::read_link(&kernel),
                        self.files.read_link(&pool)
                    );
                } else if kernel.is_dir() {
                    directories.push(path);
                } else {
                    same!(
                        self,
                        what,
                        |it| it,
                        |_path| std::fs::read(&kernel),
                        self.files.read(&pool)
                    );
                }
            }
        }
    }
}

#[test]
fn reading_paths() {
    let trees = Trees::new();
    trees.plant();
    let files = &trees.files;
    for path in PATHS {
        same!(
            trees,
            path,
            described!(),
            |at| std::fs::metadata(at(path)),
            files.metadata(at(path))
        );
        same!(
            trees,
            path,
            described!(),
            |at| std::fs::symlink_metadata(at(path)),
            files.symlink_metadata(at(path))
        );
        same!(trees, path, |it| it, |at| std::fs::read(at(path)), files.read(at(path)));
        same!(
            trees,
            path,
            |it| it,
            |at| std::fs::read_to_string(at(path)),
            files.read_to_string(at(path))
        );
        same!(trees, path, listed!(), |at| std::fs::read_dir(at(path)), files.read_dir(at(path)));
        same!(trees, path, |it| it, |at| std::fs::read_link(at(path)), files.read_link(at(path)));
        same!(trees, path, |it| it, |at| std::fs::exists(at(path)), files.exists(at(path)));
        same!(trees, path, |it| it, |at| at(path).try_exists(), files.try_exists(at(path)));
        same!(
            trees,
            path,
            |it| it,
            |at| std::io::Result::Ok(at(path).is_file()),
            std::io::Result::Ok(files.is_file(at(path)))
        );
        same!(
            trees,
            path,
            |it| it,
            |at| std::io::Result::Ok(at(path).is_dir()),
            std::io::Result::Ok(files.is_dir(at(path)))
        );
        same!(
            trees,
            path,
            |it| it,
            |at| std::io::Result::Ok(at(path).is_symlink()),
            std::io::Result::Ok(files.is_symlink(at(path)))
        );
        let kernel = trees.kernel.canonicalize().unwrap();
        let inside = |path: PathBuf, root: &Path| path.strip_prefix(root).unwrap().to_owned();
        same!(
            trees,
            path,
            |it| it,
            |at| std::fs::canonicalize(at(path)).map(|path| inside(path, &kernel)),
            files.canonicalize(at(path)).map(|path| inside(path, Path::new("/")))
        );
    }
    same!(trees, "root", |it| it, |_at| std::fs::canonicalize("/"), files.canonicalize("/.."));
    same!(trees, "empty", |it| it, |_at| std::fs::canonicalize(""), files.canonicalize(""));
    same!(trees, "empty", |it| it, |_at| std::fs::create_dir_all(""), files.create_dir_all(""));
    same!(trees, "empty", |it| it, |_at| std::fs::exists(""), files.exists(""));
}

#[test]
fn changing_paths() {
    let trees = Trees::new();
    let files = &trees.files;
    let calls = 12;
    for path in PATHS {
        for call in 0..calls {
            trees.plant();
            let what = format!("call {call} of {path}");
            let mode = Permissions(0o751);
            match call {
                0 => same!(
                    trees,
                    what,
                    |it| it,
                    |at| std::fs::create_dir(at(path)),
                    files.create_dir(at(path))
                ),
                1 => same!(
                    trees,
                    what,
                    |it| it,
                    |at| std::fs::create_dir_all(at(path)),
                    files.create_dir_all(at(path))
                ),
                2 => same!(
                    trees,
                    what,
                    |it| it,
                    |at| std::fs::remove_dir(at(path)),
                    files.remove_dir(at(path))
                ),
                3 => same!(
                    trees,
                    what,
                    |it| it,
                    |at| std::fs::remove_dir_all(at(path)),
                    files.remove_dir_all(at(path))
                ),
                4 => same!(
                    trees,
                    what,
                    |it| it,
                    |at| std::fs::remove_file(at(path)),
                    files.remove_file(at(path))
                ),
                5 => same!(
                    trees,
                    what,
                    |it| it,
                    |at| std::fs::write(at(path), b"new"),
                    files.write(at(path), b"new")
                ),
                6 => same!(
                    trees,
                    what,
                    |it| it,
                    |at| std::fs::set_permissions(at(path), mode.of()),
                    files.set_permissions(at(path), mode.of())
                ),
                7 => same!(
                    trees,
                    what,
                    drop,
                    |at| std::fs::File::create(at(path)),
                    files.create_file(at(path))
                ),
                8 => same!(
                    trees,
                    what,
                    drop,
                    |at| std::fs::File::create_new(at(path)),
                    files.create_new_file(at(path))
                ),
                9 => same!(
                    trees,
                    what,
                    drop,
                    |at| std::fs::File::open(at(path)),
                    files.open_file(at(path))
                ),
                10 => same!(
                    trees,
                    what,
                    |it| it,
                    |at| std::fs::DirBuilder::new()
                        .recursive(true)
                        .mode(0o711)
                        .create(at(&format!("{path}/x/y"))),
                    files
                        .dir_builder()
                        .recursive(true)
                        .mode(0o711)
                        .create(at(&format!("{path}/x/y")))
                ),
                _ => {
                    let (uid, gid) = (Some(rustix::process::geteuid().as_raw()), None);
                    same!(
                        trees,
                        what,
                        |it| it,
                        |at| std::os::unix::fs::chown(at(path), uid, gid),
                        files.chown(at(path), uid, gid)
                    );
                    same!(
                        trees,
                        what,
                        |it| it,
                        |at| std::os::unix::fs::lchown(
                            at(path),
                            gid,
                            uid.map(|_| rustix::process::getegid().as_raw())
                        ),
                        files.lchown(
                            at(path),
                            gid,
                            uid.map(|_| rustix::process::getegid().as_raw())
                        )
                    );
                }
            }
            trees.compare(&what);
        }
    }
}

/// Permissions to be made once for each side.
struct Permissions(u32);

impl Permissions {
    fn of(&self) -> std::fs::Permissions {
        std::fs::Permissions::from_mode(self.0)
    }
}

#[test]
fn changing_two_paths() {
    let trees = Trees::new();
    let files = &trees.files;
    for from in PATHS {
        for to in PATHS {
            for call in 0..4 {
                trees.plant();
                let what = format!("call {call} of {from} and {to}");
                let number = |path| Some(files.metadata(Path::new("/tree").join(path)).ok()?.ino());
                match call {
                    // The one difference: `std` empties a file that is copied to itself.
                    1 if number(from).is_some() && number(from) == number(to) => {}
                    0 => same!(
                        trees,
                        what,
                        |it| it,
                        |at| std::fs::rename(at(from), at(to)),
                        files.rename(at(from), at(to))
                    ),
                    1 => same!(
                        trees,
                        what,
                        |it| it,
                        |at| std::fs::copy(at(from), at(to)),
                        files.copy(at(from), at(to))
                    ),
                    2 => same!(
                        trees,
                        what,
                        |it| it,
                        |at| std::fs::hard_link(at(from), at(to)),
                        files.hard_link(at(from), at(to))
                    ),
                    _ => same!(
                        trees,
                        what,
                        |it| it,
                        |at| std::os::unix::fs::symlink(from, at(to)),
                        files.symlink(from, at(to))
                    ),
                }
                trees.compare(&what);
            }
        }
    }
}

#[test]
fn opening() {
    let trees = Trees::new();
    let files = &trees.files;
    for path in ["f", "d", "none", "link", "dangling", "f/x"] {
        for bits in 0..1 << 7 {
            trees.plant();
            let bit = |index: u32| bits & (1 << index) != 0;
            let flags = if bit(6) { libc::O_NOFOLLOW } else { 0 };
            macro_rules! set {
                ($options:expr) => {
                    $options
                        .read(bit(0))
                        .write(bit(1))
                        .append(bit(2))
                        .truncate(bit(3))
                        .create(bit(4))
                        .create_new(bit(5))
                        .custom_flags(flags)
                        .mode(0o604)
                };
            }
            let what = format!("options {bits:07b} of {path}");
            same!(
                trees,
                what,
                drop,
                |at| set!(std::fs::OpenOptions::new()).open(at(path)),
                set!(files.options()).open(at(path))
            );
            trees.compare(&what);
        }
    }
}

/// Calls of an open file, and what they return.
macro_rules! calls {
    ($file:expr) => {{
        let mut file = $file;
        let mut log = Vec::new();
        let mut bytes = [0; 12];
        log.push(seen(file.write(b"begin")));
        log.push(seen(file.write_at(b"text", 8)));
        log.push(seen(file.write_at(b"", 80)));
        log.push(seen(file.write_all_at(b"more", 12)));
        log.push(seen(file.read_at(&mut bytes, 10)));
        log.push(seen(file.read_at(&mut bytes, 16)));
        log.push(seen(file.read_exact_at(&mut bytes, 1)));
        log.push(seen(file.read_exact_at(&mut bytes, 10)));
        log.push(seen(file.read_exact_at(&mut [], 1000)));
        log.push(seen(file.stream_position()));
        log.push(seen(file.seek(SeekFrom::End(-4))));
        log.push(seen(file.seek(SeekFrom::Current(-40))));
        log.push(seen(file.seek(SeekFrom::Start(u64::MAX))));
        log.push(seen(file.seek(SeekFrom::Start(i64::MAX as u64))));
        log.push(seen(file.seek(SeekFrom::Current(1))));
        log.push(seen(file.rewind()));
        let mut other = file.try_clone().unwrap();
        let mut text = Vec::new();
        log.push(seen(other.read_to_end(&mut text)));
        log.push(seen(file.stream_position()));
        log.push(seen((&file).write(b"!")));
        log.push(seen(file.set_len(3)));
        log.push(seen(file.metadata().map(|it| (it.len(), it.size(), it.blocks(), it.blksize()))));
        log.push(seen(file.set_len(9000)));
        log.push(seen(file.metadata().map(|it| (it.len(), it.blocks()))));
        let time = SystemTime::UNIX_EPOCH - Duration::new(5, 10);
        log.push(seen(file.set_modified(time)));
        log.push(seen(
            file.metadata().map(|it| (it.modified().unwrap() == time, it.mtime(), it.mtime_nsec())),
        ));
        log.push(seen(file.set_permissions(Permissions(0o600).of())));
        log.push(seen(file.metadata().map(|it| (it.mode(), it.permissions().mode()))));
        log.push(seen(file.sync_all()));
        log.push(seen(file.sync_data()));
        log.push(seen(file.lock_shared()));
        log.push(format!("{:?}", file.try_lock()));
        log.push(seen(file.unlock()));
        log.push(seen(file.flush()));
        (log, bytes, text)
    }};
}

#[test]
fn open_files() {
    let trees = Trees::new();
    trees.plant();
    let (kernel, files) = (trees.kernel.join("tree"), &trees.files);
    // A new file, one to read, one to append to, and a directory.
    assert_eq!(
        calls!(files.create_new_file("/tree/new").unwrap()),
        calls!(std::fs::File::create_new(kernel.join("new")).unwrap())
    );
    assert_eq!(
        calls!(files.open_file("/tree/f").unwrap()),
        calls!(std::fs::File::open(kernel.join("f")).unwrap())
    );
    assert_eq!(
        calls!(files.options().append(true).read(true).open("/tree/new").unwrap()),
        calls!(std::fs::File::options().append(true).read(true).open(kernel.join("new")).unwrap())
    );
    trees.compare("open files");
}

#[test]
fn times_and_locks() {
    let trees = Trees::new();
    trees.plant();
    let (kernel, files) = (trees.kernel.join("tree/f"), &trees.files);
    let (ours, theirs) =
        (files.open_file("/tree/f").unwrap(), std::fs::File::open(&kernel).unwrap());
    let [accessed, modified] =
        [1, 2].map(|seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
    ours.set_times(FileTimes::new().set_accessed(accessed).set_modified(modified)).unwrap();
    theirs
        .set_times(std::fs::FileTimes::new().set_accessed(accessed).set_modified(modified))
        .unwrap();
    macro_rules! times {
        ($file:expr) => {{
            let it = $file.metadata().unwrap();
            (it.accessed().unwrap(), it.modified().unwrap(), it.atime(), it.mtime_nsec())
        }};
    }
    assert_eq!(times!(ours), times!(theirs));

    let (our_other, their_other) =
        (files.open_file("/tree/f").unwrap(), std::fs::File::open(&kernel).unwrap());
    macro_rules! locks {
        ($one:expr, $other:expr) => {{
            $one.lock_shared().unwrap();
            let shared = $other.try_lock_shared().is_ok();
            $other.unlock().unwrap();
            let refused = $other.try_lock().unwrap_err();
            let text = format!("{refused} {refused:?}");
            (shared, text, std::io::Error::from(refused).kind())
        }};
    }
    assert_eq!(locks!(ours, our_other), locks!(theirs, their_other));
}

#[test]
fn errors_keep_their_kind_and_wording() {
    let trees = Trees::new();
    trees.plant();
    let ours = trees.files.open_file("/tree/none").unwrap_err();
    let theirs = std::fs::File::open(trees.kernel.join("tree/none")).unwrap_err();
    let wording = theirs.to_string();
    let (wording, _) = wording.split_once(" (os error").unwrap();
    assert_eq!(ours.to_string(), format!("/tree/none: {wording}"));
    assert_eq!(ours.path(), Some(Path::new("/tree/none")));
    assert_eq!(ours.kind(), ErrorKind::NotFound);
    assert_eq!(std::io::Error::from(ours).kind(), ErrorKind::NotFound);
}
