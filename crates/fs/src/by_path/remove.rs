//! Removing names.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use aquifer_pool::format::file::FileKind;

use crate::error::{FsError, Result};
use crate::files::Files;
use crate::names::keep_none;
use crate::node_id::Node;
use crate::read_dir::ReadDir;
use crate::walk::{self, Last, bytes_of, walk};

impl Files {
    /// Removes the name of a file or of a symbolic link. Open handles stay usable. As
    /// [`std::fs::remove_file`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// files.remove_file("/f")?;
    /// assert_eq!(file.metadata()?.nlink(), 0); // the file exists as long as it is open
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::IsADirectory`], [`FsError::Immutable`], [`FsError::Pool`].
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = bytes_of(path.as_ref());
        let gone = self.shared.change(|names| {
            let place = walk(names.slots, path, Last::Name)?;
            names.unlink(&place, path, &mut keep_none)
        })?;
        self.shared.after(gone);
        Ok(())
    }

    /// Removes an empty directory. As [`std::fs::remove_dir`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
        let gone = self.shared.change(|names| {
            let place = walk(names.slots, path, Last::Name)?;
            names.remove_directory(&place, path, &mut keep_none)
        })?;
        self.shared.after(gone);
        Ok(())
    }

    /// Removes a directory and everything in it, at any depth; symbolic links are removed, not
    /// followed. As [`std::fs::remove_dir_all`].
    ///
    /// Entries that other threads or processes create there at the same time may be left over; then
    /// the call fails.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
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
                    let name = entry.file_name_ref();
                    path.push(name);
                    match entry.file_type()?.kind() {
                        FileKind::Directory => match self.enter(directory, name, &path) {
                            Ok(below) => {
                                above.push(below);
                                continue;
                            }
                            Err(FsError::NotFound { .. } | FsError::Stale { .. }) => {}
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
    fn enter(&self, directory: Node, name: &OsStr, path: &Path) -> Result<ReadDir> {
        let shown = bytes_of(path);
        let inode = self.shared.look(|slots| {
            let place = walk::entry(slots, directory, name.as_bytes())?;
            walk::referred(slots, place.named(shown)?)
        })?;
        match inode.kind {
            FileKind::Directory => Ok(ReadDir::new(self.clone(), PathBuf::new(), &inode)),
            _ => Err(FsError::NotADirectory { path: path.to_owned() }),
        }
    }

    fn remove_entry(
        &self,
        directory: Node,
        name: &OsStr,
        is_directory: bool,
        path: &Path,
    ) -> Result<()> {
        let (name, path) = (name.as_bytes(), bytes_of(path));
        let gone = self.shared.change(|names| {
            let place = walk::entry(names.slots, directory, name)?;
            if is_directory {
                names.remove_directory(&place, path, &mut keep_none)
            } else {
                names.unlink(&place, path, &mut keep_none)
            }
        })?;
        self.shared.after(gone);
        Ok(())
    }
}

fn missing_is_fine(outcome: Result<()>) -> Result<()> {
    match outcome {
        // `Stale`: the directory was removed, and everything in it before.
        Err(FsError::NotFound { .. } | FsError::Stale { .. }) => Ok(()),
        outcome => outcome,
    }
}
