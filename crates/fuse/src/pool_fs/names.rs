//! Names: `SYMLINK`, `MKNOD`, `MKDIR`, `CREATE`, `TMPFILE`, `LINK`, `UNLINK`, `RMDIR`, `RENAME`,
//! `READLINK`.

use aquifer_fs::node::{NewNode, Node};
use aquifer_fs::{File, FsError, Metadata, RenameMode, SpecialFile};

use super::attributes::decode_device;
use super::{Errno, PoolFs, Result, caller};
use crate::wire::{Request, init, rename};

/// The bits of a mode that are permissions.
const PERMISSIONS: u32 = 0o7777;

impl PoolFs {
    fn make(
        &self,
        request: &Request<'_>,
        name: &[u8],
        new: &NewNode<'_>,
        umask: u32,
    ) -> Result<Metadata> {
        let by = caller(request).umask(umask);
        Ok(self.nodes.make(self.node(request.node)?, name, new, &by)?)
    }

    pub(super) fn symlink(
        &self,
        request: &Request<'_>,
        name: &[u8],
        target: &[u8],
    ) -> Result<Metadata> {
        self.make(request, name, &NewNode::symlink(target), 0)
    }

    pub(super) fn make_directory(
        &self,
        request: &Request<'_>,
        name: &[u8],
        mode: u32,
        umask: u32,
    ) -> Result<Metadata> {
        self.make(request, name, &NewNode::directory(mode & PERMISSIONS), umask)
    }

    pub(super) fn make_node(
        &self,
        request: &Request<'_>,
        name: &[u8],
        mode: u32,
        rdev: u32,
        umask: u32,
    ) -> Result<Metadata> {
        let permissions = mode & PERMISSIONS;
        let device = decode_device(rdev);
        let special = match mode & libc::S_IFMT {
            libc::S_IFREG | 0 => None,
            libc::S_IFIFO => Some(SpecialFile::Fifo),
            libc::S_IFSOCK => Some(SpecialFile::Socket),
            libc::S_IFCHR => Some(SpecialFile::CharDevice(device)),
            libc::S_IFBLK => Some(SpecialFile::BlockDevice(device)),
            _ => return Err(Errno(libc::EINVAL)),
        };
        let new = match special {
            Some(special) => NewNode::special(special, permissions),
            None => NewNode::file(permissions),
        };
        self.make(request, name, &new, umask)
    }

    /// For a client that opens it. Where the kernel opens files by itself, it creates them by `MKNOD`
    /// from then on: what is opened by a `CREATE` it would also close by a `RELEASE`.
    ///
    /// The kernel checks no permission of a file that it creates. So one that another mount has created
    /// since the kernel looked is not opened: after `ESTALE` the kernel looks again, and opens it.
    pub(super) fn create(
        &self,
        request: &Request<'_>,
        name: &[u8],
        flags: u32,
        mode: u32,
        umask: u32,
    ) -> Result<Metadata> {
        self.without_opening(init::NO_OPEN_SUPPORT)?;
        let mut how = self.files.options();
        how.read(true).write(true).create(true).mode(mode & PERMISSIONS);
        how.create_new(true);
        let by = caller(request).umask(umask);
        let is_exclusive = flags & libc::O_EXCL as u32 != 0;
        match self.nodes.create(self.node(request.node)?, name, &how, &by) {
            Err(FsError::Exists { .. }) if !is_exclusive => Err(Errno(libc::ESTALE)),
            created => self.opened(created?),
        }
    }

    pub(super) fn temporary_file(
        &self,
        request: &Request<'_>,
        mode: u32,
        umask: u32,
    ) -> Result<Metadata> {
        let mut how = self.files.options();
        how.read(true).write(true).mode(mode & PERMISSIONS);
        let by = caller(request).umask(umask);
        let directory = self.node(request.node)?;
        self.orphans.prepare();
        // Nothing but a pin keeps it.
        let mut born = None;
        let created = self.nodes.create_unnamed(directory, &how, &by, |node| {
            // Of an attempt that was not published.
            if let Some(before) = born.replace(node).filter(|before| *before != node) {
                self.orphans.unpin(&self.table, before.number);
            }
            self.orphans.born(&self.table, node)
        });
        match created {
            Ok(file) => {
                self.orphans.keep_open(&file);
                self.opened(file)
            }
            Err(error) => {
                if let Some(node) = born {
                    self.orphans.release(&self.table, &self.nodes, node.number);
                }
                Err(error.into())
            }
        }
    }

