//! Upgrading a pool made by an earlier program: what newer pools have is added behind feature bits.
//!
//! ```text
//!   1. recover                                   the log is empty, everything is at its place
//!   2. reserve the pages of the saved state      the head records durably that they are not fresh
//!   3. superblocks with the features, one after the other
//! ```
//!
//! Each copy of the superblock describes a whole pool of one form or the other. After a crash
//! before 3 no superblock names the reserved pages, so they are free; a pool whose copies differ is
//! the old one for an earlier program, which opens it only for reading, and the new one for this
//! program.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::core::Core;
use crate::error::Result;
use crate::format::saved::SavedLayout;
use crate::format::superblock::{KNOWN_FEATURES, SAVED, Superblock};
use crate::media::{self, Media};
use crate::options::PoolOptions;
use crate::pool::Pool;
use crate::recovery;
use crate::reservation::Reservation;
use crate::superblocks::write_superblocks;

impl Pool {
    /// Converts the pool in a file or device to the newest form, and returns whether there was
    /// anything to convert. Earlier programs refuse the pool afterwards. Of the options, only the
    /// location of the shared memory is used ([`PoolOptions::segment_directory`]).
    ///
    /// The new form opens at once after a clean close, however many files it has, and can contain
    /// named pipes, sockets and devices. It takes 6 pages, or one
    /// in 2,000 to 4,000 of a larger pool.
    ///
    /// # Errors
    /// [`PoolError::Busy`](crate::PoolError::Busy) and
    /// [`PoolError::BusyElsewhere`](crate::PoolError::BusyElsewhere) while another process has it open;
    /// [`PoolError::Full`](crate::PoolError::Full) if these pages are not free; those of [`Pool::open`] and of the media.
    /// After any of them the pool has either form.
    ///
    /// ```
    /// use aquifer_pool::Pool;
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("data.pool");
    /// # drop(Pool::create(&path, 16 << 20)?);
    /// let was_old = Pool::upgrade(&path, &Pool::options())?;
    /// assert!(!was_old, "it was just created");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn upgrade(path: impl AsRef<Path>, options: &PoolOptions) -> Result<bool> {
        Self::upgrade_on(media::open(path.as_ref(), true, None)?, options)
    }

    /// Upgrades the pool on media that no open pool uses.
    ///
    /// # Errors
    /// As for [`Pool::upgrade`]; [`PoolError::MediaInUse`](crate::PoolError::MediaInUse) if a pool is open on them.
    pub fn upgrade_on(media: Arc<dyn Media>, options: &PoolOptions) -> Result<bool> {
        upgrade_to(media, options, KNOWN_FEATURES)
    }
}

/// Adds `features`, and pages for the saved state if it needs more than it has.
pub(crate) fn upgrade_to(
    media: Arc<dyn Media>,
    options: &PoolOptions,
    features: u64,
) -> Result<bool> {
    let options = options.to_convert();
    let core = recovery::open(media.clone(), &options, None, None)?.core;
    let upgraded = core.upgrade(features);
    if let Ok(false) = upgraded {
        core.close();
        return Ok(false);
    }
    // There is nothing that closing would have to write, and closing would write the old form.
    core.handle.members.locks.leave_slot(core.handle.control());
    drop(core);
    if upgraded? {
        // Closes in the new form.
        recovery::open(media, &options, None, None)?.core.close();
    }
    Ok(true)
}

impl Core {
    fn upgrade(&self, features: u64) -> Result<bool> {
        let handle = &self.handle;
        let features = handle.features | features;
        let pages = match features & SAVED {
            0 => 0,
            _ => SavedLayout::new(&handle.layout).pages(),
        };
        if features == handle.features && pages <= handle.saved.pages {
            return Ok(false);
        }
        let reservation = (pages > handle.saved.pages)
            .then(|| self.space.reserve_pages(pages, 1, false))
            .transpose()?;
        let saved = reservation.as_ref().map_or(handle.saved, Reservation::whole);
        // Their bytes will not be zero.
        self.use_fresh_pages(saved.end_page())?;
        // Nothing else was handed out: the rest stays fresh.
        self.lower_fresh()?;
        self.checkpoint()?;
        let tail_lsn = handle.control().tail_lsn.load(Relaxed);
        let superblock = Superblock { features, saved, ..handle.superblock(tail_lsn) };
        write_superblocks(&*handle.media, &superblock, 0, handle.mutant)?;
        Ok(true)
    }
}
