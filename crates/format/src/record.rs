//! Records of the log.
//!
//! A record is one atomic change of the pool: words of metadata slots, pages of objects or patches
//! of them, or the place where pages that are too many for the log were put. A record never crosses
//! the end of the ring.
//!
//! There are two kinds of records. A *durable* record starts and ends at page boundaries, so that
//! writing it never rewrites bytes of another record. *Packed* records follow one another at
//! multiples of 64 bytes: they are visible to all processes at once, but have not been acknowledged
//! as durable. Before they become durable, a record that *closes* them fills the log up to a page
//! boundary.
//!
//! ```text
//!  0        64                  multiple of 64               multiple of 4096                  len
//!  ┌────────┬───────────────────┬────────────────────────────┬────────────────────────────────┐
//!  │ header │ entries, 40 bytes │ slots and patches, in the  │ pages, in the order of their   │
//!  │        │                   │ order of their entries     │ entries                        │
//!  └────────┴───────────────────┴────────────────────────────┴────────────────────────────────┘
//! ```
//!
//! A record counts only if its LSN is its position, its generation and its pool are those of the
//! log, and its checksum is that of header, entries and payload. `acknowledged_lsn` states up to
//! where the log was known to be durable when the record was made: a valid record whose value is
//! beyond what recovery can find proves that the log was damaged, and not only cut short by a
//! crash.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::slot_bytes::SlotBytes;
use crate::slot_change::{SETTABLE_WORDS, SlotChange, SlotWords};
use crate::{ByteRange, FormatError, PAGE_BYTES, checksum, patch};

/// Bytes of a record's header.
pub const HEADER_BYTES: usize = 64;
/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 40;

/// Records lie at multiples of this.
pub const RECORD_UNIT_BYTES: u64 = 64;
/// The minimum length of a closing record: its header and its mark.
pub const MIN_CLOSE_BYTES: u64 = 2 * RECORD_UNIT_BYTES;

const MAGIC: [u8; 4] = *b"AQLR";
const KIND_TRANSACTION: u32 = 1;
const KIND_SKIP: u32 = 2;
const KIND_CLOSE: u32 = 3;

/// Identifies the records of one pool and one generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogIdentity {
    /// The first eight bytes of the pool's uuid.
    pub pool: u64,
    /// The generation.
    pub generation: u64,
}

/// One change in a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// Words of a metadata slot; their values are in the payload.
    Slot {
        /// The slot.
        slot: u64,
        /// The words.
        words: SlotWords,
        /// Their offset in the record.
        payload_offset: u64,
    },
    /// Pages of an object's content; they are in the payload.
    Pages {
        /// The object's inode.
        inode: u64,
        /// Their place on media.
        target: ByteRange,
        /// Their offset in the record.
        payload_offset: u64,
    },
    /// Bytes of pages of an object's content; they are in the payload.
    Patches {
        /// The object's inode.
        inode: u64,
        /// The pages on media; patches count pages from its start.
        target: ByteRange,
        /// Their offset in the record.
        payload_offset: u64,
        /// Their length in the record.
        len_bytes: u64,
    },
    /// Pages of an object's content that were put elsewhere on media.
    Copied {
        /// The object's inode.
        inode: u64,
        /// Their place on media.
        target: ByteRange,
        /// The place on media of the copy.
        source_offset_bytes: u64,
        /// The checksum of these bytes.
        checksum: u64,
    },
    /// Pages that an inode names from this record on, and did not before. They were durable before
    /// the record was written.
    NewRun {
        /// Their place on media.
        range: ByteRange,
    },
    /// Bytes that an inode names from this record on, and did not before. They are durable if a
    /// later record that closes packed ones is marked, unless a packed record in between frees them.
    Exposed {
        /// Their place on media.
        range: ByteRange,
    },
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    kind: U32,
    lsn: U64,
    generation: U64,
    len_bytes: U64,
    entry_count: U32,
    reserved: U32,
    pool: U64,
    acknowledged_lsn: U64,
    checksum: U64,
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry {
    kind: U32,
    inode: U32,
    target: U64,
    len_bytes: U64,
    source: U64,
    /// For `Copied`, the checksum of the content; for `Patches`, their length; for a slot, a bit
    /// for each of its words.
    detail: U64,
}

