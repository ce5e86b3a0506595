//! The files of a pool, by path.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_pool::format::file::{FileInode, FileKind};
use aquifer_pool::{InodeUse, MetadataView, OpenOptions, Pool, PoolError, Transaction};
use aquifer_sys::credentials::Credentials;
use aquifer_vm::stitched::Stitcher;

use crate::error::{FsError, Result};
use crate::file::{File, FileOptions};
use crate::metadata::Metadata;
use crate::names::{Gone, Names, New};
use crate::open_inodes::{OpenInode, OpenInodes};
use crate::read_dir::ReadDir;
use crate::view::known_paths::KnownPaths;
use crate::walk::{self, Last, bytes_of, owned, walk};
use crate::{attributes, walk as paths};

/// The files of an open pool. Cheap to clone; can be shared between threads.
///
/// Paths start at the root of the pool, with or without a leading slash. The methods are those of
/// `std::fs`, with the same meaning; extensions carry the name that Linux uses for them.
/// Permissions and owners are stored but not enforced: any process that can open the pool can do
/// everything in it.
///
/// # Durability
/// The effect of a call is visible to all processes at once, and survives the death of any or all
/// of them. A power cut can undo it until [`Files::sync`], or [`File::sync_all`] of the file or
/// directory, has returned. After a power cut, names, lengths, attributes and the effects of
/// [`File::write_atomic`] and [`File::exchange_range`] are as of one moment: never part of a call, and never
/// a later call without the earlier ones. Each byte that was overwritten in place may be old or
/// new, independently of the others, but never comes from another file or from another place in
/// this one.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
/// # let files = aquifer_fs::Files::new(pool);
/// use std::io::{Read, Write};
///
/// files.create_dir("/notes")?;
/// files.create_file("/notes/today")?.write_all(b"begun")?;
/// let mut text = String::new();
/// files.open_file("/notes/today")?.read_to_string(&mut text)?;
/// assert_eq!(text, "begun");
/// files.sync()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Files {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub pool: Pool,
    pub opened: OpenInodes,
    pub known_paths: KnownPaths,
    /// For views of fragmented files.
    pub stitcher: Stitcher,
    /// Permission bits that new files do not get.
    pub umask: u32,
    /// The owner of new files.
    owner: Credentials,
}

impl fmt::Debug for Files {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Files").field("pool", &self.shared.pool).finish_non_exhaustive()
    }
}

/// Nanoseconds since 1970, by the coarse clock that file systems use: it ticks every few
/// milliseconds.
pub(crate) fn now_ns() -> i64 {
    aquifer_sys::clock::coarse_ns()
}

/// Converts a time to the inode format: years 1677 to 2262, clamped at both ends.
pub(crate) fn to_ns(time: SystemTime) -> i64 {
    let ns = |since: Duration| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => ns(since),
        Err(before) => ns(before.duration()).saturating_neg(),
    }
}

/// How [`Files::rename_with`] moves a name.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::{FsError, RenameMode};
///
/// files.create_dir("/one")?;
/// files.create_file("/two")?;
/// let refused = files.rename_with("/one", "/two", RenameMode::NoReplace);
/// assert!(matches!(refused, Err(FsError::Exists { .. })));
/// files.rename_with("/one", "/two", RenameMode::Exchange)?;
/// assert!(files.metadata("/two")?.is_dir());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RenameMode {
    /// An existing file with the new name is replaced, if it can be.
    #[default]
    Replace,
    /// The new name must not exist.
    NoReplace,
    /// Both names must exist, and are exchanged.
    Exchange,
}

/// How much room a pool has for files, as `statfs` reports it.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
/// # let files = aquifer_fs::Files::new(pool);
/// let before = files.space()?;
/// files.create_file("/f")?.write_at(&[1; 8192], 0)?;
/// let after = files.space()?;
/// assert_eq!(before.free_bytes - after.free_bytes, 8192);
/// assert_eq!(before.free_slots - after.free_slots, 2); // an inode, and a node for its name
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Space {
    /// Bytes for content, used or free.
    pub total_bytes: u64,
    /// Free bytes. Some may become usable only after the next checkpoint.
    pub free_bytes: u64,
    /// The longest contiguous range of free bytes.
    pub largest_free_bytes: u64,
    /// Slots for inodes and their metadata, used or free.
    pub total_slots: u64,
    /// Free slots.
    pub free_slots: u64,
}

