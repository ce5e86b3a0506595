//! The saved state: what a pool that was closed cleanly remembers, so that opening it need not read
//! all of its metadata.
//!
//! It lies in a run of pages of the data that the superblock names, and holds bitmaps of used pages
//! and slots, and a digest of each page of metadata. Everything is verified before it is believed,
//! each part by the one before it:
//!
//! ```text
//!   superblock ─▶ header ─▶ table ─▶ blocks of the maps ─▶ pages of metadata
//! ```
//!
//! The superblock has the checksum of the header, the header that of the table, the table one for
//! each block, and the digests one for each page of metadata. The state belongs to one moment: the
//! header names generation and tail of the superblock that was written with it. Whatever does not
//! match is no damage; the pool is then opened as after a crash.
//!
//! ```text
//!  page 0: header (512 bytes), table        the rest of the table      map 0 … map 4
//!  ┌──────────┬───────────────────────────┬──────────────────────────┬─────────────────────┐
//!  │ header   │ 8 bytes for each block    │                          │ blocks of 4096 bytes│
//!  └──────────┴───────────────────────────┴──────────────────────────┴─────────────────────┘
//! ```
//!
//! A block that is all zero is not stored: its entry in the table is 0, and its page may hold
//! anything.

use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::layout::Layout;
use crate::run::Run;
use crate::slot_bytes::{SLOT_BYTES, check_sum, checksum_of};
use crate::superblock::Superblock;
use crate::{FormatError, PAGE_BYTES, checksum};

const MAGIC: [u8; 8] = *b"AQSAVED\0";
/// The version of the saved state. Another version is not read: the pool is then opened as after a
/// crash, and the state written anew.
const VERSION: u32 = 1;
/// Bytes of the header. The table follows.
pub const HEADER_BYTES: usize = 512;
/// Bytes of an entry of the table.
pub const ENTRY_BYTES: usize = 8;

/// The maps, in their order on media.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Map {
    /// One bit for each page of the pool: it is not free.
    UsedPages,
    /// One bit for each slot: it is not empty.
    OccupiedSlots,
    /// One bit for each slot: it contains an object.
    Objects,
    /// One bit for each slot: it contains an inode of a file without links.
    Orphans,
    /// Eight bytes for each page of metadata: its [`page_digest`], 0 if it was never used.
    Digests,
}

/// All maps, in their order on media.
pub const MAPS: [Map; 5] =
    [Map::UsedPages, Map::OccupiedSlots, Map::Objects, Map::Orphans, Map::Digests];

/// The places of the parts of a saved state. They follow from the layout of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedLayout {
    /// The first block of each map, counted over all maps.
    first_blocks: [u64; MAPS.len()],
    /// Blocks of all maps.
    pub blocks: u64,
    /// Pages of the header and the table.
    pub table_pages: u64,
}

impl SavedLayout {
    /// The places in a pool of this layout.
    pub fn new(layout: &Layout) -> SavedLayout {
        const BITS: u64 = PAGE_BYTES * 8;
        let mut blocks = 0;
        let first_blocks = MAPS.map(|map| {
            let first_block = blocks;
            blocks += match map {
                Map::UsedPages => layout.page_count.div_ceil(BITS),
                Map::OccupiedSlots | Map::Objects | Map::Orphans => layout.slots().div_ceil(BITS),
                Map::Digests => layout.metadata_pages.div_ceil(PAGE_BYTES / 8),
            };
            first_block
        });
        let table_bytes = HEADER_BYTES as u64 + blocks * ENTRY_BYTES as u64;
        SavedLayout { first_blocks, blocks, table_pages: table_bytes.div_ceil(PAGE_BYTES) }
    }

    /// Pages of the whole saved state.
    pub fn pages(&self) -> u64 {
        self.table_pages + self.blocks
    }

    /// The blocks of a map, counted over all maps.
    pub fn blocks_of(&self, map: Map) -> std::ops::Range<u64> {
        let index = map as usize;
        let end = self.first_blocks.get(index + 1).copied().unwrap_or(self.blocks);
        self.first_blocks[index]..end
    }

    /// Bytes of the table.
    pub fn table_bytes(&self) -> usize {
        self.blocks as usize * ENTRY_BYTES
    }

    /// The page of a block, inside the run of the saved state.
    pub fn page_of_block(&self, block: u64) -> u64 {
        self.table_pages + block
    }
}