const _: () = {
    assert!(size_of::<RawHeader>() == HEADER_BYTES);
    assert!(size_of::<RawEntry>() == ENTRY_BYTES);
    assert!(std::mem::offset_of!(RawHeader, checksum) == 56);
};

const ENTRY_SLOT: u32 = 1;
const ENTRY_SLOT_PATCH: u32 = 7;
const ENTRY_PAGES: u32 = 2;
const ENTRY_COPIED: u32 = 3;
const ENTRY_NEW_RUN: u32 = 4;
const ENTRY_PATCHES: u32 = 5;
const ENTRY_EXPOSED: u32 = 6;

/// A header, validated without the rest of the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Its position in the log.
    pub lsn: u64,
    /// Length of the whole record.
    pub len_bytes: u64,
    /// The number of entries that follow; a record without entries only fills space.
    pub entry_count: u32,
    /// Whether it only fills space; then the bytes after the header do not count.
    pub is_skip: bool,
    /// Whether it closes packed records. Such a record fills space as well.
    pub is_close: bool,
    /// The position up to which the log was known to be durable.
    pub acknowledged_lsn: u64,
    checksum: u64,
}

/// The checksum of a record: of the header and the checksum of all bytes after it. Two steps,
/// because the long one does not depend on the position and is done before log space is reserved.
fn record_checksum(header: &RawHeader, body_checksum: u64) -> u64 {
    let zeroed = RawHeader { checksum: U64::ZERO, ..*header };
    let mut bytes = [0; HEADER_BYTES + 8];
    bytes[..HEADER_BYTES].copy_from_slice(zeroed.as_bytes());
    bytes[HEADER_BYTES..].copy_from_slice(&body_checksum.to_le_bytes());
    checksum(&[&bytes])
}

impl Header {
    /// Reads the header of the record at `lsn` of a log of `log_bytes`.
    ///
    /// # Errors
    /// Why this position has no record of this log.
    pub fn decode(
        bytes: &[u8],
        lsn: u64,
        log_bytes: u64,
        identity: LogIdentity,
    ) -> Result<Header, FormatError> {
        let (raw, _) = RawHeader::ref_from_prefix(bytes).map_err(|_| FormatError::Short)?;
        if raw.magic != MAGIC {
            return Err(FormatError::Magic);
        }
        let identical = |found: u64, expected: u64| {
            if found == expected { Ok(()) } else { Err(FormatError::Identity { found, expected }) }
        };
        identical(raw.lsn.get(), lsn)?;
        identical(raw.generation.get(), identity.generation)?;
        identical(raw.pool.get(), identity.pool)?;
        let field = |field, value| Err(FormatError::Field { field, value });
        let len_bytes = raw.len_bytes.get();
        let room_bytes = log_bytes - lsn % log_bytes;
        if len_bytes == 0 || !len_bytes.is_multiple_of(RECORD_UNIT_BYTES) || len_bytes > room_bytes
        {
            return field("length", len_bytes);
        }
        let entry_count = raw.entry_count.get();
        if HEADER_BYTES as u64 + u64::from(entry_count) * ENTRY_BYTES as u64 > len_bytes {
            return field("entry count", entry_count.into());
        }
        let (is_skip, is_close) = match raw.kind.get() {
            KIND_TRANSACTION => (false, false),
            KIND_SKIP if entry_count == 0 => (true, false),
            KIND_CLOSE if entry_count == 0 && len_bytes >= MIN_CLOSE_BYTES => (true, true),
            other => return field("kind", other.into()),
        };
        if raw.acknowledged_lsn.get() > lsn {
            return field("acknowledged position", raw.acknowledged_lsn.get());
        }
        let header = Header {
            lsn,
            len_bytes,
            entry_count,
            is_skip,
            is_close,
            acknowledged_lsn: raw.acknowledged_lsn.get(),
            checksum: raw.checksum.get(),
        };
        if is_skip {
            let computed = record_checksum(raw, 0);
            if header.checksum != computed {
                return Err(FormatError::Checksum { stored: header.checksum, computed });
            }
        }
        Ok(header)
    }

