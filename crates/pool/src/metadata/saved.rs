//! The saved state of a pool: saving it at a clean close, and opening the pool with it.
//! [`format::saved`](crate::format::saved) has its form.
//!
//! # Saving
//! The last process that closes the pool writes it, after the last change and together with the last
//! pages of the image, and then one pair of superblocks that names it. Every crash state is right:
//!
//! | a crash | finds | because |
//! |---|---|---|
//! | before the first superblock of the close is durable | `saved_sum` 0, and recovers in full | the superblocks that count have been written since the pool was opened |
//! | after it | the state, whole | its blocks, table and header were flushed before, and so was everything that a replay of the log would have restored |
//!
//! The maps are those of the moment at which this tail is durable: pages that wait only for the tail
//! count as free. If anything else keeps pages from being free (a pin, a reservation), or the pool
//! has failed, nothing is saved, and the next process recovers in full.
//!
//! # Opening
//! Before the first append the superblocks have a `saved_sum` of 0, durably, so the state counts only
//! until something may change. It stays where it is as the *base* of the segment: digests of pages of
//! metadata that did not change are taken from it when the pool is closed, and blocks that would not
//! change are not written.
//!
//! | the media have | the pool is opened | because |
//! |---|---|---|
//! | a superblock without `saved_sum` | in full | it is open, or was not closed |
//! | another header, table or block than the checksums say: torn, stale, of another place or pool | in full | each is verified before it is used |
//! | a header of another generation or tail than the superblock's | in full | an older superblock, or a program that forgot to clear `saved_sum` |
//! | a record at the tail | in full | the log of a pool that was closed is empty |
//! | a page of metadata that is not that of the digest | at once; what the page has is [damaged](crate::shared::base) | a write was lost, or the page damaged: the digest is kept, and a writer that has met it marks the state that it saves, so that the next writer compares all pages, and refuses |

use std::sync::atomic::Ordering::Relaxed;

use crate::bitmap;
use crate::error::Result;
use crate::format::inode::{HEAD_SLOT, PoolHead};
use crate::format::layout::SLOTS_PER_PAGE;
use crate::format::run::Run;
use crate::format::saved::{
    ENTRY_BYTES, MAPS, Map, SavedHeader, SavedLayout, block_sum, header_sum, page_digest, table_sum,
};
use crate::format::slot_bytes::SLOT_BYTES;
use crate::format::superblock::{SAVED, Superblock};
use crate::format::{FormatError, PAGE_BYTES};
use crate::log::locks::Log;
use crate::media::{ByteRange, Media, MediaError};
use crate::metadata::freed;
use crate::metadata::image_slots::{self, load_slot};
use crate::metadata::repair;
use crate::mutant::{self, Mutant};
use crate::pins::PinPlaces;
use crate::point;
use crate::shared::base::Base;
use crate::shared::handle::Handle;
use crate::shared::image_words;
use crate::shared::segment::{Segment, SlotSet};
use crate::sync::AtomicU64;

const BLOCK_BYTES: usize = PAGE_BYTES as usize;

/// Builds the segment of a pool that was closed cleanly. Returns false if the pool must be recovered
/// in full; the segment is then as it was.
pub(crate) fn resume(handle: &Handle, superblock: &Superblock) -> Result<bool> {
    let Some(base) = Base::open(&handle.media, superblock, superblock.saved_sum, handle.mutant)?
    else {
        return Ok(false);
    };
    let believes_all = mutant::is(handle.mutant, Mutant::KeepSavedMark);
    if base.header.validate(superblock).is_err()
        && !mutant::is(handle.mutant, Mutant::AnyGeneration)
        && !believes_all
    {
        return Ok(false);
    }
    // A superblock that was closed has an empty log.
    if (!superblock.segment.is_nil() || handle.log_reader().read(superblock.tail_lsn).is_ok())
        && !mutant::is(handle.mutant, Mutant::NoTailProbe)
        && !believes_all
    {
        return Ok(false);
    }
    if !load_maps(handle, &base)? || !has_its_head(&base) {
        handle.segment.forget_maps();
        return Ok(false);
    }
    if base.header.is_doubtful && handle.members.is_writable {
        let is_unread = |page: &u64| base.slot_in_memory(page * SLOTS_PER_PAGE).is_none();
        (0..base.pages()).filter(is_unread).try_for_each(|page| base.read(page))?;
    }
    let control = handle.control();
    control.fresh_from_page.store(base.header.fresh_from_page, Relaxed);
    handle.segment.set_base(base);
    point::pass("open-resumed");
    Ok(true)
}

