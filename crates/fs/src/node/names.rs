//! Creating, linking, moving and removing names, in directories given by their nodes.

use aquifer_format::directory::Referent;
use aquifer_pool::format::file::FileKind;

use super::{Caller, Node, Nodes, Removed};
use crate::error::Result;
use crate::file::File;
use crate::metadata::Metadata;
use crate::names::RenameMode;
use crate::options::FileOptions;
use crate::special::SpecialFile;
use crate::transaction::New;
use crate::walk::{self, owned};

/// What [`Nodes::make`] creates.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.pool");
/// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
/// # let files = aquifer_fs::Files::new(pool);
/// use aquifer_fs::node::NewNode;
///
/// let (nodes, caller) = (files.nodes(), files.caller());
/// let made = nodes.make(nodes.root()?, b"link", &NewNode::symlink(b"elsewhere"), &caller)?;
/// assert_eq!(nodes.read_link(made.node())?, b"elsewhere");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewNode<'a> {
    kind: FileKind,
    mode: u32,
    target: &'a [u8],
    device: u64,
}

impl<'a> NewNode<'a> {
    /// An empty file with these permissions, less the caller's umask.
    pub fn file(mode: u32) -> NewNode<'a> {
        NewNode { kind: FileKind::File, mode, target: &[], device: 0 }
    }

    /// An empty directory with these permissions, less the caller's umask.
    pub fn directory(mode: u32) -> NewNode<'a> {
        NewNode { kind: FileKind::Directory, mode, target: &[], device: 0 }
    }

    /// A symbolic link to `target`, which need not exist.
    pub fn symlink(target: &'a [u8]) -> NewNode<'a> {
        NewNode { kind: FileKind::Symlink, mode: 0o777, target, device: 0 }
    }

    /// A named pipe, a socket or a device with these permissions, less the caller's umask.
    pub fn special(special: SpecialFile, mode: u32) -> NewNode<'a> {
        NewNode { kind: special.kind(), mode, target: &[], device: special.device() }
    }

    fn by(&self, by: &'a Caller) -> Result<New<'a>> {
        if self.kind == FileKind::Symlink {
            walk::check(self.target)?;
        }
        Ok(New { device: self.device, ..New::of(self.kind, self.mode, self.target, by) })
    }
}

impl Nodes {
    /// Creates something in a directory: `mknod`, `mkdir`, `symlink`. The number and the generation of
    /// what it creates are the result of a [noted](aquifer_pool::Pool::noting) request; so are those of
    /// [`Nodes::create`] and [`Nodes::create_unnamed`].
    ///
    /// # Errors
    /// [`FsError::Exists`](crate::FsError::Exists),
    /// [`FsError::NameTooLong`](crate::FsError::NameTooLong),
    /// [`FsError::BadName`](crate::FsError::BadName),
    /// [`FsError::NotADirectory`](crate::FsError::NotADirectory),
    /// [`FsError::Immutable`](crate::FsError::Immutable);
    /// [`FsError::Stale`](crate::FsError::Stale), [`FsError::Pool`](crate::FsError::Pool).
    pub fn make(
        &self,
        directory: Node,
        name: &[u8],
        new: &NewNode<'_>,
        by: &Caller,
    ) -> Result<Metadata> {
        walk::check_name(name)?;
        let new = new.by(by)?;
        let inode = self.files.shared.change(|names| {
            let place = walk::entry(names.slots, directory, name)?;
            let made = names.make(&place, name, new)?;
            self.note_born(Node::of(&made));
            Ok(made)
        })?;
        Ok(Metadata::of(inode))
    }

    /// The result of a noted request.
    fn note_born(&self, node: Node) {
        self.files.pool().note_result([node.number, node.generation, 0]);
    }

