//! Applying records to the image: the only thing that changes it.

use std::sync::atomic::Ordering::Release;

use crate::format::directory;
use crate::format::file::is_directory;
use crate::format::inode::{HEAD_SLOT, PoolHead};
use crate::format::record::Record;
use crate::format::slot_change::SlotChange;
use crate::log::locks::Locked;
use crate::metadata::alloc;
use crate::metadata::freed;
use crate::metadata::image_slots::{load_slot, load_word, store_change};
use crate::metadata::object_names;
use crate::point;
use crate::shared::segment::Segment;

/// Applies the metadata of a record to the image. Notes the runs that are no longer named first, so
/// that the repair after a death in between still knows them.
pub(crate) fn apply(locked: &Locked<'_>, record: &Record) {
    let end_lsn = record.header.end_lsn();
    // If the version is odd already, a dead process has noted everything that is freed, and some
    // slots are stored: a comparison with the others would find only a part of it.
    if !locked.control().image.is_odd() {
        let change = freed::Change::of(&locked.handle().segment, record.slots());
        freed::note_change(locked, change, end_lsn);
    }
    apply_noted(locked, record.slots(), end_lsn);
}

/// [`apply`] of a record that ends at `end_lsn` and makes these changes; the runs they free are
/// already noted.
pub(crate) fn apply_noted<'a>(
    locked: &Locked<'_>,
    changes: impl Iterator<Item = SlotChange<'a>>,
    end_lsn: u64,
) {
    let (control, segment) = (locked.control(), &locked.handle().segment);
    point::pass("apply-noted");
    let is_half_made = control.image.is_odd();
    let version = control.image.begin_change();
    if is_half_made {
        object_names::distrust(control);
    }
    point::pass("apply-odd");
    let mut changes_names = false;
    for change in changes.filter(|change| change.slot < segment.slots()) {
        if change.slot == HEAD_SLOT && raises_fresh(segment, &change) {
            // Before the slot: if this process dies in between, applying the record again finds
            // nothing raised. Release: pairs with the Acquire in `use_fresh_pages`.
            control.fresh_lsn.store(end_lsn, Release);
        }
        let noted = object_names::before_change(segment, &change);
        store_change(segment, &change);
        alloc::note_slot(segment, change.slot);
        object_names::after_change(segment, change.slot, noted);
        changes_names |= is_of_names(load_word(segment, change.slot, 0));
    }
    if changes_names {
        control.image.note_names();
    }
    point::pass("apply-stored");
    // Before the version: a process that sees the change also sees the position that must be
    // durable for it to last.
    control.appends.note_applied(end_lsn);
    point::pass("apply-counted");
    control.image.end_change(version);
}

/// Whether changing a slot that begins like this may change what paths resolve to: every change of
/// names changes a directory.
fn is_of_names(first_word: [u8; 8]) -> bool {
    first_word[..4] == directory::MAGIC || is_directory(first_word)
}

/// Whether a change of the head turns fresh pages into used ones.
fn raises_fresh(segment: &Segment, change: &SlotChange<'_>) -> bool {
    let fresh_from_page = |bytes| PoolHead::decode(bytes).map(|head| head.fresh_from_page).ok();
    let before = load_slot(segment, HEAD_SLOT);
    let mut after = before;
    change.apply(&mut after);
    fresh_from_page(&before) < fresh_from_page(&after)
}
