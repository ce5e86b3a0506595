//! What readers load from the image without a lock: its version, and the words of its slots.
//!
//! ```text
//!   writer, with the metadata mutex                    a reader
//!
//!   version: odd (Release)                             version (Acquire): even
//!   fence (Release)                                    words, in any order
//!   words, in any order                                fence (Acquire)
//!   version: even again (Release)                      version: still the same
//! ```
//!
//! It is a sequence lock. A reader that loads the same even version before and after has words of
//! one moment; the fences ensure that a reader that has loaded one word of a change also loads at
//! least the odd version. A reader that keeps finding an odd version reads the record that is being
//! applied instead: the odd version is stored with Release, so a reader that loads it sees that
//! record ([`Appends::being_applied`](crate::shared::appends::Appends::being_applied)).
//!
//! # Pages
//! Readers that copy bytes of a file check its layout version afterwards, and views check it after
//! setting a pin ([`has_layout`]). A thread that stores bytes to a page that changed owners calls
//! [`before_bytes_are_stored`](crate::sync::before_bytes_are_stored) first:
//!
//! | reader without a pin | | the layout's writer, then the page's next owner |
//! |---|---|---|
//! | copies bytes: some are the next owner's | | stores the layout version |
//! | **fence** (Acquire) | | (the metadata mutex passes from one to the other) |
//! | loads the layout version: the new one | | **fence** (Release), stores bytes |
//!
//! The language's memory model requires both fences, though hardware that makes stores visible to
//! all CPUs at once does not: without the second fence a reader may find new bytes and the old
//! version.
//!
//! # Models
//! `loom_models` of this crate explores the sequence lock and pins, the one of `aquifer-fs`
//! explores reads without a pin. They cover readers and the order of loads and stores. Which pages
//! are free, freed or held is guarded by the metadata mutex ([`freed`](crate::metadata::freed)) and is not
//! modelled; the mutex is.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::format::file::FileState;
use crate::format::slot_bytes::SlotBytes;
use crate::format::slot_change::{SLOT_WORDS, SlotChange};
use crate::point;
use crate::sync::{AtomicU64, fence};

/// The version of the image. Changed with the metadata mutex.
#[repr(C)]
pub struct ImageVersion {
    /// Odd while the image is being changed.
    changes: AtomicU64,
    /// Raised, while `changes` is odd, by each change of what a path resolves to.
    names: AtomicU64,
}

impl ImageVersion {
    /// The version of an image that was never changed.
    #[cfg(loom)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> ImageVersion {
        ImageVersion { changes: AtomicU64::new(0), names: AtomicU64::new(0) }
    }

    /// Whether a change is in progress. With the metadata mutex held: whether an earlier holder
    /// died during a change.
    pub(crate) fn is_odd(&self) -> bool {
        !self.changes.load(Relaxed).is_multiple_of(2)
    }

    /// Marks the image as being changed, also if a dead process had marked it already. Returns the
    /// value to pass to [`end_change`](Self::end_change).
    pub fn begin_change(&self) -> u64 {
        let version = self.changes.load(Relaxed) | 1;
        // Release: pairs with the Acquire in `unchanged_during`. A reader that loads the odd
        // version sees the record that is being applied.
        self.changes.store(version, Release);
        // Release: pairs with the fence in `unchanged_during`. The odd version is visible before
        // any of the stores behind this fence.
        fence(Release);
        version
    }

    /// Notes that a change affects what paths resolve to.
    pub fn note_names(&self) {
        // Release: pairs with the Acquire in `names`. A reader that loads the new version does not
        // take the image for unchanged.
        self.names.fetch_add(1, Release);
    }

    /// Marks the change as complete.
    pub fn end_change(&self, odd_version: u64) {
        // Release: pairs with the Acquire in `unchanged_during`.
        self.changes.store(odd_version + 1, Release);
    }

    /// Ends the change of a process that died during it, if there is one.
    pub(crate) fn end_any_change(&self) {
        if self.is_odd() {
            self.end_change(self.changes.load(Relaxed));
        }
    }

    /// Returns the result of `read`, which gets the version of the image; `None` if the version
    /// changed during the call.
    #[inline]
    pub fn unchanged_during<T>(&self, read: impl FnOnce(u64) -> Option<T>) -> Option<T> {
        // Acquire: pairs with the Release in `begin_change` and `end_change`.
        let version = self.changes.load(Acquire);
        let value = read(version)?;
        // Acquire: pairs with the fence in `begin_change`. The loads above come before the one
        // below.
        fence(Acquire);
        (self.changes.load(Relaxed) == version).then_some(value)
    }

    /// [`unchanged_during`](Self::unchanged_during) for an image that is not being changed.
    #[inline]
    pub fn at_rest<T>(&self, read: impl FnOnce() -> T) -> Option<T> {
        self.unchanged_during(|version| version.is_multiple_of(2).then(read))
    }

    /// The version now, after everything that was loaded before.
    #[inline]
    pub fn now(&self) -> u64 {
        // Acquire: earlier loads stay before, and later loads are at least as new. The load pairs
        // with the Release in `end_change`.
        fence(Acquire);
        self.changes.load(Acquire)
    }

    /// The version of what paths resolve to.
    #[inline]
    pub fn names(&self) -> u64 {
        // Acquire: pairs with the Release in `note_names`. Metadata loaded afterwards is at least
        // as new.
        self.names.load(Acquire)
    }
}

