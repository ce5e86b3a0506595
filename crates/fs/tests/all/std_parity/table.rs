//! Each function of `std` and what a pool has for it.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{Permissions, TryLockError};
use std::io::{Read, Result as Io, Seek, Write};
use std::os::unix::fs as unix;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aquifer_fs::{
    DirBuilder, DirEntry, File, FileOptions, FileTimes, FileType, Files, Metadata, ReadDir, Result,
};

type P = &'static str;
type Id = Option<u32>;
type Locked = std::result::Result<(), TryLockError>;

/// Functions of `std`, and what there is for them.
struct Group {
    std: &'static str,
    here: &'static str,
    /// Names in `std` and here.
    methods: Vec<(&'static str, &'static str)>,
    /// Names in `std`, and why there is nothing of the kind.
    absent: Vec<(&'static str, &'static str)>,
}

/// Pairs of a function of `std` and a method here, each with its type.
macro_rules! methods {
    ($($std:path: $std_type:ty => $here:path: $here_type:ty;)*) => {
        vec![$({
            let _: $std_type = $std;
            let _: $here_type = $here;
            (last(stringify!($std)), stringify!($here))
        }),*]
    };
}

fn last(path: &str) -> &str {
    path.rsplit("::").next().unwrap_or(path).trim()
}

