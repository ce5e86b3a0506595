//! Files as inodes, without paths: for servers.
//!
//! A server (of FUSE, of NFS) gets an inode number and a name from its client, and walks no paths. A
//! [`Node`] is an inode number with the generation that tells it from all other inodes that ever
//! have the number; it is a plain value, which may be kept, sent and stored. [`Nodes`] has the
//! operations. Each reads the metadata as of one moment or changes them in one transaction, as
//! those by path, which are made of the same parts; what opens a file, or shortens one of many pieces,
//! takes more.
//!
//! ```text
//!   Files: path ─► walk ─► Place ┐
//!                                ├─► names: link, rename, remove, make …     File: read, write, …
//!   Nodes: node, name ─► Place ──┘
//! ```
//!
//! | a request of FUSE | here |
//! |---|---|
//! | `LOOKUP` (with `.` and `..`), `GETATTR`, `STATX` | [`Nodes::lookup`], [`Nodes::metadata`] |
//! | `SETATTR` | [`Nodes::set`] |
//! | `MKNOD`, `MKDIR`, `SYMLINK` | [`Nodes::make`] |
//! | `CREATE`, `TMPFILE` | [`Nodes::create`], [`Nodes::create_unnamed`] |
//! | `OPEN`; a client that sends none | [`Nodes::open`]; [`Nodes::open_any`], [`Nodes::hold`] |
//! | `FORGET` | drop what [`Nodes::hold`] returned, or [`Nodes::reap`] what [`Nodes::unlink`] kept |
//! | `LINK`, `UNLINK`, `RMDIR`, `RENAME2` | [`Nodes::link`], [`Nodes::unlink`], [`Nodes::remove_dir`], [`Nodes::rename`] |
//! | `READLINK` | [`Nodes::read_link`] |
//! | `READDIR`, `READDIRPLUS` | [`Nodes::read_dir`], [`Nodes::read_dir_plus`] |
//! | `GETXATTR`, `LISTXATTR`, `SETXATTR`, `REMOVEXATTR` | [`Nodes::attribute`], [`Nodes::attributes`], [`Nodes::set_attribute`], [`Nodes::remove_attribute`] |
//! | `READ`, `WRITE`, `FALLOCATE`, `LSEEK`, `FSYNC`, locks | [`File`] |
//! | `STATFS`, `SYNCFS` | [`Files::space`](crate::Files::space), [`Files::sync`](crate::Files::sync) |
//!
//! # Removed files
//! A removed directory is gone at once, unless it is kept. Any other inode stays as long as a process has it open, and
//! can be reached by its node until then. A server whose clients refer to inodes that they have not
//! opened keeps those that lose their last name: [`Nodes::unlink`] and [`Nodes::rename`] ask it before
//! any process can see that. Then its number may be used again, with another
//! generation: the node is [`FsError::Stale`].
//!
//! # Callers
//! What creates or changes something takes the [`Caller`] it is done for. Permissions are stored but
//! not enforced, except for a caller with [`Caller::enforced`]: a server checks them first, or leaves
//! that to the kernel (`default_permissions`).
//!
//! ```
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("data.pool");
//! # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
//! # let files = aquifer_fs::Files::new(pool);
//! use aquifer_fs::FsError;
//! use aquifer_fs::node::{Caller, NewNode};
//!
//! let (nodes, caller) = (files.nodes(), Caller::new(1000, 1000).umask(0o022));
//! let root = nodes.root()?;
//! let d = nodes.make(root, b"d", &NewNode::directory(0o777), &caller)?.node();
//! files.rename("/d", "/e")?; // a node stays valid wherever its names are
//! nodes.make(d, b"f", &NewNode::file(0o666), &caller)?;
//! assert!(files.exists("/e/f")?);
//! files.remove_dir_all("/e")?;
//! assert!(matches!(nodes.lookup(d, b"f"), Err(FsError::Stale { .. })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attributes;
mod names;
mod read_dir;

use aquifer_pool::format::file::{FileInode, FileKind};

