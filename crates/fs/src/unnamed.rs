//! Files without a name: made first, named when they are whole.
//!
//! An inode without links is there as long as somebody has it open, as one whose last name was removed. So what is made so and then
//! gets its name in one transaction is never seen half, and when its maker dies before that, whoever opens the pool next frees it.
//! It is what Linux calls `O_TMPFILE`, with more: a name can be replaced in the same step, and symbolic links can be made like this, too.
//!
//! Whoever opens the pool frees inodes that have no links and that nobody has open. So an inode is pinned inside of the
//! transaction that makes it: before anybody can see it.

use std::path::Path;

use aquifer_pool::InodeUse;
use aquifer_pool::format::file::FileKind;

use crate::error::{FsError, Result};
use crate::file::{File, FileOptions};
use crate::files::Files;
use crate::walk::{self, bytes_of};

impl Files {
    /// Makes an empty file that has no name, as `O_TMPFILE` does. It is gone when it is closed, unless [`File::link`] or
    /// [`File::link_over`] has given it a name.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FileOptions;
    ///
    /// files.create_file("/report")?.write_at(b"of yesterday", 0)?;
    /// let new = files.create_unnamed(&FileOptions::new().write(true))?;
    /// new.write_at(b"of today", 0)?; // nobody sees it yet
    /// new.link_over("/report")?; // all of it, at once
    /// assert_eq!(files.metadata("/report")?.len(), 8);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Options`] if they do not fit together; [`FsError::Pool`] if the pool is full or opened for reading.
    pub fn create_unnamed(&self, options: &FileOptions) -> Result<File> {
        options.check(b"")?;
        let mode = options.mode() & !self.shared.umask;
        self.make_unnamed(FileKind::File, mode, &[], options)
    }

    /// Makes a symbolic link that has no name, as [`Files::create_unnamed`] does. It can be given times, an owner, and a name.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.symlink("v1", "/current")?;
    /// files.symlink_unnamed("v2")?.link_over("/current")?; // there all the time
    /// assert_eq!(files.read_link("/current")?.to_str(), Some("v2"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NameTooLong`], [`FsError::BadName`], [`FsError::Pool`].
    pub fn symlink_unnamed(&self, target: impl AsRef<Path>) -> Result<File> {
        let target = bytes_of(target.as_ref());
        walk::check(target)?;
        self.make_unnamed(FileKind::Link, 0o777, target, &FileOptions::new())
    }

    fn make_unnamed(
        &self,
        kind: FileKind,
        mode: u32,
        target: &[u8],
        options: &FileOptions,
    ) -> Result<File> {
        let new = self.new_of(kind, mode, target);
        let (inode, pin) = self.shared.change(|names| {
            let inode = names.make_unnamed(new)?;
            let pin = self.shared.pool.pin_inode(inode.number, InodeUse::Open)?;
            Ok((inode, pin))
        })?;
        let opened = self.shared.opened.open(&inode, || Ok(pin))?;
        Ok(File::new(self.clone(), opened, options))
    }
}

impl File {
    /// Gives the file a name, or one more. It is [`Files::hard_link`] for what is open: what has no name can have one.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// files.remove_file("/f")?;
    /// file.link("/again")?;
    /// assert_eq!(files.metadata("/again")?.links(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Exists`], [`FsError::NotFound`] if the directory is not there, [`FsError::DirectoryLink`],
    /// [`FsError::TooManyLinks`], [`FsError::Pool`].
    pub fn link(&self, path: impl AsRef<Path>) -> Result<()> {
        self.link_with(path.as_ref(), false)
    }

    /// [`File::link`], and what has the name is replaced: at any moment, also after a crash, it leads to the one or to the other.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/one")?;
    /// let other = files.create_file("/other")?;
    /// other.link_over("/one")?;
    /// assert_eq!(files.metadata("/one")?.number(), other.metadata()?.number());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::link`], without [`FsError::Exists`]; [`FsError::IsADirectory`].
    pub fn link_over(&self, path: impl AsRef<Path>) -> Result<()> {
        self.link_with(path.as_ref(), true)
    }

    fn link_with(&self, path: &Path, may_replace: bool) -> Result<()> {
        let (own, to) = (self.inode(), bytes_of(path));
        if own.kind == FileKind::Directory {
            return Err(FsError::DirectoryLink { path: path.to_owned() });
        }
        let shared = &self.files().shared;
        let gone = shared.change(|names| {
            let inode = own.read(names.slots)?;
            names.link_open(inode, to, may_replace)
        })?;
        shared.after(gone)
    }
}
