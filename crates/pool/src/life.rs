//! The life of what was written: one number, the same as long as all of it is there, durable or not ([`cache_life`]).
//!
//! The superblock keeps the number of the life in which a generation of the log began. What the log has without saying that it is
//! durable counts only in the same life: then at most processes have died. Two numbers that differ prove nothing; a process in another
//! container may see other ones for the same file. So whoever finds another number must do both: not believe what needs the cache, and
//! make durable what it does believe.
//!
//! All processes that share a segment share the cache, since they hold locks of one file. So a process that joins takes the number from
//! the segment, and need not be able to find it out.
//!
//! A segment is a file too, perhaps on another file system than the pool, and has a life of its own ([`of_file`]).

use std::os::fd::BorrowedFd;

use aquifer_sys::{boot, cache_life};

use crate::format::checksum;
use crate::format::superblock::{ANY_BOOT, UNKNOWN_BOOT};
use crate::media::Media;
use crate::mutant::{self, Mutant};

/// No life: nothing is known, and nothing is believed.
pub(crate) const UNKNOWN: u64 = UNKNOWN_BOOT;

/// The life that the media are in, as this process sees them; `chosen` instead, in tests of power cuts.
pub(crate) fn of(media: &dyn Media, chosen: Option<u64>, mutant: Option<Mutant>) -> u64 {
    if let Some(chosen) = chosen {
        return chosen;
    }
    if mutant::is(mutant, Mutant::LifeOfMachine) {
        return boot::id();
    }
    of_file(media.file())
}

/// The life that a file is in, as this process sees it.
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
