//! The sum over the words of some bytes: the work of every contender on a file's content.
//!
//! Cheap enough that the time is dominated by reaching the bytes, and memory-bound for large files.
//! The sums run in parallel lanes, which compilers turn into the widest vectors allowed; so the
//! function is compiled a second time with AVX2. Not with AVX-512: there the compiler gathers words
//! that are 256 bytes apart, and bytes that are not in the CPU's caches took 5 times as long (32 KiB
//! of a mapped file: 14 instead of 2.7 µs), which punished contenders that do not copy.

/// Adds the words of `bytes`, wrapping. Bytes after the last whole word are ignored.
pub fn sum_words(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2 was just detected.
            return unsafe { with_avx2(bytes) };
        }
    }
    unrolled(bytes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2(bytes: &[u8]) -> u64 {
    unrolled(bytes)
}

/// Words added in parallel: eight vectors.
const LANES: usize = 32;

#[inline(always)]
fn unrolled(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    let (groups, rest) = words.as_chunks::<LANES>();
    let mut sums = [0_u64; LANES];
    for group in groups {
        for (sum, word) in sums.iter_mut().zip(group) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    let rest = rest.iter().map(|word| u64::from_ne_bytes(*word));
    sums.into_iter().chain(rest).fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn it_is_the_plain_sum_at_every_length() {
        let mut rng = Rng::new(1);
        let bytes: Vec<u8> = (0..4096).map(|_| rng.next() as u8).collect();
        for len_bytes in (0..600).chain([4088, 4096]) {
            let prefix = &bytes[..len_bytes];
            let plain = prefix
                .chunks_exact(8)
                .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
                .fold(0, u64::wrapping_add);
            assert_eq!(sum_words(prefix), plain, "{len_bytes}");
        }
    }
}
