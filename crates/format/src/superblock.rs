//! The superblock: identifies the pool, locates its parts, and states where its log starts.
//!
//! There are two copies. Each change writes both, one durably after the other. What the change
//! permits (overwriting log records, appending in the new generation) begins only when *both* are
//! durable: so either copy alone allows a correct recovery, and a damaged one is replaced by the
//! other. The valid copy with the higher sequence number counts.

use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::layout::Layout;
use crate::run::Run;
use crate::{FORMAT_VERSION, FormatError, MAX_FORMAT_VERSION, PAGE_BYTES, checksum};

const MAGIC: [u8; 8] = *b"AQUIFER\0";
/// The number of copies; copy `i` lies in page `i`.
pub const COPIES: u64 = 2;

/// A superblock, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// The pool's uuid; never changes.
    pub uuid: Uuid,
    /// Incremented with every change.
    pub sequence: u64,
    /// Where the parts lie.
    pub layout: Layout,
    /// Records of the log count only if they have this generation. Raised durably whenever the pool
    /// is opened by its first process, so that records that a crash left after the end of the log
    /// never count.
    pub generation: u64,
    /// The durable tail: the position from which recovery must replay.
    pub tail_lsn: u64,
    /// Identifies the segment that the processes of the pool share; nil if no process has the pool
    /// open.
    pub segment: Uuid,
    /// When the pool was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// The number of the life in which this generation began (`aquifer_sys::cache_life`): while
    /// that life lasts, everything that was written is present, whichever processes have died. 0 if
    /// the life is unknown; [`ANY_BOOT`] once all of it is durable.
    pub boot: u64,
    /// What the pool has that not all have: [`SAVED`].
    pub features: u64,
    /// The pages of the [saved state](crate::saved); empty without [`SAVED`]. They lie in the data,
    /// and no slot names them.
    pub saved: Run,
    /// The checksum of the header of the saved state; 0 if nothing is saved: the pool is open, or
    /// was not closed by its last writer.
    pub saved_sum: u64,
}

/// The feature of pools that have pages for a [saved state](crate::saved).
pub const SAVED: u64 = 1;
/// The features that this program knows. It refuses a pool with any other.
pub const KNOWN_FEATURES: u64 = SAVED;

/// Replaces the number of a life: it is not known whether what was written is present.
pub const UNKNOWN_BOOT: u64 = 0;
/// Replaces the number of a life: the log is durable up to its end, and so is everything it
/// exposes.
pub const ANY_BOOT: u64 = u64::MAX;

/// The maximum of generation, sequence number and position.
const MOST: u64 = u64::MAX / 2;

/// The sequence number after `sequence`. After the maximum it is 1: until both copies have it the
/// other copy counts, which is equally correct, because what the change permits begins when both
/// are durable.
pub fn next_sequence(sequence: u64) -> u64 {
    if sequence < MOST { sequence + 1 } else { 1 }
}

impl Superblock {
    /// Whether both describe the same pool: their fixed fields are equal.
    pub fn is_of_same_pool(&self, other: &Superblock) -> bool {
        let fixed = |superblock: &Superblock| Superblock {
            layout: Layout { page_count: 0, ..superblock.layout },
            sequence: 0,
            generation: 0,
            tail_lsn: 0,
            segment: Uuid::nil(),
            boot: 0,
            // A conversion of the pool changes them in one copy after the other.
            features: 0,
            saved: Run::EMPTY,
            saved_sum: 0,
            ..superblock.clone()
        };
        fixed(self) == fixed(other)
    }

    /// The sequence number of the next superblock.
    pub fn next_sequence(&self) -> u64 {
        next_sequence(self.sequence)
    }

    /// The next generation, which `random` makes unpredictable.
    pub fn next_generation(&self, random: u64) -> u64 {
        match self.generation + 1 + (random >> 33) {
            next if next <= MOST => next,
            // The order of generations has no meaning, and few of all numbers were ever used.
            _ => 1 + (random >> 2),
        }
    }

    /// Whether, in this life, records count whose exposed bytes are not marked as durable.
    pub fn counts_unmarked_in(&self, life: u64) -> bool {
        self.boot == ANY_BOOT || (self.boot != 0 && self.boot == life)
    }
}

