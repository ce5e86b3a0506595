//! The format of a pool on media, version 1, and the structures made of its slots. `docs/format.md`
//! has its diagrams.
//!
//! ```text
//!  page 0        1        2 …                 log_start …          data_start …              page_count
//!  ┌────────────┬────────┬───────────────────┬────────────────────┬─────────────────────────┐
//!  │ superblock │ second │ metadata: slots   │ log: a ring of     │ data: pages of objects  │
//!  │            │ copy   │ of 512 bytes      │ records            │                         │
//!  └────────────┴────────┴───────────────────┴────────────────────┴─────────────────────────┘
//! ```
//!
//! Every structure is little-endian, has a magic, a checksum that also covers the structure's
//! identity (its number, position or copy), and reserved bytes that are zero. Parsing is a pure
//! function of bytes; it checks ranges before any arithmetic and never panics. This crate makes no
//! system calls and has no unsafe code, so all of it runs under Miri and is fuzzed.
//!
//! ```text
//!   owners ── links                       whether all slots together can be believed
//!      │
//!     slot                                what any slot is, and the runs that it names
//!      │
//!   directory   file_table   byte_chain   structures over slots, each written against `slots`
//!      │
//!   inode  file  run_list  superblock     slots, the log's records, and what they are made of
//!   record  patch  saved
//!      │
//!   slot_change  layout  slot_bytes  run
//! ```
//!
//! ```
//! use aquifer_format::superblock::Superblock;
//! use aquifer_format::{FormatError, PAGE_BYTES};
//!
//! let page = vec![0; PAGE_BYTES as usize];
//! assert!(matches!(Superblock::decode(&page, 0), Err(FormatError::Magic)));
//! ```

#![forbid(unsafe_code)]

pub mod byte_chain;
mod byte_range;
pub mod directory;
pub mod file;
pub mod file_table;
pub mod inode;
pub mod layout;
pub mod links;
pub mod owners;
pub mod patch;
pub mod record;
pub mod run;
pub mod run_list;
pub mod saved;
pub mod slot;
pub mod slot_bytes;
pub mod slot_change;
pub mod slots;
pub mod superblock;

pub use byte_range::ByteRange;
pub use slots::StructureError;

use xxhash_rust::xxh3::Xxh3;

/// Size of a page of the pool, in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// The format version written here. It is frozen: pools of this version stay readable. (Version 0
/// was experimental.)
pub const FORMAT_VERSION: u32 = 1;

/// The maximum version: a higher number is damage.
pub const MAX_FORMAT_VERSION: u32 = 0xffff;

/// The checksum of every structure: XXH3 with 64 bits.
pub fn checksum(parts: &[&[u8]]) -> u64 {
    if let [single] = parts {
        return xxhash_rust::xxh3::xxh3_64(single);
    }
    let mut hash = Checksum::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finish()
}

/// [`checksum`] of bytes that arrive in pieces.
#[derive(Default)]
pub struct Checksum(Xxh3);

impl Checksum {
    /// Starts without bytes.
    pub fn new() -> Checksum {
        Checksum::default()
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all that was added.
    pub fn finish(&self) -> u64 {
        self.0.digest()
    }
}

/// What is wrong with a structure read from media.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// It does not begin with the magic.
    #[error("it does not begin like one")]
    Magic,
    /// A version that this program does not know.
    #[error("its format version is {found}, this program knows version {FORMAT_VERSION}")]
    Version {
        /// The version found.
        found: u32,
    },
    /// Features that this program does not know.
    #[error("it uses features {bits:#x} that this program does not know")]
    Features {
        /// The unknown bits.
        bits: u64,
    },
    /// The checksum does not match.
    #[error("its checksum is {stored:#018x} where the bytes have {computed:#018x}")]
    Checksum {
        /// The stored checksum.
        stored: u64,
        /// The checksum of the bytes.
        computed: u64,
    },
    /// It has another number than expected.
    #[error("it is number {found} where {expected} belongs")]
    Identity {
        /// The number found.
        found: u64,
        /// The number that belongs here.
        expected: u64,
    },
    /// A field has an invalid value.
    #[error("its field {field} cannot be {value:#x}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// It is zero although the slot was used.
    #[error("all its bytes are zero, though something was there")]
    Erased,
    /// Its bytes cannot be read.
    #[error("the media cannot read it")]
    Unreadable,
    /// Two structures that must agree do not.
    #[error("it and {other} contradict each other")]
    Contradiction {
        /// The other one.
        other: &'static str,
    },
    /// There are fewer bytes than the structure needs.
    #[error("it is cut short")]
    Short,
}
