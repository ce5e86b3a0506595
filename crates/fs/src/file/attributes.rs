//! Owner and extended attributes of an open file: like `fchown`, `fgetxattr` and related calls.

use aquifer_pool::format::file::FileInode;

use super::File;
use crate::attributes::{self, SetMode};
use crate::error::Result;
use crate::metadata::SetAttributes;

impl File {
    /// Sets user and group; `None` leaves one unchanged. As [`std::os::unix::fs::fchown`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.fchown(Some(1000), None)?;
    /// assert_eq!(file.metadata()?.uid(), 1000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`File::set_permissions`].
    pub fn fchown(&self, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.set(SetAttributes::new().owner(uid, gid))
    }

    /// Returns the value of an extended attribute, as
    /// [`Files::attribute`](crate::Files::attribute).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.set_attribute("user.colour", "green", Default::default())?;
    /// assert_eq!(file.attribute("user.colour")?, b"green");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NoAttribute`](crate::FsError::NoAttribute),
    /// [`FsError::Pool`](crate::FsError::Pool).
    pub fn attribute(&self, name: impl AsRef<[u8]>) -> Result<Vec<u8>> {
        attributes::check_length(name.as_ref())?;
        self.look_at_attributes(|inode, slots| attributes::get(inode, slots, name.as_ref()))
    }

    /// Returns the names of all extended attributes.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.set_attribute("user.colour", "green", Default::default())?;
    /// assert_eq!(file.attributes()?, [b"user.colour"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::Pool`](crate::FsError::Pool).
    pub fn attributes(&self) -> Result<Vec<Vec<u8>>> {
        self.look_at_attributes(|inode, slots| attributes::list(inode, slots))
    }

    /// Sets an extended attribute, as [`Files::set_attribute`](crate::Files::set_attribute).
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::SetMode;
    ///
    /// let file = files.create_file("/f")?;
    /// file.set_attribute("user.colour", "green", SetMode::Create)?;
    /// let again = file.set_attribute("user.colour", "red", SetMode::Create);
    /// assert_eq!(again.unwrap_err().errno(), libc::EEXIST);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Files::set_attribute`](crate::Files::set_attribute).
    pub fn set_attribute(
        &self,
        name: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        mode: SetMode,
    ) -> Result<()> {
        let (name, value) = (name.as_ref(), value.as_ref());
        attributes::check_length(name)?;
        let (own, shared) = (self.inode(), &self.files().shared);
        shared.change(|names| {
            let inode = own.read(names.slots)?;
            let path = || self.as_path();
            names.set_attribute(inode, (name, value), mode, &shared.caller, path)
        })
    }

    /// Removes an extended attribute.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// let file = files.create_file("/f")?;
    /// file.set_attribute("user.colour", "green", Default::default())?;
    /// file.remove_attribute("user.colour")?;
    /// assert!(file.attributes()?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NoAttribute`](crate::FsError::NoAttribute),
    /// [`FsError::Immutable`](crate::FsError::Immutable), [`FsError::Pool`](crate::FsError::Pool).
    pub fn remove_attribute(&self, name: impl AsRef<[u8]>) -> Result<()> {
        let name = name.as_ref();
        attributes::check_length(name)?;
        let (own, shared) = (self.inode(), &self.files().shared);
        shared.change(|names| {
            let inode = own.read(names.slots)?;
            names.remove_attribute(inode, name, &shared.caller, || self.as_path())
        })
    }

    fn look_at_attributes<T>(
        &self,
        look: impl Fn(&FileInode, &aquifer_pool::MetadataView<'_>) -> Result<T>,
    ) -> Result<T> {
        let own = self.inode();
        self.files().shared.look(|slots| {
            let inode = own.read(slots)?;
            look(&inode, slots)
        })
    }
}
