//! The version of a sequence lock: even while bytes are at rest, odd while they change.
//!
//! Readers copy without writing anything, and discard the copy if the version changed in between.
//! The copied bytes may be torn, so they are read as raw memory, never through references.

use crate::lazy::ZeroInit;
use crate::sync::{AtomicU64, Ordering, fence};

/// A version. See the module documentation. Zero is a version at rest.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Version(AtomicU64);

// SAFETY: a transparent wrapper of an `AtomicU64`, for which zero is a version at rest.
unsafe impl ZeroInit for Version {}

impl Version {
    #[cfg(loom)]
    pub fn new() -> Version {
        Version(AtomicU64::new(0))
    }

    /// At rest → changing, for a caller with exclusive access to the bytes.
    pub fn begin_change(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        // The odd version must be visible before any byte changes; pairs with the fence in
        // `is_still`.
        fence(Ordering::SeqCst);
    }

    /// At rest → changing; `false` if another thread is changing the bytes.
    pub fn try_begin_change(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        // Acquire pairs with the release in `end_change`: the previous change's writes come before
        // this one's.
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

    /// At rest → at rest, two higher: the bytes move to another frame. Called before the page word
    /// names it.
    pub fn skip(&self) {
        self.0.fetch_add(2, Ordering::Release);
    }

    /// The version at the start of a read; `None` while the bytes change.
    #[inline]
    pub fn at_rest(&self) -> Option<u64> {
        // Acquire pairs with the release in `end_change`: the bytes are at least as new as the
        // version.
        let version = self.0.load(Ordering::Acquire);
        (version & 1 == 0).then_some(version)
    }

    /// Whether nothing changed since `version`: ends a read. An acquire fence comes first, so what
    /// the caller reads afterwards is not older than the bytes it read before.
    #[inline]
    pub fn is_still(&self, version: u64) -> bool {
        // Pairs with the fence in `begin_change`: a thread that read a changed byte sees the odd
        // version.
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == version
    }
}
