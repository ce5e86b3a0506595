//! The slots of the image, in shared memory, and the marks of its pages.

use std::sync::atomic::Ordering::Relaxed;

use crate::bitmap;
use crate::format::PAGE_BYTES;
use crate::format::layout::SLOTS_PER_PAGE;
use crate::format::slot_bytes::{SLOT_BYTES, SlotBytes, from_media, to_media};
use crate::format::slot_change::SlotChange;
use crate::owners::Owners;
use crate::shared::handle::Handle;
use crate::shared::image_words;
use crate::shared::segment::{Segment, SlotSet};

/// Copies a slot out; the copy is torn if a writer changes the slot during the call.
pub(crate) fn load_slot(segment: &Segment, slot: u64) -> SlotBytes {
    let mut bytes = [0; SLOT_BYTES];
    load_slot_into(segment, slot, &mut bytes);
    bytes
}

/// A word of a slot.
#[inline]
pub(crate) fn load_word(segment: &Segment, slot: u64, index: usize) -> [u8; 8] {
    segment.slot(slot).map_or([0; 8], |words| image_words::word(words, index))
}

pub(crate) fn load_slot_into(segment: &Segment, slot: u64, bytes: &mut SlotBytes) {
    match segment.slot(slot) {
        Some(words) => image_words::copy_out(words, bytes),
        None => bytes.fill(0),
    }
}

/// Loads a slot, as it is on media, into the image, whose page must be present.
pub(crate) fn load_from_media(segment: &Segment, slot: u64, bytes: &mut SlotBytes) {
    from_media(bytes);
    let words = segment.present_slot(slot).expect("its page is present");
    for (word, source) in words.iter().zip(bytes.chunks_exact(8)) {
        word.store(u64::from_ne_bytes(source.try_into().expect("eight bytes")), Relaxed);
    }
}

/// Applies a change of a slot to the image, whose page must be present, and marks that as changed
/// since the last checkpoint.
pub(crate) fn store_change(segment: &Segment, change: &SlotChange<'_>) {
    if change.words.is_whole {
        bitmap::set_shared(segment.slot_set(SlotSet::Logged), change.slot);
    }
    // A record is published when its pages are present.
    let slot = segment.present_slot(change.slot).expect("its page is present");
    image_words::change(slot, change);
    bitmap::set_shared(segment.dirty_image_pages(), change.slot / SLOTS_PER_PAGE);
}

/// A page of the image as it is on media.
pub(crate) fn page_for_media(segment: &Segment, page: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PAGE_BYTES as usize);
    for slot in page * SLOTS_PER_PAGE..(page + 1) * SLOTS_PER_PAGE {
        bytes.extend_from_slice(&load_slot(segment, slot));
    }
    bytes
}

/// Seals the slots of pages that go to media. Called without the metadata mutex, so that other
/// processes do not wait for the checksums.
pub(crate) fn seal_page(page: &mut [u8]) {
    for slot in page.as_chunks_mut::<SLOT_BYTES>().0 {
        to_media(slot);
    }
}

/// Notes that the tail will be here once this page is on media: the next change of each of its
/// slots must be whole.
pub(crate) fn begin_log_of(segment: &Segment, page: u64) {
    const _: () = assert!(64 % SLOTS_PER_PAGE == 0);
    let first = page * SLOTS_PER_PAGE;
    let bits = ((1 << SLOTS_PER_PAGE) - 1) << (first % 64);
    segment.slot_set(SlotSet::Logged)[(first / 64) as usize].fetch_and(!bits, Relaxed);
}

/// Whether a change of a slot can be a patch.
pub(crate) fn is_logged(segment: &Segment, slot: u64) -> bool {
    bitmap::is_set(segment.slot_set(SlotSet::Logged), slot)
}

/// The generation and layout version of a file's inode; `None` if it is not a file's.
#[inline]
pub(crate) fn file_version(segment: &Segment, inode: u64) -> Option<(u64, u64)> {
    image_words::version_of_file(segment.slot(inode)?)
}

/// Examines all slots of an image that is not being changed.
pub(crate) fn owners(handle: &Handle) -> Owners {
    let (layout, saved) = (&handle.layout, handle.saved);
    Owners::new(layout, saved, |number| Some(load_slot(&handle.segment, number)), |_| {})
}