/// The header of a saved state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedHeader {
    /// The pool's uuid.
    pub uuid: Uuid,
    /// The run that the state lies in.
    pub run: Run,
    /// The generation of the superblock that names it.
    pub generation: u64,
    /// The tail in that superblock, where the log ends as well.
    pub tail_lsn: u64,
    /// Pages that are not used.
    pub free_pages: u64,
    /// The head's first fresh page.
    pub fresh_from_page: u64,
    /// The head's count of used slots.
    pub used_slots: u64,
    /// The checksum of the table.
    pub table_sum: u64,
    /// A page of metadata could not be read while the pool was open, or was not that of its digest:
    /// the next writer must compare all.
    pub is_doubtful: bool,
}

#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    version: U32,
    maps: U32,
    uuid: [u8; 16],
    start_page: U64,
    pages: U64,
    generation: U64,
    tail_lsn: U64,
    free_pages: U64,
    fresh_from_page: U64,
    used_slots: U64,
    table_sum: U64,
    is_doubtful: U64,
    reserved: [u8; 400],
    checksum: U64,
}

const _: () = {
    assert!(size_of::<Raw>() == HEADER_BYTES);
    assert!(std::mem::offset_of!(Raw, uuid) == 16);
    assert!(std::mem::offset_of!(Raw, start_page) == 32);
    assert!(std::mem::offset_of!(Raw, table_sum) == 88);
    assert!(std::mem::offset_of!(Raw, checksum) == 504);
};

/// A checksum that is never 0, which stands for the absence of one.
fn nonzero(sum: u64) -> u64 {
    sum.max(1)
}

impl SavedHeader {
    /// Encodes it.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut raw = Raw {
            magic: MAGIC,
            version: U32::new(VERSION),
            maps: U32::new(MAPS.len() as u32),
            uuid: *self.uuid.as_bytes(),
            start_page: U64::new(self.run.start_page),
            pages: U64::new(self.run.pages),
            generation: U64::new(self.generation),
            tail_lsn: U64::new(self.tail_lsn),
            free_pages: U64::new(self.free_pages),
            fresh_from_page: U64::new(self.fresh_from_page),
            used_slots: U64::new(self.used_slots),
            table_sum: U64::new(self.table_sum),
            is_doubtful: U64::new(self.is_doubtful.into()),
            reserved: [0; 400],
            checksum: U64::ZERO,
        };
        raw.checksum = U64::new(checksum(&[&raw.as_bytes()[..HEADER_BYTES - 8]]));
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Decodes it from the beginning of `bytes`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<SavedHeader, FormatError> {
        let (raw, _) = Raw::ref_from_prefix(bytes).map_err(|_| FormatError::Short)?;
        if raw.magic != MAGIC {
            return Err(FormatError::Magic);
        }
        let computed = checksum(&[&raw.as_bytes()[..HEADER_BYTES - 8]]);
        if raw.checksum.get() != computed {
            return Err(FormatError::Checksum { stored: raw.checksum.get(), computed });
        }
        if (raw.version.get(), raw.maps.get()) != (VERSION, MAPS.len() as u32) {
            return Err(FormatError::Version { found: raw.version.get() });
        }
        Ok(SavedHeader {
            uuid: Uuid::from_bytes(raw.uuid),
            run: Run { start_page: raw.start_page.get(), pages: raw.pages.get() },
            generation: raw.generation.get(),
            tail_lsn: raw.tail_lsn.get(),
            free_pages: raw.free_pages.get(),
            fresh_from_page: raw.fresh_from_page.get(),
            used_slots: raw.used_slots.get(),
            table_sum: raw.table_sum.get(),
            is_doubtful: raw.is_doubtful.get() != 0,
        })
    }

    /// Checks that it is of the same moment as the superblock, and fits its pool.
    ///
    /// # Errors
    /// What does not match.
    pub fn validate(&self, superblock: &Superblock) -> Result<(), FormatError> {
        let field = |field, value| Err(FormatError::Field { field, value });
        let layout = &superblock.layout;
        if self.uuid != superblock.uuid || self.run != superblock.saved {
            return Err(FormatError::Contradiction { other: "the superblock" });
        }
        if self.generation != superblock.generation {
            return field("generation", self.generation);
        }
        if self.tail_lsn != superblock.tail_lsn {
            return field("tail", self.tail_lsn);
        }
        if self.free_pages > layout.page_count {
            return field("free pages", self.free_pages);
        }
        if !(self.run.end_page()..=layout.page_count).contains(&self.fresh_from_page) {
            return field("first fresh page", self.fresh_from_page);
        }
        if !(1..=layout.slots()).contains(&self.used_slots) {
            return field("used slots", self.used_slots);
        }
        Ok(())
    }
}

