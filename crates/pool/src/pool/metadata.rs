//! Reading and changing the metadata of a pool.

use super::Pool;
use crate::error::{PoolError, Result};
use crate::format::file::FileState;
use crate::format::inode::Inode;
use crate::metadata::image::View as MetadataView;
use crate::metadata::reservation::Reservation;
use crate::metadata::transaction::{Durability, Transaction};

impl Pool {
    /// The inode with this number; a free one if there is none.
    ///
    /// # Errors
    /// [`PoolError::Damaged`].
    pub fn inode(&self, number: u64) -> Result<Inode> {
        self.core().image.inode(number)
    }

    /// The inode of the object with a name; `None` if there is none, or a full recovery found that it
    /// is damaged. A lookup takes about as many steps as the number of objects has bits; the first one
    /// by a process that writes, after the pool was opened or a process has died in a change, reads
    /// all objects for an index. It waits for no other process that makes a change: then it compares
    /// names, and the rest of the index is left to later lookups, transactions and
    /// [`Pool::index_names`]. One by a process that only reads compares the names of all objects until
    /// then, unless no other process has the pool open.
    ///
    /// # Errors
    /// [`PoolError::Stalled`], [`PoolError::Forked`]; [`PoolError::Damaged`] and
    /// [`PoolError::Media`] if no object that can be read has the name, and one cannot be read that
    /// may have it.
    pub fn object_named(&self, name: &[u8]) -> Result<Option<Inode>> {
        self.core().image.object_named(name)
    }

    /// Builds the index that [`Pool::object_named`] uses, unless it is whole, a thousand objects at a
    /// time; waits for changes of others. Does nothing if this handle only reads, or if the index
    /// cannot hold all objects. After a process has died in a change it is built anew: a process that
    /// keeps a pool open for others calls this again and again, which costs next to nothing while the
    /// index is whole.
    ///
    /// # Errors
    /// [`PoolError::Stalled`], [`PoolError::Forked`], [`PoolError::LocksLost`],
    /// [`PoolError::SharedMemory`]; [`PoolError::Damaged`] and [`PoolError::Media`] if an object
    /// cannot be read. What is not in the index yet is left to later calls.
    pub fn index_names(&self) -> Result<()> {
        self.core().image.index_names()
    }

    /// The inodes of all objects. Damaged ones are left out: [`Pool::info`] counts them.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn inodes(&self) -> Result<Vec<Inode>> {
        self.core().image.inodes()
    }

    /// The state that each read of a file checks, without a lock; `None` if the image is being
    /// changed, the inode is no file's, or this process is a fork.
    #[inline]
    pub fn file_state(&self, number: u64) -> Option<FileState> {
        let image = &self.core().image;
        image.handle.members.process.is_current().then(|| image.file_state(number))?
    }

    /// Whether a file has this generation and layout version, after everything that the caller has
    /// loaded before. If the caller had read the same values earlier, the pages belonged to the
    /// file all the time.
    ///
    /// # Errors
    /// [`PoolError::Stalled`], [`PoolError::Forked`].
    #[inline]
    pub fn has_layout(&self, number: u64, generation: u64, layout_version: u64) -> Result<bool> {
        self.core().image.has_layout(number, generation, layout_version)
    }

    /// A version that each change of the metadata raises, by any process; odd during a change. If
    /// it is even and unchanged, the metadata was not changed in between.
    #[inline]
    pub fn metadata_version(&self) -> u64 {
        self.core().image.metadata_version()
    }

    /// A version that each change of names raises, by any process. While it is unchanged, paths
    /// resolve as before. Metadata read after this call is at least as new.
    #[inline]
    pub fn names_version(&self) -> u64 {
        self.core().image.names_version()
    }

    /// Inodes of files without a name: a process has them open, or had them open when it died.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn orphans(&self) -> Result<Vec<u64>> {
        self.core().image.consistent(|image| image.orphans().collect())
    }

    /// Passes the metadata as of one moment to `look`, which may run several times.
    ///
    /// # Errors
    /// [`PoolError::Stalled`].
    pub fn look<T>(&self, look: impl FnMut(&MetadataView<'_>) -> T) -> Result<T> {
        self.core().image.consistent(look)
    }

    /// Changes metadata atomically; durable on return. The inodes that `change` puts name the pages
    /// of `reservations`. `change` may run several times.
    ///
    /// # Errors
    /// Those of `change`, with nothing changed; [`PoolError::Failed`], and then the outcome is old
    /// or new.
    ///
    /// # Safety
    /// A transaction can move the pages of any inode to another, and make an immutable file
    /// changeable. The layers above the pool guarantee more than the pool checks: the bytes of a
    /// leased file and of an attached object change only by the rules of these layers. The caller
    /// must change only what its own layer manages, and by the rules of that layer.
    pub unsafe fn transact<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        self.core().handle.check_may_change()?;
        self.core().transact(Durability::Now, reservations, change)
    }

    /// Changes metadata atomically, as [`Pool::transact`] does, and returns when all processes see
    /// the change; the death of any or all processes does not undo it. A power cut may, until
    /// [`Pool::sync`]. It then undoes all later changes as well, which leaves the state of one
    /// moment.
    ///
    /// What the reservations hold, and what the change exposes, must be written before. A call that
    /// uses pages for the first time may wait for the media.
    ///
    /// # Errors
    /// Those of `change` and [`PoolError::Stalled`], with nothing changed; [`PoolError::Media`] if
    /// the log cannot be written: then the outcome is old or new, and the pool is read-only.
    ///
    /// # Safety
    /// As for [`Pool::transact`].
    pub unsafe fn change<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T>,
    ) -> Result<T> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.try_change(reservations, change) }
    }

    /// [`Pool::change`] with the caller's error type.
    ///
    /// # Errors
    /// As for [`Pool::change`].
    ///
    /// # Safety
    /// As for [`Pool::transact`].
    pub unsafe fn try_change<'a, T, E: From<PoolError>>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        self.core().handle.check_may_change()?;
        let value = self.core().transact(Durability::Later, reservations, change)?;
        self.checkpoint_in_time();
        Ok(value)
    }
}