#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    version: U32,
    page_bytes: U32,
    uuid: [u8; 16],
    sequence: U64,
    page_count: U64,
    metadata_pages: U64,
    log_start_page: U64,
    log_pages: U64,
    data_start_page: U64,
    generation: U64,
    tail_lsn: U64,
    segment: [u8; 16],
    created_ns: U64,
    incompatible_features: U64,
    copy: U64,
    boot: U64,
    saved_start_page: U64,
    saved_pages: U64,
    saved_sum: U64,
    reserved: [u8; 336],
    checksum: U64,
}

/// Bytes of a superblock; the rest of its page is zero.
pub const SUPERBLOCK_BYTES: usize = 512;
const _: () = {
    assert!(size_of::<Raw>() == SUPERBLOCK_BYTES);
    assert!(std::mem::offset_of!(Raw, uuid) == 16);
    assert!(std::mem::offset_of!(Raw, page_count) == 40);
    assert!(std::mem::offset_of!(Raw, generation) == 80);
    assert!(std::mem::offset_of!(Raw, segment) == 96);
    assert!(std::mem::offset_of!(Raw, copy) == 128);
    assert!(std::mem::offset_of!(Raw, saved_start_page) == 144);
    assert!(std::mem::offset_of!(Raw, checksum) == 504);
};

impl Raw {
    fn computed_checksum(&self) -> u64 {
        checksum(&[&self.as_bytes()[..SUPERBLOCK_BYTES - 8]])
    }
}

impl Superblock {
    /// Encodes copy `copy` as a page of bytes.
    pub fn encode(&self, copy: u64) -> Vec<u8> {
        let mut raw = Raw {
            magic: MAGIC,
            version: U32::new(FORMAT_VERSION),
            page_bytes: U32::new(PAGE_BYTES as u32),
            uuid: *self.uuid.as_bytes(),
            sequence: U64::new(self.sequence),
            page_count: U64::new(self.layout.page_count),
            metadata_pages: U64::new(self.layout.metadata_pages),
            log_start_page: U64::new(self.layout.log_start_page),
            log_pages: U64::new(self.layout.log_pages),
            data_start_page: U64::new(self.layout.data_start_page),
            generation: U64::new(self.generation),
            tail_lsn: U64::new(self.tail_lsn),
            segment: *self.segment.as_bytes(),
            created_ns: U64::new(self.created_ns),
            incompatible_features: U64::new(self.features),
            copy: U64::new(copy),
            boot: U64::new(self.boot),
            saved_start_page: U64::new(self.saved.start_page),
            saved_pages: U64::new(self.saved.pages),
            saved_sum: U64::new(self.saved_sum),
            reserved: [0; 336],
            checksum: U64::ZERO,
        };
        raw.checksum = U64::new(raw.computed_checksum());
        let mut page = vec![0; PAGE_BYTES as usize];
        page[..SUPERBLOCK_BYTES].copy_from_slice(raw.as_bytes());
        page
    }