/// The image of one slot with these bytes.
#[cfg(loom)]
pub fn image_slot(bytes: &SlotBytes) -> ImageSlot {
    std::array::from_fn(|index| {
        AtomicU64::new(u64::from_ne_bytes(crate::format::slot_bytes::word(bytes, index)))
    })
}

/// The image of one slot.
pub type ImageSlot = [AtomicU64; SLOT_WORDS];

/// A word of a slot, in the byte order of the slot.
#[inline]
pub(crate) fn word(slot: &ImageSlot, index: usize) -> [u8; 8] {
    slot[index].load(Relaxed).to_ne_bytes()
}

/// Copies a slot out; the copy is torn if a writer changes the slot during the call.
#[inline]
pub(crate) fn copy_out(slot: &ImageSlot, into: &mut SlotBytes) {
    for (word, target) in slot.iter().zip(into.chunks_exact_mut(8)) {
        target.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
    }
}

/// Applies a change to a slot, between [`ImageVersion::begin_change`] and
/// [`ImageVersion::end_change`].
pub fn change(slot: &ImageSlot, change: &SlotChange<'_>) {
    if change.words.is_whole {
        // Clear the words that are not set.
        for (index, word) in slot.iter().enumerate() {
            if change.words.set & 1 << index == 0 {
                word.store(0, Relaxed);
            }
        }
    }
    point::pass("apply-half");
    for (index, value) in change.set() {
        slot[index].store(u64::from_ne_bytes(value), Relaxed);
    }
}

/// The state that each read of a file checks, with [`ImageVersion::at_rest`]; `None` if the slot is
/// no inode of a file.
#[inline]
pub fn state_of_file(slot: &ImageSlot) -> Option<FileState> {
    FileState::read(|offset| u64::from_le(slot[offset / 8].load(Relaxed)))
}

/// The current generation and layout version of a file's inode; `None` if it is none.
#[inline]
pub(crate) fn version_of_file(slot: &ImageSlot) -> Option<(u64, u64)> {
    // Acquire: before the caller's next accesses. A pin that was set before is seen by a process
    // that frees pages with a change that these loads do not show: pairs with the fence in
    // `PinPlaces::look`.
    let load = |index: usize| slot[index].load(Acquire).to_ne_bytes();
    let is_file = load(0)[..4] == crate::format::file::MAGIC;
    let (generation, version) = (u64::from_le_bytes(load(2)), u64::from_le_bytes(load(3)));
    is_file.then_some((generation, version))
}

/// Whether a file has this generation and layout version, after everything that was loaded before:
/// if so, the pages that were read belonged to the file.
#[inline]
pub fn has_layout<'a>(
    slot: impl FnOnce() -> Option<&'a ImageSlot>,
    generation: u64,
    layout_version: u64,
) -> bool {
    // Acquire: pairs with the fence in `before_bytes_are_stored`. Earlier loads stay before. The slot
    // is looked up behind it: a copy of a page that is present by now may lack the change.
    fence(Acquire);
    slot().and_then(version_of_file) == Some((generation, layout_version))
}

/// Runs `pin`, and afterwards checks that it came in time: the order is what matters.
#[inline]
pub(crate) fn pin_in_time<P, E>(
    pin: impl FnOnce() -> Result<P, E>,
    is_unchanged: impl FnOnce() -> Result<bool, E>,
) -> Result<Option<P>, E> {
    let pin = pin()?;
    Ok(is_unchanged()?.then_some(pin))
}
