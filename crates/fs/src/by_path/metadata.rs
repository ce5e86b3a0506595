//! Metadata by path.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::error::{FsError, Result};
use crate::files::Files;
use crate::metadata::{FileTimes, Metadata, SetAttributes};
use crate::walk::{self, Last, bytes_of, owned, walk};

impl Files {
    /// Returns the metadata of a file, directory or symbolic link target; symbolic links are
    /// followed. As [`std::fs::metadata`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?.write_all_at(b"text", 0)?;
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

    /// As [`Files::metadata`], but does not follow a symbolic link at the end of the path. As
    /// [`std::fs::symlink_metadata`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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

    /// Whether a path exists, symbolic links followed. As [`std::fs::exists`] and
    /// [`Path::try_exists`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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

    /// As [`Files::exists`], by the name that the method of [`Path`] has.
    ///
    /// # Errors
    /// As for [`Files::exists`].
    pub fn try_exists(&self, path: impl AsRef<Path>) -> Result<bool> {
        self.exists(path)
    }

    /// Whether a path refers to a regular file, symbolic links followed; `false` also if that
    /// cannot be found out. As [`Path::is_file`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.symlink("f", "/link")?;
    /// assert!(files.is_file("/link") && !files.is_file("/nothing"));
    /// assert!(files.is_symlink("/link") && !files.is_dir("/link"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn is_file(&self, path: impl AsRef<Path>) -> bool {
        self.metadata(path).is_ok_and(|metadata| metadata.is_file())
    }

    /// Whether a path refers to a directory; else as [`Files::is_file`]. As [`Path::is_dir`].
    pub fn is_dir(&self, path: impl AsRef<Path>) -> bool {
        self.metadata(path).is_ok_and(|metadata| metadata.is_dir())
    }

    /// Whether a path is that of a symbolic link. As [`Path::is_symlink`].
    pub fn is_symlink(&self, path: impl AsRef<Path>) -> bool {
        self.symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink())
    }

    /// Sets the permissions: the lowest 12 bits of the mode. As [`std::fs::set_permissions`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use std::fs::Permissions;
    /// use std::os::unix::fs::PermissionsExt;
    ///
    /// files.create_file("/f")?;
    /// files.set_permissions("/f", Permissions::from_mode(0o640))?;
    /// assert_eq!(files.metadata("/f")?.permissions().mode() & 0o777, 0o640);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::Immutable`], [`FsError::Pool`].
    pub fn set_permissions(&self, path: impl AsRef<Path>, permissions: Permissions) -> Result<()> {
        self.set(path.as_ref(), Last::Follow, SetAttributes::new().mode(permissions.mode()))
    }

    /// Sets user and group; `None` leaves one unchanged. As [`std::os::unix::fs::chown`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.chown("/f", Some(1000), None)?;
    /// assert_eq!(files.metadata("/f")?.uid(), 1000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::set_permissions`].
    pub fn chown(&self, path: impl AsRef<Path>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.set(path.as_ref(), Last::Follow, SetAttributes::new().owner(uid, gid))
    }

    /// As [`Files::chown`], but does not follow a symbolic link at the end of the path. As
    /// [`std::os::unix::fs::lchown`].
    ///
    /// # Errors
    /// As for [`Files::set_permissions`].
    pub fn lchown(&self, path: impl AsRef<Path>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.set(path.as_ref(), Last::Keep, SetAttributes::new().owner(uid, gid))
    }

    /// Sets times. As `std::fs::set_times`, which is not stable yet.
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
    /// files.create_file("/f")?;
    /// files.set_times("/f", FileTimes::new().set_modified(SystemTime::UNIX_EPOCH))?;
    /// assert_eq!(files.metadata("/f")?.modified()?, SystemTime::UNIX_EPOCH);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::set_permissions`].
    pub fn set_times(&self, path: impl AsRef<Path>, times: FileTimes) -> Result<()> {
        self.set(path.as_ref(), Last::Follow, SetAttributes::new().times(times))
    }

    /// As [`Files::set_times`], but does not follow a symbolic link at the end of the path.
    ///
    /// # Errors
    /// As for [`Files::set_permissions`].
    pub fn set_times_nofollow(&self, path: impl AsRef<Path>, times: FileTimes) -> Result<()> {
        self.set(path.as_ref(), Last::Keep, SetAttributes::new().times(times))
    }

    fn set(&self, path: &Path, last: Last, what: SetAttributes) -> Result<()> {
        let (shared, path) = (&self.shared, bytes_of(path));
        shared.change(|names| {
            let found = walk(names.slots, path, last)?.referent(path)?;
            let inode = walk::referred(names.slots, found)?;
            names.set(inode, &what, &shared.caller, || owned(path)).map(drop)
        })
    }
}
