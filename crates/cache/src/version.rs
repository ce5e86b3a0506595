//! A sequence lock's version: even while bytes are at rest, odd while they change.
//!
//! Readers copy without writing anything, and throw the copy away if the version moved meanwhile. What is
//! copied may be torn, so it is read as raw memory, never through references.

use crate::sync::{AtomicU64, Ordering, fence};

/// See the module documentation. Zero is a version at rest.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Version(AtomicU64);

impl Version {
    #[cfg(loom)]
    pub fn new() -> Version {
        Version(AtomicU64::new(0))
    }

    /// At rest → changing, for a caller who alone may change the bytes.
    pub fn begin_change(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        // The odd version must be visible before any byte changes; pairs with the fence in `is_still`.
        fence(Ordering::SeqCst);
    }

    /// At rest → changing; `false` if somebody else has the bytes.
    pub fn try_begin_change(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        // Acquire pairs with the release of the change before, whose writes must not come after ours.
        let begun = seen & 1 == 0
            && self
                .0
                .compare_exchange(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        // As in `begin_change`.
        fence(Ordering::SeqCst);
        begun
    }

    /// Changing → at rest.
    pub fn end_change(&self) {
        // Release pairs with the acquire in `at_rest`.
        self.0.fetch_add(1, Ordering::Release);
    }

    /// Moves on from rest to rest: the bytes are elsewhere now. Before the word that says where does.
    pub fn skip(&self) {
        self.0.fetch_add(2, Ordering::Release);
    }

    /// The version, to begin a read with; `None` while the bytes change.
    #[inline]
    pub fn at_rest(&self) -> Option<u64> {
        // Acquire pairs with the release in `end_change`: the bytes are at least as new as the version.
        let version = self.0.load(Ordering::Acquire);
        (version & 1 == 0).then_some(version)
    }

    /// Whether nothing changed since `version`, to end a read with. An acquire fence comes first, so what
    /// the caller looks at afterwards is not older than the bytes it read before.
    #[inline]
    pub fn is_still(&self, version: u64) -> bool {
        // Pairs with the fence in `begin_change`: who read a changed byte sees the odd version.
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == version
    }
}
