//! Pinning pages and inodes of a pool: see the top of `pins/mod.rs`.

use super::Pool;
use crate::error::{PoolError, Result};
use crate::pins::{InodeUse, Pin, PinValue};
use crate::shared::image_words::pin_in_time;

impl Pin<'_> {
    /// Turns it into a pin that keeps the pool open as well; `pool` must be the one that made it.
    pub fn into_owned(self, pool: &Pool) -> OwnedPin {
        assert!(std::ptr::eq(self.pins, &pool.core().pins), "a pin of another pool");
        let pin = std::mem::ManuallyDrop::new(self);
        OwnedPin { pool: pool.clone(), place: pin.place }
    }
}

/// A [`Pin`], or an open pin, that keeps the pool open as well.
#[must_use = "the pages, or the inode, are kept only as long as this lives"]
#[derive(Debug)]
pub struct OwnedPin {
    pool: Pool,
    place: u64,
}

impl Drop for OwnedPin {
    fn drop(&mut self) {
        self.pool.core().pins.unpin(self.place);
    }
}

impl Pool {
    /// Pins the pages that an inode has as of `layout_version`: pages that a later change of it
    /// frees are not reused while the result lives, in any process. Takes some nanoseconds if the
    /// pool is open for writing. If it is open for reading, takes a system call, unless the handle
    /// already pins these pages; so does dropping the last such pin. Safe from any thread.
    ///
    /// The pages may have been freed before the pin was set. The caller must check the layout
    /// version again *afterwards*, as [`Pool::pin_current`] does.
    ///
    /// # Errors
    /// [`PoolError::TooManyPins`] in a pool that is open for writing, [`PoolError::CannotLock`] in
    /// one that is open for reading; [`PoolError::Forked`]; [`PoolError::Parameter`] for an inode
    /// number that cannot exist.
    #[inline]
    pub fn pin(&self, inode: u64, layout_version: u64) -> Result<Pin<'_>> {
        let pins = &self.core().pins;
        let place = pins.set(inode, PinValue::of_version(inode, layout_version))?;
        Ok(Pin { pins, place })
    }

    /// Pins the pages of a file if its inode still has this generation and layout version;
    /// otherwise returns `None`, and the caller reads the inode again. While the result lives, the
    /// pages that the inode named then hold what was written to this file.
    ///
    /// # Errors
    /// As for [`Pool::pin`]; [`PoolError::Stalled`].
    #[inline]
    pub fn pin_current(
        &self,
        inode: u64,
        generation: u64,
        layout_version: u64,
    ) -> Result<Option<Pin<'_>>> {
        pin_in_time(
            || self.pin(inode, layout_version),
            || self.core().image.has_layout(inode, generation, layout_version),
        )
    }

    /// As [`Pool::pin_current`], if nothing in the pool has changed since its metadata had this
    /// version ([`Pool::metadata_version`]), when the inode had this layout version.
    ///
    /// # Errors
    /// As for [`Pool::pin`].
    #[inline]
    pub fn pin_unchanged(
        &self,
        inode: u64,
        layout_version: u64,
        metadata_version: u64,
    ) -> Result<Option<Pin<'_>>> {
        pin_in_time(
            || self.pin(inode, layout_version),
            // Every change of a layout changes the metadata version.
            || Ok(self.core().image.metadata_version() == metadata_version),
        )
    }

    /// As [`Pool::pin`]; the result keeps the pool open as well.
    ///
    /// # Errors
    /// As for [`Pool::pin`].
    pub fn pin_owned(&self, inode: u64, layout_version: u64) -> Result<OwnedPin> {
        let place = self.core().pins.set(inode, PinValue::of_version(inode, layout_version))?;
        Ok(OwnedPin { pool: self.clone(), place })
    }

    /// Marks an inode as in use while the result lives; its pages are not pinned. A caller that
    /// opens a file checks *afterwards* whether the inode still has a link.
    ///
    /// # Errors
    /// As for [`Pool::pin`]; [`PoolError::ReadOnly`] for [`InodeUse::Writable`] in a pool that is
    /// open for reading, or [passively](crate::PoolOptions::passive).
    pub fn pin_inode(&self, inode: u64, usage: InodeUse) -> Result<OwnedPin> {
        if usage == InodeUse::Writable && !self.is_writable() {
            return Err(PoolError::ReadOnly {
                path: self.media().path().to_path_buf(),
                reason: "it was opened for reading, and no byte of it can be stored to",
            });
        }
        if usage == InodeUse::Writable {
            self.core().handle.check_not_passive()?;
        }
        let place = self.core().pins.set(inode, PinValue::of_use(inode, usage))?;
        let pin = OwnedPin { pool: self.clone(), place };
        self.core().pins.wait_while_claimed(inode)?;
        Ok(pin)
    }

    /// Whether any process uses an inode in this way: see [`Pool::pin_inode`].
    ///
    /// An inode may be given back if it had no link *before* this call, by a transaction that was
    /// visible then, and this returns that it is not open.
    /// [`Transaction::is_used`](crate::Transaction::is_used) is the same inside a transaction.
    ///
    /// # Errors
    /// [`PoolError::Stalled`]; [`PoolError::ReadOnly`] for readers.
    pub fn is_used(&self, inode: u64, usage: InodeUse) -> Result<bool> {
        let core = self.core();
        core.handle.check_writable()?;
        Ok(core.pins.is_used(&core.log.lock()?, inode, usage))
    }
}