    /// The position after the record.
    pub fn end_lsn(&self) -> u64 {
        self.lsn + self.len_bytes
    }

    /// The word after the header of a closing record that states that everything exposed by the
    /// packed records is durable. No other bytes match it by accident. It is one aligned word, so a
    /// crash cannot tear it.
    pub fn close_mark(&self) -> [u8; 8] {
        checksum(&[b"exposed bytes are durable", &self.checksum.to_le_bytes()]).to_le_bytes()
    }
}

/// A whole record, validated.
#[derive(Debug)]
pub struct Record {
    /// Its header.
    pub header: Header,
    /// Its entries; every payload range lies inside `bytes`.
    pub entries: Vec<Entry>,
    bytes: Vec<u8>,
}

impl Record {
    /// Decodes a record from its `header.len_bytes` bytes (only the header's for a record that
    /// fills space).
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(header: Header, bytes: Vec<u8>) -> Result<Record, FormatError> {
        if header.is_skip {
            return Ok(Record { header, entries: Vec::new(), bytes });
        }
        let (raw, rest) = RawHeader::ref_from_prefix(&bytes).map_err(|_| FormatError::Short)?;
        if bytes.len() as u64 != header.len_bytes {
            return Err(FormatError::Short);
        }
        let computed = record_checksum(raw, checksum(&[rest]));
        if header.checksum != computed {
            return Err(FormatError::Checksum { stored: header.checksum, computed });
        }
        Self::decode_unchecked(header, bytes)
    }

    /// [`Record::decode`] without verifying the checksum: for a test of what the checksum is worth.
    pub fn decode_unchecked(header: Header, bytes: Vec<u8>) -> Result<Record, FormatError> {
        let (_, rest) = RawHeader::ref_from_prefix(&bytes).map_err(|_| FormatError::Short)?;
        let (raw_entries, _) =
            <[RawEntry]>::ref_from_prefix_with_elems(rest, header.entry_count as usize)
                .map_err(|_| FormatError::Short)?;
        let entries: Vec<Entry> =
            (raw_entries.iter()).map(decode_entry).collect::<Result<_, _>>()?;
        check_payload_order(&entries, header.len_bytes)?;
        let record = Record { header, entries, bytes };
        for entry in &record.entries {
            if let Entry::Patches { target, payload_offset, len_bytes, .. } = *entry {
                let patches = record.payload(payload_offset, len_bytes);
                patch::validate(patches, target.len_bytes / PAGE_BYTES)?;
            }
        }
        Ok(record)
    }

    /// The payload of an entry.
    pub fn payload(&self, payload_offset: u64, len_bytes: u64) -> &[u8] {
        &self.bytes[payload_offset as usize..(payload_offset + len_bytes) as usize]
    }

    /// All bytes of the record.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The inodes for which the record has content.
    pub fn content_inodes(&self) -> impl Iterator<Item = u64> + '_ {
        self.entries.iter().filter_map(|entry| match *entry {
            Entry::Pages { inode, .. }
            | Entry::Patches { inode, .. }
            | Entry::Copied { inode, .. } => Some(inode),
            Entry::Slot { .. } | Entry::NewRun { .. } | Entry::Exposed { .. } => None,
        })
    }

    /// The ranges that are named from this record on and are not known to be durable.
    pub fn exposed(&self) -> impl Iterator<Item = ByteRange> + '_ {
        self.entries.iter().filter_map(|entry| match *entry {
            Entry::Exposed { range } => Some(range),
            _ => None,
        })
    }

    /// Whether it closes packed records and states that all bytes they expose are durable.
    pub fn is_marked(&self) -> bool {
        self.header.is_close
            && self.bytes.get(HEADER_BYTES..HEADER_BYTES + 8) == Some(&self.header.close_mark())
    }

    /// The changes of slots.
    pub fn slots(&self) -> impl Iterator<Item = SlotChange<'_>> + Clone + '_ {
        self.entries.iter().filter_map(|entry| match *entry {
            Entry::Slot { slot, words, payload_offset } => {
                let bytes = self.payload(payload_offset, words.len_bytes());
                Some(SlotChange { slot, words, bytes })
            }
            _ => None,
        })
    }
}

