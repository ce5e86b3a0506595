//! Opening files with options.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_pool::Transaction;
use aquifer_pool::format::file::{FileInode, FileKind};

use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::file::{File, OpenFlags};
use crate::files::Files;
use crate::open_inodes::OpenInode;
use crate::transaction::{Names, New};
use crate::walk::{self, Last, Place, bytes_of, owned, walk};

/// How to open a file: [`std::fs::OpenOptions`] for files of a pool, from [`Files::options`]. The
/// setters of [`std::os::unix::fs::OpenOptionsExt`] are methods, too.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use std::io::Write;
///
/// let mut log = files.options().append(true).create(true).open("/log")?;
/// log.write_all(b"one line\n")?;
/// assert_eq!(files.metadata("/log")?.len(), 9);
///
/// let nothing = files.options().open("/log");
/// assert_eq!(nothing.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It keeps the pool open.
#[derive(Debug, Clone)]
pub struct FileOptions {
    pub(crate) files: Files,
    pub(crate) flags: OpenFlags,
}

impl Files {
    /// Returns options to open a file with, which allow nothing yet. As
    /// [`std::fs::File::options`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.options().read(true).write(true).create_new(true).open("/f")?;
    /// file.write_all_at(b"text", 0)?;
    /// assert_eq!(file.read_at(&mut [0; 10], 0)?, 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn options(&self) -> FileOptions {
        FileOptions { files: self.clone(), flags: OpenFlags::default() }
    }

    /// Opens the file that a path is known to refer to, for reading; `None` if that has to be
    /// looked up.
    pub(crate) fn open_known(&self, path: &[u8], flags: OpenFlags) -> Result<Option<File>> {
        let opened = self.shared.open_known(path)?;
        Ok(opened.map(|opened| File::new(self.clone(), opened, flags)))
    }
}

impl FileOptions {
    /// Sets whether the file can be read.
    pub fn read(&mut self, read: bool) -> &mut FileOptions {
        self.flags.read = read;
        self
    }

    /// Sets whether the file can be written.
    pub fn write(&mut self, write: bool) -> &mut FileOptions {
        self.flags.write = write;
        self
    }

    /// Sets whether each write goes to the current end of the file.
    pub fn append(&mut self, append: bool) -> &mut FileOptions {
        self.flags.append = append;
        self
    }

    /// Sets whether an existing file is truncated.
    pub fn truncate(&mut self, truncate: bool) -> &mut FileOptions {
        self.flags.truncate = truncate;
        self
    }

    /// Sets whether the file is created if it does not exist.
    pub fn create(&mut self, create: bool) -> &mut FileOptions {
        self.flags.create = create;
        self
    }

    /// Sets whether the file is created, and must not exist: `O_EXCL`. Then `create` and `truncate`
    /// are ignored.
    pub fn create_new(&mut self, create_new: bool) -> &mut FileOptions {
        self.flags.create_new = create_new;
        self
    }

