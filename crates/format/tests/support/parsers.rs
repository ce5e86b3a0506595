//! The tests of arbitrary bytes: run by the fuzzer for hours, and by a test for a moment.
//!
//! Each parser gets the bytes as they are, and again with correct magic and checksum, or only these
//! would ever be tested. What it accepts must survive a round trip through its encoding, and
//! everything computed from it must be computable.

use aquifer_format::PAGE_BYTES;
use aquifer_format::byte_chain::{CHAIN_BYTES, MAGIC as BYTE_CHAIN_MAGIC};
use aquifer_format::directory::{MAX_CHILDREN, MAX_LEVEL, Node, NodeContent, NodeView};
use aquifer_format::file::{FILE_RUNS, MAGIC as FILE_MAGIC};
use aquifer_format::inode::{Inode, PoolHead};
use aquifer_format::layout::Layout;
use aquifer_format::record::{Entry, HEADER_BYTES, Header, LogIdentity, MIN_CLOSE_BYTES, Record};
use aquifer_format::run::MAX_PAGES;
use aquifer_format::run_list::{LIST_RUNS, MAGIC as RUN_LIST_MAGIC};
use aquifer_format::saved::{self, SavedHeader, SavedLayout};
use aquifer_format::slot::Slot;
use aquifer_format::slot_bytes::{SLOT_BYTES, SlotBytes};
use aquifer_format::superblock::{KNOWN_FEATURES, SUPERBLOCK_BYTES, Superblock};

use super::forge;

const PAGE: usize = PAGE_BYTES as usize;

/// Pads `data` with zeros to at least `len` bytes.
fn padded(data: &[u8], len: usize) -> Vec<u8> {
    let mut bytes = data.to_vec();
    bytes.resize(bytes.len().max(len), 0);
    bytes
}

/// Tests any bytes as a superblock.
pub fn superblock(data: &[u8]) {
    for copy in 0..2 {
        accept_superblock(data, copy);
        let mut image = vec![0; 2 * PAGE];
        let page = &mut image[copy as usize * PAGE..][..PAGE];
        let len = data.len().min(SUPERBLOCK_BYTES);
        page[..len].copy_from_slice(&data[..len]);
        page[..12].copy_from_slice(b"AQUIFER\0\0\0\0\0");
        page[12..16].copy_from_slice(&(PAGE as u32).to_le_bytes());
        page[120] &= KNOWN_FEATURES as u8;
        page[121..128].fill(0);
        page[128..136].copy_from_slice(&copy.to_le_bytes());
        forge::seal_superblock(&mut image, copy as usize);
        accept_superblock(&image[copy as usize * PAGE..], copy);
    }
}

fn accept_superblock(bytes: &[u8], copy: u64) {
    let Ok(superblock) = Superblock::decode(bytes, copy) else { return };
    let layout = superblock.layout;
    layout.validate().expect("it was validated");
    assert!(layout.metadata().end_bytes() == layout.log().offset_bytes);
    assert!(layout.log().end_bytes() == layout.data().offset_bytes);
    assert!(layout.data().end_bytes() == layout.len_bytes());
    assert!(layout.slot_offset_bytes(layout.slots()) == layout.log().offset_bytes);
    assert!(superblock.saved.end_page() <= layout.page_count);
    let _ = SavedLayout::new(&layout).pages();
    let _ = superblock.sequence + 1;
    let _ = superblock.generation + (1 << 40);
    let _ = superblock.tail_lsn + layout.log().len_bytes;
    assert!(superblock.is_of_same_pool(&superblock));
    let page = superblock.encode(copy);
    assert_eq!(Superblock::decode(&page, copy), Ok(superblock));
}

/// Tests any bytes as the header of a saved state.
pub fn saved(data: &[u8]) {
    let mut bytes = [0; saved::HEADER_BYTES];
    let len = data.len().min(bytes.len());
    bytes[..len].copy_from_slice(&data[..len]);
    assert_eq!(
        SavedHeader::decode(data).is_ok(),
        len == bytes.len() && SavedHeader::decode(&bytes).is_ok()
    );
    bytes[..16].copy_from_slice(b"AQSAVED\0\x01\0\0\0\x05\0\0\0");
    bytes[96..504].fill(0);
    let sum = aquifer_format::checksum(&[&bytes[..504]]);
    bytes[504..].copy_from_slice(&sum.to_le_bytes());
    let header = SavedHeader::decode(&bytes).expect("magic, version and checksum are right");
    assert_eq!(header.encode(), bytes);
    // Any header is of some superblock, or of none.
    let layout = Layout::new(4 << 20, 64, 64 << 10).expect("it fits");
    let superblock = Superblock {
        uuid: header.uuid,
        sequence: 1,
        layout,
        generation: header.generation,
        tail_lsn: header.tail_lsn,
        segment: header.uuid,
        created_ns: 0,
        boot: 0,
        features: KNOWN_FEATURES,
        saved: header.run,
        saved_sum: 1,
    };
    if header.validate(&superblock).is_ok() {
        assert!(header.fresh_from_page <= layout.page_count);
        assert!(header.used_slots <= layout.slots() && header.free_pages <= layout.page_count);
    }
}

