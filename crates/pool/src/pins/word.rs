//! The representation of a pin, and the order in which readers and freeing threads access pins.
//!
//! ```text
//!  63            32 31             0
//!  ┌───────────────┬───────────────┐
//!  │ inode         │ layout version│      0: no pin. Inode 0, the pool's head, is never pinned.
//!  └───────────────┴───────────────┘
//! ```
//!
//! # Visibility
//! A reader loads the layout version *v* and the runs from the image, pins (inode, *v*), and loads
//! the layout version again. If it is still *v*, the pages of these runs are not reused until the
//! reader removes its pin; otherwise the reader retries. A thread that changes the runs stores the
//! new version in the image. Later, a thread that holds the metadata mutex checks the pins of the
//! pages that the change freed, and keeps those that are pinned:
//!
//! | reader | | freeing thread |
//! |---|---|---|
//! | stores the pin | | stores the new version (`apply::apply`) |
//! | **fence** | | **fence** ([`PinWord::fence_before_look`]) |
//! | loads the version: still the old one | | loads the pins: none |
//!
//! At most one of the two can have this outcome. The two fences have an order; the load after the
//! second fence sees the store before the first. The mutex makes the store of the version visible
//! to the freeing thread, also if that is in another process. (With a weaker order both stores
//! could wait in the store buffers of their CPUs: `loom_models` finds that.)
//!
//! A pin is removed with a Release store, and the scan loads it with Acquire: all that the reader
//! has loaded from the pages is ordered before the stores of their next owner.
//!
//! The pin of a process that opened the pool for reading is a lock instead of a word; the same
//! argument holds ([`locks`](super::locks)).
//!
//! A reader never derives a pin of an old version from an existing pin: a scan reads the pins one
//! after another, and would miss a pin that is set behind its position while the first one is
//! removed. So pins cannot be cloned.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use crate::sync::{AtomicU64, fence, fence_behind_locked_instruction};

/// A way to use an inode, apart from its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InodeUse {
    /// It is open.
    Open,
    /// Its bytes can be stored to directly, without a system call or a lock.
    Writable,
    /// Its bytes are taken to be constant.
    Leased,
}

impl InodeUse {
    /// The low half of a pin of this kind. No pin of a version has this value, nor has one in a lent
    /// block.
    pub fn low(self) -> u32 {
        match self {
            InodeUse::Open => u32::MAX,
            InodeUse::Writable => u32::MAX - 1,
            InodeUse::Leased => u32::MAX - 2,
        }
    }
}

/// The low half of an open pin in a lent block: another value, or a server that is late could remove
/// the pin of a handle that has claimed the block since.
const LENT: u32 = u32::MAX - 3;
/// The lowest of these values.
pub(super) const LEAST_USE: u32 = LENT;

/// A pin: of an inode that is in use, or of its pages as of one layout version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PinValue(u64);

impl PinValue {
    /// The pin of an inode's pages as of `layout_version`; `None` for an inode that cannot be
    /// pinned.
    pub fn of_version(inode: u64, layout_version: u64) -> Option<PinValue> {
        // Clamped below the use values: a pin of an older version only keeps more pages.
        Self::new(inode, (layout_version as u32).min(LEAST_USE - 1))
    }

    /// The pin of the inode itself.
    pub fn of_use(inode: u64, usage: InodeUse) -> Option<PinValue> {
        Self::new(inode, usage.low())
    }

    /// The open pin of an inode in a lent block.
    pub fn of_lent(inode: u64) -> Option<PinValue> {
        Self::new(inode, LENT)
    }

    /// Whether the inode is used in this way.
    pub fn is_of_use(self, inode: u64, usage: InodeUse) -> bool {
        let is_lent = usage == InodeUse::Open && self.low() == LENT;
        self.inode() == inode && (self.low() == usage.low() || is_lent)
    }

    fn new(inode: u64, low: u32) -> Option<PinValue> {
        let inode = u32::try_from(inode).ok().filter(|inode| *inode != 0)?;
        Some(PinValue(u64::from(inode) << 32 | u64::from(low)))
    }

    /// The key of pages that a change freed: their inode and its layout version before the change.
    /// See [`PinSet::covers`].
    pub fn of_freed(inode: u64, layout_version: u64) -> PinValue {
        PinValue(inode << 32 | u64::from(layout_version as u32))
    }

    pub fn from_bits(bits: u64) -> PinValue {
        PinValue(bits)
    }

    pub fn to_bits(self) -> u64 {
        self.0
    }

    pub fn inode(self) -> u64 {
        self.0 >> 32
    }

    pub fn low(self) -> u32 {
        self.0 as u32
    }

    /// Whether it keeps pages, and does not state how an inode is used.
    pub fn is_of_pages(self) -> bool {
        self.low() < LEAST_USE
    }
}

/// A word that holds a pin or is empty.
pub(crate) trait PinWord {
    /// Sets a pin if the word is empty. The caller's later loads come after the pin is visible.
    fn try_set(&self, value: PinValue) -> bool;
    /// Removes the pin. The caller's earlier loads come before the removal.
    fn clear(&self);
    /// Removes the pin if it is this one, and returns whether it was.
    fn clear_if(&self, value: PinValue) -> bool;
    /// The pin, if any.
    fn get(&self) -> Option<PinValue>;
    /// The fence between a thread's stores and its scan of the pins.
    fn fence_before_look();
}