    /// Sets the permissions of a new file, less the process's umask; 0o666 by default. As
    /// [`OpenOptionsExt::mode`](std::os::unix::fs::OpenOptionsExt::mode).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.options().write(true).create(true).mode(0o600).open("/f")?;
    /// assert_eq!(file.metadata()?.mode() & 0o777, 0o600);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn mode(&mut self, mode: u32) -> &mut FileOptions {
        self.flags.mode = mode;
        self
    }

    /// Sets other flags of `open`, without those of the access mode. As
    /// [`OpenOptionsExt::custom_flags`](std::os::unix::fs::OpenOptionsExt::custom_flags), except
    /// that a flag without meaning for files of a pool is an error: `O_NOFOLLOW` has one.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FsError;
    ///
    /// files.create_file("/f")?;
    /// files.symlink("f", "/link")?;
    /// let opened = files.options().read(true).custom_flags(libc::O_NOFOLLOW).open("/link");
    /// assert!(matches!(opened, Err(FsError::LinkLoop { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn custom_flags(&mut self, flags: i32) -> &mut FileOptions {
        self.flags.custom = flags & !libc::O_ACCMODE;
        self
    }

    /// Opens a file, or a directory for reading. As [`std::fs::OpenOptions::open`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FsError;
    ///
    /// let mut new = files.options();
    /// new.write(true).create_new(true);
    /// new.open("/f")?.write_all_at(b"text", 0)?;
    /// assert!(matches!(new.open("/f"), Err(FsError::Exists { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Options`] if they contradict each other; [`FsError::NotFound`],
    /// [`FsError::IsADirectory`] and other errors of the path; [`FsError::Exists`] for
    /// `create_new`; [`FsError::Pool`] if the pool is full or opened read-only.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<File> {
        let path = bytes_of(path.as_ref());
        self.flags.check(path)?;
        let shared = &self.files.shared;
        let only_reads = !self.flags.writes() && self.flags.last() == Last::Follow;
        if only_reads && let Some(file) = self.files.open_known(path, self.flags)? {
            return Ok(file);
        }
        loop {
            let (inode, is_new) = if self.flags.makes() {
                self.open_or_make(path)?
            } else if only_reads {
                (shared.look_up_to_read(path)?, false)
            } else {
                (shared.look_up(path, self.flags.last())?, false)
            };
            // `None`: the inode was removed between lookup and open. The path now refers to
            // something else or to nothing, so look it up again.
            self.check_kind(&inode, || owned(path))?;
            if let Some(opened) = shared.open_inode(&inode)? {
                return self.opened(opened, !is_new);
            }
        }
    }

    /// Fails if an inode cannot be opened in this way.
    pub(crate) fn check_kind(
        &self,
        inode: &FileInode,
        path: impl FnOnce() -> PathBuf,
    ) -> Result<()> {
        if inode.kind == FileKind::Directory && self.flags.writes() {
            return Err(FsError::IsADirectory { path: path() });
        }
        if inode.kind == FileKind::Symlink {
            return Err(FsError::LinkLoop { path: path() });
        }
        if inode.kind.is_special() {
            return Err(FsError::Special { path: path() });
        }
        if inode.is_immutable && self.flags.writes() {
            return Err(FsError::Immutable { path: path() });
        }
        Ok(())
    }

    /// The handle of an inode that is open now. `truncates`: if the options ask for that.
    pub(crate) fn opened(&self, opened: Arc<OpenInode>, truncates: bool) -> Result<File> {
        let file = File::new(self.files.clone(), opened, self.flags);
        if self.flags.truncate && truncates && file.inode().kind == FileKind::File {
            file.set_len(0)?;
        }
        Ok(file)
    }

    /// The inode that a path refers to, and whether this call created it.
    fn open_or_make(&self, path: &[u8]) -> Result<(FileInode, bool)> {
        let shared = &self.files.shared;
        shared.change(|names| {
            // A trailing slash asks for a directory, even if the symbolic link before it refers to
            // a file.
            let last = if path.ends_with(b"/") { Last::Name } else { self.flags.last() };
            let place = walk(names.slots, path, last)?;
            self.find_or_make(names, &place, path, &shared.caller)
        })
    }

    /// The inode at a place, and whether this call created it.
    pub(crate) fn find_or_make(
        &self,
        names: &mut Names<'_, Transaction<'_>>,
        place: &Place<'_>,
        path: &[u8],
        by: &Caller,
    ) -> Result<(FileInode, bool)> {
        if place.wants_directory && !place.name.is_empty() {
            return Err(FsError::IsADirectory { path: owned(path) });
        }
        match place.found {
            Some(_) if self.flags.create_new => Err(FsError::Exists { path: owned(path) }),
            Some(_) => Ok((walk::referred(names.slots, place.referent(path)?)?, false)),
            None => {
                let new = New::of(FileKind::File, self.flags.mode, &[], by);
                Ok((names.make(place, path, new)?, true))
            }
        }
    }
}