/// Checks that the payloads of the entries are consecutive, so that no two entries share bytes.
fn check_payload_order(entries: &[Entry], record_len_bytes: u64) -> Result<(), FormatError> {
    let small_bytes = (entries.iter())
        .map(|entry| match *entry {
            Entry::Slot { words, .. } => words.len_bytes(),
            Entry::Patches { len_bytes, .. } => len_bytes,
            Entry::Pages { .. }
            | Entry::Copied { .. }
            | Entry::NewRun { .. }
            | Entry::Exposed { .. } => 0,
        })
        .fold(0, u64::saturating_add);
    let (mut next_small, mut next_pages) = payload_places(entries.len(), small_bytes);
    for entry in entries {
        let (payload_offset, len_bytes, next) = match *entry {
            Entry::Slot { words, payload_offset, .. } => {
                (payload_offset, words.len_bytes(), &mut next_small)
            }
            Entry::Patches { payload_offset, len_bytes, .. } => {
                (payload_offset, len_bytes, &mut next_small)
            }
            Entry::Pages { payload_offset, target, .. } => {
                (payload_offset, target.len_bytes, &mut next_pages)
            }
            Entry::Copied { .. } | Entry::NewRun { .. } | Entry::Exposed { .. } => continue,
        };
        if payload_offset != *next {
            return Err(FormatError::Field { field: "payload offset", value: payload_offset });
        }
        *next = next.saturating_add(len_bytes);
        if *next > record_len_bytes {
            return Err(FormatError::Field { field: "payload length", value: len_bytes });
        }
    }
    Ok(())
}

/// The offsets of the small payload (slots and patches) and of the pages in a record with this many
/// entries and small bytes.
fn payload_places(entry_count: usize, small_bytes: u64) -> (u64, u64) {
    let small =
        ((HEADER_BYTES + entry_count * ENTRY_BYTES) as u64).next_multiple_of(HEADER_BYTES as u64);
    (small, small.saturating_add(small_bytes).div_ceil(PAGE_BYTES).saturating_mul(PAGE_BYTES))
}

fn decode_entry(raw: &RawEntry) -> Result<Entry, FormatError> {
    let field = |field, value| Err(FormatError::Field { field, value });
    let len_bytes = raw.len_bytes.get();
    let range = ByteRange { offset_bytes: raw.target.get(), len_bytes };
    let is_page_range = len_bytes != 0
        && len_bytes.is_multiple_of(PAGE_BYTES)
        && range.offset_bytes.is_multiple_of(PAGE_BYTES)
        && range.offset_bytes.checked_add(len_bytes).is_some();
    let payload_offset = raw.source.get();
    match raw.kind.get() {
        kind @ (ENTRY_SLOT | ENTRY_SLOT_PATCH) => {
            let words = SlotWords { is_whole: kind == ENTRY_SLOT, set: raw.detail.get() };
            if words.set & !SETTABLE_WORDS == 0 && len_bytes == words.len_bytes() {
                Ok(Entry::Slot { slot: raw.target.get(), words, payload_offset })
            } else {
                field("words", words.set)
            }
        }
        ENTRY_PAGES if is_page_range => {
            Ok(Entry::Pages { inode: raw.inode.get().into(), target: range, payload_offset })
        }
        ENTRY_COPIED if is_page_range && payload_offset.is_multiple_of(PAGE_BYTES) => {
            Ok(Entry::Copied {
                inode: raw.inode.get().into(),
                target: range,
                source_offset_bytes: payload_offset,
                checksum: raw.detail.get(),
            })
        }
        ENTRY_PATCHES if is_page_range => Ok(Entry::Patches {
            inode: raw.inode.get().into(),
            target: range,
            payload_offset,
            len_bytes: raw.detail.get(),
        }),
        ENTRY_NEW_RUN if is_page_range => Ok(Entry::NewRun { range }),
        ENTRY_EXPOSED if range.offset_bytes.checked_add(len_bytes).is_some() => {
            Ok(Entry::Exposed { range })
        }
        ENTRY_EXPOSED | ENTRY_PAGES | ENTRY_COPIED | ENTRY_NEW_RUN | ENTRY_PATCHES => {
            field("entry", len_bytes)
        }
        other => field("entry kind", other.into()),
    }
}

