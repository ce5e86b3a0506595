//! Predicts whether a page that is read will be stored to.
//!
//! A clean page of a writable mapping is installed write-protected, so reading and then storing
//! takes two faults, and the second one interrupts every CPU that runs a thread of the process.
//! If nearly every page that is read is stored to soon after, pages are installed writable and
//! Dirty at once.
//!
//! The prediction may be wrong, and a page that was only read must not be written back: another
//! writer may have changed it on the device in the meantime. So the store remembers a hash of what
//! was loaded. Write-back protects the page, hashes it again, and leaves it out if nothing has
//! changed. The hash has 128 bits and a random seed: two contents collide by chance once in 10^38.
//!
//! One page in sixteen is still installed protected and watched, to see whether the prediction
//! holds.
//!
//! # Invariant
//! A page is *guessed* only while it is Loading, Dirty or Cleaning, and only while the device holds
//! what was loaded: sealing the page (Dirty → Cleaning) ends the guess, and so does writing a
//! snapshot of it. Otherwise a later store of the loaded content would be lost.

use std::io;

use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::bits::Bits;
use crate::lazy::LazyArray;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// While pages are guessed to be stored to, one load out of this many is watched instead.
const WATCH_ONE_IN: u32 = 16;
/// Watched loads before the first guess.
const FEWEST: u32 = 64;
/// Watched loads after which old ones count half.
const HALVED_AT: u32 = 256;

/// The access history of one store, and the pages that were guessed to be stored to.
///
/// Relaxed throughout: a lost count costs a little accuracy. The guess about a page is read and changed only by the thread that
/// has the page Loading, Cleaning, or pinned for a snapshot; the page word hands it on.
pub(crate) struct Guesses {
    loads: AtomicU32,
    watched: AtomicU32,
    stored_to: AtomicU32,
    /// One bit per page: it was guessed, and has not been written since.
    guessed: Bits,
    /// One bit per page: it was installed protected, and its load is counted in `watched`.
    is_watched: Bits,
    /// The hash of what was loaded, two words per page.
    hashes: LazyArray<AtomicU64>,
    seed: u64,
}

impl Guesses {
    /// Guesses for a store of `pages` pages. Uses memory only for pages that are guessed.
    pub fn new(pages: u64) -> io::Result<Guesses> {
        Ok(Guesses {
            loads: AtomicU32::new(0),
            watched: AtomicU32::new(0),
            stored_to: AtomicU32::new(0),
            guessed: Bits::new(pages as usize)?,
            is_watched: Bits::new(pages as usize)?,
            hashes: LazyArray::new(2 * pages as usize)?,
            seed: aquifer_sys::random::next_u64()?,
        })
    }

    /// Whether a page about to be loaded for reading should be installed writable.
    pub fn will_be_stored_to(&self) -> bool {
        let load = self.loads.fetch_add(1, Ordering::Relaxed);
        let watched = self.watched.load(Ordering::Relaxed);
        let stored_to = self.stored_to.load(Ordering::Relaxed);
        let guess = watched >= FEWEST && u64::from(stored_to) * 8 >= u64::from(watched) * 7;
        if guess && !load.is_multiple_of(WATCH_ONE_IN) {
            return true;
        }
        if watched + 1 >= HALVED_AT {
            self.watched.store(watched.div_ceil(2), Ordering::Relaxed);
            self.stored_to.store(stored_to / 2, Ordering::Relaxed);
        } else {
            self.watched.fetch_add(1, Ordering::Relaxed);
        }
        false
    }

    /// Notes a load; `watched` if [`Guesses::will_be_stored_to`] returned `false` for it.
    pub fn loaded(&self, page: u64, watched: bool) {
        if watched {
            self.is_watched.set(page as usize);
        } else {
            self.is_watched.clear(page as usize);
        }
    }

    /// Notes the first store to a protected page. Counts once per watched load, so that pages which
    /// are written back and stored to repeatedly do not count.
    pub fn stored_to(&self, page: u64) {
        if self.is_watched.clear(page as usize) {
            self.stored_to.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that a page, which the caller is loading, is installed writable with this content.
    pub fn remember(&self, page: u64, content: &[u8]) {
        for (half, word) in self.halves(content).into_iter().zip(self.words_of(page)) {
            word.store(half, Ordering::Relaxed);
        }
        self.guessed.set(page as usize);
    }

    /// Whether a page was installed by a guess.
    pub fn is_guessed(&self, page: u64) -> bool {
        self.guessed.is_set(page as usize)
    }

    /// Ends the guess of a page.
    pub fn forget(&self, page: u64) {
        self.guessed.clear(page as usize);
    }

    /// Returns whether `content` is what was loaded into a guessed page.
    pub fn is_unchanged(&self, page: u64, content: &[u8]) -> bool {
        let halves = self.halves(content).into_iter();
        halves.zip(self.words_of(page)).all(|(half, word)| half == word.load(Ordering::Relaxed))
    }

    fn words_of(&self, page: u64) -> &[AtomicU64] {
        &self.hashes[2 * page as usize..][..2]
    }

    fn halves(&self, content: &[u8]) -> [u64; 2] {
        let hash = xxh3_128_with_seed(content, self.seed);
        [hash as u64, (hash >> 64) as u64]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn loads_guessed(guesses: &Guesses, loads: u32, stores: bool) -> u32 {
        (0..loads)
            .map(|_| {
                let guessed = guesses.will_be_stored_to();
                guesses.loaded(0, !guessed);
                // Stores after write-backs: only the first one counts.
                (0..if stores { 3 } else { 0 }).for_each(|_| guesses.stored_to(0));
                u32::from(guessed)
            })
            .sum()
    }

    #[test]
    fn follows_what_the_program_does() {
        let guesses = Guesses::new(1).unwrap();
        assert_eq!(loads_guessed(&guesses, 10_000, false), 0, "only reads");
        loads_guessed(&guesses, 5_000, true);
        assert!(loads_guessed(&guesses, 1_000, true) > 900, "reads, then stores");
        loads_guessed(&guesses, 5_000, false);
        assert_eq!(loads_guessed(&guesses, 1_000, false), 0, "only reads again");
        for _ in 0..100_000 {
            guesses.stored_to(0);
        }
        assert_eq!(loads_guessed(&guesses, 1_000, false), 0, "stores to what was loaded long ago");
    }

    #[test]
    fn one_changed_bit_is_noticed_and_pages_are_kept_apart() {
        let guesses = Guesses::new(130).unwrap();
        for page in [0, 63, 64, 129] {
            let mut content = vec![page as u8; 4096];
            assert!(!guesses.is_guessed(page));
            guesses.remember(page, &content);
            assert!(guesses.is_guessed(page) && guesses.is_unchanged(page, &content));
            content[4095] ^= 1;
            assert!(!guesses.is_unchanged(page, &content));
        }
        guesses.forget(64);
        assert_eq!(
            [0, 63, 64, 129].map(|page| guesses.is_guessed(page)),
            [true, true, false, true]
        );
    }
}
