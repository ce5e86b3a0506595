//! Making files immutable, and mutable again.

use std::path::Path;

use aquifer_pool::format::file::FileInode;
use aquifer_pool::{InodeUse, Transaction};

use crate::error::{FsError, Result};
use crate::files::{Files, Shared};
use crate::names::Names;
use crate::walk::{self, Last, bytes_of, owned, walk};

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
            let number = self.shared.look_up(path, Last::Follow)?.number;
            // Take the write lock: in-flight writers have already passed the immutability check.
            let _writing = self.shared.pool.lock_file(number)?;
            let outcome = if is_immutable {
                self.shared.freeze(path, number)?
            } else {
                // First stop new leases, then check that there are none.
                match self.shared.begin_to_clear_immutable(path, number)? {
                    Found::Elsewhere => Found::Elsewhere,
                    Found::There => self.shared.clear_immutable(path, number)?,
                }
            };
            match outcome {
                Found::There => return Ok(()),
                Found::Elsewhere => {}
            }
        }
    }
}

/// Whether a path still refers to a given inode.
enum Found {
    There,
    Elsewhere,
}

impl Shared {
    /// Makes a file immutable. The caller holds the file's lock.
    fn freeze(&self, path: &[u8], number: u64) -> Result<Found> {
        self.change_found(path, number, |names, inode| {
            if !inode.is_immutable && names.slots.is_used(number, InodeUse::Writable) {
                return Err(FsError::InUse { path: owned(path) });
            }
            (inode.is_immutable, inode.is_clearing_immutable) = (true, false);
            Ok(())
        })
    }

    /// Marks an immutable file as clearing: no new leases.
    fn begin_to_clear_immutable(&self, path: &[u8], number: u64) -> Result<Found> {
        self.change_found(path, number, |_, inode| {
            inode.is_clearing_immutable = inode.is_immutable;
            Ok(())
        })
    }

    /// Makes a file mutable; if it has a lease, restores full immutability and fails.
    fn clear_immutable(&self, path: &[u8], number: u64) -> Result<Found> {
        let mut is_leased = false;
        let found = self.change_found(path, number, |names, inode| {
            is_leased = names.slots.is_used(number, InodeUse::Leased);
            (inode.is_immutable, inode.is_clearing_immutable) = (is_leased, false);
            Ok(())
        })?;
        if is_leased { Err(FsError::InUse { path: owned(path) }) } else { Ok(found) }
    }

    /// Changes the inode of this number, if the path still refers to it.
    fn change_found(
        &self,
        path: &[u8],
        number: u64,
        mut change: impl FnMut(&mut Names<'_, Transaction<'_>>, &mut FileInode) -> Result<()>,
    ) -> Result<Found> {
        self.change(|names| {
            let found = walk(names.slots, path, Last::Follow)?.referent(path)?;
            if found.inode != number {
                return Ok(Found::Elsewhere);
            }
            let before = walk::referred(names.slots, found)?;
            let mut inode = before.clone();
            change(names, &mut inode)?;
            if inode != before {
                inode.changed_ns = names.now_ns;
                names.put(&inode)?;
            }
            Ok(Found::There)
        })
    }
}