    /// A file that the client now has open, and is about to use.
    fn opened(&self, file: File) -> Result<Metadata> {
        let found = file.metadata()?;
        self.handles.put(file);
        Ok(found)
    }

    pub(super) fn link(&self, linked: u64, directory: u64, name: &[u8]) -> Result<Metadata> {
        Ok(self.nodes.link(self.node(linked)?, self.node(directory)?, name)?)
    }

    pub(super) fn unlink(&self, directory: u64, name: &[u8]) -> Result<()> {
        let directory = self.node(directory)?;
        self.removing(|keep| self.nodes.unlink(directory, name, keep).map(drop))
    }

    pub(super) fn remove_directory(&self, directory: u64, name: &[u8]) -> Result<()> {
        let directory = self.node(directory)?;
        self.removing(|keep| self.nodes.remove_dir(directory, name, keep).map(drop))
    }

    pub(super) fn rename(
        &self,
        request: &Request<'_>,
        name: &[u8],
        (to, new_name): (u64, &[u8]),
        flags: u32,
    ) -> Result<()> {
        const WHITEOUT_NOREPLACE: u32 = rename::WHITEOUT | rename::NOREPLACE;
        let mode = match flags {
            0 => RenameMode::Replace,
            rename::NOREPLACE => RenameMode::NoReplace,
            rename::EXCHANGE => RenameMode::Exchange,
            rename::WHITEOUT => RenameMode::Whiteout,
            WHITEOUT_NOREPLACE => RenameMode::WhiteoutNoReplace,
            _ => return Err(Errno(libc::EINVAL)),
        };
        let (into, from, to) = (to, self.node(request.node)?, self.node(to)?);
        let by = caller(request);
        let moves = self.options.is_shared() && request.node != into;
        let exchanges = mode == RenameMode::Exchange;
        // Lookups meanwhile, and those behind a death of this server, may find it at either place.
        if moves {
            self.note_moved(None, from, name);
            if exchanges {
                self.note_moved(None, to, new_name);
            }
        }
        self.removing(|keep| {
            self.nodes.rename((from, name), (to, new_name), mode, &by, keep).map(drop)
        })?;
        if moves {
            self.note_moved(Some(into), to, new_name);
            if exchanges {
                self.note_moved(Some(request.node), from, name);
            }
        }
        Ok(())
    }

    /// Notes that the kernel moves the directory with a name, as [`NodeTable::moved`]. If others have
    /// moved it meanwhile, the kernel will find it elsewhere, as another node.
    ///
    /// [`NodeTable::moved`]: crate::state::NodeTable::moved
    fn note_moved(&self, id: Option<u64>, directory: Node, name: &[u8]) {
        if let Ok(found) = self.nodes.lookup(directory, name)
            && found.is_dir()
        {
            self.table.moved(id, found.node());
        }
    }

    /// Removes a name, and keeps the inode that thereby loses its last one if the kernel knows it.
    fn removing(
        &self,
        remove: impl FnOnce(&mut dyn FnMut(Node) -> aquifer_fs::Result<bool>) -> aquifer_fs::Result<()>,
    ) -> Result<()> {
        self.orphans.prepare();
        // Given up, or kept, after the transaction: see `Nodes::unlink`.
        let mut held = Vec::new();
        let removed = remove(&mut |node| {
            if !self.table.knows(node) {
                return Ok(false);
            }
            held.push(self.orphans.hold(&self.table, &self.nodes, node)?);
            Ok(true)
        });
        for held in held {
            if removed.is_err() {
                self.orphans.give_up(&self.table, &self.nodes, held);
                continue;
            }
            let number = self.orphans.keep(held);
            // An attempt of the transaction that failed may have held something else, which the
            // kernel may have forgotten since.
            if self.table.lookups(number) == 0 {
                self.orphans.release(&self.table, &self.nodes, number);
            }
        }
        Ok(removed?)
    }

    pub(super) fn read_link(&self, node: u64) -> Result<Vec<u8>> {
        Ok(self.nodes.read_link(self.node(node)?)?)
    }
}
