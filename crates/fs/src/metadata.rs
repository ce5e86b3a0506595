//! What an inode says of its file.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_pool::format::PAGE_BYTES;
use aquifer_pool::format::file::{FileInode, FileKind};

/// What a file, directory or symbolic link is, as of one moment.
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

    /// What it is.
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
        self.kind() == FileKind::Link
    }

    /// Length in bytes: of the content of a file, of the target of a symbolic link; of a directory, how many names it has.
    pub fn len(&self) -> u64 {
        match self.kind() {
            FileKind::Directory => self.inode.entries,
            _ => self.inode.size_bytes,
        }
    }

    /// Whether that is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the pool that hold its content. Holes do not count; space that is kept for growing does.
    pub fn allocated_bytes(&self) -> u64 {
        self.inode.pages * PAGE_BYTES
    }

    /// The number of its inode: two names with the same one lead to the same file.
    pub fn number(&self) -> u64 {
        self.inode.number
    }

    /// Tells the file from all that had its number before, or will have it: number and incarnation together name one file for as long as the
    /// pool lives.
    pub fn incarnation(&self) -> u64 {
        self.inode.incarnation
    }

    /// Names that lead to it; for a directory, 2 and one for each directory in it.
    pub fn links(&self) -> u32 {
        self.inode.links
    }

    /// Permissions, as `chmod` has them.
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

    /// Whether content, attributes and names are not to be changed.
    pub fn is_immutable(&self) -> bool {
        self.inode.is_immutable
    }

    /// When the content was last changed; for a directory, when a name was.
    pub fn modified(&self) -> SystemTime {
        time(self.inode.modified_ns)
    }

    /// When the content was last read, as far as somebody said so: reading does not change it.
    pub fn accessed(&self) -> SystemTime {
        time(self.inode.accessed_ns)
    }

    /// When anything of it was last changed.
    pub fn changed(&self) -> SystemTime {
        time(self.inode.changed_ns)
    }

    /// When it was made.
    pub fn created(&self) -> SystemTime {
        time(self.inode.created_ns)
    }
}
