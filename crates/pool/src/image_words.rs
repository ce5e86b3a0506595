//! What readers of the image look at without a lock: its version, and the words of its slots.
//!
//! ```text
//!   whoever changes it, with the metadata mutex        a reader
//!
//!   version: odd (Release)                             version (Acquire): even
//!   fence (Release)                                    words, in any order
//!   words, in any order                                fence (Acquire)
//!   version: even again (Release)                      version: still the same
//! ```
//!
//! It is a sequence lock. A reader that finds the same even version before and after has words of one moment; the fences see to it that
//! who has seen one word of a change finds at least the odd version. One that finds an odd version all the time reads the record
//! that is being applied instead: the odd version is stored with Release, so who sees it sees that record
//! ([`Appends::being_applied`](crate::appends::Appends::being_applied)).
//!
//! # Pages
//! Readers that copy bytes of a file look at its layout version afterwards, and views after they have set a pin ([`has_layout`]). Who stores bytes to a page that changed hands says so first ([`before_bytes_are_stored`]):
//!
//! | reader without a pin | | who changes the layout, and who has the page next |
//! |---|---|---|
//! | copies bytes: some are the next owner's | | stores the layout version |
//! | **fence** (Acquire) | | (the metadata mutex goes from one to the other) |
//! | loads the layout version: the new one | | **fence** (Release), stores bytes |
//!
//! Not by hardware that shows stores to all CPUs at once, but by the language, both fences are needed: without the second one a reader may
//! find new bytes and the old version.
//!
//! # Models
//! `loom_models` of this crate explores the sequence lock and pins, that of `aquifer-fs` reading without a pin. They are about readers and the
//! order of loads and stores. Which pages are free, what was freed and what is held lies under the metadata mutex
//! ([`freed`](crate::freed)) and is not modelled; the mutex is.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::format::file::FileState;
use crate::format::inode::SlotBytes;
use crate::format::slot_change::{SLOT_WORDS, SlotChange};
use crate::point;
use crate::sync::{AtomicU64, fence};

/// The version of the image. Changed with the metadata mutex.
#[repr(C)]
pub struct ImageVersion {
    /// Odd while the image is being changed.
    changes: AtomicU64,
    /// Raised, while the other is odd, by each change of what a path leads to.
    names: AtomicU64,
}

impl ImageVersion {
    /// Of an image that was never changed.
    #[cfg(loom)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> ImageVersion {
        ImageVersion { changes: AtomicU64::new(0), names: AtomicU64::new(0) }
    }

    /// Whether somebody changes the image; with the metadata mutex that is who died with it.
    pub(crate) fn is_odd(&self) -> bool {
        !self.changes.load(Relaxed).is_multiple_of(2)
    }

    /// Says that the image is being changed; also after somebody died who had said so. Returns what [`end_change`](Self::end_change) is
    /// to be told.
    pub fn begin_change(&self) -> u64 {
        let version = self.changes.load(Relaxed) | 1;
        // Release: who sees that it is odd finds the record that is being applied.
        self.changes.store(version, Release);
        // Release: the odd version is seen before any of the stores behind this. Pairs with the fence in `unchanged_during`.
        fence(Release);
        version
    }

    /// Says that what a path leads to was changed.
    pub fn note_names(&self) {
        // Release: who sees the new version does not take the image for unchanged.
        self.names.fetch_add(1, Release);
    }

    /// Says that the change is made.
    pub fn end_change(&self, odd_version: u64) {
        // Release: pairs with the Acquire in `unchanged_during`.
        self.changes.store(odd_version + 1, Release);
    }

    /// Ends the change that a dead process had begun, if it had.
    pub(crate) fn end_any_change(&self) {
        if self.is_odd() {
            self.end_change(self.changes.load(Relaxed));
        }
    }

    /// What `read` makes of the image, which it gets the version of; `None` if that has changed meanwhile.
    #[inline]
    pub fn unchanged_during<T>(&self, read: impl FnOnce(u64) -> Option<T>) -> Option<T> {
        // Acquire: pairs with the Release at the end of a change.
        let version = self.changes.load(Acquire);
        let value = read(version)?;
        // Acquire: the loads above come before the one below. Pairs with the fence in `begin_change`.
        fence(Acquire);
        (self.changes.load(Relaxed) == version).then_some(value)
    }

    /// [`unchanged_during`](Self::unchanged_during) of an image that nobody changes.
    #[inline]
    pub fn at_rest<T>(&self, read: impl FnOnce() -> T) -> Option<T> {
        self.unchanged_during(|version| version.is_multiple_of(2).then(read))
    }

    /// The version now, after everything that was loaded before.
    #[inline]
    pub fn now(&self) -> u64 {
        // Acquire: what was loaded before stays before, and what is looked at afterwards is at least as new. Pairs with the Release at the end
        // of a change.
        fence(Acquire);
        self.changes.load(Acquire)
    }

    /// That of what paths lead to.
    #[inline]
    pub fn names(&self) -> u64 {
        // Acquire: the metadata that is looked at afterwards is at least as new. Pairs with the Release in `note_names`.
        self.names.load(Acquire)
    }
}

