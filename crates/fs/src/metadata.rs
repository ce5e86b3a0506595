//! Metadata of a file, from its inode, and what of it can be set.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind};

use crate::error::Result;

/// The metadata of a file, directory or symbolic link, as of one moment:
/// [`std::fs::Metadata`], which only the system can make, for a pool. The methods of
/// [`std::os::unix::fs::MetadataExt`] are methods, too, except `dev` and `rdev`: a pool is no
/// device and holds none.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// files.create_file("/f")?.write_all_at(b"text", 0)?;
/// let metadata = files.metadata("/f")?;
/// assert!(metadata.is_file() && !metadata.is_empty());
/// assert_eq!((metadata.len(), metadata.allocated_bytes(), metadata.nlink()), (4, 4096, 1));
/// assert_eq!(metadata.modified()?, metadata.changed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    inode: FileInode,
}

fn time(ns: i64) -> SystemTime {
    let since = Duration::from_nanos(ns.unsigned_abs());
    if ns < 0 { UNIX_EPOCH - since } else { UNIX_EPOCH + since }
}

/// Converts a time to the inode format: years 1677 to 2262, clamped at both ends.
fn to_ns(time: SystemTime) -> i64 {
    let ns = |since: Duration| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => ns(since),
        Err(before) => ns(before.duration()).saturating_neg(),
    }
}

/// Splits a time as the system does: the nanoseconds are not negative.
fn seconds(ns: i64) -> i64 {
    ns.div_euclid(1_000_000_000)
}

fn nanoseconds(ns: i64) -> i64 {
    ns.rem_euclid(1_000_000_000)
}

pub(crate) fn set_owner(inode: &mut FileInode, uid: Option<u32>, gid: Option<u32>) {
    inode.uid = uid.unwrap_or(inode.uid);
    inode.gid = gid.unwrap_or(inode.gid);
}

/// The type of a file: [`std::fs::FileType`], which cannot be made for anything but the system's
/// files. A pool has no devices, sockets and named pipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileType {
    kind: FileKind,
}

impl FileType {
    pub(crate) fn of(kind: FileKind) -> FileType {
        FileType { kind }
    }

    /// Returns the type as an enum, to match on.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind == FileKind::File
    }

    /// Whether it is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.kind == FileKind::Symlink
    }
}

/// The times that a call sets, none at first: [`std::fs::FileTimes`], which cannot be read.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use std::time::SystemTime;
///
/// use aquifer_fs::FileTimes;
///
/// let file = files.create_file("/f")?;
/// file.set_times(FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH))?;
/// assert_eq!(file.metadata()?.accessed()?, SystemTime::UNIX_EPOCH);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct FileTimes {
    accessed: Option<SystemTime>,
    modified: Option<SystemTime>,
}

impl FileTimes {
    /// Returns times none of which is set.
    pub fn new() -> FileTimes {
        FileTimes::default()
    }

    /// Sets the time of the last access.
    pub fn set_accessed(self, time: SystemTime) -> FileTimes {
        FileTimes { accessed: Some(time), ..self }
    }

    /// Sets the time of the last modification.
    pub fn set_modified(self, time: SystemTime) -> FileTimes {
        FileTimes { modified: Some(time), ..self }
    }

    pub(crate) fn apply(self, inode: &mut FileInode) {
        inode.accessed_ns = self.accessed.map_or(inode.accessed_ns, to_ns);
        inode.modified_ns = self.modified.map_or(inode.modified_ns, to_ns);
    }
}

impl Metadata {
    pub(crate) fn of(inode: FileInode) -> Metadata {
        Metadata { inode }
    }

    /// Returns the type of file.
    pub fn file_type(&self) -> FileType {
        FileType::of(self.inode.kind)
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.file_type().is_file()
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.file_type().is_dir()
    }

