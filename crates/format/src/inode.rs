//! Slots of the metadata: 512 bytes each. Slot 0 is the pool's head; this module also has the
//! inodes of objects and free slots.
//!
//! An inode's number is its slot. Files have inodes of another form ([`file`](crate::file)). A slot
//! that was never used is all zero. A freed slot keeps its number and its generation, which is
//! higher for each later inode in the slot, so that two inodes that had the same number can be
//! distinguished.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::FormatError;
use crate::layout::Layout;
use crate::run::{RawRun, Run};
use crate::slot_bytes::{SLOT_BYTES, SlotBytes, check_sum, checksum_of};

/// The longest name, in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// The most runs in a slot.
pub const INLINE_RUNS: usize = 8;
/// The slot of the pool's head.
pub const HEAD_SLOT: u64 = 0;

pub(crate) const INODE_MAGIC: [u8; 4] = *b"AQIN";
const HEAD_MAGIC: [u8; 4] = *b"AQHD";

/// The kind of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InodeKind {
    /// A free slot.
    Free,
    /// A persistent object: one contiguous range of pages with a fixed address.
    Object,
}

/// The keys for attaching: salted hashes. Without a hash, no key is required.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyHashes {
    /// Hashed together with each key.
    pub salt: [u8; 16],
    /// The hash of the key for reading.
    pub read: Option<[u8; 32]>,
    /// The hash of the key for writing.
    pub write: Option<[u8; 32]>,
}

/// An inode, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inode {
    /// Its slot.
    pub number: u64,
    /// What it is.
    pub kind: InodeKind,
    /// Differs from that of every other inode in the same slot, past or future.
    pub generation: u64,
    /// Raised whenever its runs change.
    pub layout_version: u64,
    /// Length of its content in bytes; the runs cover it.
    pub size_bytes: u64,
    /// The address where its content is attached; 0 for content without a fixed address.
    pub address: u64,
    /// Whether it may move to another address.
    pub is_relocatable: bool,
    /// Whether its content is a heap, which only the heap may store to.
    pub is_heap: bool,
    /// When it was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When its metadata was last changed, in nanoseconds since 1970.
    pub changed_ns: u64,
    /// The pages of its content, in order.
    pub runs: Vec<Run>,
    /// Pages that hold a large commit until it is applied.
    pub shadow: Run,
    /// The keys for attaching.
    pub keys: KeyHashes,
    /// Its name: any bytes but NUL.
    pub name: Vec<u8>,
}

#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawInode {
    magic: [u8; 4],
    kind: U16,
    flags: U16,
    number: U64,
    generation: U64,
    layout_version: U64,
    size_bytes: U64,
    address: U64,
    created_ns: U64,
    changed_ns: U64,
    runs: [RawRun; INLINE_RUNS],
    shadow: RawRun,
    key_salt: [u8; 16],
    read_key_hash: [u8; 32],
    write_key_hash: [u8; 32],
    reserved: [u8; 32],
    name_len: u8,
    name: [u8; MAX_NAME_BYTES],
    checksum: U64,
}

const _: () = {
    assert!(size_of::<RawInode>() == SLOT_BYTES);
    assert!(std::mem::offset_of!(RawInode, generation) == 16);
    assert!(std::mem::offset_of!(RawInode, runs) == 64);
    assert!(std::mem::offset_of!(RawInode, shadow) == 128);
    assert!(std::mem::offset_of!(RawInode, name_len) == 248);
    assert!(std::mem::offset_of!(RawInode, checksum) == 504);
};

/// The byte range of the runs: the shadow follows those of the content.
pub(crate) const RUNS_RANGE: std::ops::Range<usize> = 64..128 + 8;
/// The byte range of the name's length, one byte, and of the name after it.
pub const NAME_RANGE: std::ops::Range<usize> = 248..504;

const RELOCATABLE: u16 = 1;
const HAS_READ_KEY: u16 = 2;
const HAS_WRITE_KEY: u16 = 4;
const HEAP: u16 = 8;
const KNOWN_FLAGS: u16 = RELOCATABLE | HAS_READ_KEY | HAS_WRITE_KEY | HEAP;

const KIND_FREE: u16 = 0;
const KIND_OBJECT: u16 = 1;

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

impl Inode {
    /// Creates an unused inode with this number.
    pub fn free(number: u64, generation: u64) -> Inode {
        Inode {
            number,
            kind: InodeKind::Free,
            generation,
            layout_version: 0,
            size_bytes: 0,
            address: 0,
            is_relocatable: false,
            is_heap: false,
            created_ns: 0,
            changed_ns: 0,
            runs: Vec::new(),
            shadow: Run::EMPTY,
            keys: KeyHashes::default(),
            name: Vec::new(),
        }
    }

    /// Overwrites the bytes with those of [`Inode::free`], unsealed.
    pub fn make_free(bytes: &mut SlotBytes, number: u64, generation: u64) {
        bytes.fill(0);
        bytes[..4].copy_from_slice(&INODE_MAGIC);
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        bytes[16..24].copy_from_slice(&generation.to_le_bytes());
    }

