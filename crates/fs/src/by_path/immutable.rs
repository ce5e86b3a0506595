//! Making files immutable, and mutable again.

use std::path::{Path, PathBuf};

use aquifer_pool::format::file::FileInode;
use aquifer_pool::{InodeUse, Transaction};

use crate::error::{FsError, Result};
use crate::files::{Files, Shared};
use crate::node::Nodes;
use crate::node_id::Node;
use crate::transaction::Names;
use crate::walk::{self, Last, bytes_of, owned};

impl Files {
    /// Makes a file immutable, or mutable again. While it is immutable, its content, attributes and
    /// names cannot be changed, and its bytes are available as a slice ([`Lease`](crate::Lease)).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::FsError;
    ///
    /// files.create_file("/f")?;
    /// files.set_immutable("/f", true)?;
    /// assert!(matches!(files.remove_file("/f"), Err(FsError::Immutable { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`], [`FsError::Pool`]. [`FsError::InUse`] when making a file immutable
    /// that has a [`ViewMut`](crate::ViewMut), or mutable one that has a [`Lease`](crate::Lease).
    pub fn set_immutable(&self, path: impl AsRef<Path>, is_immutable: bool) -> Result<()> {
        let path = bytes_of(path.as_ref());
        loop {
            let node = Node::of(&self.shared.look_up(path, Last::Follow)?);
            match self.shared.set_immutable(node, is_immutable, || owned(path)) {
                // It was removed in between. The path now refers to something else or to nothing.
                Err(FsError::Stale { .. }) => {}
                outcome => return outcome,
            }
        }
    }
}

impl Nodes {
    /// As [`Files::set_immutable`], for any inode.
    ///
    /// # Errors
    /// As for [`Files::set_immutable`], with [`FsError::Stale`] in place of errors of the path.
    pub fn set_immutable(&self, node: Node, is_immutable: bool) -> Result<()> {
        self.files().shared.set_immutable(node, is_immutable, || node.to_path())
    }
}

impl Shared {
    fn set_immutable(
        &self,
        node: Node,
        is_immutable: bool,
        path: impl Fn() -> PathBuf,
    ) -> Result<()> {
        // Take the write lock: in-flight writers have already passed the immutability check.
        let _writing = self.pool.lock_file(node.number)?;
        let in_use = || Err(FsError::InUse { path: path() });
        if is_immutable {
            return self.change_live(node, |names, inode| {
                if !inode.is_immutable && names.slots.is_used(node.number, InodeUse::Writable) {
                    return in_use();
                }
                (inode.is_immutable, inode.is_clearing_immutable) = (true, false);
                Ok(())
            });
        }
        // First stop new leases, then check that there are none.
        self.change_live(node, |_, inode| {
            inode.is_clearing_immutable = inode.is_immutable;
            Ok(())
        })?;
        let mut is_leased = false;
        self.change_live(node, |names, inode| {
            is_leased = names.slots.is_used(node.number, InodeUse::Leased);
            (inode.is_immutable, inode.is_clearing_immutable) = (is_leased, false);
            Ok(())
        })?;
        if is_leased { in_use() } else { Ok(()) }
    }

    fn change_live(
        &self,
        node: Node,
        mut change: impl FnMut(&mut Names<'_, Transaction<'_>>, &mut FileInode) -> Result<()>,
    ) -> Result<()> {
        self.change(|names| {
            let before = walk::live(names.slots, node)?;
            let mut inode = before.clone();
            change(names, &mut inode)?;
            if inode != before {
                inode.changed_ns = names.now_ns;
                names.put(&inode)?;
            }
            Ok(())
        })
    }
}