pub use crate::caller::Caller;
use crate::error::{FsError, Result};
use crate::file::{File, OpenFlags};
use crate::files::Files;
use crate::metadata::Metadata;
pub use crate::metadata::SetAttributes;
pub use crate::node_id::{Node, Removed};
use crate::options::FileOptions;
use crate::walk;
pub use names::NewNode;
pub use read_dir::{Cookie, NodeEntry};

/// The files of a pool as inodes: from [`Files::nodes`]. See the [module](self). Cheap to clone; can
/// be shared between threads.
#[derive(Debug, Clone)]
pub struct Nodes {
    files: Files,
}

impl Files {
    /// The files as inodes, without paths: for servers, which get inode numbers from their clients.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir("/d")?;
    /// let nodes = files.nodes();
    /// let found = nodes.lookup(nodes.root()?, b"d")?;
    /// assert_eq!(found.node(), files.metadata("/d")?.node());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn nodes(&self) -> Nodes {
        Nodes { files: self.clone() }
    }
}

impl Nodes {
    /// Returns the files, by path.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Reads an inode.
    fn look_at(&self, node: Node) -> Result<FileInode> {
        self.files.shared.look(|slots| walk::live(slots, node))
    }

    /// Returns the root directory. It is never removed.
    ///
    /// # Errors
    /// [`FsError::Pool`], [`FsError::Damaged`].
    pub fn root(&self) -> Result<Node> {
        let root = self.files.shared.look(|slots| walk::inode(slots, Node::ROOT_NUMBER))?;
        Ok(Node::of(&root))
    }

    /// Returns the inode that has this number now: for callers that know that it cannot be another
    /// one than they mean, because they have it open.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// assert_eq!(files.nodes().numbered(file.node().number)?, file.node());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Stale`] if none has it.
    pub fn numbered(&self, number: u64) -> Result<Node> {
        let now = self.files.shared.generation_and_links(number)?;
        let (generation, _) = now.ok_or(FsError::Stale { number, generation: 0 })?;
        Ok(Node { number, generation })
    }

    /// Looks up a name in a directory; `.` is the directory itself, `..` the one above it. Symbolic
    /// links are not followed. [`Metadata::node`] is the node.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_dir_all("/d/e")?;
    /// let nodes = files.nodes();
    /// let d = nodes.lookup(nodes.root()?, b"d")?.node();
    /// let e = nodes.lookup(d, b"e")?.node();
    /// assert_eq!(nodes.lookup(e, b"..")?.node(), d);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::NameTooLong`], [`FsError::BadName`];
    /// [`FsError::NotADirectory`], [`FsError::Stale`].
    pub fn lookup(&self, directory: Node, name: &[u8]) -> Result<Metadata> {
        walk::check_name(name)?;
        let inode = self.files.shared.look(|slots| {
            let place = walk::entry(slots, directory, name)?;
            walk::referred(slots, place.named(name)?)
        })?;
        Ok(Metadata::of(inode))
    }

    /// Returns the metadata of an inode of any kind.
    ///
    /// # Errors
    /// [`FsError::Stale`], [`FsError::Pool`].
    pub fn metadata(&self, node: Node) -> Result<Metadata> {
        self.look_at(node).map(Metadata::of)
    }

    /// Sets permissions, owner, length and times in one change, and returns the metadata. A file of many
    /// pieces is shortened in several changes, the last of which sets all others.
    ///
    /// # Errors
    /// [`FsError::Immutable`], [`FsError::Stale`], [`FsError::Pool`]; for a length the errors of
    /// [`File::set_len`], and [`FsError::IsADirectory`] or [`FsError::LinkLoop`] for what has no
    /// length to set.
    pub fn set(&self, node: Node, what: &SetAttributes, by: &Caller) -> Result<Metadata> {
        if let Some(len_bytes) = what.len_bytes {
            let file = self.open(node, self.files.options().write(true))?;
            file.set_len_and(len_bytes, what, by)?;
            return file.metadata();
        }
        let inode = self.files.shared.change(|names| {
            let inode = walk::live(names.slots, node)?;
            names.set(inode, what, by, || node.to_path())
        })?;
        Ok(Metadata::of(inode))
    }