    /// All runs of pages that it names.
    pub fn all_runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.runs.iter().copied().chain([self.shadow]).filter(|run| !run.is_empty())
    }

    /// The number of pages of its content.
    pub fn content_pages(&self) -> u64 {
        self.runs.iter().map(|run| run.pages).sum()
    }

    /// Encodes it as bytes.
    ///
    /// # Errors
    /// [`FormatError::Field`] if a field does not fit: too many runs, a name too long.
    pub fn encode(&self) -> Result<SlotBytes, FormatError> {
        let mut raw = RawInode {
            magic: INODE_MAGIC,
            kind: U16::new(match self.kind {
                InodeKind::Free => KIND_FREE,
                InodeKind::Object => KIND_OBJECT,
            }),
            flags: U16::new(
                if self.is_relocatable { RELOCATABLE } else { 0 }
                    | if self.keys.read.is_some() { HAS_READ_KEY } else { 0 }
                    | if self.keys.write.is_some() { HAS_WRITE_KEY } else { 0 }
                    | if self.is_heap { HEAP } else { 0 },
            ),
            number: U64::new(self.number),
            generation: U64::new(self.generation),
            layout_version: U64::new(self.layout_version),
            size_bytes: U64::new(self.size_bytes),
            address: U64::new(self.address),
            created_ns: U64::new(self.created_ns),
            changed_ns: U64::new(self.changed_ns),
            runs: [RawRun::EMPTY; INLINE_RUNS],
            shadow: RawRun::pack(self.shadow)?,
            key_salt: self.keys.salt,
            read_key_hash: self.keys.read.unwrap_or_default(),
            write_key_hash: self.keys.write.unwrap_or_default(),
            reserved: [0; 32],
            name_len: 0,
            name: [0; MAX_NAME_BYTES],
            checksum: U64::ZERO,
        };
        if self.runs.len() > INLINE_RUNS {
            return Err(FormatError::Field { field: "run count", value: self.runs.len() as u64 });
        }
        for (slot, run) in raw.runs.iter_mut().zip(&self.runs) {
            *slot = RawRun::pack(*run)?;
        }
        let name_len = self.name.len();
        raw.name_len = u8::try_from(name_len)
            .map_err(|_| FormatError::Field { field: "name length", value: name_len as u64 })?;
        raw.name[..name_len].copy_from_slice(&self.name);
        raw.checksum = U64::new(checksum_of(raw.as_bytes()));
        let mut bytes = [0; SLOT_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        Ok(bytes)
    }

    /// Decodes the inode in slot `number`. Zero bytes are a free inode that was never used.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8], number: u64) -> Result<Inode, FormatError> {
        let (raw, _) = RawInode::ref_from_prefix(bytes).map_err(|_| FormatError::Short)?;
        if is_zero(raw.as_bytes()) {
            return Ok(Inode::free(number, 0));
        }
        if raw.magic != INODE_MAGIC {
            return Err(FormatError::Magic);
        }
        check_sum(raw.as_bytes(), raw.checksum.get())?;
        if raw.number.get() != number {
            return Err(FormatError::Identity { found: raw.number.get(), expected: number });
        }
        let field = |field, value| FormatError::Field { field, value };
        let flags = raw.flags.get();
        if flags & !KNOWN_FLAGS != 0 {
            return Err(field("flags", flags.into()));
        }
        let kind = match raw.kind.get() {
            KIND_FREE => InodeKind::Free,
            KIND_OBJECT => InodeKind::Object,
            other => return Err(field("kind", other.into())),
        };
        let name = raw.name[..usize::from(raw.name_len)].to_vec();
        if name.contains(&0) || (kind == InodeKind::Object && name.is_empty()) {
            return Err(field("name", name.len() as u64));
        }
        let named = raw.runs.iter().filter(|run| !run.unpack().is_empty()).count();
        let runs: Vec<Run> =
            (raw.runs.iter().map(|run| run.unpack())).take_while(|run| !run.is_empty()).collect();
        let names_nothing = runs.is_empty() && raw.shadow.unpack().is_empty();
        if runs.len() != named || (kind == InodeKind::Free && !names_nothing) {
            return Err(field("runs", named as u64));
        }
        let covered: u64 = runs.iter().map(|run| run.pages * crate::PAGE_BYTES).sum();
        if raw.size_bytes.get() > covered {
            return Err(field("size", raw.size_bytes.get()));
        }
        // An object is one mapping because its runs are contiguous.
        if kind == InodeKind::Object
            && (runs.is_empty() || runs.windows(2).any(|w| w[0].end_page() != w[1].start_page))
        {
            return Err(field("runs", runs.len() as u64));
        }
        Ok(Inode {
            number,
            kind,
            generation: raw.generation.get(),
            layout_version: raw.layout_version.get(),
            size_bytes: raw.size_bytes.get(),
            address: raw.address.get(),
            is_relocatable: flags & RELOCATABLE != 0,
            is_heap: flags & HEAP != 0,
            created_ns: raw.created_ns.get(),
            changed_ns: raw.changed_ns.get(),
            runs,
            shadow: raw.shadow.unpack(),
            keys: KeyHashes {
                salt: raw.key_salt,
                read: (flags & HAS_READ_KEY != 0).then_some(raw.read_key_hash),
                write: (flags & HAS_WRITE_KEY != 0).then_some(raw.write_key_hash),
            },
            name,
        })
    }
}