/// The checksum of an encoded header that the superblock has; never 0.
pub fn header_sum(bytes: &[u8; HEADER_BYTES]) -> u64 {
    nonzero(checksum(&[bytes]))
}

/// The checksum of a table: of all its entries.
pub fn table_sum(entries: &[u8]) -> u64 {
    checksum(&[entries])
}

/// The entry of a block in the table: 0 if all its bytes are zero. `block` is counted over all
/// maps; the entry covers it, so that a block in the wrong place does not match.
pub fn block_sum(block: u64, bytes: &[u8]) -> u64 {
    if bytes.iter().all(|&byte| byte == 0) {
        return 0;
    }
    nonzero(checksum(&[&block.to_le_bytes(), bytes]))
}

/// The digest of a page of metadata, from the checksums that its slots have on media: 0 if all are
/// 0, which is so only where no slot was used.
///
/// Each slot is verified by its own checksum. What the digest adds is *which* one: an old version of
/// a slot that a lost write left there is valid by itself.
pub fn page_digest(page: &[u8]) -> u64 {
    let mut sums = [0; PAGE_BYTES as usize / SLOT_BYTES * 8];
    for (sum, slot) in sums.chunks_exact_mut(8).zip(page.chunks_exact(SLOT_BYTES)) {
        sum.copy_from_slice(&slot[SLOT_BYTES - 8..]);
    }
    if sums.iter().all(|&byte| byte == 0) {
        return 0;
    }
    nonzero(checksum(&[&sums]))
}