/// A record under construction: all entries first, then as many payload bytes as they announced, in
/// the same order.
#[derive(Debug, Default)]
pub struct RecordBuilder {
    entries: Vec<RawEntry>,
    small_bytes: u64,
    page_bytes: u64,
    is_packed: bool,
}

impl RecordBuilder {
    /// An empty record.
    pub fn new() -> RecordBuilder {
        RecordBuilder::default()
    }

    /// Clears the builder and keeps its memory. A packed record starts at the next multiple of 64
    /// bytes after the one before it, and has no pages.
    pub fn clear(&mut self, is_packed: bool) {
        self.entries.clear();
        (self.small_bytes, self.page_bytes, self.is_packed) = (0, 0, is_packed);
    }

    fn push(&mut self, kind: u32, inode: u64, target: ByteRange, source: u64, detail: u64) {
        self.entries.push(RawEntry {
            kind: U32::new(kind),
            inode: U32::new(inode as u32),
            target: U64::new(target.offset_bytes),
            len_bytes: U64::new(target.len_bytes),
            source: U64::new(source),
            detail: U64::new(detail),
        });
    }

    /// Adds words of a slot: the next bytes of slots and patches are theirs.
    pub fn slot(&mut self, slot: u64, words: SlotWords) {
        let target = ByteRange { offset_bytes: slot, len_bytes: words.len_bytes() };
        let kind = if words.is_whole { ENTRY_SLOT } else { ENTRY_SLOT_PATCH };
        self.push(kind, 0, target, self.small_bytes, words.set);
        self.small_bytes += words.len_bytes();
    }

    /// Adds patches of pages of `target`: the next `len_bytes` of slots and patches.
    pub fn patches(&mut self, inode: u64, target: ByteRange, len_bytes: u64) {
        self.push(ENTRY_PATCHES, inode, target, self.small_bytes, len_bytes);
        self.small_bytes += len_bytes;
    }

    /// Adds pages of an object: the next `target.len_bytes` of pages.
    pub fn pages(&mut self, inode: u64, target: ByteRange) {
        self.push(ENTRY_PAGES, inode, target, self.page_bytes, 0);
        self.page_bytes += target.len_bytes;
    }

    /// Adds pages that were copied to another place on media.
    pub fn copied(&mut self, inode: u64, target: ByteRange, source_offset_bytes: u64, sum: u64) {
        self.push(ENTRY_COPIED, inode, target, source_offset_bytes, sum);
    }

    /// Adds a run that is named from this record on, and durable.
    pub fn new_run(&mut self, range: ByteRange) {
        self.push(ENTRY_NEW_RUN, 0, range, 0, 0);
    }

    /// Adds bytes that are named from this record on, and not durable yet.
    pub fn exposed(&mut self, range: ByteRange) {
        self.push(ENTRY_EXPOSED, 0, range, 0, 0);
    }

    fn places(&self) -> (usize, usize) {
        let (small, pages) = payload_places(self.entries.len(), self.small_bytes);
        let pages = if self.is_packed {
            (small + self.small_bytes).next_multiple_of(RECORD_UNIT_BYTES)
        } else {
            pages
        };
        (small as usize, pages as usize)
    }

