//! Shared support of the tests of the crash-enumerating media.

#![allow(dead_code, reason = "each test file uses its part")]

use aquifer_pool::media::{ByteRange, PersistenceDomain};

/// The domains in which writes can be lost.
pub const DOMAINS: [PersistenceDomain; 2] = [PersistenceDomain::PageCache, PersistenceDomain::Dax];

/// Returns a range of bytes.
pub fn range(offset_bytes: u64, len_bytes: u64) -> ByteRange {
    ByteRange { offset_bytes, len_bytes }
}
