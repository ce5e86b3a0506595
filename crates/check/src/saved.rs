//! The saved state of a pool that was closed cleanly: whether it can be used, and whether it says
//! what the slots say.

use aquifer_format::file::{LINKS_WORD, is_unlinked};
use aquifer_format::inode::PoolHead;
use aquifer_format::layout::{Layout, SLOTS_PER_PAGE};
use aquifer_format::run::Run;
use aquifer_format::saved::{
    HEADER_BYTES, MAPS, Map, SavedHeader, SavedLayout, block_sum, header_sum, page_digest,
    table_sum,
};
use aquifer_format::slot::{is_free_slot, is_object_slot};
use aquifer_format::slot_bytes::{SlotBytes, word};
use aquifer_format::superblock::Superblock;
use aquifer_format::{ByteRange, PAGE_BYTES};

use super::report::{FindingKind, Severity};
use super::{Checker, text};

/// The maps as the slots have them.
pub(super) struct Maps {
    layout: SavedLayout,
    blocks: Vec<u8>,
}

impl Maps {
    pub fn new(layout: &Layout) -> Maps {
        let layout = SavedLayout::new(layout);
        Maps { layout, blocks: vec![0; (layout.blocks * PAGE_BYTES) as usize] }
    }

    fn bytes(&mut self, map: Map) -> &mut [u8] {
        let place = self.layout.blocks_of(map);
        &mut self.blocks[(place.start * PAGE_BYTES) as usize..(place.end * PAGE_BYTES) as usize]
    }

    fn set(&mut self, map: Map, bit: u64) {
        self.bytes(map)[(bit / 8) as usize] |= 1 << (bit % 8);
    }

    pub fn note_slot(&mut self, number: u64, bytes: &SlotBytes) {
        let first = word(bytes, 0);
        if !is_free_slot(first) {
            self.set(Map::OccupiedSlots, number);
            if is_object_slot(first) {
                self.set(Map::Objects, number);
            }
        }
        if is_unlinked(first, word(bytes, LINKS_WORD)) {
            self.set(Map::Orphans, number);
        }
    }

    fn note_used(&mut self, run: Run) {
        (run.start_page..run.end_page()).for_each(|page| self.set(Map::UsedPages, page));
    }

    fn used_pages(&mut self) -> u64 {
        self.bytes(Map::UsedPages).iter().map(|byte| u64::from(byte.count_ones())).sum()
    }
}