/// Reads the head, which is part of every transaction: whether it is the one of this state.
fn has_its_head(base: &Base) -> bool {
    let mut bytes = [0; SLOT_BYTES];
    let words =
        base.read(HEAD_SLOT / SLOTS_PER_PAGE).ok().and_then(|()| base.slot_in_memory(HEAD_SLOT));
    words.into_iter().for_each(|words| image_words::copy_out(words, &mut bytes));
    let SavedHeader { fresh_from_page, used_slots, .. } = base.header;
    PoolHead::decode(&bytes) == Ok(PoolHead { fresh_from_page, used_slots })
}

/// Gives the segment that this process has joined its base.
pub(crate) fn adopt_base(handle: &Handle, superblock: &Superblock) -> Result<()> {
    let sum = handle.control().base_sum.load(Relaxed);
    if sum == 0 {
        return Ok(());
    }
    let unreadable = || handle.damaged("the saved state", FormatError::Unreadable);
    let base = Base::open(&handle.media, superblock, sum, handle.mutant)?.ok_or_else(unreadable)?;
    handle.segment.adopt_base(base);
    // The head is part of every transaction.
    handle.segment.read_slot(HEAD_SLOT).map(drop)
}

/// Loads the maps of pages and slots; false if they do not match. Reads each up to its last bit.
fn load_maps(handle: &Handle, base: &Base) -> Result<bool> {
    let (segment, control) = (&handle.segment, handle.control());
    for map in [Map::UsedPages, Map::OccupiedSlots, Map::Objects, Map::Orphans] {
        let blocks = base.stored_blocks(map);
        if map == Map::UsedPages {
            segment.allocate_maps((blocks.end - blocks.start) * PAGE_BYTES * 8)?;
        }
        let Some(bytes) = base.blocks(blocks) else { return Ok(false) };
        let values = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        // Most of them are zero already, and need no memory.
        let values = values.enumerate().filter(|(_, value)| *value != 0);
        let words = map_of(segment, map);
        for (index, value) in values.take_while(|(index, _)| *index < words.len()) {
            words[index].store(value, Relaxed);
            if map == Map::UsedPages && handle.members.is_writable {
                segment.base_used_pages()[index].store(value, Relaxed);
            }
        }
    }
    let used: u64 = words(segment.used_pages()).map(|word| u64::from(word.count_ones())).sum();
    control.free_count.store(base.header.free_pages, Relaxed);
    Ok(used.checked_add(base.header.free_pages) == Some(handle.layout.page_count)
        && are_in_bounds(handle))
}

/// Whether the maps have no bits behind the last page and slot, and no page counts as free that is
/// never free. No accident leads to others; the counts of what is free are right only with these.
fn are_in_bounds(handle: &Handle) -> bool {
    let (segment, layout) = (&handle.segment, &handle.layout);
    let has_none_from = |map: Map, count: u64| {
        let words = map_of(segment, map);
        let end = words.len() as u64 * 64;
        bitmap::first(|index| words[index].load(Relaxed), count, end) >= end
    };
    let are_used = |from: u64, end: u64| {
        let words = segment.used_pages();
        let word = |index: usize| words.get(index).map_or(u64::MAX, |word| !word.load(Relaxed));
        bitmap::first(word, from, end) >= end
    };
    has_none_from(Map::UsedPages, layout.page_count)
        && [Map::OccupiedSlots, Map::Objects, Map::Orphans]
            .into_iter()
            .all(|map| has_none_from(map, layout.slots()))
        && are_used(0, layout.data_start_page)
        && are_used(handle.saved.start_page, handle.saved.end_page())
}