/// Tests any bytes as an inode and as the head.
pub fn slot(data: &[u8]) {
    for magic in [None, Some(b"AQIN"), Some(b"AQHD")] {
        let mut bytes = padded(data, SLOT_BYTES);
        bytes.truncate(SLOT_BYTES);
        if let Some(magic) = magic {
            bytes[..4].copy_from_slice(magic);
            forge::seal_slot(&mut bytes);
        }
        let number = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        if let Ok(inode) = Inode::decode(&bytes, number) {
            let _ = inode.content_pages();
            for run in inode.all_runs() {
                assert!(!run.is_empty() && run.bytes().end_bytes() >= run.bytes().len_bytes);
            }
            let again = inode.encode().expect("it was decoded");
            assert_eq!(Inode::decode(&again, number), Ok(inode));
        }
        if let Ok(head) = PoolHead::decode(&bytes) {
            assert_eq!(PoolHead::decode(&head.encode()), Ok(head));
        }
    }
    let _ = Inode::decode(data, 1);
    let _ = PoolHead::decode(data);
    directory_node(data);
    file_slots(data);
}

/// The offsets of the content in the inode of a file, and in other slots of it.
const FILE_RUNS_OFFSET: usize = 184;
const LIST_RUNS_OFFSET: usize = 32;

/// Tests any bytes as a slot of a file: its inode, more of its runs, bytes.
fn file_slots(data: &[u8]) {
    let mut bytes: SlotBytes = padded(data, SLOT_BYTES)[..SLOT_BYTES].try_into().expect("512");
    accept_file_slot(&bytes);
    // Counts, lengths and kinds: the valid ones, and one more; runs beyond the count are zero.
    let less_than = |bytes: &mut SlotBytes, offset: usize, limit: usize| {
        let value = usize::from(u16::from_le_bytes([bytes[offset], bytes[offset + 1]])) % limit;
        bytes[offset..offset + 2].copy_from_slice(&(value as u16).to_le_bytes());
        value
    };
    for (magic, limit, runs_offset) in [
        (RUN_LIST_MAGIC, LIST_RUNS + 2, Some(LIST_RUNS_OFFSET)),
        (BYTE_CHAIN_MAGIC, CHAIN_BYTES + 2, None),
        (FILE_MAGIC, 4, Some(FILE_RUNS_OFFSET)),
    ] {
        bytes[..4].copy_from_slice(&magic);
        let mut count = less_than(&mut bytes, 4, limit);
        if magic == FILE_MAGIC {
            less_than(&mut bytes, 6, 3);
            // The size, in bytes.
            bytes[38] %= 0x12;
            bytes[39] = 0;
            count = less_than(&mut bytes, FILE_RUNS_OFFSET - 48, FILE_RUNS + 2);
        }
        if let Some(offset) = runs_offset {
            let end = (offset + count * 8).min(SLOT_BYTES - 8);
            bytes[end..].fill(0);
        }
        forge::seal_slot(&mut bytes);
        accept_file_slot(&bytes);
    }
}

fn accept_file_slot(bytes: &SlotBytes) {
    let number = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
    let Ok(slot) = Slot::decode(bytes, number) else { return };
    let again = match &slot {
        Slot::File(inode) => inode.encode(),
        Slot::Runs(list) => list.encode(),
        Slot::Bytes(chain) => chain.encode(),
        _ => return,
    };
    let again = again.expect("it was decoded");
    assert_eq!(Slot::decode(&again, number).as_ref(), Ok(&slot));
    // Runs beyond the count are zero.
    let content = if matches!(slot, Slot::File(_)) { FILE_RUNS_OFFSET } else { LIST_RUNS_OFFSET };
    assert_eq!(again[content..SLOT_BYTES - 8], bytes[content..SLOT_BYTES - 8], "{slot:?}");
    for run in slot.runs() {
        assert!(!run.is_empty() && !run.is_hole() && run.end_page() < 2 * MAX_PAGES);
    }
}

