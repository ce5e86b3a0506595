//! Changes bytes of a pool like an adversary that recomputes the checksums.

use aquifer_format::PAGE_BYTES;
use aquifer_format::checksum;
use aquifer_format::layout::Layout;
use aquifer_format::record::{HEADER_BYTES, Header, LogIdentity};
use aquifer_format::saved::{
    self, Map, SavedHeader, SavedLayout, block_sum, header_sum, page_digest, table_sum,
};
use aquifer_format::slot_bytes::SLOT_BYTES;
use aquifer_format::superblock::{SUPERBLOCK_BYTES, Superblock};

const PAGE: usize = PAGE_BYTES as usize;

/// The superblock of a sample, from any valid copy.
pub fn superblock(image: &[u8]) -> Superblock {
    (0..2)
        .find_map(|copy| {
            Superblock::decode(&image[copy * PAGE..(copy + 1) * PAGE], copy as u64).ok()
        })
        .expect("one copy is whole")
}

/// Whether a copy of the superblock is valid.
pub fn is_readable(image: &[u8]) -> bool {
    (0..2).any(|copy| {
        image
            .get(copy * PAGE..(copy + 1) * PAGE)
            .is_some_and(|page| Superblock::decode(page, copy as u64).is_ok())
    })
}

/// The identity in records of the pool.
pub fn identity(superblock: &Superblock) -> LogIdentity {
    LogIdentity { pool: superblock.uuid.as_u64_pair().0, generation: superblock.generation }
}

/// Recomputes the checksum of a superblock.
pub fn seal_superblock(image: &mut [u8], copy: usize) {
    let bytes = &mut image[copy * PAGE..copy * PAGE + SUPERBLOCK_BYTES];
    let sum = checksum(&[&bytes[..SUPERBLOCK_BYTES - 8]]);
    bytes[SUPERBLOCK_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
}

/// Recomputes the checksum of a slot.
pub fn seal_slot(slot: &mut [u8]) {
    let sum = checksum(&[&slot[..SLOT_BYTES - 8]]);
    slot[SLOT_BYTES - 8..SLOT_BYTES].copy_from_slice(&sum.to_le_bytes());
}

/// The bytes of a slot on media.
pub fn slot<'a>(image: &'a mut [u8], layout: &Layout, number: u64) -> &'a mut [u8] {
    let start = layout.slot_offset_bytes(number) as usize;
    &mut image[start..start + SLOT_BYTES]
}

/// The place of a record in the image.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub offset: usize,
    pub len: usize,
    pub lsn: u64,
}

/// The records of the log from its tail on, without those that only fill space.
pub fn records(image: &[u8]) -> Vec<Place> {
    let superblock = superblock(image);
    let log = superblock.layout.log();
    let mut lsn = superblock.tail_lsn;
    let mut places = Vec::new();
    loop {
        let offset = (log.offset_bytes + lsn % log.len_bytes) as usize;
        let page = &image[offset..offset + PAGE];
        let Ok(header) = Header::decode(page, lsn, log.len_bytes, identity(&superblock)) else {
            return places;
        };
        if !header.is_skip {
            places.push(Place { offset, len: header.len_bytes as usize, lsn });
        }
        lsn = header.end_lsn();
    }
}

/// Recomputes the checksum of a record.
pub fn seal_record(record: &mut [u8]) {
    // Bytes after the header do not count in a record that only fills space or closes packed ones.
    let body = match record[4] {
        1 => checksum(&[&record[HEADER_BYTES..]]),
        _ => 0,
    };
    record[HEADER_BYTES - 8..HEADER_BYTES].fill(0);
    let sum = checksum(&[&record[..HEADER_BYTES], &body.to_le_bytes()]);
    record[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
}

/// The layout of the saved state of a sample that has one, and where it begins.
pub fn saved_state(image: &[u8]) -> (SavedLayout, usize) {
    let superblock = superblock(image);
    (SavedLayout::new(&superblock.layout), superblock.saved.start_page as usize * PAGE)
}

/// Makes the digests of the saved state those of the slots.
pub fn redigest(image: &mut [u8]) {
    let (layout, start) = saved_state(image);
    let pool = superblock(image).layout;
    let digests =
        start + layout.page_of_block(layout.blocks_of(Map::Digests).start) as usize * PAGE;
    for page in 0..pool.metadata_pages as usize {
        let slots = pool.metadata().offset_bytes as usize + page * PAGE;
        // The superblock may be forged as well, and say that they lie elsewhere.
        let Some(digest) = image.get(slots..slots + PAGE).map(page_digest) else { return };
        let Some(place) = image.get_mut(digests + page * 8..) else { return };
        let Some(place) = place.first_chunk_mut() else { return };
        *place = digest.to_le_bytes();
    }
}

/// Recomputes all checksums of the saved state, from the blocks of the maps up to the superblock;
/// false if it has no header.
pub fn reseal(image: &mut [u8]) -> bool {
    let (layout, start) = saved_state(image);
    let mut table = Vec::new();
    for block in 0..layout.blocks {
        let page = start + layout.page_of_block(block) as usize * PAGE;
        // As above.
        let Some(bytes) = image.get(page..page + PAGE) else { return false };
        table.extend_from_slice(&block_sum(block, bytes).to_le_bytes());
    }
    let place = start + saved::HEADER_BYTES;
    let Some(place) = image.get_mut(place..place + table.len()) else { return false };
    place.copy_from_slice(&table);
    let Ok(header) = SavedHeader::decode(&image[start..]) else { return false };
    let bytes = SavedHeader { table_sum: table_sum(&table), ..header }.encode();
    image[start..start + saved::HEADER_BYTES].copy_from_slice(&bytes);
    let superblock = Superblock { saved_sum: header_sum(&bytes), ..superblock(image) };
    for copy in 0..2 {
        image[copy * PAGE..(copy + 1) * PAGE].copy_from_slice(&superblock.encode(copy as u64));
    }
    true
}