#[rustfmt::skip]
fn groups() -> Vec<Group> {
    vec![
        Group {
            std: "std::fs",
            here: "Files",
            methods: methods! {
                std::fs::canonicalize: fn(P) -> Io<PathBuf> => Files::canonicalize: fn(&Files, P) -> Result<PathBuf>;
                std::fs::copy: fn(P, P) -> Io<u64> => Files::copy: fn(&Files, P, P) -> Result<u64>;
                std::fs::create_dir: fn(P) -> Io<()> => Files::create_dir: fn(&Files, P) -> Result<()>;
                std::fs::create_dir_all: fn(P) -> Io<()> => Files::create_dir_all: fn(&Files, P) -> Result<()>;
                std::fs::exists: fn(P) -> Io<bool> => Files::exists: fn(&Files, P) -> Result<bool>;
                std::fs::hard_link: fn(P, P) -> Io<()> => Files::hard_link: fn(&Files, P, P) -> Result<()>;
                std::fs::metadata: fn(P) -> Io<std::fs::Metadata> => Files::metadata: fn(&Files, P) -> Result<Metadata>;
                std::fs::read: fn(P) -> Io<Vec<u8>> => Files::read: fn(&Files, P) -> Result<Vec<u8>>;
                std::fs::read_dir: fn(P) -> Io<std::fs::ReadDir> => Files::read_dir: fn(&Files, P) -> Result<ReadDir>;
                std::fs::read_link: fn(P) -> Io<PathBuf> => Files::read_link: fn(&Files, P) -> Result<PathBuf>;
                std::fs::read_to_string: fn(P) -> Io<String> => Files::read_to_string: fn(&Files, P) -> Result<String>;
                std::fs::remove_dir: fn(P) -> Io<()> => Files::remove_dir: fn(&Files, P) -> Result<()>;
                std::fs::remove_dir_all: fn(P) -> Io<()> => Files::remove_dir_all: fn(&Files, P) -> Result<()>;
                std::fs::remove_file: fn(P) -> Io<()> => Files::remove_file: fn(&Files, P) -> Result<()>;
                std::fs::rename: fn(P, P) -> Io<()> => Files::rename: fn(&Files, P, P) -> Result<()>;
                std::fs::set_permissions: fn(P, Permissions) -> Io<()> => Files::set_permissions: fn(&Files, P, Permissions) -> Result<()>;
                std::fs::symlink_metadata: fn(P) -> Io<std::fs::Metadata> => Files::symlink_metadata: fn(&Files, P) -> Result<Metadata>;
                std::fs::write: fn(P, P) -> Io<()> => Files::write: fn(&Files, P, P) -> Result<()>;
            },
            absent: vec![
                ("soft_link", "deprecated in `std`: `symlink`"),
                ("copy of a file to itself", "an error that leaves the file as it is; `std` empties it"),
            ],
        },
        Group {
            std: "std::path::Path",
            here: "Files",
            methods: methods! {
                Path::canonicalize: fn(&Path) -> Io<PathBuf> => Files::canonicalize: fn(&Files, P) -> Result<PathBuf>;
                Path::is_dir: fn(&Path) -> bool => Files::is_dir: fn(&Files, P) -> bool;
                Path::is_file: fn(&Path) -> bool => Files::is_file: fn(&Files, P) -> bool;
                Path::is_symlink: fn(&Path) -> bool => Files::is_symlink: fn(&Files, P) -> bool;
                Path::metadata: fn(&Path) -> Io<std::fs::Metadata> => Files::metadata: fn(&Files, P) -> Result<Metadata>;
                Path::read_dir: fn(&Path) -> Io<std::fs::ReadDir> => Files::read_dir: fn(&Files, P) -> Result<ReadDir>;
                Path::read_link: fn(&Path) -> Io<PathBuf> => Files::read_link: fn(&Files, P) -> Result<PathBuf>;
                Path::symlink_metadata: fn(&Path) -> Io<std::fs::Metadata> => Files::symlink_metadata: fn(&Files, P) -> Result<Metadata>;
                Path::try_exists: fn(&Path) -> Io<bool> => Files::try_exists: fn(&Files, P) -> Result<bool>;
            },
            absent: vec![("exists", "`Files::exists` is that of `std::fs`, which tells errors from absence; add `.unwrap_or(false)`")],
        },
        Group {
            std: "std::fs::File",
            here: "File",
            methods: methods! {
                std::fs::File::create: fn(P) -> Io<std::fs::File> => Files::create_file: fn(&Files, P) -> Result<File>;
                std::fs::File::create_new: fn(P) -> Io<std::fs::File> => Files::create_new_file: fn(&Files, P) -> Result<File>;
                std::fs::File::lock: fn(&std::fs::File) -> Io<()> => File::lock: fn(&File) -> Result<()>;
                std::fs::File::lock_shared: fn(&std::fs::File) -> Io<()> => File::lock_shared: fn(&File) -> Result<()>;
                std::fs::File::metadata: fn(&std::fs::File) -> Io<std::fs::Metadata> => File::metadata: fn(&File) -> Result<Metadata>;
                std::fs::File::open: fn(P) -> Io<std::fs::File> => Files::open_file: fn(&Files, P) -> Result<File>;
                std::fs::File::options: fn() -> std::fs::OpenOptions => Files::options: fn(&Files) -> FileOptions;
                std::fs::File::set_len: fn(&std::fs::File, u64) -> Io<()> => File::set_len: fn(&File, u64) -> Result<()>;
                std::fs::File::set_modified: fn(&std::fs::File, SystemTime) -> Io<()> => File::set_modified: fn(&File, SystemTime) -> Result<()>;
                std::fs::File::set_permissions: fn(&std::fs::File, Permissions) -> Io<()> => File::set_permissions: fn(&File, Permissions) -> Result<()>;
                std::fs::File::set_times: fn(&std::fs::File, std::fs::FileTimes) -> Io<()> => File::set_times: fn(&File, FileTimes) -> Result<()>;
                std::fs::File::sync_all: fn(&std::fs::File) -> Io<()> => File::sync_all: fn(&File) -> Result<()>;
                std::fs::File::sync_data: fn(&std::fs::File) -> Io<()> => File::sync_data: fn(&File) -> Result<()>;
                std::fs::File::try_clone: fn(&std::fs::File) -> Io<std::fs::File> => File::try_clone: fn(&File) -> Result<File>;
                std::fs::File::try_lock: fn(&std::fs::File) -> Locked => File::try_lock: fn(&File) -> Locked;
                std::fs::File::try_lock_shared: fn(&std::fs::File) -> Locked => File::try_lock_shared: fn(&File) -> Locked;
                std::fs::File::unlock: fn(&std::fs::File) -> Io<()> => File::unlock: fn(&File) -> Result<()>;
                unix::FileExt::read_at: fn(&std::fs::File, &mut [u8], u64) -> Io<usize> => File::read_at: fn(&File, &mut [u8], u64) -> Result<usize>;
                unix::FileExt::read_exact_at: fn(&std::fs::File, &mut [u8], u64) -> Io<()> => File::read_exact_at: fn(&File, &mut [u8], u64) -> Result<()>;
                unix::FileExt::write_all_at: fn(&std::fs::File, &[u8], u64) -> Io<()> => File::write_all_at: fn(&File, &[u8], u64) -> Result<()>;
                unix::FileExt::write_at: fn(&std::fs::File, &[u8], u64) -> Io<usize> => File::write_at: fn(&File, &[u8], u64) -> Result<usize>;
                std::os::unix::fs::fchown: fn(std::fs::File, Id, Id) -> Io<()> => File::fchown: fn(&File, Id, Id) -> Result<()>;
            },
            absent: vec![
                ("AsFd, AsRawFd, FromRawFd, IntoRawFd, From<OwnedFd>, Into<Stdio>, IsTerminal", "a file of a pool has no descriptor"),
                ("Read, Write and Seek for Arc<File>", "only `std` can implement them; a `File` is shared by cloning it"),
            ],
        },
        Group {
            std: "std::fs::OpenOptions",
            here: "FileOptions",
            methods: methods! {
                std::fs::OpenOptions::append: fn(&mut std::fs::OpenOptions, bool) -> &mut std::fs::OpenOptions => FileOptions::append: fn(&mut FileOptions, bool) -> &mut FileOptions;
                std::fs::OpenOptions::create: fn(&mut std::fs::OpenOptions, bool) -> &mut std::fs::OpenOptions => FileOptions::create: fn(&mut FileOptions, bool) -> &mut FileOptions;
                std::fs::OpenOptions::create_new: fn(&mut std::fs::OpenOptions, bool) -> &mut std::fs::OpenOptions => FileOptions::create_new: fn(&mut FileOptions, bool) -> &mut FileOptions;
                std::fs::OpenOptions::new: fn() -> std::fs::OpenOptions => Files::options: fn(&Files) -> FileOptions;
                std::fs::OpenOptions::open: fn(&std::fs::OpenOptions, P) -> Io<std::fs::File> => FileOptions::open: fn(&FileOptions, P) -> Result<File>;
                std::fs::OpenOptions::read: fn(&mut std::fs::OpenOptions, bool) -> &mut std::fs::OpenOptions => FileOptions::read: fn(&mut FileOptions, bool) -> &mut FileOptions;
                std::fs::OpenOptions::truncate: fn(&mut std::fs::OpenOptions, bool) -> &mut std::fs::OpenOptions => FileOptions::truncate: fn(&mut FileOptions, bool) -> &mut FileOptions;
                std::fs::OpenOptions::write: fn(&mut std::fs::OpenOptions, bool) -> &mut std::fs::OpenOptions => FileOptions::write: fn(&mut FileOptions, bool) -> &mut FileOptions;
                unix::OpenOptionsExt::custom_flags: fn(&mut std::fs::OpenOptions, i32) -> &mut std::fs::OpenOptions => FileOptions::custom_flags: fn(&mut FileOptions, i32) -> &mut FileOptions;
                unix::OpenOptionsExt::mode: fn(&mut std::fs::OpenOptions, u32) -> &mut std::fs::OpenOptions => FileOptions::mode: fn(&mut FileOptions, u32) -> &mut FileOptions;
            },
            absent: vec![("custom_flags with other flags than O_NOFOLLOW", "an error: they mean nothing for files of a pool")],
        },
        Group {
            std: "std::fs::DirBuilder",
            here: "DirBuilder",
            methods: methods! {
                std::fs::DirBuilder::create: fn(&std::fs::DirBuilder, P) -> Io<()> => DirBuilder::create: fn(&DirBuilder, P) -> Result<()>;
                std::fs::DirBuilder::new: fn() -> std::fs::DirBuilder => Files::dir_builder: fn(&Files) -> DirBuilder;
                std::fs::DirBuilder::recursive: fn(&mut std::fs::DirBuilder, bool) -> &mut std::fs::DirBuilder => DirBuilder::recursive: fn(&mut DirBuilder, bool) -> &mut DirBuilder;
                unix::DirBuilderExt::mode: fn(&mut std::fs::DirBuilder, u32) -> &mut std::fs::DirBuilder => DirBuilder::mode: fn(&mut DirBuilder, u32) -> &mut DirBuilder;
            },
            absent: Vec::new(),
        },
        Group {
            std: "std::fs::DirEntry",
            here: "DirEntry",
            methods: methods! {
                std::fs::DirEntry::file_name: fn(&std::fs::DirEntry) -> OsString => DirEntry::file_name: fn(&DirEntry) -> OsString;
                std::fs::DirEntry::file_type: fn(&std::fs::DirEntry) -> Io<std::fs::FileType> => DirEntry::file_type: fn(&DirEntry) -> Result<FileType>;
                std::fs::DirEntry::metadata: fn(&std::fs::DirEntry) -> Io<std::fs::Metadata> => DirEntry::metadata: fn(&DirEntry) -> Result<Metadata>;
                std::fs::DirEntry::path: fn(&std::fs::DirEntry) -> PathBuf => DirEntry::path: fn(&DirEntry) -> PathBuf;
                unix::DirEntryExt::ino: fn(&std::fs::DirEntry) -> u64 => DirEntry::ino: fn(&DirEntry) -> u64;
            },
            absent: Vec::new(),
        },
        Group {
            std: "std::fs::Metadata",
            here: "Metadata",
            methods: methods! {
                std::fs::Metadata::accessed: fn(&std::fs::Metadata) -> Io<SystemTime> => Metadata::accessed: fn(&Metadata) -> Result<SystemTime>;
                std::fs::Metadata::created: fn(&std::fs::Metadata) -> Io<SystemTime> => Metadata::created: fn(&Metadata) -> Result<SystemTime>;
                std::fs::Metadata::file_type: fn(&std::fs::Metadata) -> std::fs::FileType => Metadata::file_type: fn(&Metadata) -> FileType;
                std::fs::Metadata::is_dir: fn(&std::fs::Metadata) -> bool => Metadata::is_dir: fn(&Metadata) -> bool;
                std::fs::Metadata::is_file: fn(&std::fs::Metadata) -> bool => Metadata::is_file: fn(&Metadata) -> bool;
                std::fs::Metadata::is_symlink: fn(&std::fs::Metadata) -> bool => Metadata::is_symlink: fn(&Metadata) -> bool;
                std::fs::Metadata::len: fn(&std::fs::Metadata) -> u64 => Metadata::len: fn(&Metadata) -> u64;
                std::fs::Metadata::modified: fn(&std::fs::Metadata) -> Io<SystemTime> => Metadata::modified: fn(&Metadata) -> Result<SystemTime>;
                std::fs::Metadata::permissions: fn(&std::fs::Metadata) -> Permissions => Metadata::permissions: fn(&Metadata) -> Permissions;
                unix::MetadataExt::atime: fn(&std::fs::Metadata) -> i64 => Metadata::atime: fn(&Metadata) -> i64;
                unix::MetadataExt::atime_nsec: fn(&std::fs::Metadata) -> i64 => Metadata::atime_nsec: fn(&Metadata) -> i64;
                unix::MetadataExt::blksize: fn(&std::fs::Metadata) -> u64 => Metadata::blksize: fn(&Metadata) -> u64;
                unix::MetadataExt::blocks: fn(&std::fs::Metadata) -> u64 => Metadata::blocks: fn(&Metadata) -> u64;
                unix::MetadataExt::ctime: fn(&std::fs::Metadata) -> i64 => Metadata::ctime: fn(&Metadata) -> i64;
                unix::MetadataExt::ctime_nsec: fn(&std::fs::Metadata) -> i64 => Metadata::ctime_nsec: fn(&Metadata) -> i64;
                unix::MetadataExt::gid: fn(&std::fs::Metadata) -> u32 => Metadata::gid: fn(&Metadata) -> u32;
                unix::MetadataExt::ino: fn(&std::fs::Metadata) -> u64 => Metadata::ino: fn(&Metadata) -> u64;
                unix::MetadataExt::mode: fn(&std::fs::Metadata) -> u32 => Metadata::mode: fn(&Metadata) -> u32;
                unix::MetadataExt::mtime: fn(&std::fs::Metadata) -> i64 => Metadata::mtime: fn(&Metadata) -> i64;
                unix::MetadataExt::mtime_nsec: fn(&std::fs::Metadata) -> i64 => Metadata::mtime_nsec: fn(&Metadata) -> i64;
                unix::MetadataExt::nlink: fn(&std::fs::Metadata) -> u64 => Metadata::nlink: fn(&Metadata) -> u64;
                unix::MetadataExt::rdev: fn(&std::fs::Metadata) -> u64 => Metadata::rdev: fn(&Metadata) -> u64;
                unix::MetadataExt::size: fn(&std::fs::Metadata) -> u64 => Metadata::size: fn(&Metadata) -> u64;
                unix::MetadataExt::uid: fn(&std::fs::Metadata) -> u32 => Metadata::uid: fn(&Metadata) -> u32;
            },
            absent: vec![("dev", "a pool is no device; `Pool::info` has its identity")],
        },
        Group {
            std: "std::fs::FileType",
            here: "FileType",
            methods: methods! {
                std::fs::FileType::is_dir: fn(&std::fs::FileType) -> bool => FileType::is_dir: fn(&FileType) -> bool;
                std::fs::FileType::is_file: fn(&std::fs::FileType) -> bool => FileType::is_file: fn(&FileType) -> bool;
                std::fs::FileType::is_symlink: fn(&std::fs::FileType) -> bool => FileType::is_symlink: fn(&FileType) -> bool;
                unix::FileTypeExt::is_block_device: fn(&std::fs::FileType) -> bool => FileType::is_block_device: fn(&FileType) -> bool;
                unix::FileTypeExt::is_char_device: fn(&std::fs::FileType) -> bool => FileType::is_char_device: fn(&FileType) -> bool;
                unix::FileTypeExt::is_fifo: fn(&std::fs::FileType) -> bool => FileType::is_fifo: fn(&FileType) -> bool;
                unix::FileTypeExt::is_socket: fn(&std::fs::FileType) -> bool => FileType::is_socket: fn(&FileType) -> bool;
            },
            absent: Vec::new(),
        },
        Group {
            std: "std::fs::FileTimes",
            here: "FileTimes",
            methods: methods! {
                std::fs::FileTimes::new: fn() -> std::fs::FileTimes => FileTimes::new: fn() -> FileTimes;
                std::fs::FileTimes::set_accessed: fn(std::fs::FileTimes, SystemTime) -> std::fs::FileTimes => FileTimes::set_accessed: fn(FileTimes, SystemTime) -> FileTimes;
                std::fs::FileTimes::set_modified: fn(std::fs::FileTimes, SystemTime) -> std::fs::FileTimes => FileTimes::set_modified: fn(FileTimes, SystemTime) -> FileTimes;
            },
            absent: Vec::new(),
        },
        Group {
            std: "std::os::unix::fs",
            here: "Files",
            methods: methods! {
                std::os::unix::fs::chown: fn(P, Id, Id) -> Io<()> => Files::chown: fn(&Files, P, Id, Id) -> Result<()>;
                std::os::unix::fs::lchown: fn(P, Id, Id) -> Io<()> => Files::lchown: fn(&Files, P, Id, Id) -> Result<()>;
                std::os::unix::fs::symlink: fn(P, P) -> Io<()> => Files::symlink: fn(&Files, P, P) -> Result<()>;
            },
            absent: vec![("chroot", "the paths of a pool start at its root")],
        },
    ]
}