impl PinWord for AtomicU64 {
    #[inline]
    fn try_set(&self, value: PinValue) -> bool {
        // Relaxed: avoids acquiring the cache line when the word is taken.
        if self.load(Relaxed) != 0 {
            return false;
        }
        // SeqCst: see the table at the top.
        let is_set = self.compare_exchange(0, value.0, SeqCst, Relaxed).is_ok();
        fence_behind_locked_instruction();
        is_set
    }

    #[inline]
    fn clear(&self) {
        // Release: pairs with the Acquire of `get`.
        self.store(0, Release);
    }

    fn clear_if(&self, value: PinValue) -> bool {
        // Release: as in `clear`.
        self.compare_exchange(value.0, 0, Release, Relaxed).is_ok()
    }

    fn get(&self) -> Option<PinValue> {
        // Acquire: pairs with the Release of `clear`.
        let bits = self.load(Acquire);
        (bits != 0).then_some(PinValue(bits))
    }

    fn fence_before_look() {
        // SeqCst: pairs with that of `try_set`, and with `fence_after_lock`.
        fence(SeqCst);
    }
}

/// The fence between the system call that sets a reader's lock and the loads after it.
pub(super) fn fence_after_lock() {
    // SeqCst: pairs with `fence_before_look`. See the table at the top.
    fence(SeqCst);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_pin_of_an_inode_is_no_pin_of_pages() {
        const ALL: [InodeUse; 3] = [InodeUse::Open, InodeUse::Writable, InodeUse::Leased];
        for usage in ALL {
            let used = PinValue::of_use(7, usage).unwrap();
            for other in ALL {
                assert_eq!(PinValue::of_use(7, other) == Some(used), usage == other);
            }
            let lent = PinValue::of_lent(7).unwrap();
            assert!(lent != used && used.is_of_use(7, usage) && !used.is_of_use(8, usage));
            assert_eq!(lent.is_of_use(7, usage), usage == InodeUse::Open);
            for version in [1, u64::from(u32::MAX), u64::from(LEAST_USE)] {
                let version = PinValue::of_version(7, version);
                assert!(version != Some(used) && version != Some(lent));
            }
            assert!(!used.is_of_pages() && !lent.is_of_pages());
        }
    }

    #[test]
    fn a_pin_is_never_nothing() {
        assert_eq!(PinValue::of_version(0, 3), None);
        assert_eq!(PinValue::of_version(1 << 32, 3), None);
        assert_ne!(PinValue::of_version(1, 0).unwrap().to_bits(), 0);
    }
}

/// Opening an inode against removing its last name, explored by loom. Readers of pages are in
/// `loom_models`.
#[cfg(all(test, loom))]
mod loom_models {
    use std::sync::Arc;

    use loom::cell::UnsafeCell;
    use loom::sync::Mutex;
    use loom::thread;

    use super::*;

    const INODE: u64 = 7;

    fn explore(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    /// An inode that is opened while its last name is removed.
    struct Named<const IS_CLAIMED: bool> {
        pin: AtomicU64,
        claim: AtomicU64,
        links: AtomicU64,
        mutex: Mutex<()>,
        /// Loom fails the model if it is read while it is being given back.
        inode: UnsafeCell<u64>,
    }

    impl<const IS_CLAIMED: bool> Named<IS_CLAIMED> {
        fn open(&self) {
            assert!(self.pin.try_set(PinValue::of_use(INODE, InodeUse::Open).unwrap()));
            while self.claim.load(Acquire) == INODE {
                drop(self.mutex.lock().unwrap());
            }
            if self.links.load(Acquire) == 1 {
                // SAFETY: loom fails the model if another thread writes to the cell during this
                // access.
                self.inode.with(|inode| assert_eq!(unsafe { *inode }, 1));
            }
            self.pin.clear();
        }

        fn remove(&self) {
            let _locked = self.mutex.lock().unwrap();
            if IS_CLAIMED {
                self.claim.store(INODE, Relaxed);
            }
            AtomicU64::fence_before_look();
            let is_unused = self.pin.get().is_none();
            self.links.store(0, Release);
            if is_unused {
                // SAFETY: as above: loom fails the model on any concurrent access.
                self.inode.with_mut(|inode| unsafe { *inode = 2 });
            }
            self.claim.store(0, Release);
        }
    }

    fn one_opener<const IS_CLAIMED: bool>() {
        let named = Arc::new(Named::<IS_CLAIMED> {
            pin: AtomicU64::new(0),
            claim: AtomicU64::new(0),
            links: AtomicU64::new(1),
            mutex: Mutex::new(()),
            inode: UnsafeCell::new(1),
        });
        let removing = named.clone();
        let remover = thread::spawn(move || removing.remove());
        named.open();
        remover.join().unwrap();
    }

    #[test]
    fn loom_an_inode_that_is_being_opened_is_not_given_back() {
        explore(one_opener::<true>);
    }

    #[test]
    fn loom_without_a_claim_an_inode_is_freed_while_it_is_opened() {
        let outcome = std::panic::catch_unwind(|| explore(one_opener::<false>));
        assert!(outcome.is_err(), "the model notices nothing");
    }
}
