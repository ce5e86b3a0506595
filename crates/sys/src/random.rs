//! Random bytes from the kernel, for identities and salts.

use std::io;

use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes` with `getrandom(2)`, which blocks until the kernel's generator is seeded.
pub fn fill(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let got = retry_on_intr(|| getrandom(&mut *bytes, GetRandomFlags::empty()))?;
        bytes = &mut bytes[got..];
    }
    Ok(())
}

/// Returns 64 random bits.
pub fn next_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    fill(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Returns a random number below `bound`, which is not 0. The bias is below `bound` / 2^64.
pub fn below(bound: u64) -> io::Result<u64> {
    assert!(bound > 0, "no number is below 0");
    next_u64().map(|bits| ((u128::from(bits) * u128::from(bound)) >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_filled() {
        // A byte that stays 0 in all of 16 rounds has a chance of 2^-128.
        let mut seen = vec![0u8; 1000];
        for _ in 0..16 {
            let mut bytes = vec![0; 1000];
            fill(&mut bytes).unwrap();
            seen.iter_mut().zip(bytes).for_each(|(seen, byte)| *seen |= byte);
        }
        assert!(seen.iter().all(|byte| *byte != 0));
        assert_ne!(next_u64().unwrap(), next_u64().unwrap());
    }

    #[test]
    fn numbers_are_spread_below_their_bound() {
        let numbers: std::collections::BTreeSet<_> = (0..100).map(|_| below(3).unwrap()).collect();
        assert_eq!(numbers.into_iter().collect::<Vec<_>>(), [0, 1, 2]);
    }
}
