//! How a file is opened.

use crate::error::{FsError, Result};
use crate::walk::{Last, owned};

/// How to open a file: as `std::fs::OpenOptions`, with the same meaning.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
/// # let files = aquifer_fs::Files::new(pool);
/// use std::io::Write;
///
/// use aquifer_fs::FileOptions;
///
/// let mut log = files.open_with("/log", &FileOptions::new().append(true).create(true))?;
/// log.write_all(b"one line\n")?;
/// assert_eq!(files.metadata("/log")?.len(), 9);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct FileOptions {
    read: bool,
    write: bool,
    append: bool,
    truncate: bool,
    create: bool,
    create_new: bool,
    keep_link: bool,
    mode: Option<u32>,
}

impl FileOptions {
    /// Returns options that allow nothing yet.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{FileOptions, FsError};
    ///
    /// let nothing = files.open_with("/f", &FileOptions::new());
    /// assert!(matches!(nothing, Err(FsError::Options { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new() -> FileOptions {
        FileOptions::default()
    }

    /// Sets whether the file can be read.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FileOptions;
    ///
    /// files.create_file("/f")?;
    /// let file = files.open_with("/f", &FileOptions::new().read(true))?;
    /// assert_eq!(file.read_at(&mut [0; 10], 0)?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read(mut self, read: bool) -> FileOptions {
        self.read = read;
        self
    }

    /// Sets whether the file can be written.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{FileOptions, FsError};
    ///
    /// files.create_file("/f")?;
    /// let file = files.open_with("/f", &FileOptions::new().write(true))?;
    /// file.write_at(b"text", 0)?;
    /// assert!(matches!(file.read_at(&mut [0; 10], 0), Err(FsError::NotOpenFor { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn write(mut self, write: bool) -> FileOptions {
        self.write = write;
        self
    }

    /// Sets whether each write goes to the current end of the file.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FileOptions;
    ///
    /// files.create_file("/f")?.write_at(b"some ", 0)?;
    /// files.open_with("/f", &FileOptions::new().append(true))?.write_at(b"text", 0)?;
    /// assert_eq!(files.metadata("/f")?.len(), 9);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn append(mut self, append: bool) -> FileOptions {
        self.append = append;
        self
    }

    /// Sets whether the file is truncated.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FileOptions;
    ///
    /// files.create_file("/f")?.write_at(b"text", 0)?;
    /// files.open_with("/f", &FileOptions::new().write(true).truncate(true))?;
    /// assert!(files.metadata("/f")?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn truncate(mut self, truncate: bool) -> FileOptions {
        self.truncate = truncate;
        self
    }

    /// Sets whether the file is created if it does not exist.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FileOptions;
    ///
    /// files.open_with("/f", &FileOptions::new().write(true).create(true))?;
    /// assert!(files.exists("/f")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn create(mut self, create: bool) -> FileOptions {
        self.create = create;
        self
    }

    /// Sets whether the file is created, and must not exist: `O_EXCL`.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{FileOptions, FsError};
    ///
    /// files.create_file("/f")?;
    /// let options = FileOptions::new().write(true).create_new(true);
    /// assert!(matches!(files.open_with("/f", &options), Err(FsError::Exists { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn create_new(mut self, create_new: bool) -> FileOptions {
        self.create_new = create_new;
        self
    }

    /// Sets whether a symbolic link at the end of the path is an error: `O_NOFOLLOW`.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{FileOptions, FsError};
    ///
    /// files.create_file("/f")?;
    /// files.symlink("f", "/link")?;
    /// let options = FileOptions::new().read(true).no_follow(true);
    /// assert!(matches!(files.open_with("/link", &options), Err(FsError::LinkLoop { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn no_follow(mut self, no_follow: bool) -> FileOptions {
        self.keep_link = no_follow;
        self
    }

    /// Sets the permissions of a new file, less the process's umask; 0o666 by default.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FileOptions;
    ///
    /// let options = FileOptions::new().write(true).create(true).permissions(0o600);
    /// assert_eq!(files.open_with("/f", &options)?.metadata()?.mode(), 0o600);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn permissions(mut self, mode: u32) -> FileOptions {
        self.mode = Some(mode);
        self
    }

    pub(crate) fn check(&self, path: &[u8]) -> Result<()> {
        let reason = match self {
            _ if !self.read && !self.writes() => "it is opened neither for reading nor for writing",
            _ if (self.makes() || self.truncate) && !self.writes() => {
                "what is made or emptied is opened for writing"
            }
            _ if self.append && self.truncate && !self.create_new => {
                "what is emptied is not opened for appending"
            }
            _ => return Ok(()),
        };
        Err(FsError::Options { path: owned(path), reason })
    }

    pub(crate) fn reads(&self) -> bool {
        self.read
    }

    pub(crate) fn writes(&self) -> bool {
        self.write || self.append
    }

    pub(crate) fn appends(&self) -> bool {
        self.append
    }

    pub(crate) fn makes(&self) -> bool {
        self.create || self.create_new
    }

    pub(crate) fn makes_new(&self) -> bool {
        self.create_new
    }

    pub(crate) fn truncates(&self) -> bool {
        self.truncate
    }

    pub(crate) fn last(&self) -> Last {
        if self.keep_link || self.create_new { Last::Keep } else { Last::Follow }
    }

    pub(crate) fn mode(&self) -> u32 {
        self.mode.unwrap_or(0o666)
    }
}
