//! The bytes of published objects: `docs/format.md` describes each of them. Pure functions; parsing any bytes gives a
//! value or a reason, and allocates no more than the bytes given times a constant.

use sha2::{Digest, Sha256};
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The unit of chunks, and of the pools they are made of.
pub(super) const PAGE_BYTES: u64 = aquifer_pool::format::PAGE_BYTES;
pub(super) const SMALLEST_CHUNK_BYTES: u32 = 64 << 10;
pub(super) const LARGEST_CHUNK_BYTES: u32 = 64 << 20;
/// Chunks of one table.
pub(super) const TABLE_CHUNKS: u32 = 4096;
/// The most bytes of an entry of the log: five million tables, which are 20 PiB of default chunks.
pub(super) const MOST_ENTRY_BYTES: u64 = 256 << 20;
/// The most bytes of a table.
pub(super) const MOST_TABLE_BYTES: u64 =
    (size_of::<RawTable>() + MOST_TABLE_CHUNKS as usize * size_of::<RawReference>()) as u64;
const MOST_TABLE_CHUNKS: u32 = 1 << 16;

const LOG_MAGIC: [u8; 8] = *b"AQPUBLOG";
const TABLE_MAGIC: [u8; 8] = *b"AQPUBTAB";
const CHUNK_MAGIC: [u8; 8] = *b"AQPUBCHK";
const VERSION: u32 = 1;
const SNAPSHOT: u32 = 1;
const COLLECTION: u32 = 2;
const SHA_256: u32 = 1;
const NO_COMPRESSION: u32 = 0;

/// A SHA-256.
pub(super) type Hash = [u8; 32];

