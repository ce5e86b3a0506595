//! Growing a pool that no process has open.
//!
//! ```text
//!   1. recover                        the log is empty, everything is at its place
//!   2. zero what the file has already behind the pool, make the file longer, both durably
//!   3. superblocks with the new number of pages, one after the other
//!   4. a longer run for the saved state, which grows with the pool
//!      - its pages are reserved: the head records durably that they are not fresh
//!      - superblocks that name it, one after the other
//! ```
//!
//! A crash before 3 leaves the old pool in a longer file, which is harmless; during 3 each copy
//! describes a whole pool of one size or the other; so it is in 4, before which no superblock names
//! the reserved pages, and they are free. The head is not changed: its first fresh page
//! lies in the old pool or at its end, and everything from there on is still zero.
//!
//! A pool does not shrink: objects lie wherever there was room.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::{PoolError, Result};
use crate::format::PAGE_BYTES;
use crate::format::layout::Layout;
use crate::format::saved::SavedLayout;
use crate::format::superblock::{SAVED, Superblock};
use crate::log::superblocks::write_superblocks;
use crate::media::{ByteRange, Media};
use crate::metadata::core::Core;
use crate::open::create::has_room_for_saved;
use crate::open::recovery;
use crate::options::PoolOptions;

/// Enlarges a closed pool: see [`Pool::grow`](crate::Pool::grow).
pub(crate) fn grow(
    media: Arc<dyn Media>,
    len_bytes: u64,
    options: &PoolOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Layout> {
    let options = options.to_convert();
    let core = recovery::open(media.clone(), &options, None, None)?.core;
    let grown = match core.prepare_to_grow(len_bytes, progress) {
        Ok(Some(superblock)) => {
            let written = write_superblocks(&*core.handle.media, &superblock, 0, options.mutant);
            // There is nothing that closing would have to write, and closing would write the old
            // length.
            core.handle.members.locks.leave_slot(core.handle.control());
            written?;
            superblock.layout
        }
        unchanged => {
            // Opening has discarded the saved state.
            core.close();
            unchanged?;
            core.handle.layout
        }
    };
    let wants_saved = core.handle.features & SAVED != 0 || has_room_for_saved(&grown);
    drop(core);
    if !wants_saved {
        return Ok(grown);
    }
    match place_saved(media, &options) {
        // Fragmented, and hardly longer than before: it works without a saved state.
        Err(PoolError::Full { .. }) => Ok(grown),
        placed => placed.map(|()| grown),
    }
}

/// Gives the saved state of a closed pool a run, if it needs more pages than it has.
fn place_saved(media: Arc<dyn Media>, options: &PoolOptions) -> Result<()> {
    let core = recovery::open(media.clone(), options, None, None)?.core;
    let placed = core.place_saved();
    if let Ok(false) = placed {
        core.close();
        return Ok(());
    }
    // There is nothing that closing would have to write, and closing would name the old run.
    core.handle.members.locks.leave_slot(core.handle.control());
    drop(core);
    placed?;
    // Closes with the new one.
    recovery::open(media, options, None, None)?.core.close();
    Ok(())
}

impl Core {
    /// Makes the file longer. Returns the superblock of the longer pool; `None` if it is as long
    /// already.
    fn prepare_to_grow(
        &self,
        len_bytes: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<Superblock>> {
        let (old, media) = (self.handle.layout, &*self.handle.media);
        let new = Layout { page_count: len_bytes / PAGE_BYTES, ..old };
        let refused = |reason| PoolError::Parameter {
            what: "the size",
            value: format!("{len_bytes} bytes"),
            reason,
        };
        if new.page_count < old.page_count {
            return Err(refused("the pool is longer than that, and pools do not shrink"));
        }
        new.validate().map_err(|_| refused("no pool can be that long"))?;
        if new == old {
            return Ok(None);
        }
        // Bytes that another program wrote behind the pool are not zero.
        let behind = ByteRange {
            offset_bytes: old.len_bytes(),
            len_bytes: media.len_bytes().min(new.len_bytes()) - old.len_bytes(),
        };
        zero_durably(media, behind)?;
        if media.len_bytes() < new.len_bytes() {
            media.grow_with_progress(new.len_bytes(), progress)?;
        }
        let tail_lsn = self.handle.control().tail_lsn.load(Relaxed);
        Ok(Some(Superblock { layout: new, ..self.handle.superblock(tail_lsn) }))
    }

    /// Writes superblocks with a longer run for the saved state. Returns false if it is long enough.
    fn place_saved(&self) -> Result<bool> {
        let handle = &self.handle;
        let pages = SavedLayout::new(&handle.layout).pages();
        if pages <= handle.saved.pages {
            return Ok(false);
        }
        let reservation = self.space.reserve_pages(pages, 1, false)?;
        let saved = reservation.whole();
        // Their bytes will not be zero.
        self.use_fresh_pages(saved.end_page())?;
        // Nothing else was handed out: the rest stays fresh.
        self.lower_fresh()?;
        self.checkpoint()?;
        let tail_lsn = handle.control().tail_lsn.load(Relaxed);
        let features = handle.features | SAVED;
        let superblock = Superblock { features, saved, ..handle.superblock(tail_lsn) };
        write_superblocks(&*handle.media, &superblock, 0, handle.mutant)?;
        Ok(true)
    }
}

fn zero_durably(media: &dyn Media, range: ByteRange) -> Result<()> {
    const PIECE_BYTES: u64 = 1 << 20;
    if range.len_bytes == 0 {
        return Ok(());
    }
    let zeros = vec![0; PIECE_BYTES.min(range.len_bytes) as usize];
    for done in (0..range.len_bytes).step_by(PIECE_BYTES as usize) {
        let len_bytes = PIECE_BYTES.min(range.len_bytes - done) as usize;
        // SAFETY: no inode has these pages yet.
        unsafe { media.write_at(range.offset_bytes + done, &zeros[..len_bytes])? };
    }
    media.write_back(&[range])?;
    media.flush()?;
    Ok(())
}