/// What is checked by traits, and by nothing but the type of `std` that is used.
#[test]
fn traits_are_implemented() {
    fn is_file<T: Read + Write + Seek>() {}
    is_file::<File>();
    is_file::<&File>();
    fn lists<T: Iterator<Item = Result<DirEntry>>>() {}
    lists::<ReadDir>();
}

/// The table, as a list of equal names and a table of the others for each type.
pub fn as_markdown() -> String {
    let mut text = String::new();
    let mut others = Vec::new();
    for group in groups() {
        let mut same = Vec::new();
        for (std, here) in group.methods {
            if here == format!("{}::{std}", group.here) {
                same.push(format!("`{std}`"));
            } else {
                others.push((format!("{}::{std}", group.std), format!("`{here}`")));
            }
        }
        for (std, why) in group.absent {
            let between = if std.contains(' ') { ": " } else { "::" };
            others.push((format!("{}{between}{std}", group.std), why.to_owned()));
        }
        writeln!(text, "* `{}` → `{}`: {}.", group.std, group.here, same.join(", ")).unwrap();
    }
    text += "* `std::fs::Permissions`, `std::fs::TryLockError`: those of `std`.\n";
    text += "* `std::io::Read`, `Write`, `Seek`: for `File` and `&File`.\n\n";
    text += "| of `std` | here |\n|---|---|\n";
    for (std, here) in others {
        writeln!(text, "| `{std}` | {here} |").unwrap();
    }
    text
}
