//! Metadata of a file, from its inode, and what of it can be set.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind};

use crate::error::Result;
use crate::node_id::Node;
use crate::permission::Permission;

/// The metadata of a file of any kind, as of one moment: [`std::fs::Metadata`], which only the
/// system can make, for a pool. The methods of [`std::os::unix::fs::MetadataExt`] are methods, too,
/// except `dev`: a pool is no device.
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

/// The type of a file: [`std::fs::FileType`], which cannot be made for anything but the system's
/// files. The methods of [`std::os::unix::fs::FileTypeExt`] are methods, too.
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

    /// Whether it is a named pipe.
    pub fn is_fifo(&self) -> bool {
        self.kind == FileKind::Fifo
    }

    /// Whether it is a socket.
    pub fn is_socket(&self) -> bool {
        self.kind == FileKind::Socket
    }

    /// Whether it is a character device.
    pub fn is_char_device(&self) -> bool {
        self.kind == FileKind::CharDevice
    }

    /// Whether it is a block device.
    pub fn is_block_device(&self) -> bool {
        self.kind == FileKind::BlockDevice
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
}

/// What one call sets of permissions, owner, length and times; nothing at first. See
/// [`Nodes::set`](crate::node::Nodes::set).
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::node::SetAttributes;
///
/// files.write("/f", "some text")?;
/// let node = files.metadata("/f")?.node();
/// let what = SetAttributes::new().mode(0o600).owner(Some(1000), None).len(4);
/// let metadata = files.nodes().set(node, &what, &files.caller())?;
/// assert_eq!((metadata.mode() & 0o777, metadata.uid(), metadata.len()), (0o600, 1000, 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetAttributes {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) sets_owner: bool,
    pub(crate) len_bytes: Option<u64>,
    accessed: Option<SetTime>,
    modified: Option<SetTime>,
    changed_ns: Option<i64>,
    pub(crate) clears_set_id: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SetTime {
    Now,
    At(i64),
}

impl SetTime {
    fn ns(self, now_ns: i64) -> i64 {
        match self {
            SetTime::Now => now_ns,
            SetTime::At(ns) => ns,
        }
    }
}

impl SetAttributes {
    /// Sets nothing.
    pub fn new() -> SetAttributes {
        SetAttributes::default()
    }

    /// Sets the permissions: the lowest 12 bits of the mode.
    #[must_use]
    pub fn mode(self, mode: u32) -> SetAttributes {
        SetAttributes { mode: Some(mode & 0o7777), ..self }
    }

    /// Sets user and group; `None` leaves one as it is. This also clears the set-user-ID and
    /// set-group-ID bits of anything but a directory, as `chown` does; [`SetAttributes::mode`] of
    /// the same call counts.
    #[must_use]
    pub fn owner(self, uid: Option<u32>, gid: Option<u32>) -> SetAttributes {
        SetAttributes { uid, gid, sets_owner: true, ..self }
    }

    /// Sets the length of a file in bytes, as [`File::set_len`](crate::File::set_len).
    #[must_use]
    pub fn len(self, len_bytes: u64) -> SetAttributes {
        SetAttributes { len_bytes: Some(len_bytes), ..self }
    }

    /// Sets the times that are set there.
    #[must_use]
    pub fn times(self, times: FileTimes) -> SetAttributes {
        let at = |time: Option<SystemTime>| time.map(|time| SetTime::At(to_ns(time)));
        SetAttributes {
            accessed: at(times.accessed).or(self.accessed),
            modified: at(times.modified).or(self.modified),
            ..self
        }
    }

    /// Sets the access time to the time of the call, by the clock of the pool's other times:
    /// `UTIME_NOW`.
    #[must_use]
    pub fn accessed_now(self) -> SetAttributes {
        SetAttributes { accessed: Some(SetTime::Now), ..self }
    }

    /// Sets the time of the last modification to the time of the call.
    #[must_use]
    pub fn modified_now(self) -> SetAttributes {
        SetAttributes { modified: Some(SetTime::Now), ..self }
    }

    /// Sets the time of the last change, which otherwise is the time of the call: for a server whose
    /// clients cache it.
    #[must_use]
    pub fn changed(self, time: SystemTime) -> SetAttributes {
        SetAttributes { changed_ns: Some(to_ns(time)), ..self }
    }

    /// Clears the bits of a file that run it as its user or group: `FATTR_KILL_SUIDGID`. Without the
    /// permission for the group to run it, the second bit means something else, and stays.
    #[must_use]
    pub fn clear_set_id(self) -> SetAttributes {
        SetAttributes { clears_set_id: true, ..self }
    }

    /// The permission that a caller needs. A length needs none here: the client has opened the file for
    /// writing. Times of now that come with a length are part of that change.
    pub(crate) fn permission(&self) -> Option<Permission> {
        let times = [self.accessed, self.modified];
        let is_explicit = times.iter().any(|time| matches!(time, Some(SetTime::At(_))));
        let set = times.iter().flatten().count();
        if self.mode.is_some() || self.sets_owner || is_explicit {
            Some(Permission::Owner)
        } else if set == 0 || self.len_bytes.is_some() {
            None
        } else if set == times.len() {
            Some(Permission::Write)
        } else {
            Some(Permission::Owner)
        }
    }

    /// Changes an inode, apart from its length and from what follows for its mode.
    pub(crate) fn apply(&self, inode: &mut FileInode, now_ns: i64) {
        inode.mode = self.mode.unwrap_or(inode.mode);
        inode.uid = self.uid.unwrap_or(inode.uid);
        inode.gid = self.gid.unwrap_or(inode.gid);
        inode.accessed_ns = self.accessed.map_or(inode.accessed_ns, |time| time.ns(now_ns));
        inode.modified_ns = self.modified.map_or(inode.modified_ns, |time| time.ns(now_ns));
        inode.changed_ns = self.changed_ns.unwrap_or(now_ns);
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

    /// Number and generation together, to reach the file without a path: see
    /// [`Nodes`](crate::node::Nodes).
    pub fn node(&self) -> Node {
        Node::of(&self.inode)
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
            FileKind::Fifo => libc::S_IFIFO,
            FileKind::Socket => libc::S_IFSOCK,
            FileKind::CharDevice => libc::S_IFCHR,
            FileKind::BlockDevice => libc::S_IFBLK,
            _ => libc::S_IFREG,
        };
        kind | self.inode.mode
    }

    /// The number of a device, as the system encodes it (`libc::major`, `libc::minor`); 0 for
    /// anything else.
    pub fn rdev(&self) -> u64 {
        let device = self.inode.device;
        libc::makedev((device >> 32) as u32, device as u32)
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