/// Checks that a page of metadata is the one that has this digest: each slot is valid, or was never
/// used.
///
/// # Errors
/// The index of the slot in the page, and what is wrong with it.
pub fn check_page(page: &[u8], digest: u64) -> Result<(), (usize, FormatError)> {
    for (index, slot) in page.as_chunks::<SLOT_BYTES>().0.iter().enumerate() {
        let stored = u64::from_le_bytes(slot[SLOT_BYTES - 8..].try_into().expect("eight bytes"));
        if stored == 0 {
            if slot.iter().any(|&byte| byte != 0) {
                let computed = checksum_of(slot);
                return Err((index, FormatError::Checksum { stored, computed }));
            }
        } else {
            check_sum(slot, stored).map_err(|error| (index, error))?;
        }
    }
    if page_digest(page) == digest {
        Ok(())
    } else {
        Err((0, FormatError::Contradiction { other: "the saved digest" }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout {
        page_count: 2 << 20,
        metadata_pages: 156_250,
        log_start_page: 156_252,
        log_pages: 32_768,
        data_start_page: 189_020,
    };

    fn superblock() -> Superblock {
        Superblock {
            uuid: Uuid::from_u128(7),
            sequence: 3,
            layout: LAYOUT,
            generation: 12,
            tail_lsn: 4096,
            segment: Uuid::nil(),
            created_ns: 0,
            boot: 0,
            features: crate::superblock::SAVED,
            saved: Run { start_page: 189_020, pages: SavedLayout::new(&LAYOUT).pages() },
            saved_sum: 0,
        }
    }

    fn header() -> SavedHeader {
        let superblock = superblock();
        SavedHeader {
            uuid: superblock.uuid,
            run: superblock.saved,
            generation: superblock.generation,
            tail_lsn: superblock.tail_lsn,
            free_pages: 100,
            fresh_from_page: 189_600,
            used_slots: 2,
            table_sum: 99,
            is_doubtful: true,
        }
    }

    #[test]
    fn the_parts_follow_each_other() {
        let saved = SavedLayout::new(&LAYOUT);
        let blocks: Vec<u64> =
            MAPS.iter().map(|map| saved.blocks_of(*map)).map(|map| map.end - map.start).collect();
        assert_eq!(blocks, [64, 39, 39, 39, 306]);
        assert_eq!((saved.blocks, saved.table_pages), (487, 2));
        assert_eq!(saved.blocks_of(Map::Digests), 181..487);
        assert_eq!(saved.pages(), 489);
        assert_eq!(saved.page_of_block(486), 488);
        let small = Layout::new(4 << 20, 64, 64 << 10).unwrap();
        assert_eq!(SavedLayout::new(&small).pages(), 6);
    }

    #[test]
    fn a_header_is_what_was_encoded_byte_for_byte() {
        let header = header();
        let bytes = header.encode();
        assert_eq!(&bytes[..16], b"AQSAVED\0\x01\0\0\0\x05\0\0\0");
        assert_eq!(bytes[16..32], *header.uuid.as_bytes());
        for (offset, value) in [(32, 189_020), (40, 489), (48, 12), (56, 4096), (64, 100)] {
            assert_eq!(bytes[offset..offset + 8], u64::to_le_bytes(value));
        }
        for (offset, value) in [(72, 189_600), (80, 2), (88, 99)] {
            assert_eq!(bytes[offset..offset + 8], u64::to_le_bytes(value));
        }
        assert_eq!(bytes[96..104], 1_u64.to_le_bytes());
        assert!(bytes[104..504].iter().all(|&byte| byte == 0));
        let decoded = SavedHeader::decode(&bytes).unwrap();
        assert_eq!(decoded, header);
        decoded.validate(&superblock()).unwrap();
    }

    #[test]
    fn a_flipped_bit_is_found() {
        let bytes = header().encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(SavedHeader::decode(&flipped).is_err(), "bit {bit}");
            assert_ne!(header_sum(&flipped), header_sum(&bytes));
        }
        assert_eq!(SavedHeader::decode(&bytes[..511]), Err(FormatError::Short));
    }

    #[test]
    fn a_header_of_another_moment_or_pool_does_not_match() {
        let change = |change: fn(&mut SavedHeader)| {
            let mut header = header();
            change(&mut header);
            SavedHeader::decode(&header.encode()).unwrap().validate(&superblock()).unwrap_err()
        };
        change(|header| header.generation += 1);
        change(|header| header.tail_lsn += 4096);
        change(|header| header.uuid = Uuid::from_u128(8));
        change(|header| header.run.start_page += 1);
        change(|header| header.run.pages += 1);
        change(|header| header.free_pages = u64::MAX);
        change(|header| header.fresh_from_page = LAYOUT.page_count + 1);
        change(|header| header.fresh_from_page = header.run.end_page() - 1);
        change(|header| header.used_slots = 0);
        change(|header| header.used_slots = LAYOUT.slots() + 1);
    }

    #[test]
    fn a_page_is_believed_only_as_a_whole() {
        let mut page = vec![0; PAGE_BYTES as usize];
        assert_eq!(check_page(&page, 0), Ok(()));
        let slot = |generation| crate::inode::Inode::free(2, generation).encode().unwrap();
        page[1024..1536].copy_from_slice(&slot(5));
        let digest = page_digest(&page);
        assert_eq!(check_page(&page, digest), Ok(()));
        let mut changed = page.clone();
        changed[1030] ^= 1;
        assert!(matches!(check_page(&changed, digest), Err((2, FormatError::Checksum { .. }))));
        // An older slot is valid by itself.
        changed[1024..1536].copy_from_slice(&slot(4));
        assert!(matches!(
            check_page(&changed, digest),
            Err((_, FormatError::Contradiction { .. }))
        ));
        changed[1024..1536].fill(0);
        assert!(check_page(&changed, digest).is_err());
        page[0] = 1;
        assert!(matches!(check_page(&page, digest), Err((0, FormatError::Checksum { .. }))));
    }

    #[test]
    fn sums_tell_blocks_and_pages_apart() {
        let mut block = [0; PAGE_BYTES as usize];
        assert_eq!(block_sum(3, &block), 0);
        assert_eq!(page_digest(&block), 0);
        block[5] = 1;
        assert_ne!(block_sum(3, &block), block_sum(4, &block));
        assert_eq!(page_digest(&block), 0, "only the checksums of the slots count");
        block[4095] = 1;
        let last = page_digest(&block);
        block.swap(4095, 511);
        assert!(last != 0 && last != page_digest(&block));
    }
}