    /// Opens a file, or a directory for reading. Options that create files are ignored; `O_NOFOLLOW`
    /// as well.
    ///
    /// A file without names can be opened as long as it exists; by a process that opened the pool
    /// read-only, while it has the file open.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/f", "text")?;
    /// let file = files.nodes().open(files.metadata("/f")?.node(), files.options().read(true))?;
    /// let mut text = [0; 4];
    /// file.read_exact_at(&mut text, 0)?;
    /// assert_eq!(&text, b"text");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Stale`], [`FsError::Options`], [`FsError::IsADirectory`], [`FsError::LinkLoop`] for a
    /// symbolic link, [`FsError::Immutable`], [`FsError::Pool`]. [`FsError::OtherPool`] if the
    /// options are those of another [`Files`].
    pub fn open(&self, node: Node, how: &FileOptions) -> Result<File> {
        self.check_options(how)?;
        let inode = self.look_at(node)?;
        how.check_kind(&inode, || node.to_path())?;
        how.opened(self.files.shared.open_node(&inode)?, true)
    }

    /// Opens a file for reading and writing, also one that is immutable, so that writing fails: for a
    /// server that uses one handle for all requests about a file.
    ///
    /// # Errors
    /// As for [`Nodes::open`], without [`FsError::Immutable`].
    pub fn open_any(&self, node: Node) -> Result<File> {
        let mut how = self.files.options();
        how.read(true).write(true);
        let inode = FileInode { is_immutable: false, ..self.look_at(node)? };
        how.check_kind(&inode, || node.to_path())?;
        how.opened(self.files.shared.open_node(&inode)?, false)
    }

    /// Frees an inode that has no names, unless a process has it open: for a caller that kept it with
    /// [`Nodes::unlink`], and has removed its pin. Returns false if a process has it open; else it is
    /// gone, or has a name.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FsError;
    ///
    /// files.create_file("/f")?;
    /// let nodes = files.nodes();
    /// let removed = nodes.unlink(nodes.root()?, b"f", |_| Ok(true))?; // and pins nothing
    /// assert!(nodes.reap(removed.node)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`].
    pub fn reap(&self, node: Node) -> Result<bool> {
        self.files.shared.reap(node)
    }

    /// Returns a handle that permits neither reading nor writing, of an inode of any kind: as with
    /// `O_PATH`. As long as it is there, the inode is, whatever happens to its names; a directory is
    /// gone when it is removed.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FsError;
    ///
    /// files.create_file("/f")?;
    /// let (nodes, node) = (files.nodes(), files.metadata("/f")?.node());
    /// let held = nodes.hold(node)?;
    /// files.remove_file("/f")?;
    /// assert_eq!(nodes.metadata(node)?.nlink(), 0);
    /// drop(held);
    /// assert!(matches!(nodes.metadata(node), Err(FsError::Stale { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Stale`], [`FsError::Pool`].
    pub fn hold(&self, node: Node) -> Result<File> {
        let opened = self.files.shared.open_node(&self.look_at(node)?)?;
        Ok(File::new(self.files.clone(), opened, OpenFlags::default()))
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// [`FsError::NotALink`], [`FsError::Stale`].
    pub fn read_link(&self, node: Node) -> Result<Vec<u8>> {
        self.files.shared.look(|slots| {
            let inode = walk::live(slots, node)?;
            match inode.kind {
                FileKind::Symlink => walk::target(slots, &inode),
                _ => Err(FsError::NotALink { path: node.to_path() }),
            }
        })
    }

    fn check_options(&self, how: &FileOptions) -> Result<()> {
        how.flags.check(b"")?;
        if std::sync::Arc::ptr_eq(&how.files.shared, &self.files.shared) {
            Ok(())
        } else {
            Err(FsError::OtherPool)
        }
    }
}