/// The map in the segment that corresponds to one of the saved state. Not for digests.
fn map_of(segment: &Segment, map: Map) -> &[AtomicU64] {
    match map {
        Map::UsedPages => segment.used_pages(),
        Map::OccupiedSlots => segment.slot_set(SlotSet::Occupied),
        Map::Objects => segment.slot_set(SlotSet::Objects),
        Map::Orphans => segment.slot_set(SlotSet::Orphans),
        Map::Digests => &[],
    }
}

fn words(map: &[AtomicU64]) -> impl Iterator<Item = u64> + '_ {
    map.iter().map(|word| word.load(Relaxed))
}

/// A state to be saved.
pub(crate) struct State {
    header: SavedHeader,
    layout: SavedLayout,
    table: Vec<u8>,
    /// The blocks that differ from those on media, ascending.
    changed: Vec<(u64, Vec<u8>)>,
}

/// The state that a close with this tail saves; `None` if it cannot be saved. For the process that
/// closes the pool and has locked all others out, after the last change.
pub(crate) fn state(log: &Log, pins: &PinPlaces, head_lsn: u64) -> Result<Option<State>> {
    let handle = &*log.handle;
    let (control, layout) = (handle.control(), SavedLayout::new(&handle.layout));
    // A pool that has grown since may have too few pages.
    if handle.features & SAVED == 0 || handle.saved.pages < layout.pages() {
        return Ok(None);
    }
    let locked = log.lock()?;
    repair::take_from_the_dead(&locked)?;
    let has_pins = pins.look(&handle.members.locks).len() > 0;
    let is_quiet = control.appends.head_lsn() == head_lsn
        && words(handle.segment.dirty_image_pages()).all(|word| word == 0);
    if has_pins
        || !is_quiet
        || handle.segment.processes().any(|(_, process)| repair::has_reservations(process))
    {
        return Ok(None);
    }
    let head = PoolHead::decode(&load_slot(&handle.segment, HEAD_SLOT));
    let Ok(head) = head.and_then(|head| head.validate(&handle.layout)) else { return Ok(None) };
    let base = handle.segment.base();
    let mut state = State {
        header: SavedHeader {
            uuid: handle.uuid,
            run: handle.saved,
            generation: control.generation.load(Relaxed),
            tail_lsn: head_lsn,
            free_pages: 0,
            fresh_from_page: head.fresh_from_page,
            used_slots: head.used_slots,
            table_sum: 0,
            // The digest of a page that could not be read stays, and goes on showing the damage.
            is_doubtful: control.base_is_doubtful.load(Relaxed) != 0,
        },
        layout,
        table: base.map_or_else(|| vec![0; layout.table_bytes()], |base| base.table.clone()),
        changed: Vec::new(),
    };
    for map in MAPS.into_iter().filter(|map| *map != Map::Digests) {
        state.add_map(handle, map);
    }
    state.add_digests(handle, base);
    state.header.table_sum = table_sum(&state.table);
    Ok(Some(state))
}

impl State {
    /// Adds a block. One that is as it was needs not be written.
    fn add(&mut self, block: u64, bytes: &[u8]) {
        let sum = block_sum(block, bytes);
        let entry = &mut self.table[block as usize * ENTRY_BYTES..][..ENTRY_BYTES];
        if entry == sum.to_le_bytes() {
            return;
        }
        entry.copy_from_slice(&sum.to_le_bytes());
        if sum != 0 {
            self.changed.push((block, bytes.to_vec()));
        }
    }