/// The pool's head: facts about the whole pool that change with its metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolHead {
    /// Pages from this one on were never used: they are zero since the pool was created.
    pub fresh_from_page: u64,
    /// Slots from this one on were never used: they are zero, and no other slot is. This
    /// distinguishes a slot whose sector was lost from one that was never used.
    pub used_slots: u64,
}

#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHead {
    magic: [u8; 4],
    reserved0: [u8; 4],
    fresh_from_page: U64,
    used_slots: U64,
    reserved: [u8; 480],
    checksum: U64,
}

const _: () = {
    assert!(size_of::<RawHead>() == SLOT_BYTES);
    assert!(std::mem::offset_of!(RawHead, fresh_from_page) == 8);
    assert!(std::mem::offset_of!(RawHead, used_slots) == 16);
};

impl PoolHead {
    /// Encodes it as bytes.
    pub fn encode(&self) -> SlotBytes {
        let mut raw = RawHead {
            magic: HEAD_MAGIC,
            reserved0: [0; 4],
            fresh_from_page: U64::new(self.fresh_from_page),
            used_slots: U64::new(self.used_slots),
            reserved: [0; 480],
            checksum: U64::ZERO,
        };
        raw.checksum = U64::new(checksum_of(raw.as_bytes()));
        let mut bytes = [0; SLOT_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Reads it from words of a slot that are known to be valid.
    #[inline]
    pub fn read(word: impl Fn(usize) -> u64) -> PoolHead {
        PoolHead { fresh_from_page: word(1), used_slots: word(2) }
    }

    /// Decodes the head.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<PoolHead, FormatError> {
        let (raw, _) = RawHead::ref_from_prefix(bytes).map_err(|_| FormatError::Short)?;
        if raw.magic != HEAD_MAGIC {
            return Err(FormatError::Magic);
        }
        check_sum(raw.as_bytes(), raw.checksum.get())?;
        Ok(PoolHead {
            fresh_from_page: raw.fresh_from_page.get(),
            used_slots: raw.used_slots.get(),
        })
    }

    /// Returns the head if its fields are possible in a pool with this layout.
    ///
    /// # Errors
    /// [`FormatError::Field`] names the first field that is not.
    pub fn validate(self, layout: &Layout) -> Result<PoolHead, FormatError> {
        let field = |field, value| Err(FormatError::Field { field, value });
        if !(layout.data_start_page..=layout.page_count).contains(&self.fresh_from_page) {
            return field("first fresh page", self.fresh_from_page);
        }
        if !(HEAD_SLOT + 1..=layout.slots()).contains(&self.used_slots) {
            return field("used slots", self.used_slots);
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object() -> Inode {
        Inode {
            kind: InodeKind::Object,
            size_bytes: 5000,
            address: 0x2000_0020_0000,
            is_relocatable: true,
            is_heap: true,
            runs: vec![Run { start_page: 100, pages: 1 }, Run { start_page: 101, pages: 1 }],
            shadow: Run { start_page: 300, pages: 4 },
            keys: KeyHashes { salt: [1; 16], read: None, write: Some([2; 32]) },
            name: b"an object".to_vec(),
            ..Inode::free(7, 3)
        }
    }

    #[test]
    fn an_inode_comes_back_as_it_was() {
        let inode = object();
        assert_eq!(Inode::decode(&inode.encode().unwrap(), 7), Ok(inode));
        assert_eq!(Inode::decode(&[0; SLOT_BYTES], 9), Ok(Inode::free(9, 0)));
        let free = Inode::free(9, 4);
        let mut bytes = [7; SLOT_BYTES];
        Inode::make_free(&mut bytes, 9, 4);
        crate::slot_bytes::seal(&mut bytes);
        assert_eq!(Ok(bytes), free.encode());
    }

    #[test]
    fn a_checksum_covers_the_number_of_the_slot() {
        let bytes = object().encode().unwrap();
        assert_eq!(Inode::decode(&bytes, 8), Err(FormatError::Identity { found: 7, expected: 8 }));
    }

    #[test]
    fn each_flipped_bit_is_noticed() {
        let bytes = object().encode().unwrap();
        for bit in 0..SLOT_BYTES * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Inode::decode(&damaged, 7).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn an_object_with_a_gap_is_refused() {
        let mut inode = object();
        inode.runs[1].start_page += 1;
        assert!(matches!(
            Inode::decode(&inode.encode().unwrap(), 7),
            Err(FormatError::Field { field: "runs", .. })
        ));
    }
}
