//! What the tests of the crash-enumerating media share.

#![allow(dead_code, reason = "each test file uses its part")]

use aquifer_pool::media::{ByteRange, PersistenceDomain};

/// The domains in which something can be lost.
pub const DOMAINS: [PersistenceDomain; 2] = [PersistenceDomain::PageCache, PersistenceDomain::Dax];

/// The seed of a test: `AQUIFER_SEED`, or the one given. Printed, so that a failure can be replayed.
pub fn seed(usual: u64) -> u64 {
    let seed = std::env::var("AQUIFER_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(usual);
    println!("replay with AQUIFER_SEED={seed}");
    seed
}

/// How many steps a test takes: `usual`, scaled by `AQUIFER_STEPS` in percent.
pub fn steps(usual: u64) -> u64 {
    let percent = std::env::var("AQUIFER_STEPS").ok().and_then(|steps| steps.parse().ok());
    (usual * percent.unwrap_or(100u64)).div_ceil(100)
}

/// A range of bytes.
pub fn range(offset_bytes: u64, len_bytes: u64) -> ByteRange {
    ByteRange { offset_bytes, len_bytes }
}