    /// Adds a map of the segment.
    fn add_map(&mut self, handle: &Handle, map: Map) {
        let words = map_of(&handle.segment, map);
        let mut bytes: Vec<u8> =
            words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        if map == Map::UsedPages {
            if !mutant::is(handle.mutant, Mutant::SavedWhileFreed) {
                let (waiting, held) = freed::waiting(handle.control());
                waiting.chain(held).for_each(|run| clear(&mut bytes, run));
            }
            let used: u64 = bytes.iter().map(|byte| u64::from(byte.count_ones())).sum();
            self.header.free_pages = handle.layout.page_count - used;
        }
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        let mut blocks = bytes.chunks_exact(BLOCK_BYTES);
        for block in self.layout.blocks_of(map) {
            match blocks.next() {
                Some(bytes) => self.add(block, bytes),
                // The maps of pages end where no page was ever used.
                None => self.table[block as usize * ENTRY_BYTES..][..ENTRY_BYTES].fill(0),
            }
        }
    }

    /// Adds the digests: of a page that did not change since the base, its digest in that.
    fn add_digests(&mut self, handle: &Handle, base: Option<&Base>) {
        const PAGES: u64 = PAGE_BYTES / 8;
        let segment = &handle.segment;
        let end_page = self.header.used_slots.div_ceil(SLOTS_PER_PAGE);
        let written = segment.written_image_pages();
        for (index, block) in (0..).zip(self.layout.blocks_of(Map::Digests)) {
            let pages = index * PAGES..((index + 1) * PAGES).min(end_page);
            let is_changed = |page: &u64| bitmap::is_set(written, *page);
            let mut bytes = vec![0; BLOCK_BYTES];
            if let Some(base) = base {
                if !pages.clone().any(|page| is_changed(&page)) {
                    continue;
                }
                bytes = base.block_of_digests(index);
            }
            for page in pages.filter(|page| base.is_none() || is_changed(page)) {
                let place = (page % PAGES) as usize * 8;
                bytes[place..place + 8].copy_from_slice(&digest_of(segment, page).to_le_bytes());
            }
            self.add(block, &bytes);
        }
    }

    fn place(&self, page: u64, pages: u64) -> ByteRange {
        Run { start_page: self.header.run.start_page + page, pages }.bytes()
    }

    /// Writes it to its place, and adds the ranges that must become durable before a superblock
    /// names it. Returns the checksum for that superblock.
    pub fn write(
        &self,
        media: &dyn Media,
        ranges: &mut Vec<ByteRange>,
    ) -> std::result::Result<u64, MediaError> {
        let header = self.header.encode();
        let mut first = header.to_vec();
        first.extend_from_slice(&self.table);
        first.resize((self.layout.table_pages * PAGE_BYTES) as usize, 0);
        let mut write = |range: ByteRange, bytes: &[u8]| {
            ranges.push(range);
            // SAFETY: pages of the saved state: no slot names them, and no reference to them is
            // ever made.
            unsafe { media.write_at(range.offset_bytes, bytes) }
        };
        write(self.place(0, self.layout.table_pages), &first)?;
        for part in self.changed.chunk_by(|(one, _), (other, _)| one + 1 == *other) {
            let page = self.layout.page_of_block(part[0].0);
            let bytes: Vec<u8> = part.iter().flat_map(|(_, bytes)| bytes).copied().collect();
            write(self.place(page, part.len() as u64), &bytes)?;
        }
        point::pass("close-saved");
        Ok(header_sum(&header))
    }
}

fn digest_of(segment: &Segment, page: u64) -> u64 {
    let mut bytes = image_slots::page_for_media(segment, page);
    image_slots::seal_page(&mut bytes);
    page_digest(&bytes)
}

/// Clears the bits of a run, as far as the map has them: a state whose map was forged may end before.
fn clear(map: &mut [u8], run: Run) {
    for page in run.start_page..run.end_page().min(map.len() as u64 * 8) {
        map[(page / 8) as usize] &= !(1 << (page % 8));
    }
}
