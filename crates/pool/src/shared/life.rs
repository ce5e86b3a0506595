//! The life of written bytes: a number that stays the same as long as all of them are there,
//! durable or not ([`cache_life`]).
//!
//! The superblock stores the life in which a generation of the log began. Records that are not
//! marked as durable count only in the same life: then at most processes have died. Two different
//! numbers prove nothing; a process in another container may see a different number for the same
//! file. So a process that finds another number must do both: distrust what depends on the cache,
//! and make durable what it does trust.
//!
//! All processes that share a segment share the cache, since they hold locks of one file. So a
//! process that joins takes the number from the segment, and need not be able to determine it.
//!
//! A segment is a file too, possibly on another file system than the pool, and has a separate life
//! ([`of_file`]).

use std::os::fd::BorrowedFd;

use aquifer_sys::{boot, cache_life};

use crate::format::checksum;
use crate::format::superblock::{ANY_BOOT, UNKNOWN_BOOT};
use crate::media::Media;
use crate::mutant::{self, Mutant};

/// No life: it is unknown, and nothing is trusted.
pub(crate) const UNKNOWN: u64 = UNKNOWN_BOOT;

/// The life that the media are in, as seen by this process; `chosen` instead, in tests of power
/// cuts.
pub(crate) fn of(media: &dyn Media, chosen: Option<u64>, mutant: Option<Mutant>) -> u64 {
    if let Some(chosen) = chosen {
        return chosen;
    }
    if mutant::is(mutant, Mutant::LifeOfMachine) {
        return boot::id();
    }
    of_file(media.file())
}

/// The life that a file is in, as seen by this process.
pub(crate) fn of_file(file: BorrowedFd<'_>) -> u64 {
    match cache_life::of(file) {
        None => UNKNOWN,
        Some(numbers) => {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            match checksum(&[&bytes]) {
                UNKNOWN | ANY_BOOT => 1,
                life => life,
            }
        }
    }
}