    /// Opens the file of this name, and creates it if it does not exist, as `openat` with
    /// `O_CREAT`; with [`FileOptions::create_new`] it must not exist. Symbolic links are not
    /// followed. The file's node is [`File::node`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::node::Caller;
    ///
    /// let nodes = files.nodes();
    /// let mut how = files.options();
    /// how.write(true).create_new(true).mode(0o600);
    /// let file = nodes.create(nodes.root()?, b"f", &how, &Caller::new(1000, 1000))?;
    /// assert_eq!(file.metadata()?.uid(), 1000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Nodes::make`] and [`Nodes::open`].
    pub fn create(
        &self,
        directory: Node,
        name: &[u8],
        how: &FileOptions,
        by: &Caller,
    ) -> Result<File> {
        self.check_options(how)?;
        walk::check_name(name)?;
        let shared = &self.files.shared;
        loop {
            let (inode, is_new) = shared.change(|names| {
                let place = walk::entry(names.slots, directory, name)?;
                let (inode, is_new) = how.find_or_make(names, &place, name, by)?;
                self.note_born(Node::of(&inode));
                Ok((inode, is_new))
            })?;
            how.check_kind(&inode, || owned(name))?;
            // `None`: it was removed in between. The name now refers to something else or to nothing.
            if let Some(opened) = shared.open_inode(&inode)? {
                return how.opened(opened, !is_new);
            }
        }
    }

    /// Creates a file without a name, with the permissions and the group that it would get in this
    /// directory: `O_TMPFILE`. [`Nodes::link`] gives it a name; else it is gone when it is closed.
    ///
    /// `born` is called with it before any process can see it, as `keep` of [`Nodes::unlink`] is: a
    /// caller may pin it in a way that outlasts its process. `|_| Ok(())` does nothing.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let (nodes, caller) = (files.nodes(), files.caller());
    /// let root = nodes.root()?;
    /// let file = nodes.create_unnamed(root, files.options().write(true), &caller, |_| Ok(()))?;
    /// file.write_all_at(b"complete", 0)?;
    /// nodes.link(file.node(), root, b"f")?;
    /// assert_eq!(files.read("/f")?, b"complete");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Options`](crate::FsError::Options),
    /// [`FsError::NotADirectory`](crate::FsError::NotADirectory),
    /// [`FsError::Stale`](crate::FsError::Stale), [`FsError::Pool`](crate::FsError::Pool).
    pub fn create_unnamed(
        &self,
        directory: Node,
        how: &FileOptions,
        by: &Caller,
        mut born: impl FnMut(Node) -> Result<()>,
    ) -> Result<File> {
        self.check_options(how)?;
        let new = New::of(FileKind::File, how.flags.mode, &[], by);
        self.files.make_unnamed(new, Some(directory), how.flags, |node| {
            self.note_born(node);
            born(node)
        })
    }

    /// Adds a name for anything but a directory, and returns its metadata as they are then.
    ///
    /// # Errors
    /// [`FsError::Exists`](crate::FsError::Exists),
    /// [`FsError::DirectoryLink`](crate::FsError::DirectoryLink),
    /// [`FsError::TooManyLinks`](crate::FsError::TooManyLinks),
    /// [`FsError::Immutable`](crate::FsError::Immutable); errors of the name and the directory, as
    /// for [`Nodes::make`].
    pub fn link(&self, node: Node, directory: Node, name: &[u8]) -> Result<Metadata> {
        walk::check_name(name)?;
        let inode = self.files.shared.change(|names| {
            let inode = walk::live(names.slots, node)?;
            let place = walk::entry(names.slots, directory, name)?;
            let source = Referent { inode: inode.number, kind: inode.kind };
            names.link(source, name, &place, name)
        })?;
        Ok(Metadata::of(inode))
    }

