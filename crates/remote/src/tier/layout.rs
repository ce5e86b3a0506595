//! The bytes of a tier's files.
//!
//! | file | content |
//! |---|---|
//! | `control` | one [`Control`]: the budget, an estimate of the bytes used, and the clock's hand |
//! | `<key>.object` | one version of one object, sparse: header, states, proofs, data |
//!
//! ```text
//! 0         4096        aligned to 4096            aligned to 64 KiB
//! │ Header  │ a state   │ a proof of 16 bytes      │ the object's bytes,
//! │         │ per block │ per sub-block            │ at their own offsets from here on
//! ```
//!
//! A block is 64 KiB, a sub-block 4 KiB or what the object's end leaves of it. A proof is xxh3-128 over the sub-block's
//! bytes, seeded with the object's key and the sub-block's number; zero means that the sub-block is absent. A
//! state is a hint for eviction: wrong ones cost a download or leave a block in place for longer.

use std::mem::offset_of;
use std::ops::Range;

use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed, xxh3_128, xxh3_128_with_seed};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub(crate) const SUB_BLOCK_BYTES: u64 = 4 << 10;
pub(super) const BLOCK_BYTES: u64 = 64 << 10;
pub(super) const PROOF_BYTES: u64 = 16;

const OBJECT_MAGIC: [u8; 8] = *b"AQTIEROB";
const CONTROL_MAGIC: [u8; 8] = *b"AQTIERCT";
const LAYOUT_VERSION: u32 = 1;

/// States of a block.
pub(super) const EMPTY: u8 = 0;
pub(super) const COLD: u8 = 1;
pub(super) const HOT: u8 = 2;

/// Identifies one version of one object: the first half of a SHA-256 of its URL without secrets, of its ETag and its
/// length, and of the layout's version, so that programs with different layouts use different files. A server chooses its
/// ETags, so a hash without resistance to collisions would let it give two objects one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key(pub [u8; 16]);

impl Key {
    pub fn of(url: &str, etag: &str, len_bytes: u64) -> Key {
        let identity = format!("{LAYOUT_VERSION}\0{url}\0{etag}\0{len_bytes}");
        Key(digest(identity.as_bytes()))
    }

    pub fn file_name(self) -> String {
        let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        hex + OBJECT_SUFFIX
    }

    /// The key in a file's name.
    pub fn parse(name: &str) -> Option<Key> {
        let hex = name.strip_suffix(OBJECT_SUFFIX)?;
        let is_hex = hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = (hex.len() == 32 && is_hex).then(|| u128::from_str_radix(hex, 16))?;
        Some(Key(number.ok()?.to_be_bytes()))
    }

    /// The proof of a sub-block; never zero. Async-signal-safe.
    pub fn proof(self, sub_block: u64, bytes: &[u8]) -> u128 {
        let seed = xxh3_64_with_seed(&self.0, sub_block);
        xxh3_128_with_seed(bytes, seed).max(1)
    }
}

/// The first half of the SHA-256.
pub(crate) fn digest(bytes: &[u8]) -> [u8; 16] {
    let whole: [u8; 32] = Sha256::digest(bytes).into();
    std::array::from_fn(|at| whole[at])
}

const OBJECT_SUFFIX: &str = ".object";

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Header {
    magic: [u8; 8],
    version: u32,
    sub_block_bytes: u32,
    len_bytes: u64,
    key: [u8; 16],
    url_bytes: u16,
    etag_bytes: u16,
    reserved: u32,
    text: [u8; TEXT_BYTES],
    checksum: [u8; 16],
}

const TEXT_BYTES: usize = 4096 - 64;

const _: () = assert!(size_of::<Header>() == 4096);
const _: () = assert!(offset_of!(Header, checksum) == 4096 - 16);

