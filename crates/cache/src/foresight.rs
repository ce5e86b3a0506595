//! Guessing that a page which is read will be stored to.
//!
//! A clean page of a writable mapping comes in write-protected, so a program that reads and then stores pays
//! for two faults. Where nearly every page that is read is stored to soon after, pages are installed writable
//! and dirty at once: one fault instead of two, for the price of writing back the few that were not stored to
//! after all. One page in sixteen still comes in protected, to see whether the guess holds.

use std::sync::atomic::{AtomicU32, Ordering};

/// Loads between two that are watched, while the guess is that pages are stored to.
const WATCH_ONE_IN: u32 = 16;
/// Watched loads before the first guess.
const FEWEST: u32 = 64;
/// Watched loads after which old ones count half.
const HALVED_AT: u32 = 256;

/// What is known about the loads of one store. Relaxed throughout: a lost count costs a little accuracy.
#[derive(Default)]
pub(crate) struct Foresight {
    loads: AtomicU32,
    watched: AtomicU32,
    stored_to: AtomicU32,
}

impl Foresight {
    /// Whether a page about to be loaded for reading should come in writable.
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

    /// A page that came in protected was stored to.
    pub fn stored_to(&self) {
        self.stored_to.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads_guessed(foresight: &Foresight, loads: u32, stores: bool) -> u32 {
        (0..loads)
            .map(|_| {
                let guessed = foresight.will_be_stored_to();
                if !guessed && stores {
                    foresight.stored_to();
                }
                u32::from(guessed)
            })
            .sum()
    }

    #[test]
    fn follows_what_the_program_does() {
        let foresight = Foresight::default();
        assert_eq!(loads_guessed(&foresight, 10_000, false), 0, "only reads");
        loads_guessed(&foresight, 5_000, true);
        assert!(loads_guessed(&foresight, 1_000, true) > 900, "reads, then stores");
        loads_guessed(&foresight, 5_000, false);
        assert_eq!(loads_guessed(&foresight, 1_000, false), 0, "only reads again");
    }
}
