//! Opening files.

use std::path::Path;

use crate::error::Result;
use crate::file::{File, OpenFlags};
use crate::files::Files;
use crate::walk::bytes_of;

impl Files {
    /// Opens a file for reading. As [`std::fs::File::open`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::io::Read;
    ///
    /// files.create_file("/f")?.write_all_at(b"text", 0)?;
    /// let mut text = String::new();
    /// files.open_file("/f")?.read_to_string(&mut text)?;
    /// assert_eq!(text, "text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`](crate::FsError::NotFound),
    /// [`FsError::IsADirectory`](crate::FsError::IsADirectory), and other errors of the path.
    pub fn open_file(&self, path: impl AsRef<Path>) -> Result<File> {
        let flags = OpenFlags { read: true, ..OpenFlags::default() };
        match self.open_known(bytes_of(path.as_ref()), flags)? {
            Some(file) => Ok(file),
            None => self.options().read(true).open(path),
        }
    }

    /// Opens a file for writing: creates it if it does not exist, truncates it if it does.
    /// As [`std::fs::File::create`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::io::Write;
    ///
    /// files.create_file("/f")?.write_all(b"a long text")?;
    /// files.create_file("/f")?.write_all(b"a short one")?;
    /// assert_eq!(files.metadata("/f")?.len(), 11);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::open_file`]; [`FsError::Pool`](crate::FsError::Pool) if the pool is full or
    /// opened read-only.
    pub fn create_file(&self, path: impl AsRef<Path>) -> Result<File> {
        self.options().write(true).create(true).truncate(true).open(path)
    }

    /// Creates a file that must not exist, and opens it for reading and writing. As
    /// [`std::fs::File::create_new`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_new_file("/f")?.write_all_at(b"text", 0)?;
    /// let again = files.create_new_file("/f").unwrap_err();
    /// assert_eq!(again.kind(), std::io::ErrorKind::AlreadyExists);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::create_file`]; [`FsError::Exists`](crate::FsError::Exists).
    pub fn create_new_file(&self, path: impl AsRef<Path>) -> Result<File> {
        self.options().read(true).write(true).create_new(true).open(path)
    }
}