    /// The part of `record` with slots and patches.
    pub fn small_part<'a>(&self, record: &'a mut [u8]) -> &'a mut [u8] {
        &mut record[self.places().0..][..self.small_bytes as usize]
    }

    /// Copies the announced words of slots to `record`; `after` yields the slots in the order of
    /// the entries.
    pub fn copy_slots<'a>(&self, after: impl Iterator<Item = &'a SlotBytes>, record: &mut [u8]) {
        let mut rest = self.small_part(record);
        for (entry, after) in self.entries.iter().zip(after) {
            let words = SlotWords { is_whole: false, set: entry.detail.get() };
            let (part, behind) = rest.split_at_mut(words.len_bytes() as usize);
            words.copy_from(after, part);
            rest = behind;
        }
    }

    /// The changes of slots, read from `record`, whose small payload is complete.
    pub fn slots<'a>(&'a self, record: &'a [u8]) -> impl Iterator<Item = SlotChange<'a>> + 'a {
        let payload = &record[self.places().0..][..self.small_bytes as usize];
        self.entries.iter().filter_map(|entry| {
            let is_whole = entry.kind.get() == ENTRY_SLOT;
            let is_slot = is_whole || entry.kind.get() == ENTRY_SLOT_PATCH;
            is_slot.then(|| {
                let words = SlotWords { is_whole, set: entry.detail.get() };
                let bytes = &payload[entry.source.get() as usize..][..words.len_bytes() as usize];
                SlotChange { slot: entry.target.get(), words, bytes }
            })
        })
    }

    /// The part of `record` with pages.
    pub fn page_part<'a>(&self, record: &'a mut [u8]) -> &'a mut [u8] {
        &mut record[self.places().1..][..self.page_bytes as usize]
    }

    /// The length of the whole record.
    pub fn len_bytes(&self) -> u64 {
        self.places().1 as u64 + self.page_bytes
    }

    /// Writes the entries to the front of `record`, whose payload is complete. Returns the checksum
    /// of all bytes after the header, for [`RecordBuilder::seal`]. `record` has
    /// [`RecordBuilder::len_bytes`].
    pub fn finish_body(&self, record: &mut [u8]) -> u64 {
        debug_assert_eq!(record.len() as u64, self.len_bytes());
        let (small, pages) = self.places();
        let entries_end = HEADER_BYTES + self.entries.len() * ENTRY_BYTES;
        record[entries_end..small].fill(0);
        record[small + self.small_bytes as usize..pages].fill(0);
        for (index, entry) in self.entries.iter().enumerate() {
            let mut entry = *entry;
            let part = match entry.kind.get() {
                ENTRY_SLOT | ENTRY_SLOT_PATCH | ENTRY_PATCHES => small,
                ENTRY_PAGES => pages,
                _ => 0,
            };
            entry.source = U64::new(entry.source.get() + part as u64);
            let start = HEADER_BYTES + index * ENTRY_BYTES;
            record[start..start + ENTRY_BYTES].copy_from_slice(entry.as_bytes());
        }
        checksum(&[&record[HEADER_BYTES..]])
    }

    /// Writes the header, which makes `record` the record at `lsn`.
    pub fn seal(
        &self,
        record: &mut [u8],
        body_checksum: u64,
        lsn: u64,
        acknowledged_lsn: u64,
        identity: LogIdentity,
    ) {
        let mut header = RawHeader {
            magic: MAGIC,
            kind: U32::new(KIND_TRANSACTION),
            lsn: U64::new(lsn),
            generation: U64::new(identity.generation),
            len_bytes: U64::new(record.len() as u64),
            entry_count: U32::new(self.entries.len() as u32),
            reserved: U32::ZERO,
            pool: U64::new(identity.pool),
            acknowledged_lsn: U64::new(acknowledged_lsn),
            checksum: U64::ZERO,
        };
        header.checksum = U64::new(record_checksum(&header, body_checksum));
        record[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    }
}

fn filling_header(
    kind: u32,
    lsn: u64,
    len_bytes: u64,
    acknowledged_lsn: u64,
    identity: LogIdentity,
) -> RawHeader {
    let mut header = RawHeader {
        magic: MAGIC,
        kind: U32::new(kind),
        lsn: U64::new(lsn),
        generation: U64::new(identity.generation),
        len_bytes: U64::new(len_bytes),
        entry_count: U32::ZERO,
        reserved: U32::ZERO,
        pool: U64::new(identity.pool),
        acknowledged_lsn: U64::new(acknowledged_lsn),
        checksum: U64::ZERO,
    };
    header.checksum = U64::new(record_checksum(&header, 0));
    header
}