impl Header {
    pub fn new(url: &str, etag: &str, len_bytes: u64) -> Header {
        let mut header = Header {
            magic: OBJECT_MAGIC,
            version: LAYOUT_VERSION,
            sub_block_bytes: SUB_BLOCK_BYTES as u32,
            len_bytes,
            key: Key::of(url, etag, len_bytes).0,
            url_bytes: 0,
            etag_bytes: 0,
            reserved: 0,
            text: [0; TEXT_BYTES],
            checksum: [0; 16],
        };
        // The key identifies the object; the texts are for people, and cut off where they do not fit.
        let (url, etag) = (cut(url, 3072), cut(etag, TEXT_BYTES - 3072));
        header.text[..url.len()].copy_from_slice(url.as_bytes());
        header.text[url.len()..][..etag.len()].copy_from_slice(etag.as_bytes());
        header.url_bytes = url.len() as u16;
        header.etag_bytes = etag.len() as u16;
        header.checksum = header.sum();
        header
    }

    /// Claims another length, with a checksum that matches.
    #[cfg(test)]
    pub fn lying(url: &str, etag: &str, len_bytes: u64, claimed_bytes: u64) -> Header {
        let mut header = Header::new(url, etag, len_bytes);
        header.len_bytes = claimed_bytes;
        header.checksum = header.sum();
        header
    }

    fn sum(&self) -> [u8; 16] {
        xxh3_128(&self.as_bytes()[..offset_of!(Header, checksum)]).to_le_bytes()
    }

    /// Whether it is whole and of this version, whichever object's it is.
    pub fn is_valid(&self) -> bool {
        self.check(Key(self.key)).is_ok()
    }

    /// Checks the header of the file of this key.
    pub fn check(&self, key: Key) -> Result<(), &'static str> {
        if self.magic != OBJECT_MAGIC || self.checksum != self.sum() {
            return Err("its header is damaged");
        }
        if self.version != LAYOUT_VERSION || self.sub_block_bytes != SUB_BLOCK_BYTES as u32 {
            return Err("another version of Aquifer wrote it");
        }
        if self.key != key.0 || self.len_bytes > Geometry::LONGEST_BYTES {
            return Err("its header is that of another file");
        }
        Ok(())
    }

    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    pub fn url(&self) -> String {
        let end = usize::from(self.url_bytes).min(TEXT_BYTES);
        String::from_utf8_lossy(&self.text[..end]).into_owned()
    }

    pub fn etag(&self) -> String {
        let start = usize::from(self.url_bytes).min(TEXT_BYTES);
        let end = (start + usize::from(self.etag_bytes)).min(TEXT_BYTES);
        String::from_utf8_lossy(&self.text[start..end]).into_owned()
    }
}

/// The longest prefix of at most so many bytes.
fn cut(text: &str, most_bytes: usize) -> &str {
    let most_bytes = most_bytes.min(text.len());
    let end = (0..=most_bytes).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

/// Where things are in an object's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub len_bytes: u64,
}

impl Geometry {
    /// Longer objects are not tiered: no file could hold them.
    pub const LONGEST_BYTES: u64 = 1 << 50;
    pub const STATES_AT: u64 = size_of::<Header>() as u64;

    pub fn blocks(self) -> u64 {
        self.len_bytes.div_ceil(BLOCK_BYTES)
    }

    pub fn sub_blocks(self) -> u64 {
        self.len_bytes.div_ceil(SUB_BLOCK_BYTES)
    }

    pub fn proofs_at(self) -> u64 {
        (Self::STATES_AT + self.blocks()).next_multiple_of(4096)
    }

    pub fn proof_at(self, sub_block: u64) -> u64 {
        self.proofs_at() + sub_block * PROOF_BYTES
    }

    pub fn proofs_end(self) -> u64 {
        self.proof_at(self.sub_blocks())
    }

    pub fn data_at(self) -> u64 {
        self.proofs_end().next_multiple_of(BLOCK_BYTES)
    }

    pub fn file_bytes(self) -> u64 {
        self.data_at() + self.len_bytes
    }

    /// The sub-blocks that a range of the object touches.
    pub fn touched(self, range: Range<u64>) -> Range<u64> {
        range.start / SUB_BLOCK_BYTES..range.end.div_ceil(SUB_BLOCK_BYTES)
    }

    /// The bytes of sub-blocks.
    pub fn bytes_of(self, sub_blocks: Range<u64>) -> Range<u64> {
        let end = (sub_blocks.end * SUB_BLOCK_BYTES).min(self.len_bytes);
        sub_blocks.start * SUB_BLOCK_BYTES..end
    }