impl Checker<'_> {
    /// Checks the saved state against the slots. `maps` has those of the slots already, and nothing
    /// is in the log; `used` are the runs that slots name, and the saved state's own.
    pub(super) fn check_saved(
        &mut self,
        superblock: &Superblock,
        head: &PoolHead,
        mut maps: Maps,
        used: &[Run],
    ) {
        let run = superblock.saved;
        let header = ByteRange { len_bytes: HEADER_BYTES as u64, ..run.bytes() };
        let saved = maps.layout;
        if saved.pages() > run.pages {
            return self.explain_saved(header, "lies in fewer pages than it needs");
        }
        let first = Run { pages: saved.table_pages, ..run };
        let Some(bytes) = self.read(first.bytes(), "The saved state") else { return };
        let (encoded, rest) = bytes.split_at(HEADER_BYTES);
        let table = &rest[..saved.table_bytes()];
        let is_named = header_sum(encoded.try_into().expect("its length")) == superblock.saved_sum;
        let found = SavedHeader::decode(encoded)
            .and_then(|header| header.validate(superblock).map(|()| header));
        let found = match found {
            Ok(found) if is_named && found.table_sum == table_sum(table) => found,
            _ => return self.explain_saved(header, "is not the one that the superblock names"),
        };
        maps.note_used(Run { start_page: 0, pages: superblock.layout.data_start_page });
        used.iter().for_each(|run| maps.note_used(*run));
        let used_pages = maps.used_pages();
        if (found.fresh_from_page, found.used_slots) != (head.fresh_from_page, head.used_slots)
            || found.free_pages != superblock.layout.page_count.saturating_sub(used_pages)
        {
            self.explain_saved(header, "and the slots differ in how much is in use");
        }
        if !self.note_digests(&superblock.layout, head, &mut maps) {
            return;
        }
        let entries = table.as_chunks::<8>().0.iter().map(|entry| u64::from_le_bytes(*entry));
        for (block, entry) in (0..).zip(entries) {
            let start = (block * PAGE_BYTES) as usize;
            let expected = &maps.blocks[start..start + PAGE_BYTES as usize];
            let mut stored = vec![0; PAGE_BYTES as usize];
            let page = Run { start_page: run.start_page + saved.page_of_block(block), pages: 1 };
            if entry != 0 {
                let Some(bytes) = self.read(page.bytes(), "The saved state") else { return };
                if block_sum(block, &bytes) != entry {
                    self.explain_saved(page.bytes(), "has a damaged block");
                    continue;
                }
                stored = bytes;
            }
            if entry != block_sum(block, expected) {
                let digests = saved.blocks_of(Map::Digests);
                if digests.contains(&block) {
                    let differ = (stored.chunks(8).zip(expected.chunks(8)).enumerate())
                        .filter(|(_, (stored, expected))| stored != expected);
                    let first = (block - digests.start) * (PAGE_BYTES / 8);
                    let pages: Vec<u64> = differ.map(|(index, _)| first + index as u64).collect();
                    pages.into_iter().for_each(|page| self.explain_other_slots(superblock, page));
                    continue;
                }
                let map = MAPS.into_iter().find(|map| saved.blocks_of(*map).contains(&block));
                let what = match map.expect("each block is of a map") {
                    Map::UsedPages => "and the slots differ in which pages are used",
                    Map::OccupiedSlots => "and the slots differ in which of them are used",
                    Map::Objects => "and the slots differ in which of them are objects",
                    Map::Orphans => "and the slots differ in which files have no name",
                    Map::Digests => unreachable!("explained before"),
                };
                self.explain_saved(page.bytes(), what);
            }
        }
    }

    /// Computes the digests of all pages that were ever used; false if one cannot be read.
    fn note_digests(&mut self, layout: &Layout, head: &PoolHead, maps: &mut Maps) -> bool {
        const PIECE_PAGES: u64 = 256;
        let end = head.used_slots.div_ceil(SLOTS_PER_PAGE);
        for page in (0..end).step_by(PIECE_PAGES as usize) {
            let range = ByteRange {
                offset_bytes: layout.metadata().offset_bytes + page * PAGE_BYTES,
                len_bytes: PIECE_PAGES.min(end - page) * PAGE_BYTES,
            };
            let Some(bytes) = self.read(range, "Metadata") else { return false };
            let digests = maps.bytes(Map::Digests).chunks_exact_mut(8).skip(page as usize);
            for (bytes, digest) in bytes.chunks_exact(PAGE_BYTES as usize).zip(digests) {
                digest.copy_from_slice(&page_digest(bytes).to_le_bytes());
            }
        }
        true
    }

    fn explain_other_slots(&mut self, superblock: &Superblock, page: u64) {
        let offset_bytes = superblock.layout.metadata().offset_bytes + page * PAGE_BYTES;
        let first = page * SLOTS_PER_PAGE;
        self.find(
            Severity::Damage,
            FindingKind::Inode,
            ByteRange { offset_bytes, len_bytes: PAGE_BYTES },
            text(
                format!(
                    "The inodes {first} to {} are not those that were there when the pool was closed",
                    first + SLOTS_PER_PAGE - 1
                ),
                "A write of this page was lost, or the page was damaged: acknowledged changes are \
                 missing. What is there may be valid, and older",
                "Restore the pool from a backup. `PoolOptions::check` opens it with what is there",
            ),
        );
    }

    fn explain_saved(&mut self, place: ByteRange, what: &str) {
        self.find(
            Severity::Damage,
            FindingKind::SavedState,
            place,
            text(
                format!("The state that was saved when the pool was closed {what}"),
                "It lets the pool open without reading all slots; a slot or the state itself is not \
                 as it was written",
                "Run `aquifer pool check --repair`, which discards it: the pool is then opened as \
                 after a crash, and all slots are read",
            ),
        );
    }
}