/// Tests any bytes as a node of a directory, decoded, and read as lookups do.
fn directory_node(data: &[u8]) {
    for is_sealed in [false, true] {
        let mut bytes: SlotBytes = padded(data, SLOT_BYTES)[..SLOT_BYTES].try_into().expect("512");
        if is_sealed {
            bytes[..4].copy_from_slice(b"AQDN");
            // Levels and counts: the valid ones, and one more.
            (bytes[4], bytes[5]) = (bytes[4] % (MAX_LEVEL + 2) as u8, 0);
            (bytes[6], bytes[7]) = (bytes[6] % (MAX_CHILDREN + 2) as u8, 0);
            forge::seal_slot(&mut bytes);
        }
        let number = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        if let Ok(view) = NodeView::new(&bytes, number) {
            let hash = u64::from_le_bytes(bytes[48..56].try_into().expect("eight bytes"));
            let child = view.child(view.child_index(hash));
            assert_eq!(child.is_some(), view.level() > 0, "there is always a way down");
            let _ = view.place(hash, &bytes[62..70]);
            assert!(view.entries().count() <= view.count());
            let _ = view.entry_bytes();
            let _ = view.decode_entries();
        }
        let Ok(node) = Node::decode(&bytes, number) else { continue };
        // A slot in shared memory has no checksum yet.
        let content = ..SLOT_BYTES - 8;
        assert_eq!(node.encode().expect("it was decoded")[content], bytes[content]);
        let view = NodeView::new(&bytes, number).expect("it was decoded");
        if let NodeContent::Leaf(entries) = &node.content {
            for entry in entries {
                let found = view.place(entry.hash, &entry.name).expect("it was decoded").entry;
                assert_eq!(found.map(|found| found.inode), Some(entry.inode));
            }
        }
    }
}

/// Tests any bytes as a record of a log.
pub fn record(data: &[u8]) {
    const LOG_BYTES: u64 = 64 << 10;
    const IDENTITY: LogIdentity = LogIdentity { pool: 3, generation: 7 };
    // At the start of a page, and at a position of packed records.
    for lsn in [5 * LOG_BYTES + PAGE_BYTES, 5 * LOG_BYTES + PAGE_BYTES + 192] {
        record_at(data, lsn, LOG_BYTES, IDENTITY);
    }
}

fn record_at(data: &[u8], lsn: u64, log_bytes: u64, identity: LogIdentity) {
    for is_sealed in [false, true] {
        let mut bytes = data.to_vec();
        if is_sealed {
            bytes = padded(data, HEADER_BYTES);
            let unit = if lsn.is_multiple_of(PAGE_BYTES) { PAGE } else { HEADER_BYTES };
            bytes.resize(bytes.len().next_multiple_of(unit).min(14 * PAGE), 0);
            bytes[..4].copy_from_slice(b"AQLR");
            // Makes the kind a transaction more often than random bytes would.
            let kind = 1
                + u32::from(data.first().is_some_and(|first| first % 4 == 1))
                + u32::from(data.first().is_some_and(|first| first % 8 == 1));
            bytes[4..8].copy_from_slice(&kind.to_le_bytes());
            bytes[8..16].copy_from_slice(&lsn.to_le_bytes());
            bytes[16..24].copy_from_slice(&identity.generation.to_le_bytes());
            let len_bytes = bytes.len() as u64;
            bytes[24..32].copy_from_slice(&len_bytes.to_le_bytes());
            bytes[34..40].fill(0);
            bytes[40..48].copy_from_slice(&identity.pool.to_le_bytes());
            bytes[51..56].fill(0);
            if kind > 1 {
                bytes[32..36].fill(0);
            }
            forge::seal_record(&mut bytes);
        }
        let Ok(header) = Header::decode(&bytes, lsn, log_bytes, identity) else { continue };
        assert!(header.end_lsn() > lsn && header.end_lsn() <= 6 * log_bytes, "inside the ring");
        assert!(!header.is_close || header.len_bytes >= MIN_CLOSE_BYTES);
        bytes.resize(header.len_bytes as usize, 0);
        let Ok(mut record) = Record::decode(header, bytes.clone()) else { continue };
        if header.is_close {
            bytes[HEADER_BYTES..HEADER_BYTES + 8].copy_from_slice(&header.close_mark());
            record = Record::decode(header, bytes).expect("what fills space has no content");
            assert!(record.is_marked());
        }
        let _ = record.content_inodes().count();
        for change in record.slots() {
            assert_eq!(change.bytes.len() as u64, change.words.len_bytes());
            change.apply(&mut [0; SLOT_BYTES]);
        }
        let mut payload_bytes = 0;
        for entry in &record.entries {
            match *entry {
                Entry::Slot { words, payload_offset, .. } => {
                    payload_bytes += record.payload(payload_offset, words.len_bytes()).len();
                }
                Entry::Pages { target, payload_offset, .. } => {
                    payload_bytes += record.payload(payload_offset, target.len_bytes).len();
                }
                Entry::Patches { target, payload_offset, len_bytes, .. } => {
                    let bytes = record.payload(payload_offset, len_bytes);
                    payload_bytes += bytes.len();
                    let pages = target.len_bytes / PAGE_BYTES;
                    for patch in aquifer_format::patch::iter(bytes) {
                        let end = usize::from(patch.offset) + patch.bytes.len();
                        assert!(u64::from(patch.page) < pages && end <= PAGE);
                    }
                }
                Entry::Copied { target, .. } => assert!(target.end_bytes() > target.offset_bytes),
                Entry::NewRun { range } => assert!(range.end_bytes() > range.offset_bytes),
                Entry::Exposed { range } => assert!(range.end_bytes() >= range.offset_bytes),
            }
        }
        assert!(payload_bytes <= record.bytes().len(), "each has its own part");
    }
}