    /// Decodes copy `copy` from the bytes of its page.
    ///
    /// # Errors
    /// What is wrong with it. The magic and the version are checked first, to distinguish a foreign
    /// file and a future version from damage. Damage of the version alone is distinguished from
    /// another version as well: the rest still matches the checksum of this one.
    pub fn decode(bytes: &[u8], copy: u64) -> Result<Superblock, FormatError> {
        let (raw, _) = Raw::ref_from_prefix(bytes).map_err(|_| FormatError::Short)?;
        if raw.magic != MAGIC {
            return Err(FormatError::Magic);
        }
        let computed = raw.computed_checksum();
        let damaged = FormatError::Checksum { stored: raw.checksum.get(), computed };
        // Before the checksum, which another version may compute differently.
        let version = raw.version.get();
        if version != FORMAT_VERSION {
            let of_this_version = Raw { version: U32::new(FORMAT_VERSION), ..raw.clone() };
            let is_damage = version > MAX_FORMAT_VERSION
                || of_this_version.computed_checksum() == raw.checksum.get();
            return Err(if is_damage { damaged } else { FormatError::Version { found: version } });
        }
        if raw.checksum.get() != computed {
            return Err(damaged);
        }
        let features = raw.incompatible_features.get();
        if features & !KNOWN_FEATURES != 0 {
            return Err(FormatError::Features { bits: features & !KNOWN_FEATURES });
        }
        if raw.copy.get() != copy {
            return Err(FormatError::Identity { found: raw.copy.get(), expected: copy });
        }
        if u64::from(raw.page_bytes.get()) != PAGE_BYTES {
            return Err(FormatError::Field {
                field: "page size",
                value: raw.page_bytes.get().into(),
            });
        }
        let layout = Layout {
            page_count: raw.page_count.get(),
            metadata_pages: raw.metadata_pages.get(),
            log_start_page: raw.log_start_page.get(),
            log_pages: raw.log_pages.get(),
            data_start_page: raw.data_start_page.get(),
        };
        layout.validate()?;
        // Positions near the maximum would overflow when the log grows.
        if raw.tail_lsn.get() > MOST || raw.tail_lsn.get() % PAGE_BYTES != 0 {
            return Err(FormatError::Field { field: "tail", value: raw.tail_lsn.get() });
        }
        for (field, value) in
            [("generation", raw.generation.get()), ("sequence number", raw.sequence.get())]
        {
            if value > MOST {
                return Err(FormatError::Field { field, value });
            }
        }
        let saved = Run { start_page: raw.saved_start_page.get(), pages: raw.saved_pages.get() };
        let is_inside = saved.start_page >= layout.data_start_page
            && saved
                .start_page
                .checked_add(saved.pages)
                .is_some_and(|end| end <= layout.page_count);
        if if features & SAVED != 0 { saved.is_empty() || !is_inside } else { saved != Run::EMPTY }
        {
            return Err(FormatError::Field { field: "saved state", value: saved.start_page });
        }
        if raw.saved_sum.get() != 0 && features & SAVED == 0 {
            return Err(FormatError::Field { field: "saved checksum", value: raw.saved_sum.get() });
        }
        Ok(Superblock {
            uuid: Uuid::from_bytes(raw.uuid),
            sequence: raw.sequence.get(),
            layout,
            generation: raw.generation.get(),
            tail_lsn: raw.tail_lsn.get(),
            segment: Uuid::from_bytes(raw.segment),
            created_ns: raw.created_ns.get(),
            boot: raw.boot.get(),
            features,
            saved,
            saved_sum: raw.saved_sum.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        Superblock {
            uuid: Uuid::from_u128(1),
            sequence: 1,
            layout: Layout::new(4 << 20, 64, 64 << 10).unwrap(),
            generation: 1,
            tail_lsn: 0,
            segment: Uuid::nil(),
            created_ns: 0,
            boot: 0,
            features: KNOWN_FEATURES,
            saved: Run { start_page: 30, pages: 6 },
            saved_sum: 77,
        }
    }

    fn decode(superblock: &Superblock) -> Result<Superblock, FormatError> {
        Superblock::decode(&superblock.encode(1), 1)
    }

    #[test]
    fn features_and_the_saved_state_are_kept() {
        let superblock = superblock();
        let page = superblock.encode(0);
        assert_eq!(page[120..128], 1u64.to_le_bytes());
        assert_eq!(page[144..152], 30u64.to_le_bytes());
        assert_eq!(page[152..160], 6u64.to_le_bytes());
        assert_eq!(page[160..168], 77u64.to_le_bytes());
        assert!(page[168..504].iter().all(|&byte| byte == 0));
        assert_eq!(decode(&superblock), Ok(superblock.clone()));
        // A conversion that stopped between the two copies.
        let before =
            Superblock { features: 0, saved: Run::EMPTY, saved_sum: 0, ..superblock.clone() };
        assert!(before.is_of_same_pool(&superblock));
        assert_eq!(decode(&before), Ok(before.clone()));
    }

    #[test]
    fn unknown_features_are_refused() {
        let later = Superblock { features: KNOWN_FEATURES | 1 << 40, ..superblock() };
        assert_eq!(decode(&later), Err(FormatError::Features { bits: 1 << 40 }));
    }

    #[test]
    fn the_saved_state_lies_in_the_data_or_is_none() {
        let refused = |change: fn(&mut Superblock)| {
            let mut superblock = superblock();
            change(&mut superblock);
            assert!(
                matches!(decode(&superblock), Err(FormatError::Field { .. })),
                "{superblock:?}"
            );
        };
        refused(|it| it.saved.pages = 0);
        refused(|it| it.saved = Run::EMPTY);
        refused(|it| it.saved.start_page = it.layout.data_start_page - 1);
        refused(|it| it.saved.start_page = it.layout.page_count - 5);
        refused(|it| it.saved.start_page = u64::MAX);
        refused(|it| it.saved.pages = u64::MAX);
        refused(|it| it.features = 0);
        refused(|it| (it.features, it.saved) = (0, Run::EMPTY));
    }
}