/// The image of one slot with these bytes.
#[cfg(loom)]
pub fn image_slot(bytes: &SlotBytes) -> ImageSlot {
    std::array::from_fn(|index| {
        AtomicU64::new(u64::from_ne_bytes(crate::format::slot::word(bytes, index)))
    })
}

/// The image of one slot.
pub type ImageSlot = [AtomicU64; SLOT_WORDS];

/// A word of a slot, as its bytes lie there.
#[inline]
pub(crate) fn word(slot: &ImageSlot, index: usize) -> [u8; 8] {
    slot[index].load(Relaxed).to_ne_bytes()
}

/// Copies a slot out; torn if somebody writes to it meanwhile.
#[inline]
pub(crate) fn copy_out(slot: &ImageSlot, into: &mut SlotBytes) {
    for (word, target) in slot.iter().zip(into.chunks_exact_mut(8)) {
        target.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
    }
}

/// Makes a change of a slot, between [`ImageVersion::begin_change`] and [`ImageVersion::end_change`].
pub fn change(slot: &ImageSlot, change: &SlotChange<'_>) {
    if change.words.is_whole {
        // What is not set.
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

/// What a reader asks of a file each time, [`ImageVersion::at_rest`]; `None` if the slot is no inode of one.
#[inline]
pub fn state_of_file(slot: &ImageSlot) -> Option<FileState> {
    FileState::read(|offset| u64::from_le(slot[offset / 8].load(Relaxed)))
}

/// What a file's inode has for incarnation and layout version now; `None` if it is none.
#[inline]
pub(crate) fn version_of_file(slot: &ImageSlot) -> Option<(u64, u64)> {
    // Acquire: before whatever the caller does next. A pin that was set before is seen by whoever frees pages by a change that
    // these do not show: pairs with the fence in `Pins::look`.
    let load = |index: usize| slot[index].load(Acquire).to_ne_bytes();
    let is_file = load(0)[..4] == crate::format::file::MAGIC;
    let (incarnation, version) = (u64::from_le_bytes(load(2)), u64::from_le_bytes(load(3)));
    is_file.then_some((incarnation, version))
}

/// Whether a file has this incarnation and layout version, after everything that was loaded before: if so, the pages that were looked at were
/// the file's.
#[inline]
pub fn has_layout(slot: &ImageSlot, incarnation: u64, layout_version: u64) -> bool {
    // Acquire: what was loaded before stays before. Pairs with the fence in `before_bytes_are_stored`.
    fence(Acquire);
    version_of_file(slot) == Some((incarnation, layout_version))
}

/// To be called by who stores bytes to a page that may have been somebody else's: who sees one of them sees the change that took the page
/// away. No instruction where stores are seen in their order anyway, as on x86.
#[inline]
pub fn before_bytes_are_stored() {
    // Release: pairs with the fence in `layout_version`.
    fence(Release);
}

/// Runs `pin`, and looks afterwards whether it came in time: the order is what matters.
#[inline]
pub(crate) fn pin_in_time<P, E>(
    pin: impl FnOnce() -> Result<P, E>,
    is_unchanged: impl FnOnce() -> Result<bool, E>,
) -> Result<Option<P>, E> {
    let pin = pin()?;
    Ok(is_unchanged()?.then_some(pin))
}