    /// Removes a name of anything but a directory. Returns what had it.
    ///
    /// `keep` is called with an inode that is about to lose its last name, before any process can
    /// see that: if it returns true, the inode stays, without a name, until [`Nodes::reap`]. Before
    /// it does, it pins the inode in some way that outlasts the call: [`Nodes::hold`] is one. Without
    /// that, the inode is freed by the next process that looks for such inodes. `|_| Ok(false)` keeps
    /// only what processes have open.
    ///
    /// It runs with the metadata mutex of the pool held, for which all processes wait, perhaps
    /// several times and with different inodes. It may only pin: any other change of the pool,
    /// dropping a [`File`] among them, would wait for itself. So it collects what
    /// [`Nodes::hold`] returns, for example in a `Vec` that is dropped later.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.write("/f", "text")?;
    /// let (nodes, node) = (files.nodes(), files.metadata("/f")?.node());
    /// let removed = nodes.unlink(nodes.root()?, b"f", |_| Ok(false))?;
    /// assert_eq!((removed.node, removed.links), (node, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`](crate::FsError::NotFound),
    /// [`FsError::IsADirectory`](crate::FsError::IsADirectory),
    /// [`FsError::Immutable`](crate::FsError::Immutable); errors of the name and the directory, as
    /// for [`Nodes::make`].
    pub fn unlink(
        &self,
        directory: Node,
        name: &[u8],
        mut keep: impl FnMut(Node) -> Result<bool>,
    ) -> Result<Removed> {
        walk::check_name(name)?;
        let shared = &self.files.shared;
        let gone = shared.change(|names| {
            let place = walk::entry(names.slots, directory, name)?;
            names.unlink(&place, name, &mut keep)
        })?;
        shared.after(gone);
        Ok(gone.removed.expect("what had the name"))
    }

    /// Removes an empty directory. Returns what it was. `keep` is that of [`Nodes::unlink`]: a directory
    /// that is kept has its attributes, and nothing can be in it any more.
    ///
    /// # Errors
    /// [`FsError::NotFound`](crate::FsError::NotFound),
    /// [`FsError::NotADirectory`](crate::FsError::NotADirectory),
    /// [`FsError::NotEmpty`](crate::FsError::NotEmpty),
    /// [`FsError::Immutable`](crate::FsError::Immutable); errors of the name and the directory, as
    /// for [`Nodes::make`].
    pub fn remove_dir(
        &self,
        directory: Node,
        name: &[u8],
        mut keep: impl FnMut(Node) -> Result<bool>,
    ) -> Result<Removed> {
        walk::check_name(name)?;
        let shared = &self.files.shared;
        let gone = shared.change(|names| {
            let place = walk::entry(names.slots, directory, name)?;
            names.remove_directory(&place, name, &mut keep)
        })?;
        shared.after(gone);
        Ok(gone.removed.expect("what had the name"))
    }

    /// Moves a name, in any of the modes of `renameat2`. Returns what had the new name before, if it
    /// was replaced. A whiteout ([`RenameMode::Whiteout`]) belongs to `by`; `keep` is that of
    /// [`Nodes::unlink`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::RenameMode;
    ///
    /// files.create_file("/f")?;
    /// files.create_dir("/d")?;
    /// let (nodes, d) = (files.nodes(), files.metadata("/d")?.node());
    /// let (from, to) = ((nodes.root()?, &b"f"[..]), (d, &b"g"[..]));
    /// nodes.rename(from, to, RenameMode::NoReplace, &files.caller(), |_| Ok(false))?;
    /// assert!(files.exists("/d/g")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::rename_with`](crate::Files::rename_with), with
    /// [`FsError::Stale`](crate::FsError::Stale) and
    /// [`FsError::NotADirectory`](crate::FsError::NotADirectory) for the directories.
    pub fn rename(
        &self,
        (from_directory, from): (Node, &[u8]),
        (to_directory, to): (Node, &[u8]),
        mode: RenameMode,
        by: &Caller,
        mut keep: impl FnMut(Node) -> Result<bool>,
    ) -> Result<Option<Removed>> {
        walk::check_name(from)?;
        walk::check_name(to)?;
        let shared = &self.files.shared;
        let gone = shared.change(|names| {
            let source = walk::entry(names.slots, from_directory, from)?;
            let target = walk::entry(names.slots, to_directory, to)?;
            names.rename_as(mode, (&source, from), (&target, to), by, &mut keep)
        })?;
        shared.after(gone);
        Ok(gone.removed)
    }
}
