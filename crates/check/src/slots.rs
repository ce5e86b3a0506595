//! Slots as the last record of the log leaves them, read from media page by page.

use std::cell::RefCell;

use aquifer_format::PAGE_BYTES;
use aquifer_format::layout::{Layout, SLOTS_PER_PAGE};
use aquifer_format::slot_bytes::{SLOT_BYTES, SlotBytes, from_media, to_media};
use aquifer_format::slots::ReadSlots;
use aquifer_pool::media::{ByteRange, Media};
use aquifer_pool::{PoolError, Result};

use super::log::LogView;

/// The slots of a pool that is checked.
pub(super) struct Slots<'a> {
    media: &'a dyn Media,
    layout: Layout,
    log: &'a LogView,
    /// The page that was read last.
    page: RefCell<Option<(u64, Vec<u8>)>>,
    /// Pages that cannot be read.
    unread: RefCell<Vec<ByteRange>>,
}

impl<'a> Slots<'a> {
    pub fn new(media: &'a dyn Media, layout: Layout, log: &'a LogView) -> Slots<'a> {
        Slots { media, layout, log, page: RefCell::default(), unread: RefCell::default() }
    }

    /// The bytes of a slot; `None` if they cannot be read or the slot does not exist.
    pub fn read(&self, number: u64) -> Option<SlotBytes> {
        if number >= self.layout.slots() {
            return None;
        }
        if let Some((_, bytes)) = self.log.slots.get(&number) {
            let mut bytes = *bytes;
            to_media(&mut bytes);
            return Some(bytes);
        }
        let index = number / SLOTS_PER_PAGE;
        let mut page = self.page.borrow_mut();
        if page.as_ref().is_none_or(|(loaded, _)| *loaded != index) {
            *page = Some((index, self.read_page(index)?));
        }
        let (_, bytes) = page.as_ref()?;
        let start = (number % SLOTS_PER_PAGE) as usize * SLOT_BYTES;
        let mut bytes = bytes[start..start + SLOT_BYTES].try_into().ok()?;
        from_media(&mut bytes);
        Some(bytes)
    }

    fn read_page(&self, index: u64) -> Option<Vec<u8>> {
        let range = ByteRange {
            offset_bytes: self.layout.metadata().offset_bytes + index * PAGE_BYTES,
            len_bytes: PAGE_BYTES,
        };
        let mut bytes = vec![0; PAGE_BYTES as usize];
        match self.media.read_at(range.offset_bytes, &mut bytes) {
            Ok(()) => Some(bytes),
            Err(_) => {
                let mut unread = self.unread.borrow_mut();
                // Recorded once per page, not for each of its slots.
                if !unread.contains(&range) && unread.len() < MOST_UNREAD {
                    unread.push(range);
                }
                None
            }
        }
    }

    /// The pages that could not be read.
    pub fn into_unread(self) -> Vec<ByteRange> {
        self.unread.into_inner()
    }
}

/// The most unreadable pages that are recorded.
const MOST_UNREAD: usize = 1000;

impl ReadSlots for Slots<'_> {
    type Error = PoolError;

    fn slot(&self, number: u64) -> Result<SlotBytes> {
        Ok(self.read(number).unwrap_or([0; SLOT_BYTES]))
    }
}
