//! Metadata of a file, from its inode.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind};

/// The metadata of a file, directory or symbolic link, as of one moment.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20, &Default::default(), &Default::default())?;
/// # let files = aquifer_fs::Files::new(pool);
/// files.create_file("/f")?.write_at(b"text", 0)?;
/// let metadata = files.metadata("/f")?;
/// assert!(metadata.is_file() && !metadata.is_empty());
/// assert_eq!((metadata.len(), metadata.allocated_bytes(), metadata.links()), (4, 4096, 1));
/// assert_eq!(metadata.modified(), metadata.changed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    inode: FileInode,
}

fn time(ns: i64) -> SystemTime {
    let since = Duration::from_nanos(ns.unsigned_abs());
    if ns < 0 { UNIX_EPOCH - since } else { UNIX_EPOCH + since }
}

impl Metadata {
    pub(crate) fn of(inode: FileInode) -> Metadata {
        Metadata { inode }
    }

    /// Returns the kind of file.
    pub fn kind(&self) -> FileKind {
        self.inode.kind
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.kind() == FileKind::File
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.kind() == FileKind::Directory
    }

    /// Whether it is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.kind() == FileKind::Symlink
    }

    /// Length in bytes: of a file's content, of a symbolic link's target; for a directory, how many
    /// names it has.
    pub fn len(&self) -> u64 {
        match self.kind() {
            FileKind::Directory => self.inode.entries,
            _ => self.inode.size_bytes,
        }
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the pool that hold the content. Holes do not count; room to grow into does.
    pub fn allocated_bytes(&self) -> u64 {
        self.inode.pages * PAGE_BYTES
    }

    /// Returns the inode number: two names with the same number refer to the same file.
    pub fn number(&self) -> u64 {
        self.inode.number
    }

    /// Distinguishes the file from all others that ever have its number: number and generation
    /// together identify one file for the lifetime of the pool.
    pub fn generation(&self) -> u64 {
        self.inode.generation
    }

    /// How many names it has; for a directory, 2 plus one for each subdirectory.
    pub fn links(&self) -> u32 {
        self.inode.links
    }

    /// Returns the permissions, as for `chmod`.
    pub fn mode(&self) -> u32 {
        self.inode.mode
    }

    /// The user it belongs to.
    pub fn uid(&self) -> u32 {
        self.inode.uid
    }

    /// The group it belongs to.
    pub fn gid(&self) -> u32 {
        self.inode.gid
    }

    /// Whether content, attributes and names cannot be changed.
    pub fn is_immutable(&self) -> bool {
        self.inode.is_immutable
    }

    /// When the content was last changed; for a directory, its names.
    pub fn modified(&self) -> SystemTime {
        time(self.inode.modified_ns)
    }

    /// The access time, as set explicitly: reading does not change it.
    pub fn accessed(&self) -> SystemTime {
        time(self.inode.accessed_ns)
    }

    /// When anything about the file was last changed.
    pub fn changed(&self) -> SystemTime {
        time(self.inode.changed_ns)
    }

    /// When the file was created.
    pub fn created(&self) -> SystemTime {
        time(self.inode.created_ns)
    }
}
