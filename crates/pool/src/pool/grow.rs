//! Growing a pool, and upgrading it: while it is closed.

use std::path::Path;
use std::sync::Arc;

use super::Pool;
use crate::error::Result;
use crate::format::layout::Layout;
use crate::format::superblock::KNOWN_FEATURES;
use crate::media::{self, Media};
use crate::open::{grow, upgrade};
use crate::options::PoolOptions;

impl Pool {
    /// Grows the pool in a file or device to `len_bytes`, rounded down to whole pages. `progress`
    /// is called from time to time with the number of new bytes so far, and the total. Of the
    /// options, only the location of the shared memory is used
    /// ([`PoolOptions::segment_directory`]).
    ///
    /// # Errors
    /// [`PoolError::Busy`] and [`PoolError::BusyElsewhere`] while another process has it open;
    /// [`PoolError::Parameter`] if it is longer already, or would become longer than a pool can be;
    /// those of [`Pool::open`] and of the media. After any of them the pool has either the old or
    /// the new length.
    pub fn grow(
        path: impl AsRef<Path>,
        len_bytes: u64,
        options: &PoolOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Layout> {
        Self::grow_on(media::open(path.as_ref(), true, None)?, len_bytes, options, progress)
    }

    /// Grows the pool on media that no open pool uses.
    ///
    /// # Errors
    /// As for [`Pool::grow`]; [`PoolError::MediaInUse`] if a pool is open on them.
    pub fn grow_on(
        media: Arc<dyn Media>,
        len_bytes: u64,
        options: &PoolOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Layout> {
        grow::grow(media, len_bytes, options, progress)
    }
}

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
        upgrade::upgrade_to(media, options, KNOWN_FEATURES)
    }
}
