//! Hashes that are the same in every process.
//!
//! A hash map in an object outlives the program that filled it. `std::hash::Hash` does not define
//! which bytes it feeds a hasher, so they may change with the compiler, and `HashMap` seeds its
//! hasher anew in every process. So keys here have a defined hash: 64-bit XXH3 over the bytes
//! stated below.
//!
//! The hash is not keyed: an attacker who chooses the keys can make them collide. Do not use it on
//! untrusted keys.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// A hash that is part of the format. Equal values, including borrowed forms, have equal hashes.
pub trait StableHash {
    /// The hash.
    fn stable_hash(&self) -> u64;
}

/// Combines hashes in order: for a type with several fields.
pub fn combine<const N: usize>(hashes: [u64; N]) -> u64 {
    hashes.into_iter().fold(N as u64, |all, hash| xxh3_64_with_seed(&hash.to_le_bytes(), all))
}

macro_rules! integers {
    ($($integer:ty),*) => { $(
        /// Over the little-endian bytes.
        impl StableHash for $integer {
            fn stable_hash(&self) -> u64 {
                xxh3_64(&self.to_le_bytes())
            }
        }
    )* };
}
integers!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize);

/// Over the UTF-8 bytes.
impl StableHash for str {
    fn stable_hash(&self) -> u64 {
        xxh3_64(self.as_bytes())
    }
}

/// As the number 0 or 1 in one byte.
impl StableHash for bool {
    fn stable_hash(&self) -> u64 {
        u8::from(*self).stable_hash()
    }
}

/// As the number in 32 bits.
impl StableHash for char {
    fn stable_hash(&self) -> u64 {
        u32::from(*self).stable_hash()
    }
}

/// The elements' hashes, combined.
impl<T: StableHash, const N: usize> StableHash for [T; N] {
    fn stable_hash(&self) -> u64 {
        combine(self.each_ref().map(T::stable_hash))
    }
}

impl<T: StableHash + ?Sized> StableHash for &T {
    fn stable_hash(&self) -> u64 {
        (**self).stable_hash()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference values of XXH3: the format must not depend on the implementation used.
    #[test]
    fn hashes_are_those_of_xxh3() {
        assert_eq!("".stable_hash(), 0x2d06_8005_38d3_94c2);
        assert_eq!(1u64.stable_hash(), xxh3_64(&[1, 0, 0, 0, 0, 0, 0, 0]));
        assert_ne!([1u8, 2].stable_hash(), [2u8, 1].stable_hash());
        assert_eq!("abc".stable_hash(), (&"abc").stable_hash());
    }
}
