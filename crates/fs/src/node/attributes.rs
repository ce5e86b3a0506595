//! Extended attributes by node.

use super::{Caller, Node, Nodes};
use crate::attributes::{self, SetMode};
use crate::error::Result;
use crate::walk;

impl Nodes {
    /// Returns the value of an extended attribute.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let (nodes, caller) = (files.nodes(), files.caller());
    /// let root = nodes.root()?;
    /// nodes.set_attribute(root, b"user.colour", b"green", Default::default(), &caller)?;
    /// assert_eq!(nodes.attributes(root)?, [b"user.colour"]);
    /// assert_eq!(nodes.attribute(root, b"user.colour")?, b"green");
    /// nodes.remove_attribute(root, b"user.colour", &caller)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NoAttribute`](crate::FsError::NoAttribute), errors of the name;
    /// [`FsError::Stale`](crate::FsError::Stale).
    pub fn attribute(&self, node: Node, name: &[u8]) -> Result<Vec<u8>> {
        self.files.shared.look(|slots| attributes::get(&walk::live(slots, node)?, slots, name))
    }

    /// Returns the names of all extended attributes, in order of creation.
    ///
    /// # Errors
    /// [`FsError::Stale`](crate::FsError::Stale).
    pub fn attributes(&self, node: Node) -> Result<Vec<Vec<u8>>> {
        self.files.shared.look(|slots| attributes::list(&walk::live(slots, node)?, slots))
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// As for [`Files::set_attribute`](crate::Files::set_attribute), with
    /// [`FsError::Stale`](crate::FsError::Stale) in place of errors of a path.
    pub fn set_attribute(
        &self,
        node: Node,
        name: &[u8],
        value: &[u8],
        mode: SetMode,
        by: &Caller,
    ) -> Result<()> {
        attributes::check_length(name)?;
        attributes::check_value(value)?;
        self.files.shared.change(|names| {
            let inode = walk::live(names.slots, node)?;
            names.set_attribute(inode, (name, value), mode, by, || node.to_path())
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// As for [`Files::remove_attribute`](crate::Files::remove_attribute), with
    /// [`FsError::Stale`](crate::FsError::Stale) in place of errors of a path.
    pub fn remove_attribute(&self, node: Node, name: &[u8], by: &Caller) -> Result<()> {
        attributes::check_length(name)?;
        self.files.shared.change(|names| {
            let inode = walk::live(names.slots, node)?;
            names.remove_attribute(inode, name, by, || node.to_path())
        })
    }
}