pub(super) fn hash(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// What is wrong with an object's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrong {
    Damaged(&'static str),
    Later(&'static str),
}

use Wrong::{Damaged, Later};

/// The object that holds a chunk or a table; none if that is all zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Reference {
    pub hash: Hash,
    /// The newest entry of the log that its publisher knew when it was uploaded. Part of its name.
    pub epoch: u64,
    /// Of the object.
    pub len_bytes: u32,
    /// Pages of the pool that it holds, itself or by its chunks.
    pub pages: u32,
}

impl Reference {
    pub const NONE: Reference = Reference { hash: [0; 32], epoch: 0, len_bytes: 0, pages: 0 };

    pub fn is_none(&self) -> bool {
        self.len_bytes == 0
    }
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawReference {
    hash: [u8; 32],
    epoch: U64,
    len_bytes: U32,
    pages: U32,
}

impl From<&Reference> for RawReference {
    fn from(of: &Reference) -> RawReference {
        RawReference {
            hash: of.hash,
            epoch: of.epoch.into(),
            len_bytes: of.len_bytes.into(),
            pages: of.pages.into(),
        }
    }
}

impl RawReference {
    /// `most_bytes` and `most_pages` are those of what it may refer to.
    fn decode(&self, most_bytes: u64, most_pages: u64) -> Result<Reference, Wrong> {
        let decoded = Reference {
            hash: self.hash,
            epoch: self.epoch.get(),
            len_bytes: self.len_bytes.get(),
            pages: self.pages.get(),
        };
        if decoded.is_none() && decoded != Reference::NONE {
            return Err(Damaged("a reference to nothing is not zero"));
        }
        if u64::from(decoded.len_bytes) > most_bytes || u64::from(decoded.pages) > most_pages {
            return Err(Damaged("a reference is to more than there can be"));
        }
        if decoded.epoch > MOST_POSITION {
            return Err(Damaged("an epoch is too large"));
        }
        Ok(decoded)
    }
}

/// The highest position in the log.
pub(super) const MOST_POSITION: u64 = u64::MAX / 2;

/// The state of a pool that a snapshot has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    pub uuid: Uuid,
    pub len_bytes: u64,
    /// As in the superblock.
    pub sequence: u64,
    pub generation: u64,
    pub tail_lsn: u64,
}

/// A snapshot, or a collection of what snapshots no longer need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its number in the log.
    pub position: u64,
    pub uuid: Uuid,
    /// The last collection before it; 0: none.
    pub last_collection: u64,
    pub created_ns: u64,
    /// Tells entries of two publishers apart.
    pub nonce: u64,
    pub body: Body,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Body {
    Snapshot(Snapshot),
    Collection(Collection),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub state: State,
    pub chunk_bytes: u32,
    /// Of all objects that it needs.
    pub stored_bytes: u64,
    pub pages: u64,
    pub tables: Vec<Reference>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Collection {
    /// Objects of an earlier epoch that no kept snapshot needs are deleted.
    pub cutoff: u64,
    /// Positions of the snapshots that stay, ascending. All others before the collection are removed.
    pub kept: Vec<u64>,
}

#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry {
    magic: [u8; 8],
    version: U32,
    kind: U32,
    position: U64,
    uuid: [u8; 16],
    last_collection: U64,
    created_ns: U64,
    nonce: U64,
    incompatible_features: U64,
    // Of a snapshot; zero in a collection.
    pool_bytes: U64,
    sequence: U64,
    generation: U64,
    tail_lsn: U64,
    stored_bytes: U64,
    pages: U64,
    chunk_bytes: U32,
    table_chunks: U32,
    hash: U32,
    compression: U32,
    // Of a collection; zero in a snapshot.
    cutoff: U64,
    /// Tables, or kept snapshots.
    count: U64,
    reserved: [u8; 104],
}

const ENTRY_HEADER_BYTES: usize = 256;
const _: () = {
    assert!(size_of::<RawEntry>() == ENTRY_HEADER_BYTES);
    assert!(std::mem::offset_of!(RawEntry, pool_bytes) == 72);
    assert!(std::mem::offset_of!(RawEntry, chunk_bytes) == 120);
    assert!(std::mem::offset_of!(RawEntry, cutoff) == 136);
    assert!(std::mem::offset_of!(RawEntry, reserved) == 152);
    assert!(size_of::<RawReference>() == 48);
    assert!(size_of::<RawTable>() == 16);
    assert!(size_of::<RawRun>() == 8);
};

/// How many tables the chunks of a pool take.
pub(super) fn tables_of(pool_bytes: u64, chunk_bytes: u32) -> u64 {
    pool_bytes.div_ceil(u64::from(chunk_bytes)).div_ceil(u64::from(TABLE_CHUNKS))
}

/// The most bytes of a chunk's object.
pub(super) fn most_object_bytes(chunk_bytes: u32) -> u64 {
    let pages = u64::from(chunk_bytes) / PAGE_BYTES;
    let runs = pages.div_ceil(2);
    u64::from(chunk_bytes) + (size_of::<RawChunk>() as u64) + runs * (size_of::<RawRun>() as u64)
}

impl Entry {
    pub fn encode(&self) -> Vec<u8> {
        let mut raw = RawEntry::new_zeroed();
        raw.magic = LOG_MAGIC;
        raw.version = VERSION.into();
        raw.position = self.position.into();
        raw.uuid = *self.uuid.as_bytes();
        raw.last_collection = self.last_collection.into();
        raw.created_ns = self.created_ns.into();
        raw.nonce = self.nonce.into();
        let mut rest = Vec::new();
        match &self.body {
            Body::Snapshot(snapshot) => {
                raw.kind = SNAPSHOT.into();
                raw.pool_bytes = snapshot.state.len_bytes.into();
                raw.sequence = snapshot.state.sequence.into();
                raw.generation = snapshot.state.generation.into();
                raw.tail_lsn = snapshot.state.tail_lsn.into();
                raw.stored_bytes = snapshot.stored_bytes.into();
                raw.pages = snapshot.pages.into();
                raw.chunk_bytes = snapshot.chunk_bytes.into();
                raw.table_chunks = TABLE_CHUNKS.into();
                raw.hash = SHA_256.into();
                raw.compression = NO_COMPRESSION.into();
                raw.count = (snapshot.tables.len() as u64).into();
                for table in &snapshot.tables {
                    rest.extend_from_slice(RawReference::from(table).as_bytes());
                }
            }
            Body::Collection(collection) => {
                raw.kind = COLLECTION.into();
                raw.cutoff = collection.cutoff.into();
                raw.count = (collection.kept.len() as u64).into();
                for kept in &collection.kept {
                    rest.extend_from_slice(&kept.to_le_bytes());
                }
            }
        }
        let mut bytes = raw.as_bytes().to_vec();
        bytes.extend_from_slice(&rest);
        let sum = hash(&bytes);
        bytes.extend_from_slice(&sum);
        bytes
    }

    /// Decodes the entry at `position`.
    pub fn decode(bytes: &[u8], position: u64) -> Result<Entry, Wrong> {
        let (raw, _) = RawEntry::ref_from_prefix(bytes).map_err(|_| Damaged("it is too short"))?;
        if raw.magic != LOG_MAGIC {
            return Err(Damaged("it does not begin as an entry of the log does"));
        }
        // Before the checksum, which another version may compute differently.
        if raw.version.get() != VERSION {
            return Err(Later("another version of the format"));
        }
        let Some((covered, sum)) = bytes.split_last_chunk::<32>() else {
            return Err(Damaged("it is too short"));
        };
        if hash(covered) != *sum {
            return Err(Damaged("its checksum does not match"));
        }
        if raw.incompatible_features.get() != 0 {
            return Err(Later("features that this program does not know"));
        }
        if raw.position.get() != position || position == 0 || position > MOST_POSITION {
            return Err(Damaged("it is the entry of another position"));
        }
        let last_collection = raw.last_collection.get();
        if last_collection >= position {
            return Err(Damaged("it names a collection that is not before it"));
        }
        let rest = covered.get(ENTRY_HEADER_BYTES..).ok_or(Damaged("it is too short"))?;
        let body = match raw.kind.get() {
            SNAPSHOT => Body::Snapshot(Snapshot::decode(raw, rest)?),
            COLLECTION => Body::Collection(Collection::decode(raw, rest)?),
            _ => return Err(Later("another kind of entry")),
        };
        Ok(Entry {
            position,
            uuid: Uuid::from_bytes(raw.uuid),
            last_collection,
            created_ns: raw.created_ns.get(),
            nonce: raw.nonce.get(),
            body,
        })
    }
}

impl Snapshot {
    fn decode(raw: &RawEntry, rest: &[u8]) -> Result<Snapshot, Wrong> {
        if raw.hash.get() != SHA_256 {
            return Err(Later("another hash"));
        }
        if raw.compression.get() != NO_COMPRESSION {
            return Err(Later("compressed chunks"));
        }
        let chunk_bytes = raw.chunk_bytes.get();
        let is_size = chunk_bytes.is_power_of_two()
            && (SMALLEST_CHUNK_BYTES..=LARGEST_CHUNK_BYTES).contains(&chunk_bytes);
        if !is_size {
            return Err(Damaged("its chunks have no possible size"));
        }
        if raw.table_chunks.get() != TABLE_CHUNKS {
            return Err(Later("tables of another length"));
        }
        let len_bytes = raw.pool_bytes.get();
        let is_pool = len_bytes > 0
            && len_bytes.is_multiple_of(PAGE_BYTES)
            && len_bytes / PAGE_BYTES <= aquifer_pool::format::run::MAX_PAGES;
        if !is_pool {
            return Err(Damaged("no pool has its length"));
        }
        if raw.pages.get() > len_bytes / PAGE_BYTES {
            return Err(Damaged("it has more pages than its pool"));
        }
        let tables = tables_of(len_bytes, chunk_bytes);
        let raws = <[RawReference]>::ref_from_bytes(rest)
            .ok()
            .filter(|raws| raws.len() as u64 == tables && raw.count.get() == tables)
            .ok_or(Damaged("its tables are not as many as its pool has"))?;
        let most_pages = u64::from(TABLE_CHUNKS) * u64::from(chunk_bytes) / PAGE_BYTES;
        let tables = raws.iter().map(|raw| raw.decode(MOST_TABLE_BYTES, most_pages));
        let tables = tables.collect::<Result<Vec<_>, _>>()?;
        Ok(Snapshot {
            state: State {
                uuid: Uuid::from_bytes(raw.uuid),
                len_bytes,
                sequence: raw.sequence.get(),
                generation: raw.generation.get(),
                tail_lsn: raw.tail_lsn.get(),
            },
            chunk_bytes,
            stored_bytes: raw.stored_bytes.get(),
            pages: raw.pages.get(),
            tables,
        })
    }

    /// How many chunks there are.
    pub fn chunks(&self) -> u64 {
        self.state.len_bytes.div_ceil(u64::from(self.chunk_bytes))
    }

    /// How many of them the table has.
    pub fn chunks_of_table(&self, table: usize) -> usize {
        let before = table as u64 * u64::from(TABLE_CHUNKS);
        self.chunks().saturating_sub(before).min(u64::from(TABLE_CHUNKS)) as usize
    }
}

impl Collection {
    fn decode(raw: &RawEntry, rest: &[u8]) -> Result<Collection, Wrong> {
        let kept = <[U64]>::ref_from_bytes(rest)
            .ok()
            .filter(|kept| kept.len() as u64 == raw.count.get())
            .ok_or(Damaged("its snapshots are not as many as it says"))?;
        let kept: Vec<u64> = kept.iter().map(|kept| kept.get()).collect();
        let are_in_order = kept.is_sorted_by(|one, next| one < next)
            && kept.first().is_none_or(|&first| first > 0)
            && kept.last().is_none_or(|&last| last < raw.position.get());
        if !are_in_order || raw.cutoff.get() > raw.position.get() {
            return Err(Damaged("it names what is not before it"));
        }
        Ok(Collection { cutoff: raw.cutoff.get(), kept })
    }
}

#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawTable {
    magic: [u8; 8],
    version: U32,
    count: U32,
}

