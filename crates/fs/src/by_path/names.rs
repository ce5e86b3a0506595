//! Creating, moving and listing names.

use std::path::{Path, PathBuf};

use aquifer_pool::format::file::FileKind;

use crate::error::{FsError, Result};
use crate::files::Files;
use crate::names::{RenameMode, keep_none};
use crate::read_dir::ReadDir;
use crate::transaction::New;
use crate::walk::{self, Last, bytes_of, owned, walk};

/// Creates directories with options: [`std::fs::DirBuilder`] for a pool, from
/// [`Files::dir_builder`]. The setter of [`std::os::unix::fs::DirBuilderExt`] is a method, too.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// files.dir_builder().recursive(true).mode(0o700).create("/a/b")?;
/// assert_eq!(files.metadata("/a/b")?.mode() & 0o777, 0o700);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It keeps the pool open.
#[derive(Debug, Clone)]
pub struct DirBuilder {
    files: Files,
    recursive: bool,
    mode: u32,
}

impl DirBuilder {
    /// Sets whether missing parents are created, too, and an existing directory is no error.
    pub fn recursive(&mut self, recursive: bool) -> &mut DirBuilder {
        self.recursive = recursive;
        self
    }

    /// Sets the permissions of new directories, less the process's umask; 0o777 by default.
    pub fn mode(&mut self, mode: u32) -> &mut DirBuilder {
        self.mode = mode;
        self
    }

    /// Creates the directory. As [`std::fs::DirBuilder::create`].
    ///
    /// # Errors
    /// As for [`Files::create_dir`] and [`Files::create_dir_all`].
    pub fn create(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if self.recursive { self.create_all(path) } else { self.create_one(path) }
    }

    fn create_one(&self, path: &Path) -> Result<()> {
        self.files.make(bytes_of(path), FileKind::Directory, self.mode, &[])
    }

    fn create_all(&self, path: &Path) -> Result<()> {
        if path.as_os_str().is_empty() {
            return Ok(());
        }
        match self.create_one(path) {
            Err(FsError::NotFound { .. }) => {}
            Err(_) if self.files.is_dir(path) => return Ok(()),
            outcome => return outcome,
        }
        match path.parent() {
            Some(parent) => self.create_all(parent)?,
            None => return Err(FsError::NotFound { path: path.to_owned() }),
        }
        match self.create_one(path) {
            // Another thread or process was first.
            Err(_) if self.files.is_dir(path) => Ok(()),
            outcome => outcome,
        }
    }
}

impl Files {
    /// Creates a directory. As [`std::fs::create_dir`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
        self.dir_builder().create(path)
    }

    /// Creates a directory and all its missing parents. It is no error if the directory exists. As
    /// [`std::fs::create_dir_all`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
        self.dir_builder().recursive(true).create(path)
    }

    /// Returns options to create directories with.
    pub fn dir_builder(&self) -> DirBuilder {
        DirBuilder { files: self.clone(), recursive: false, mode: 0o777 }
    }

    fn make(&self, path: &[u8], kind: FileKind, mode: u32, target: &[u8]) -> Result<()> {
        let new = New::of(kind, mode, target, &self.shared.caller);
        self.shared.change(|names| {
            let place = walk(names.slots, path, Last::Name)?;
            names.make(&place, path, new).map(drop)
        })
    }

    /// Creates a symbolic link at `link` to `target`, which need not exist. As
    /// [`std::os::unix::fs::symlink`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
        walk::check(target)?;
        self.make(bytes_of(link.as_ref()), FileKind::Symlink, 0o777, target)
    }

    /// Adds another name for a file or a symbolic link. As [`std::fs::hard_link`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/one")?;
    /// files.hard_link("/one", "/two")?;
    /// files.remove_file("/one")?;
    /// assert_eq!(files.metadata("/two")?.nlink(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Exists`], [`FsError::DirectoryLink`], [`FsError::TooManyLinks`],
    /// [`FsError::NotFound`], [`FsError::Pool`].
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let (from, to) = (bytes_of(original.as_ref()), bytes_of(link.as_ref()));
        self.shared.change(|names| {
            let source = walk(names.slots, from, Last::Keep)?.referent(from)?;
            let place = walk(names.slots, to, Last::Name)?;
            names.link(source, from, &place, to).map(drop)
        })
    }

    /// Returns the target of a symbolic link. As [`std::fs::read_link`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
                    walk::target(slots, &inode).map(|target| owned(&target))
                }
                _ => Err(FsError::NotALink { path: owned(path) }),
            }
        })
    }

    /// Returns the path from the root without `.`, `..` and symbolic links; it must exist. As
    /// [`std::fs::canonicalize`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir_all("/a/b")?;
    /// files.symlink("a/b", "/link")?;
    /// assert_eq!(files.canonicalize("link/../b/.")?.to_str(), Some("/a/b"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::metadata`].
    pub fn canonicalize(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        let path = bytes_of(path.as_ref());
        self.shared.look(|slots| {
            walk(slots, path, Last::Follow)?.referent(path)?;
            walk::canonical(slots, path).map(|canonical| owned(&canonical))
        })
    }

    /// Moves a name. As [`std::fs::rename`]: if the new name exists, it is replaced atomically: at any moment, also after a
    /// crash, it refers either to the old file or to the new one.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/new")?.write_all_at(b"new", 0)?;
    /// files.create_file("/current")?.write_all_at(b"of yesterday", 0)?;
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
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
        let shared = &self.shared;
        let gone = shared.change(|names| {
            let source = walk(names.slots, from, Last::Name)?;
            let target = walk(names.slots, to, Last::Name)?;
            names.rename_as(mode, (&source, from), (&target, to), &shared.caller, &mut keep_none)
        })?;
        self.shared.after(gone);
        Ok(())
    }

    /// Returns the names in a directory, in no particular order, without `.` and `..`. As
    /// [`std::fs::read_dir`].
    ///
    /// A name that exists all the time is returned exactly once, whatever happens to other names at
    /// the same time.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/one")?;
    /// files.create_dir("/two")?;
    /// let names: Result<Vec<_>, _> =
    ///     files.read_dir("/")?.map(|entry| entry.map(|entry| entry.file_name())).collect();
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
}