/// The first page of a record that fills `len_bytes` of the log at `lsn` and changes nothing.
pub fn skip_page(
    lsn: u64,
    len_bytes: u64,
    acknowledged_lsn: u64,
    identity: LogIdentity,
) -> Vec<u8> {
    let header = filling_header(KIND_SKIP, lsn, len_bytes, acknowledged_lsn, identity);
    let mut page = vec![0; PAGE_BYTES as usize];
    page[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    page
}

/// The first bytes of a record that fills `len_bytes` of the log at `lsn` and closes packed
/// records, without the mark.
pub fn close_start(
    lsn: u64,
    len_bytes: u64,
    acknowledged_lsn: u64,
    identity: LogIdentity,
) -> [u8; MIN_CLOSE_BYTES as usize] {
    let header = filling_header(KIND_CLOSE, lsn, len_bytes, acknowledged_lsn, identity);
    let mut bytes = [0; MIN_CLOSE_BYTES as usize];
    bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG_BYTES: u64 = 1 << 20;
    const IDENTITY: LogIdentity = LogIdentity { pool: 77, generation: 5 };

    fn record() -> Vec<u8> {
        let mut builder = RecordBuilder::new();
        builder.slot(5, SlotWords { is_whole: false, set: 0b101 });
        builder.pages(3, ByteRange { offset_bytes: 8192, len_bytes: 4096 });
        builder.pages(4, ByteRange { offset_bytes: 40960, len_bytes: 8192 });
        builder.new_run(ByteRange { offset_bytes: 40960, len_bytes: 8192 });
        let mut bytes = vec![9; builder.len_bytes() as usize];
        let body = builder.finish_body(&mut bytes);
        builder.seal(&mut bytes, body, 4096, 0, IDENTITY);
        bytes
    }

    #[test]
    fn a_record_comes_back_as_it_was() {
        let bytes = record();
        assert_eq!(bytes.len(), 4 * 4096);
        let header = Header::decode(&bytes, 4096, LOG_BYTES, IDENTITY).unwrap();
        let record = Record::decode(header, bytes).unwrap();
        assert_eq!(record.entries.len(), 4);
        let Entry::Pages { inode: 4, target, payload_offset: 8192 } = record.entries[2] else {
            panic!("{:?}", record.entries[2]);
        };
        assert_eq!(target, ByteRange { offset_bytes: 40960, len_bytes: 8192 });
        assert_eq!(record.payload(8192, 8192), [9; 8192]);
        let slots: Vec<_> = record.slots().map(|change| (change.slot, change.bytes)).collect();
        assert_eq!(slots, [(5, &[9; 16][..])]);
    }

    #[test]
    fn a_record_counts_only_at_its_place_in_its_pool_and_generation() {
        let bytes = record();
        assert!(Header::decode(&bytes, 8192, LOG_BYTES, IDENTITY).is_err());
        for other in [
            LogIdentity { pool: 78, ..IDENTITY },
            LogIdentity { generation: 6, ..IDENTITY },
            LogIdentity { generation: 4, ..IDENTITY },
        ] {
            assert!(Header::decode(&bytes, 4096, LOG_BYTES, other).is_err());
        }
    }

    #[test]
    fn each_flipped_bit_is_noticed() {
        let bytes = record();
        for bit in (0..HEADER_BYTES * 8 + 40 * 8 * 4).chain([4096 * 8, 4096 * 8 * 4 - 1]) {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let outcome = Header::decode(&damaged, 4096, LOG_BYTES, IDENTITY).and_then(|header| {
                damaged.truncate(header.len_bytes as usize);
                Record::decode(header, damaged)
            });
            assert!(outcome.is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_skip_fills_any_length() {
        let page = skip_page(8192, 40960, 4096, IDENTITY);
        let header = Header::decode(&page, 8192, LOG_BYTES, IDENTITY).unwrap();
        assert!(header.is_skip);
        assert_eq!(header.end_lsn(), 8192 + 40960);
        // A skip cannot cross the end of the ring.
        assert!(Header::decode(&page, 8192, 40960, IDENTITY).is_err());
    }
}
