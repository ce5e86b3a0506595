//! Holders of files that have died: whether their last changes are in the image.
//!
//! A writer reads the file under the file's lock, and its reads must include the last change by the
//! holder before it. If that holder has died right after its change was published, the next holder of
//! the *metadata mutex* brings the image up to date. So each death is counted, and the next holder of
//! the file goes on once the mutex was taken after the last death counted.
//!
//! The counts only rise: if a repair took back what it has counted, one that was begun before another
//! death could take that away as well.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::sync::AtomicU64;

/// How many holders of files have died, and up to which of them the image is up to date.
#[repr(C)]
pub(crate) struct DeadHolders {
    dead: AtomicU64,
    repaired: AtomicU64,
}

impl DeadHolders {
    #[cfg(all(test, loom))]
    pub fn new() -> DeadHolders {
        DeadHolders { dead: AtomicU64::new(0), repaired: AtomicU64::new(0) }
    }

    /// Counts a dead holder. With the mutex of its file.
    pub fn note(&self) {
        // Relaxed: the mutex of the file orders it before the loads of all later holders.
        self.dead.fetch_add(1, Relaxed);
    }

    /// Returns once the image has the last changes of all dead holders of the file, whose mutex the
    /// caller holds. `repair` takes the metadata mutex, which brings the image up to date.
    pub fn settle<E>(&self, repair: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let dead = self.dead.load(Relaxed);
        // Acquire: pairs with the Release below. The image has what that repair has changed.
        if self.repaired.load(Acquire) < dead {
            repair()?;
            self.repaired.fetch_max(dead, Release);
        }
        Ok(())
    }
}
