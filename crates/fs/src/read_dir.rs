//! Iterating over the names in a directory.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use aquifer_format::directory::Tree;
use aquifer_pool::format::directory::DirectoryEntry;
use aquifer_pool::format::file::FileInode;

use crate::error::{FsError, Result};
use crate::files::Files;
use crate::metadata::{FileType, Metadata};
use crate::node_id::Node;
use crate::walk::{self, Last, bytes_of};

/// How many names are read at a time, as of one moment.
const BATCH: usize = 128;

/// An iterator over a directory, as [`std::fs::ReadDir`]: see [`Files::read_dir`].
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// files.create_dir("/d")?;
/// for entry in files.read_dir("/")? {
///     assert_eq!(entry?.path().to_str(), Some("/d"));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ReadDir {
    files: Files,
    path: PathBuf,
    node: Node,
    entries: VecDeque<DirectoryEntry>,
    /// Where to continue; `None` at the end.
    next_hash: Option<u64>,
}

/// A name in a directory, as [`std::fs::DirEntry`].
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// files.create_file("/f")?;
/// let entry = files.read_dir("/")?.next().expect("one name")?;
/// assert!(entry.file_name() == "f" && entry.file_type()?.is_file());
/// assert_eq!(entry.ino(), entry.metadata()?.ino());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct DirEntry {
    files: Files,
    directory: PathBuf,
    entry: DirectoryEntry,
}

impl ReadDir {
    pub(crate) fn new(files: Files, path: PathBuf, inode: &FileInode) -> ReadDir {
        let node = Node::of(inode);
        ReadDir { files, path, node, entries: VecDeque::new(), next_hash: Some(0) }
    }

    /// The directory.
    pub(crate) fn directory(&self) -> Node {
        self.node
    }

    fn read_on(&mut self) -> Result<()> {
        let Some(from_hash) = self.next_hash else { return Ok(()) };
        let batch = self.files.shared.look(|slots| {
            let inode = match walk::live(slots, self.node) {
                // The directory was removed, so it has no names.
                Err(FsError::Stale { .. }) => return Ok(None),
                inode => inode?,
            };
            let tree = Tree { owner: inode.number, seed: inode.seed, root: inode.part };
            Ok(Some(tree.read_from(slots, from_hash, BATCH)?))
        })?;
        self.next_hash = batch.as_ref().and_then(|batch| batch.next_hash);
        self.entries.extend(batch.into_iter().flat_map(|batch| batch.entries));
        Ok(())
    }
}

impl Iterator for ReadDir {
    type Item = Result<DirEntry>;

    fn next(&mut self) -> Option<Result<DirEntry>> {
        loop {
            if let Some(entry) = self.entries.pop_front() {
                let (files, directory) = (self.files.clone(), self.path.clone());
                return Some(Ok(DirEntry { files, directory, entry }));
            }
            self.next_hash?;
            if let Err(error) = self.read_on() {
                self.next_hash = None;
                return Some(Err(error));
            }
        }
    }
}

impl DirEntry {
    /// Returns the name.
    pub fn file_name(&self) -> OsString {
        self.file_name_ref().to_owned()
    }

    /// Returns the name without a copy.
    pub fn file_name_ref(&self) -> &OsStr {
        OsStr::from_bytes(&self.entry.name)
    }

    /// Returns the path of the directory joined with the name.
    pub fn path(&self) -> PathBuf {
        self.directory.join(self.file_name_ref())
    }

    /// Returns the path of the directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the type of the file that the name refers to; a symbolic link is not followed.
    ///
    /// # Errors
    /// None: the directory has the types. The result is that of [`std::fs::DirEntry::file_type`].
    pub fn file_type(&self) -> Result<FileType> {
        Ok(FileType::of(self.entry.kind))
    }

    /// Returns the number of the inode that the name refers to.
    pub fn ino(&self) -> u64 {
        self.entry.inode
    }

    /// Returns the current metadata; a symbolic link is not followed.
    ///
    /// # Errors
    /// As for [`Files::symlink_metadata`].
    pub fn metadata(&self) -> Result<Metadata> {
        let inode = self.files.shared.look_up(bytes_of(&self.path()), Last::Keep)?;
        Ok(Metadata::of(inode))
    }
}
