//! Growing a pool while it is closed.

use std::path::Path;

use super::Pool;
use crate::error::Result;
use crate::format::layout::Layout;
use crate::media;
use crate::open::grow;
use crate::options::PoolOptions;

impl Pool {
    /// Grows the pool in a file or device to `len_bytes`, rounded down to whole pages. `progress`
    /// is called from time to time with the number of new bytes so far, and the total. Of the
    /// options, only the location of the shared memory is used
    /// ([`PoolOptions::segment_directory`]).
    ///
    /// # Errors
    /// [`PoolError::Busy`](crate::PoolError::Busy) and [`PoolError::BusyElsewhere`](crate::PoolError::BusyElsewhere) while another process has it open;
    /// [`PoolError::Parameter`](crate::PoolError::Parameter) if it is longer already, or would become longer than a pool can be;
    /// those of [`Pool::open`] and of the media. After any of them the pool has either the old or
    /// the new length.
    pub fn grow(
        path: impl AsRef<Path>,
        len_bytes: u64,
        options: &PoolOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Layout> {
        grow::grow(media::open(path.as_ref(), true, None)?, len_bytes, options, progress)
    }

    /// Grows the pool on media that no open pool uses.
    ///
    /// # Errors
    /// As for [`Pool::grow`]; [`PoolError::MediaInUse`] if a pool is open on them.
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    pub fn grow_on(
        media: std::sync::Arc<dyn media::Media>,
        len_bytes: u64,
        options: &PoolOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Layout> {
        grow::grow(media, len_bytes, options, progress)
    }
}