/// Encodes a table of chunks.
pub(super) fn encode_table(chunks: &[Reference]) -> Vec<u8> {
    let count = u32::try_from(chunks.len()).expect("at most TABLE_CHUNKS");
    let raw = RawTable { magic: TABLE_MAGIC, version: VERSION.into(), count: count.into() };
    let mut bytes = raw.as_bytes().to_vec();
    for chunk in chunks {
        bytes.extend_from_slice(RawReference::from(chunk).as_bytes());
    }
    bytes
}

/// Decodes a table that must have `count` chunks. Its hash has been compared.
pub(super) fn decode_table(
    bytes: &[u8],
    count: usize,
    chunk_bytes: u32,
) -> Result<Vec<Reference>, Wrong> {
    let (raw, rest) = RawTable::ref_from_prefix(bytes).map_err(|_| Damaged("it is too short"))?;
    if raw.magic != TABLE_MAGIC {
        return Err(Damaged("it does not begin as a table does"));
    }
    if raw.version.get() != VERSION {
        return Err(Later("another version of the format"));
    }
    let raws = <[RawReference]>::ref_from_bytes(rest)
        .ok()
        .filter(|raws| raws.len() == count && raw.count.get() as usize == count)
        .ok_or(Damaged("its chunks are not as many as there must be"))?;
    let most_pages = u64::from(chunk_bytes) / PAGE_BYTES;
    raws.iter().map(|raw| raw.decode(most_object_bytes(chunk_bytes), most_pages)).collect()
}

