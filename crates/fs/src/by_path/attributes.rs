//! Extended attributes by path.

use std::path::Path;

use crate::attributes;
use crate::error::Result;
use crate::files::Files;
use crate::walk::{self, Last, bytes_of, owned, walk};

impl Files {
    /// Returns the value of an extended attribute.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.set_attribute("/f", "user.colour", "green", Default::default())?;
    /// assert_eq!(files.attribute("/f", "user.colour")?, b"green");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NoAttribute`](crate::FsError::NoAttribute),
    /// [`FsError::NotFound`](crate::FsError::NotFound).
    pub fn attribute(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<Vec<u8>> {
        attributes::check_length(name.as_ref())?;
        let path = bytes_of(path.as_ref());
        self.shared.look(|slots| {
            let found = walk(slots, path, Last::Follow)?.referent(path)?;
            attributes::get(&walk::referred(slots, found)?, slots, name.as_ref())
        })
    }

    /// Returns the names of all extended attributes.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.set_attribute("/f", "user.colour", "green", Default::default())?;
    /// assert_eq!(files.attributes("/f")?, [b"user.colour"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NotFound`](crate::FsError::NotFound).
    pub fn attributes(&self, path: impl AsRef<Path>) -> Result<Vec<Vec<u8>>> {
        let path = bytes_of(path.as_ref());
        self.shared.look(|slots| {
            let found = walk(slots, path, Last::Follow)?.referent(path)?;
            attributes::list(&walk::referred(slots, found)?, slots)
        })
    }

    /// Sets an extended attribute.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// use aquifer_fs::{FsError, SetMode};
    ///
    /// files.create_file("/f")?;
    /// files.set_attribute("/f", "user.colour", "green", SetMode::Create)?;
    /// let again = files.set_attribute("/f", "user.colour", "red", SetMode::Create);
    /// assert!(matches!(again, Err(FsError::AttributeExists { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the name and value; [`FsError::AttributeExists`](crate::FsError::AttributeExists)
    /// and [`FsError::NoAttribute`](crate::FsError::NoAttribute) depending on `mode`;
    /// [`FsError::NotFound`](crate::FsError::NotFound),
    /// [`FsError::Immutable`](crate::FsError::Immutable), [`FsError::Pool`](crate::FsError::Pool).
    pub fn set_attribute(
        &self,
        path: impl AsRef<Path>,
        name: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        mode: attributes::SetMode,
    ) -> Result<()> {
        let (name, value) = (name.as_ref(), value.as_ref());
        attributes::check_length(name)?;
        attributes::check_value(value)?;
        let (shared, path) = (&self.shared, bytes_of(path.as_ref()));
        shared.change(|names| {
            let found = walk(names.slots, path, Last::Follow)?.referent(path)?;
            let inode = walk::referred(names.slots, found)?;
            names.set_attribute(inode, (name, value), mode, &shared.caller, || owned(path))
        })
    }

    /// Removes an extended attribute.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # let pool = aquifer_pool::Pool::create(&path, 1 << 20)?;
    /// # let files = aquifer_fs::Files::new(pool);
    /// files.create_file("/f")?;
    /// files.set_attribute("/f", "user.colour", "green", Default::default())?;
    /// files.remove_attribute("/f", "user.colour")?;
    /// assert!(files.attributes("/f")?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FsError::NoAttribute`](crate::FsError::NoAttribute),
    /// [`FsError::NotFound`](crate::FsError::NotFound),
    /// [`FsError::Immutable`](crate::FsError::Immutable), [`FsError::Pool`](crate::FsError::Pool).
    pub fn remove_attribute(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<()> {
        let name = name.as_ref();
        attributes::check_length(name)?;
        let (shared, path) = (&self.shared, bytes_of(path.as_ref()));
        shared.change(|names| {
            let found = walk(names.slots, path, Last::Follow)?.referent(path)?;
            let inode = walk::referred(names.slots, found)?;
            names.remove_attribute(inode, name, &shared.caller, || owned(path))
        })
    }
}
