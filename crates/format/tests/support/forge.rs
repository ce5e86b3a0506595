//! Changes bytes of a pool like an adversary that recomputes the checksums.

use aquifer_format::PAGE_BYTES;
use aquifer_format::checksum;
use aquifer_format::inode::SLOT_BYTES;
use aquifer_format::layout::Layout;
use aquifer_format::record::{HEADER_BYTES, Header, LogIdentity};
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