#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawChunk {
    magic: [u8; 8],
    version: U32,
    runs: U32,
}

/// Pages of a chunk that are in its object, one behind the other.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRun {
    first_page: U32,
    pages: U32,
}

/// Encodes the pages of a chunk that are not zero; `None` if all are. The last chunk of a pool may be shorter.
/// Returns the object and its number of pages.
pub(super) fn encode_chunk(content: &[u8]) -> Option<(Vec<u8>, u32)> {
    let page_bytes = PAGE_BYTES as usize;
    let mut runs: Vec<RawRun> = Vec::new();
    for (index, page) in (0..).zip(content.chunks(page_bytes)) {
        if is_zero(page) {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.first_page.get() + last.pages.get() == index => {
                last.pages += 1;
            }
            _ => runs.push(RawRun { first_page: U32::new(index), pages: U32::new(1) }),
        }
    }
    let count = u32::try_from(runs.len()).expect("at most one for two pages");
    let pages: u32 = runs.iter().map(|run| run.pages.get()).sum();
    if count == 0 {
        return None;
    }
    let raw = RawChunk { magic: CHUNK_MAGIC, version: VERSION.into(), runs: count.into() };
    let len = size_of::<RawChunk>() + runs.as_bytes().len() + pages as usize * page_bytes;
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(raw.as_bytes());
    bytes.extend_from_slice(runs.as_bytes());
    for run in &runs {
        let start = run.first_page.get() as usize * page_bytes;
        bytes.extend_from_slice(&content[start..start + run.pages.get() as usize * page_bytes]);
    }
    Some((bytes, pages))
}

/// Whether all bytes are zero.
fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|word| *word == [0; 64]) && rest.iter().all(|&byte| byte == 0)
}

/// Decodes a chunk of `len_bytes`: the offset of each piece of content in the chunk, and its bytes. The object's hash
/// has been compared.
pub(super) fn decode_chunk(bytes: &[u8], len_bytes: u64) -> Result<Vec<(u64, &[u8])>, Wrong> {
    let (raw, rest) = RawChunk::ref_from_prefix(bytes).map_err(|_| Damaged("it is too short"))?;
    if raw.magic != CHUNK_MAGIC {
        return Err(Damaged("it does not begin as a chunk does"));
    }
    if raw.version.get() != VERSION {
        return Err(Later("another version of the format"));
    }
    let count = raw.runs.get() as usize;
    let (runs, mut content) = <[RawRun]>::ref_from_prefix_with_elems(rest, count)
        .map_err(|_| Damaged("it is too short"))?;
    let (mut pieces, mut end) = (Vec::with_capacity(count), 0);
    for run in runs {
        let start = u64::from(run.first_page.get()) * PAGE_BYTES;
        let piece_bytes = u64::from(run.pages.get()) * PAGE_BYTES;
        if start < end || piece_bytes == 0 || start + piece_bytes > len_bytes {
            return Err(Damaged("its pages are not in order, or beyond its end"));
        }
        let Some((piece, left)) = content.split_at_checked(piece_bytes as usize) else {
            return Err(Damaged("it is too short"));
        };
        pieces.push((start, piece));
        (content, end) = (left, start + piece_bytes);
    }
    match content {
        [] => Ok(pieces),
        _ => Err(Damaged("it is too long")),
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
