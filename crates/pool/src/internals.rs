//! What the check of a pool (`aquifer-check`) shares with recovery, so that both come to the same
//! result on any bytes. No other crate needs it; it is not a part of the public interface, and any
//! version may change it.

use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::format::owners::Owners;
use crate::format::superblock::Superblock;
use crate::log::superblocks::{Superblocks, read_superblocks, write_superblocks};
use crate::media::Media;
use crate::metadata::image_slots;
use crate::open::recovery::{self, OnlyOne};
use crate::options::PoolOptions;
use crate::pool::Pool;
use crate::shared::life;
use crate::shared::segment_place::{Owner, Places};

pub use crate::log::reader::{Counted, LogEnd, LogReader, UNMARKED};
pub use crate::log::replay::most_copied_bytes;
pub use crate::shared::presence::Presence;

/// Keeps all other openers of a pool out until it is dropped.
pub struct Alone {
    _locks: OnlyOne,
}

/// Locks media exclusively without opening the pool on them, which may be damaged.
///
/// # Errors
/// As for opening the pool exclusively.
pub fn lock_for_one(media: &dyn Media, options: &PoolOptions) -> Result<Alone> {
    recovery::lock_for_one(media, options, None).map(|only| Alone { _locks: only })
}

/// Options to open a pool alone and repair it: for writing even if its link counts are wrong.
/// `boot` replaces the life that the media are in, in tests of power cuts.
pub fn to_repair(boot: Option<u64>) -> PoolOptions {
    PoolOptions {
        exclusive: true,
        background: false,
        repairs: true,
        boot,
        ..PoolOptions::default()
    }
}

/// The life that recovery takes the superblock to name; `directory` is the one chosen for shared
/// memory.
pub fn boot_of_left(directory: Option<&Path>, superblock: &Superblock, media: &dyn Media) -> u64 {
    recovery::boot_of_left(&Places::new(directory, media.path()), superblock, media)
}

/// Shared memory of this pool, which no process uses if none has the pool open; `directory` is the
/// one chosen for it.
pub fn left_behind(
    directory: Option<&Path>,
    superblock: &Superblock,
    media: &dyn Media,
) -> Vec<PathBuf> {
    let Ok(owner) = Owner::new(superblock.uuid, media.file()) else { return Vec::new() };
    let left = Places::new(directory, media.path());
    let left = left.left_by(owner, superblock.segment, superblock.uuid);
    left.into_iter().map(|left| left.path).collect()
}

/// The life that media are in, as seen by this process; `chosen` instead, in tests of power cuts.
pub fn life_of(media: &dyn Media, chosen: Option<u64>) -> u64 {
    life::of(media, chosen, None)
}

/// Makes the superblocks name no saved state, so that the pool is opened as after a crash. The caller
/// has locked the media.
///
/// # Errors
/// Those of reading and writing the superblocks.
pub fn discard_saved(media: &dyn Media) -> Result<()> {
    let Superblocks { valid, copy, .. } = read_superblocks(media)?;
    let sequence = valid.next_sequence();
    let discarded = Superblock { sequence, saved_sum: 0, ..valid };
    Ok(write_superblocks(media, &discarded, copy, None)?)
}

/// The owners of pages and the inconsistencies, as the image of an open pool has them.
pub fn owners(pool: &Pool) -> Owners {
    image_slots::owners(&pool.core().handle)
}