    /// Whether it is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.file_type().is_symlink()
    }

    /// Length in bytes: of a file's content, of a symbolic link's target; for a directory, how many
    /// names it has.
    pub fn len(&self) -> u64 {
        match self.inode.kind {
            FileKind::Directory => self.inode.entries,
            _ => self.inode.size_bytes,
        }
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As [`Metadata::len`].
    pub fn size(&self) -> u64 {
        self.len()
    }

    /// Bytes of the pool that hold the content. Holes do not count; room to grow into does.
    pub fn allocated_bytes(&self) -> u64 {
        self.inode.pages * PAGE_BYTES
    }

    /// [`Metadata::allocated_bytes`] in units of 512 bytes.
    pub fn blocks(&self) -> u64 {
        self.allocated_bytes() / 512
    }

    /// The unit in which a pool allocates, in bytes.
    pub fn blksize(&self) -> u64 {
        PAGE_BYTES
    }

    /// Returns the inode number: two names with the same number refer to the same file.
    pub fn ino(&self) -> u64 {
        self.inode.number
    }

    /// Distinguishes the file from all others that ever have its number: number and generation
    /// together identify one file for the lifetime of the pool.
    pub fn generation(&self) -> u64 {
        self.inode.generation
    }

    /// How many names it has; for a directory, 2 plus one for each subdirectory.
    pub fn nlink(&self) -> u64 {
        self.inode.links.into()
    }

    /// Returns the permissions; like those of the system's files, with the bits of the file type.
    pub fn permissions(&self) -> Permissions {
        Permissions::from_mode(self.mode())
    }

    /// Returns permissions and file type, as `st_mode`.
    pub fn mode(&self) -> u32 {
        let kind = match self.inode.kind {
            FileKind::Directory => libc::S_IFDIR,
            FileKind::Symlink => libc::S_IFLNK,
            _ => libc::S_IFREG,
        };
        kind | self.inode.mode
    }

    /// The user it belongs to.
    pub fn uid(&self) -> u32 {
        self.inode.uid
    }

    /// The group it belongs to.
    pub fn gid(&self) -> u32 {
        self.inode.gid
    }

    /// Whether content, attributes and names cannot be changed.
    pub fn is_immutable(&self) -> bool {
        self.inode.is_immutable
    }

    /// When the content was last changed; for a directory, its names.
    ///
    /// # Errors
    /// None: a pool keeps all times. The type is that of [`std::fs::Metadata::modified`].
    pub fn modified(&self) -> Result<SystemTime> {
        Ok(time(self.inode.modified_ns))
    }

    /// The access time, as set explicitly: reading does not change it.
    ///
    /// # Errors
    /// None, as for [`Metadata::modified`].
    pub fn accessed(&self) -> Result<SystemTime> {
        Ok(time(self.inode.accessed_ns))
    }

    /// When the file was created.
    ///
    /// # Errors
    /// None, as for [`Metadata::modified`].
    pub fn created(&self) -> Result<SystemTime> {
        Ok(time(self.inode.created_ns))
    }

    /// When anything about the file was last changed.
    pub fn changed(&self) -> SystemTime {
        time(self.inode.changed_ns)
    }

    /// The access time, in whole seconds since 1970.
    pub fn atime(&self) -> i64 {
        seconds(self.inode.accessed_ns)
    }

    /// The nanoseconds of [`Metadata::atime`].
    pub fn atime_nsec(&self) -> i64 {
        nanoseconds(self.inode.accessed_ns)
    }

    /// The time of the last modification, in whole seconds since 1970.
    pub fn mtime(&self) -> i64 {
        seconds(self.inode.modified_ns)
    }

    /// The nanoseconds of [`Metadata::mtime`].
    pub fn mtime_nsec(&self) -> i64 {
        nanoseconds(self.inode.modified_ns)
    }

    /// The time of the last change, in whole seconds since 1970.
    pub fn ctime(&self) -> i64 {
        seconds(self.inode.changed_ns)
    }

    /// The nanoseconds of [`Metadata::ctime`].
    pub fn ctime_nsec(&self) -> i64 {
        nanoseconds(self.inode.changed_ns)
    }
}
