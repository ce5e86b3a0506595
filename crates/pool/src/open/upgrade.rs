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

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::Result;
use crate::format::saved::SavedLayout;
use crate::format::superblock::{SAVED, Superblock};
use crate::log::superblocks::write_superblocks;
use crate::media::Media;
use crate::metadata::core::Core;
use crate::metadata::reservation::Reservation;
use crate::open::recovery;
use crate::options::PoolOptions;

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