    /// The sub-blocks of a block.
    pub fn of_block(self, block: u64) -> Range<u64> {
        let per_block = BLOCK_BYTES / SUB_BLOCK_BYTES;
        block * per_block..((block + 1) * per_block).min(self.sub_blocks())
    }
}

/// What the processes of a tier share, changed under the lock of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Control {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    pub budget_bytes: u64,
    /// An estimate: counted at the first opening and at each eviction, added to by writers in between.
    pub used_bytes: u64,
    /// Where eviction goes on.
    pub hand_key: [u8; 16],
    pub hand_block: u64,
    checksum: u64,
}

const _: () = assert!(size_of::<Control>() == 64);

impl Control {
    pub fn new(budget_bytes: u64) -> Control {
        Control {
            magic: CONTROL_MAGIC,
            version: LAYOUT_VERSION,
            reserved: 0,
            budget_bytes,
            used_bytes: 0,
            hand_key: [0; 16],
            hand_block: 0,
            checksum: 0,
        }
    }

    pub fn seal(mut self) -> Control {
        self.checksum = self.sum();
        self
    }

    fn sum(&self) -> u64 {
        xxh3_64(&self.as_bytes()[..offset_of!(Control, checksum)])
    }

    /// Whether it is whole, and of this version: a crash may leave any part of it.
    pub fn is_valid(&self) -> bool {
        self.magic == CONTROL_MAGIC && self.version == LAYOUT_VERSION && self.checksum == self.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_file_do_not_overlap() {
        for len_bytes in [0, 1, 4096, 4097, 65_536, 65_537, 1 << 30, Geometry::LONGEST_BYTES] {
            let geometry = Geometry { len_bytes };
            assert!(Geometry::STATES_AT + geometry.blocks() <= geometry.proofs_at());
            assert!(geometry.proof_at(geometry.sub_blocks()) <= geometry.data_at());
            assert_eq!(geometry.bytes_of(geometry.touched(0..len_bytes)), 0..len_bytes);
            assert!(i64::try_from(geometry.file_bytes()).is_ok());
        }
        let geometry = Geometry { len_bytes: 70_000 };
        assert_eq!(geometry.of_block(1), 16..18);
        assert_eq!(geometry.bytes_of(16..18), 65_536..70_000);
    }

    #[test]
    fn proofs_depend_on_key_place_and_bytes() {
        let (one, other) = (Key::of("s3://b/k", "\"1\"", 9), Key::of("s3://b/k", "\"2\"", 9));
        let proof = one.proof(3, b"bytes");
        assert_ne!(proof, one.proof(4, b"bytes"));
        assert_ne!(proof, other.proof(3, b"bytes"));
        assert_ne!(proof, one.proof(3, b"bytez"));
    }

    #[test]
    fn keys_are_no_collisions_that_a_server_can_make() {
        // `printf '1\0s3://b/k\0"1"\0009' | sha256sum`, the first half.
        let name = Key::of("s3://b/k", "\"1\"", 9).file_name();
        assert_eq!(name, "18f56a86a22ea51556317091996e7e7c.object");
    }

    #[test]
    fn names_and_headers_are_read_back() {
        let url = format!("s3://bucket/{}", "é".repeat(3000));
        let header = Header::new(&url, "\"etag\"", 77);
        let key = Key::of(&url, "\"etag\"", 77);
        assert_eq!(Key::parse(&key.file_name()), Some(key));
        for bad in ["", ".object", "control", "0123.object", &"+".repeat(32)] {
            assert_eq!(Key::parse(bad), None, "{bad}");
        }
        header.check(key).unwrap();
        assert!(url.starts_with(&header.url()));
        assert_eq!(header.etag(), "\"etag\"");
        assert!(header.check(Key::of("s3://other", "\"etag\"", 77)).is_err());
        let mut damaged = Header::new(&url, "\"etag\"", 77);
        damaged.text[9] ^= 1;
        assert!(damaged.check(key).is_err());
    }
}
