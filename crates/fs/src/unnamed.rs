//! Files without a name: created first, named when they are complete.
//!
//! An inode without links exists as long as a process has it open, just as one whose last name was
//! removed. A file that is created so and then gets its name in one transaction is never seen
//! incomplete; if its creator dies first, the next process that opens the pool frees it. This is
//! Linux's `O_TMPFILE`, and more: the name can replace an existing one in the same step, and
//! symbolic links can be created this way, too.
//!
//! A process that opens the pool frees inodes that have no links and are not open. So an unnamed
//! inode is pinned inside the transaction that creates it, before any other process can see it.

use std::path::Path;

use aquifer_pool::InodeUse;
use aquifer_pool::format::file::FileKind;

use crate::error::{FsError, Result};
use crate::file::{File, OpenFlags};
use crate::files::Files;
use crate::node_id::Node;
use crate::options::FileOptions;
use crate::transaction::New;
use crate::walk::{self, Last, bytes_of, walk};

impl FileOptions {
    /// Creates an empty file that has no name, as `O_TMPFILE` does. Closing it frees it, unless
    /// [`File::link`] or [`File::link_over`] has given it a name.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/report", "of yesterday")?;
    /// let new = files.options().write(true).create_unnamed()?;
    /// new.write_all_at(b"of today", 0)?; // not visible yet
    /// new.link_over("/report")?; // visible, complete
    /// assert_eq!(files.read("/report")?, b"of today");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Options`] if they contradict each other; [`FsError::Pool`] if the pool is full or
    /// opened read-only.
    pub fn create_unnamed(&self) -> Result<File> {
        self.flags.check(b"")?;
        let new = New::of(FileKind::File, self.flags.mode, &[], &self.files.shared.caller);
        self.files.make_unnamed(new, None, self.flags, |_| Ok(()))
    }
}

impl Files {
    /// Creates a symbolic link that has no name, as [`FileOptions::create_unnamed`]. It can be given
    /// times, an owner, and a name.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.symlink("v1", "/current")?;
    /// files.symlink_unnamed("v2")?.link_over("/current")?; // the name always exists
    /// assert_eq!(files.read_link("/current")?.to_str(), Some("v2"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NameTooLong`], [`FsError::BadName`], [`FsError::Pool`].
    pub fn symlink_unnamed(&self, target: impl AsRef<Path>) -> Result<File> {
        let target = bytes_of(target.as_ref());
        walk::check(target)?;
        let new = New::of(FileKind::Symlink, 0o777, target, &self.shared.caller);
        self.make_unnamed(new, None, OpenFlags::default(), |_| Ok(()))
    }

    /// Creates an inode without a name, as if in that directory.
    pub(crate) fn make_unnamed(
        &self,
        new: New<'_>,
        directory: Option<Node>,
        flags: OpenFlags,
        mut born: impl FnMut(Node) -> Result<()>,
    ) -> Result<File> {
        let (inode, pin) = self.shared.change(|names| {
            let directory = directory.map(|node| walk::live_directory(names.slots, node));
            let inode = names.make_unnamed(new, directory.transpose()?.as_ref())?;
            let pin = self.shared.pool.pin_inode(inode.number, InodeUse::Open)?;
            born(Node::of(&inode))?;
            Ok((inode, pin))
        })?;
        let opened = self.shared.opened.open((&inode).into(), || Ok(pin))?;
        Ok(File::new(self.clone(), opened, flags))
    }
}

impl File {
    /// Adds a name for the open file, as [`Files::hard_link`]; it may be the file's first.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// files.remove_file("/f")?;
    /// file.link("/again")?;
    /// assert_eq!(files.metadata("/again")?.nlink(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Exists`], [`FsError::NotFound`] if the directory does not exist,
    /// [`FsError::DirectoryLink`], [`FsError::TooManyLinks`], [`FsError::Pool`].
    pub fn link(&self, path: impl AsRef<Path>) -> Result<()> {
        self.link_with(path.as_ref(), false)
    }

    /// As [`File::link`], but replaces an existing name: at any moment, also after a crash, the
    /// name refers to the old file or to this one.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/one")?;
    /// let other = files.create_file("/other")?;
    /// other.link_over("/one")?;
    /// assert_eq!(files.metadata("/one")?.ino(), other.metadata()?.ino());
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
            let place = walk(names.slots, to, Last::Name)?;
            names.link_open(inode, &place, to, may_replace)
        })?;
        shared.after(gone);
        Ok(())
    }
}