impl Files {
    /// The files of a pool.
    ///
    /// New files belong to the process's current effective user and group, and get permissions less
    /// its current umask.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::Files;
    /// use aquifer_pool::{CreateOptions, OpenOptions, Pool};
    ///
    /// let path = directory.path().join("new.pool");
    /// let pool = Pool::create(&path, 1 << 20, &CreateOptions::default(), &OpenOptions::default())?;
    /// let files = Files::new(pool);
    /// assert!(files.metadata("/")?.is_dir());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(pool: Pool) -> Files {
        let umask = aquifer_sys::credentials::umask();
        let owner = aquifer_sys::credentials::effective();
        let shared = Shared {
            pool,
            opened: OpenInodes::default(),
            known_paths: KnownPaths::new(),
            stitcher: Stitcher::new(),
            umask,
            owner,
        };
        let files = Files { shared: Arc::new(shared) };
        if files.shared.pool.is_writable() {
            files.shared.reap_orphans();
        }
        files
    }

    /// Opens a pool and returns its files.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::Files;
    /// use aquifer_pool::OpenOptions;
    ///
    /// let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    /// let reader = Files::open(&path, &read_only)?; // alongside writers
    /// files.create_file("/f")?;
    /// assert!(reader.exists("/f")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Pool::open`].
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Files> {
        Ok(Files::new(Pool::open(path, options)?))
    }

    /// Returns the pool.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.pool().checkpoint()?;
    /// assert_eq!(files.pool().info()?.directories, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// Opens a file for reading.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::io::Read;
    ///
    /// files.create_file("/f")?.write_at(b"text", 0)?;
    /// let mut text = String::new();
    /// files.open_file("/f")?.read_to_string(&mut text)?; // as with `std::fs::File::open`
    /// assert_eq!(text, "text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::IsADirectory`], and other errors of the path.
    pub fn open_file(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_with(path, &FileOptions::new().read(true))
    }

    /// Opens a file for writing: creates it if it does not exist, truncates it if it does.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::io::Write;
    ///
    /// files.create_file("/f")?.write_all(b"a long text")?;
    /// files.create_file("/f")?.write_all(b"a short one")?; // as with `std::fs::File::create`
    /// assert_eq!(files.metadata("/f")?.len(), 11);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::open_file`]; [`FsError::Pool`] if the pool is full or opened read-only.
    pub fn create_file(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_with(path, &FileOptions::new().write(true).create(true).truncate(true))
    }

    /// Opens a file, or a directory for reading, according to the options.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{FileOptions, FsError};
    ///
    /// let new = FileOptions::new().write(true).create_new(true).permissions(0o600);
    /// files.open_with("/f", &new)?.write_at(b"text", 0)?;
    /// assert!(matches!(files.open_with("/f", &new), Err(FsError::Exists { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::create_file`]; [`FsError::Exists`] for `create_new`.
    pub fn open_with(&self, path: impl AsRef<Path>, options: &FileOptions) -> Result<File> {
        let path = bytes_of(path.as_ref());
        options.check(path)?;
        loop {
            let (inode, is_new) = if options.makes() {
                self.open_or_make(path, options)?
            } else {
                (self.shared.look_up(path, options.last())?, false)
            };
            // `None`: the inode was removed between lookup and open. The path now refers to
            // something else or to nothing, so look it up again.
            if let Some(file) = self.open_found(path, &inode, options)? {
                if options.truncates() && !is_new && inode.kind == FileKind::File {
                    file.set_len(0)?;
                }
                return Ok(file);
            }
        }
    }

    fn open_found(
        &self,
        path: &[u8],
        inode: &FileInode,
        options: &FileOptions,
    ) -> Result<Option<File>> {
        if inode.kind == FileKind::Directory && options.writes() {
            return Err(FsError::IsADirectory { path: owned(path) });
        }
        if inode.kind == FileKind::Symlink {
            return Err(FsError::LinkLoop { path: owned(path) });
        }
        if inode.is_immutable && options.writes() {
            return Err(FsError::Immutable { path: owned(path) });
        }
        let opened = self.shared.open_inode(inode)?;
        Ok(opened.map(|opened| File::new(self.clone(), opened, options)))
    }

    /// The inode that a path refers to, and whether this call created it.
    fn open_or_make(&self, path: &[u8], options: &FileOptions) -> Result<(FileInode, bool)> {
        let mode = options.mode() & !self.shared.umask;
        self.shared.change(|names| {
            // A trailing slash asks for a directory, even if the symbolic link before it refers to
            // a file.
            let last = if path.ends_with(b"/") { Last::Name } else { options.last() };
            let place = walk(names.slots, path, last)?;
            if place.wants_directory && !place.name.is_empty() {
                return Err(FsError::IsADirectory { path: owned(path) });
            }
            match place.found {
                Some(_) if options.makes_new() => Err(FsError::Exists { path: owned(path) }),
                Some(_) => Ok((walk::referred(names.slots, place.referent(path)?)?, false)),
                None => {
                    let new = self.new_of(FileKind::File, mode, &[]);
                    Ok((names.make(&place, path, new)?, true))
                }
            }
        })
    }

    pub(crate) fn new_of<'a>(&self, kind: FileKind, mode: u32, target: &'a [u8]) -> New<'a> {
        let owner = self.shared.owner;
        // If the system has no random numbers, an attacker can choose names that collide; nothing
        // worse.
        let seed = match kind {
            FileKind::Directory => aquifer_sys::random::next_u64().unwrap_or(now_ns() as u64),
            _ => 0,
        };
        New { kind, mode, uid: owner.uid, gid: owner.gid, target, seed }
    }

    /// Returns the metadata of a file, directory or symbolic link target; symbolic links are
    /// followed.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_at(b"text", 0)?;
    /// files.symlink("f", "/link")?;
    /// assert_eq!(files.metadata("/link")?.len(), 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], and other errors of the path.
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        let inode = self.shared.look_up(bytes_of(path.as_ref()), Last::Follow)?;
        Ok(Metadata::of(inode))
    }

    /// As [`Files::metadata`], but does not follow a symbolic link at the end of the path.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.symlink("elsewhere", "/link")?;
    /// assert!(files.symlink_metadata("/link")?.is_symlink());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::metadata`].
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        let inode = self.shared.look_up(bytes_of(path.as_ref()), Last::Keep)?;
        Ok(Metadata::of(inode))
    }

    /// Whether a path exists, symbolic links followed.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// assert!(!files.exists("/f")?);
    /// files.create_file("/f")?;
    /// assert!(files.exists("/f")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::metadata`], without [`FsError::NotFound`].
    pub fn exists(&self, path: impl AsRef<Path>) -> Result<bool> {
        match self.metadata(path) {
            Ok(_) => Ok(true),
            Err(FsError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Creates a directory.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir("/d")?;
    /// assert_eq!(files.create_dir("/d").unwrap_err().errno(), libc::EEXIST);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Exists`], [`FsError::NotFound`] if the parent directory does not exist,
    /// [`FsError::Pool`].
    pub fn create_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        self.make(bytes_of(path.as_ref()), FileKind::Directory, 0o777, &[]).map(drop)
    }

    /// Creates a directory and all its missing parents. It is no error if the directory exists.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir_all("/a/b/c")?;
    /// files.create_dir_all("/a/b")?;
    /// assert!(files.metadata("/a/b/c")?.is_dir());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::create_dir`]; [`FsError::NotADirectory`], [`FsError::Exists`] if something
    /// else has one of the names.
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        match self.create_dir(path) {
            Err(FsError::NotFound { .. }) => {}
            outcome => return self.or_is_directory(path, outcome),
        }
        match path.parent() {
            Some(parent) => self.create_dir_all(parent)?,
            None => return Err(FsError::NotFound { path: path.to_owned() }),
        }
        // Another thread or process may have created it first.
        self.or_is_directory(path, self.create_dir(path))
    }

    fn or_is_directory(&self, path: &Path, made: Result<()>) -> Result<()> {
        match made {
            Err(FsError::Exists { .. }) if self.metadata(path).is_ok_and(|it| it.is_dir()) => {
                Ok(())
            }
            made => made,
        }
    }

    fn make(&self, path: &[u8], kind: FileKind, mode: u32, target: &[u8]) -> Result<FileInode> {
        let mode = match kind {
            FileKind::Symlink => mode,
            _ => mode & !self.shared.umask,
        };
        let new = self.new_of(kind, mode, target);
        self.shared.change(|names| {
            let place = walk(names.slots, path, Last::Name)?;
            names.make(&place, path, new)
        })
    }

    /// Creates a symbolic link at `link` to `target`, which need not exist.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir("/d")?;
    /// files.create_file("/d/f")?;
    /// files.symlink("d/f", "/link")?; // relative to the directory of the link
    /// assert!(files.metadata("/link")?.is_file());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Exists`], [`FsError::NotFound`], [`FsError::Pool`].
    pub fn symlink(&self, target: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let target = bytes_of(target.as_ref());
        paths::check(target)?;
        self.make(bytes_of(link.as_ref()), FileKind::Symlink, 0o777, target).map(drop)
    }

    /// Adds another name for a file or a symbolic link.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/one")?;
    /// files.hard_link("/one", "/two")?;
    /// files.remove_file("/one")?;
    /// assert_eq!(files.metadata("/two")?.links(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Exists`], [`FsError::DirectoryLink`], [`FsError::TooManyLinks`],
    /// [`FsError::NotFound`], [`FsError::Pool`].
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let (from, to) = (bytes_of(original.as_ref()), bytes_of(link.as_ref()));
        self.shared.change(|names| names.link(from, to))
    }

    /// Returns the target of a symbolic link.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.symlink("no/such/file", "/link")?;
    /// assert_eq!(files.read_link("/link")?.to_str(), Some("no/such/file"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotALink`], [`FsError::NotFound`].
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        let path = bytes_of(path.as_ref());
        self.shared.look(|slots| {
            let found = walk(slots, path, Last::Keep)?.referent(path)?;
            match found.kind {
                FileKind::Symlink => {
                    let inode = walk::referred(slots, found)?;
                    paths::target(slots, &inode).map(|target| owned(&target))
                }
                _ => Err(FsError::NotALink { path: owned(path) }),
            }
        })
    }

    /// Removes the name of a file or of a symbolic link. Open handles stay usable.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// files.remove_file("/f")?;
    /// assert_eq!(file.metadata()?.links(), 0); // the file exists as long as it is open
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::IsADirectory`], [`FsError::Immutable`], [`FsError::Pool`].
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = bytes_of(path.as_ref());
        let gone = self.shared.change(|names| names.unlink(path))?;
        self.shared.after(gone)
    }

    /// Removes an empty directory.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FsError;
    ///
    /// files.create_dir_all("/d/e")?;
    /// assert!(matches!(files.remove_dir("/d"), Err(FsError::NotEmpty { .. })));
    /// files.remove_dir("/d/e")?;
    /// files.remove_dir("/d")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::NotADirectory`], [`FsError::NotEmpty`], [`FsError::Pool`].
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = bytes_of(path.as_ref());
        let gone = self.shared.change(|names| names.remove_directory(path))?;
        self.shared.after(gone)
    }

    /// Removes a directory and everything in it, at any depth; symbolic links are removed, not
    /// followed.
    ///
    /// Entries that other threads or processes create there at the same time may be left over; then
    /// the call fails.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir_all("/d/e/f")?;
    /// files.remove_dir_all("/d")?;
    /// assert!(!files.exists("/d")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::remove_dir`] and [`Files::remove_file`].
    pub fn remove_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut path = path.as_ref().to_owned();
        let top = self.shared.look_up(bytes_of(&path), Last::Keep)?;
        match top.kind {
            FileKind::Directory => {}
            FileKind::Symlink => return self.remove_file(path),
            _ => return Err(FsError::NotADirectory { path }),
        }
        // Iterative: a tree can be deeper than the stack. Each directory is addressed by its inode,
        // not by its path: a path can be too long, and can refer to something else by then.
        let mut above = vec![ReadDir::new(self.clone(), PathBuf::new(), &top)];
        while let Some(entries) = above.last_mut() {
            let directory = entries.directory();
            match entries.next() {
                Some(entry) => {
                    let entry = entry?;
                    let name = entry.file_name();
                    path.push(name);
                    match entry.kind() {
                        FileKind::Directory => match self.enter(directory, name, &path) {
                            Ok(below) => {
                                above.push(below);
                                continue;
                            }
                            Err(FsError::NotFound { .. }) => {}
                            Err(error) => return Err(error),
                        },
                        _ => missing_is_fine(self.remove_entry(directory, name, false, &path))?,
                    }
                }
                None => {
                    above.pop();
                    let removed = match (above.last(), path.file_name()) {
                        (Some(parent), Some(name)) => {
                            self.remove_entry(parent.directory(), name, true, &path)
                        }
                        _ => self.remove_dir(&path),
                    };
                    missing_is_fine(removed)?;
                }
            }
            path.pop();
        }
        Ok(())
    }

    /// Opens a subdirectory of a directory given by its inode. `path` is for messages.
    fn enter(&self, directory: (u64, u64), name: &OsStr, path: &Path) -> Result<ReadDir> {
        let shown = bytes_of(path);
        let inode = self.shared.look(|slots| {
            let place = walk::entry(slots, directory, name.as_bytes(), shown)?;
            walk::referred(slots, place.named(shown)?)
        })?;
        match inode.kind {
            FileKind::Directory => Ok(ReadDir::new(self.clone(), PathBuf::new(), &inode)),
            _ => Err(FsError::NotADirectory { path: path.to_owned() }),
        }
    }

    fn remove_entry(
        &self,
        directory: (u64, u64),
        name: &OsStr,
        is_directory: bool,
        path: &Path,
    ) -> Result<()> {
        let (name, path) = (name.as_bytes(), bytes_of(path));
        let gone =
            self.shared.change(|names| names.remove_entry(directory, name, is_directory, path))?;
        self.shared.after(gone)
    }

    /// Moves a name. If the new name exists, it is replaced atomically: at any moment, also after a
    /// crash, it refers either to the old file or to the new one.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/new")?.write_at(b"new", 0)?;
    /// files.create_file("/current")?.write_at(b"of yesterday", 0)?;
    /// files.rename("/new", "/current")?;
    /// assert_eq!(files.metadata("/current")?.len(), 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::NotEmpty`], [`FsError::IsADirectory`],
    /// [`FsError::NotADirectory`], [`FsError::IntoItself`], [`FsError::Immutable`],
    /// [`FsError::Pool`].
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        self.rename_with(from, to, RenameMode::Replace)
    }

    /// As [`Files::rename`], or in one of the other modes of `renameat2`.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::RenameMode;
    ///
    /// files.create_dir("/v1")?;
    /// files.create_dir("/v2")?;
    /// files.create_file("/v2/f")?;
    /// files.rename_with("/v1", "/v2", RenameMode::Exchange)?;
    /// assert!(files.exists("/v1/f")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::rename`]; [`FsError::Exists`] for [`RenameMode::NoReplace`].
    pub fn rename_with(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        mode: RenameMode,
    ) -> Result<()> {
        let (from, to) = (bytes_of(from.as_ref()), bytes_of(to.as_ref()));
        let gone = self.shared.change(|names| match mode {
            RenameMode::Exchange => names.exchange(from, to).map(|()| Gone::Linked),
            _ => names.rename(from, to, mode == RenameMode::Replace),
        })?;
        self.shared.after(gone)
    }

    /// Returns the names in a directory, in no particular order, without `.` and `..`.
    ///
    /// A name that exists all the time is returned exactly once, whatever happens to other names at
    /// the same time.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/one")?;
    /// files.create_dir("/two")?;
    /// let names: Result<Vec<_>, _> =
    ///     files.read_dir("/")?.map(|entry| entry.map(|entry| entry.into_file_name())).collect();
    /// let mut names = names?;
    /// names.sort();
    /// assert_eq!(names, ["one", "two"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::NotADirectory`].
    pub fn read_dir(&self, path: impl AsRef<Path>) -> Result<ReadDir> {
        let path = path.as_ref();
        let inode = self.shared.look_up(bytes_of(path), Last::Follow)?;
        match inode.kind {
            FileKind::Directory => Ok(ReadDir::new(self.clone(), path.to_owned(), &inode)),
            _ => Err(FsError::NotADirectory { path: path.to_owned() }),
        }
    }

    /// Sets the permissions: the lowest 12 bits of `mode`, as for `chmod`.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.set_permissions("/f", 0o640)?;
    /// assert_eq!(files.metadata("/f")?.mode(), 0o640);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::Immutable`], [`FsError::Pool`].
    pub fn set_permissions(&self, path: impl AsRef<Path>, mode: u32) -> Result<()> {
        self.set(path.as_ref(), Last::Follow, |inode| inode.mode = mode & 0o7777)
    }

    /// Sets user and group; `None` leaves one unchanged. Does not follow a symbolic link.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.set_owner("/f", Some(1000), None)?;
    /// assert_eq!(files.metadata("/f")?.uid(), 1000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::set_permissions`].
    pub fn set_owner(
        &self,
        path: impl AsRef<Path>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<()> {
        self.set(path.as_ref(), Last::Keep, |inode| {
            inode.uid = uid.unwrap_or(inode.uid);
            inode.gid = gid.unwrap_or(inode.gid);
        })
    }

    /// Sets the times of the last access and the last modification; `None` leaves one unchanged.
    /// Does not follow a symbolic link.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::time::SystemTime;
    ///
    /// files.create_file("/f")?;
    /// files.set_times("/f", None, Some(SystemTime::UNIX_EPOCH))?;
    /// assert_eq!(files.metadata("/f")?.modified(), SystemTime::UNIX_EPOCH);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::set_permissions`].
    pub fn set_times(
        &self,
        path: impl AsRef<Path>,
        accessed: Option<SystemTime>,
        modified: Option<SystemTime>,
    ) -> Result<()> {
        self.set(path.as_ref(), Last::Keep, |inode| {
            inode.accessed_ns = accessed.map_or(inode.accessed_ns, to_ns);
            inode.modified_ns = modified.map_or(inode.modified_ns, to_ns);
        })
    }

    /// Makes a file immutable, or mutable again. While it is immutable, its content, attributes and
    /// names cannot be changed, and its bytes are available as a slice ([`Lease`](crate::Lease)).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FsError;
    ///
    /// files.create_file("/f")?;
    /// files.set_immutable("/f", true)?;
    /// assert!(matches!(files.remove_file("/f"), Err(FsError::Immutable { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::Pool`]. [`FsError::InUse`] when making a file immutable
    /// that has a [`ViewMut`](crate::ViewMut), or mutable one that has a [`Lease`](crate::Lease).
    pub fn set_immutable(&self, path: impl AsRef<Path>, is_immutable: bool) -> Result<()> {
        let path = bytes_of(path.as_ref());
        loop {
            let number = self.shared.look_up(path, Last::Follow)?.number;
            // Take the write lock: in-flight writers have already passed the immutability check.
            let _writing = self.shared.pool.lock_file(number)?;
            let outcome = if is_immutable {
                self.shared.freeze(path, number)?
            } else {
                // First stop new leases, then check that there are none.
                match self.shared.begin_to_clear_immutable(path, number)? {
                    Found::Elsewhere => Found::Elsewhere,
                    Found::There => self.shared.clear_immutable(path, number)?,
                }
            };
            match outcome {
                Found::There => return Ok(()),
                Found::Elsewhere => {}
            }
        }
    }

    fn set(&self, path: &Path, last: Last, set: impl Fn(&mut FileInode)) -> Result<()> {
        let path = bytes_of(path);
        self.shared.change(|names| {
            let found = walk(names.slots, path, last)?.referent(path)?;
            let mut inode = walk::referred(names.slots, found)?;
            if inode.is_immutable {
                return Err(FsError::Immutable { path: owned(path) });
            }
            set(&mut inode);
            inode.changed_ns = names.now_ns;
            names.put(&inode)
        })
    }

    /// Returns the value of an extended attribute.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.set_attribute("/f", "user.colour", "green", Default::default())?;
    /// assert_eq!(files.attribute("/f", "user.colour")?, b"green");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NoAttribute`], [`FsError::NotFound`].
    pub fn attribute(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<Vec<u8>> {
        attributes::check_length(name.as_ref())?;
        let path = bytes_of(path.as_ref());
        self.shared.look(|slots| {
            let found = walk(slots, path, Last::Follow)?.referent(path)?;
            attributes::get(&walk::referred(slots, found)?, slots, name.as_ref())
        })
    }

    /// Returns the names of all extended attributes.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.set_attribute("/f", "user.colour", "green", Default::default())?;
    /// assert_eq!(files.attributes("/f")?, [b"user.colour"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`].
    pub fn attributes(&self, path: impl AsRef<Path>) -> Result<Vec<Vec<u8>>> {
        let path = bytes_of(path.as_ref());
        self.shared.look(|slots| {
            let found = walk(slots, path, Last::Follow)?.referent(path)?;
            attributes::list(&walk::referred(slots, found)?, slots)
        })
    }

    /// Sets an extended attribute.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{FsError, SetMode};
    ///
    /// files.create_file("/f")?;
    /// files.set_attribute("/f", "user.colour", "green", SetMode::Create)?;
    /// let again = files.set_attribute("/f", "user.colour", "red", SetMode::Create);
    /// assert!(matches!(again, Err(FsError::AttributeExists { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the name and value; [`FsError::AttributeExists`] and [`FsError::NoAttribute`]
    /// depending on `mode`; [`FsError::NotFound`], [`FsError::Immutable`], [`FsError::Pool`].
    pub fn set_attribute(
        &self,
        path: impl AsRef<Path>,
        name: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        mode: attributes::SetMode,
    ) -> Result<()> {
        let (name, value) = (name.as_ref(), value.as_ref());
        attributes::check_length(name)?;
        attributes::check_value(value)?;
        self.change_attributes(path.as_ref(), |inode, slots| {
            attributes::set(inode, slots, name, value, mode)
        })
    }

    /// Removes an extended attribute.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.set_attribute("/f", "user.colour", "green", Default::default())?;
    /// files.remove_attribute("/f", "user.colour")?;
    /// assert!(files.attributes("/f")?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NoAttribute`], [`FsError::NotFound`], [`FsError::Immutable`], [`FsError::Pool`].
    pub fn remove_attribute(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<()> {
        let name = name.as_ref();
        attributes::check_length(name)?;
        self.change_attributes(path.as_ref(), |inode, slots| attributes::remove(inode, slots, name))
    }

    fn change_attributes(
        &self,
        path: &Path,
        change: impl Fn(&mut FileInode, &mut Transaction<'_>) -> Result<()>,
    ) -> Result<()> {
        let path = bytes_of(path);
        self.shared.change(|names| {
            let found = walk(names.slots, path, Last::Follow)?.referent(path)?;
            let mut inode = walk::referred(names.slots, found)?;
            if inode.is_immutable {
                return Err(FsError::Immutable { path: owned(path) });
            }
            change(&mut inode, names.slots)?;
            inode.changed_ns = names.now_ns;
            names.put(&inode)
        })
    }

    /// Returns how much room there is.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let space = files.space()?;
    /// assert!(space.largest_free_bytes <= space.free_bytes && space.free_bytes <= space.total_bytes);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`].
    pub fn space(&self) -> Result<Space> {
        const PAGE_BYTES: u64 = aquifer_pool::format::PAGE_BYTES;
        let (layout, room) = (self.shared.pool.layout(), self.shared.pool.room()?);
        Ok(Space {
            total_bytes: layout.data().len_bytes,
            free_bytes: room.free_pages * PAGE_BYTES,
            largest_free_bytes: room.largest_free_pages * PAGE_BYTES,
            total_slots: layout.slots(),
            free_slots: room.free_slots,
        })
    }

    /// Makes all earlier changes in the pool durable, by any process.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir("/d")?;
    /// files.sync()?; // now it survives a power cut
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`]; the pool is read-only after that.
    pub fn sync(&self) -> Result<()> {
        self.shared.sync_all()
    }
}

fn missing_is_fine(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(FsError::NotFound { .. }) => Ok(()),
        outcome => outcome,
    }
}

/// Whether a path still refers to a given inode.
enum Found {
    There,
    Elsewhere,
}

impl Shared {
    /// Makes a file immutable. The caller holds the file's lock.
    fn freeze(&self, path: &[u8], number: u64) -> Result<Found> {
        self.change_found(path, number, |names, inode| {
            if !inode.is_immutable && names.slots.is_used(number, InodeUse::Writable) {
                return Err(FsError::InUse { path: owned(path) });
            }
            (inode.is_immutable, inode.is_clearing_immutable) = (true, false);
            Ok(())
        })
    }

    /// Marks an immutable file as clearing: no new leases.
    fn begin_to_clear_immutable(&self, path: &[u8], number: u64) -> Result<Found> {
        self.change_found(path, number, |_, inode| {
            inode.is_clearing_immutable = inode.is_immutable;
            Ok(())
        })
    }

    /// Makes a file mutable; if it has a lease, restores full immutability and fails.
    fn clear_immutable(&self, path: &[u8], number: u64) -> Result<Found> {
        let mut is_leased = false;
        let found = self.change_found(path, number, |names, inode| {
            is_leased = names.slots.is_used(number, InodeUse::Leased);
            (inode.is_immutable, inode.is_clearing_immutable) = (is_leased, false);
            Ok(())
        })?;
        if is_leased { Err(FsError::InUse { path: owned(path) }) } else { Ok(found) }
    }

    /// Changes the inode of this number, if the path still refers to it.
    fn change_found(
        &self,
        path: &[u8],
        number: u64,
        mut change: impl FnMut(&mut Names<'_, Transaction<'_>>, &mut FileInode) -> Result<()>,
    ) -> Result<Found> {
        self.change(|names| {
            let found = walk(names.slots, path, Last::Follow)?.referent(path)?;
            if found.inode != number {
                return Ok(Found::Elsewhere);
            }
            let before = walk::referred(names.slots, found)?;
            let mut inode = before.clone();
            change(names, &mut inode)?;
            if inode != before {
                inode.changed_ns = names.now_ns;
                names.put(&inode)?;
            }
            Ok(Found::There)
        })
    }

    /// Reads the metadata as of one moment.
    pub fn look<T>(&self, mut look: impl FnMut(&MetadataView<'_>) -> Result<T>) -> Result<T> {
        self.pool.look(|slots| look(slots))?
    }

    /// The inode that a path refers to.
    fn look_up(&self, path: &[u8], last: Last) -> Result<FileInode> {
        self.look(|slots| {
            let found = walk(slots, path, last)?.referent(path)?;
            walk::referred(slots, found)
        })
    }

    /// Changes names in one transaction; if inodes run out, reaps orphans and retries once.
    pub fn change<T>(
        &self,
        mut change: impl FnMut(&mut Names<'_, Transaction<'_>>) -> Result<T>,
    ) -> Result<T> {
        match self.change_once(&mut change) {
            Err(FsError::Pool(PoolError::NoFreeInode { .. })) if self.reap_orphans() => {
                self.change_once(change)
            }
            changed => changed,
        }
    }

    fn change_once<T>(
        &self,
        mut change: impl FnMut(&mut Names<'_, Transaction<'_>>) -> Result<T>,
    ) -> Result<T> {
        let now_ns = now_ns();
        // SAFETY: `Names` changes inodes of files by the rules of this crate: the runs and bytes of
        // an immutable file do not change, and the file becomes mutable only when it has no lease.
        unsafe { self.pool.try_change(Vec::new(), |slots| change(&mut Names { slots, now_ns })) }
    }

    /// Opens an inode that was just looked up; `None` if it was removed since.
    fn open_inode(&self, inode: &FileInode) -> Result<Option<Arc<OpenInode>>> {
        let open = self.opened.open(inode, || self.pool.pin_inode(inode.number, InodeUse::Open))?;
        // After the pin: a process that removes the last link either sees the pin and leaves the
        // inode, or has removed the link already, which this check finds.
        let now = match self.pool.file_state(inode.number) {
            Some(now) => Some((now.generation, now.links)),
            None => self.look(|slots| {
                let now = walk::inode(slots, inode.number).ok();
                Ok(now.map(|now| (now.generation, now.links)))
            })?,
        };
        // `inode.links == 0` at lookup: the link count of a named inode is wrong. No process that
        // would reap it can have the pool open.
        let is_there = now.is_some_and(|(generation, links)| {
            generation == inode.generation && (links > 0 || inode.links == 0)
        });
        if !is_there {
            // The remover may have left the inode to this process because it saw the pin.
            self.close(open, false);
            return Ok(None);
        }
        Ok(Some(open))
    }

    /// Does the work that remains after a name was removed.
    pub fn after(&self, gone: Gone) -> Result<()> {
        match gone {
            Gone::Orphan(number) => self.reap(number).map(drop),
            Gone::Linked | Gone::Freed => Ok(()),
        }
    }

    /// Frees an inode without links, in as many transactions as needed, unless a process has it
    /// open. Returns whether it was freed.
    pub fn reap(&self, number: u64) -> Result<bool> {
        loop {
            let is_reaped = self.change_once(|names| {
                if names.slots.is_used(number, InodeUse::Open) {
                    Ok(None)
                } else {
                    names.reap(number).map(Some)
                }
            })?;
            match is_reaped {
                None => return Ok(false),
                Some(true) => return Ok(true),
                Some(false) => {}
            }
        }
    }

    /// Frees the files without links that no process has open any more: a process that had one open
    /// has died, or could not free it because it opened the pool read-only. Returns whether there
    /// was any.
    pub fn reap_orphans(&self) -> bool {
        let orphans = self.pool.orphans().unwrap_or_default();
        // A failure here is retried the next time room is needed.
        let reaped = orphans.into_iter().filter(|&number| self.reap(number).unwrap_or(false));
        reaped.count() > 0
    }

    /// Reserves pages; if the pool is full, reaps orphans and retries once.
    pub fn with_room<T>(
        &self,
        reserve: impl Fn() -> std::result::Result<T, PoolError>,
    ) -> std::result::Result<T, PoolError> {
        match reserve() {
            Err(PoolError::Full { .. }) if self.reap_orphans() => reserve(),
            reserved => reserved,
        }
    }

    pub fn sync_all(&self) -> Result<()> {
        self.pool.sync_data()?;
        Ok(self.pool.sync()?)
    }
}
