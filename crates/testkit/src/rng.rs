//! A small seeded generator: xoshiro256++ (D. Blackman and S. Vigna, "Scrambled Linear Pseudorandom
//! Number Generators", 2021), seeded with SplitMix64 as its authors recommend. Not for secrets.

/// A seeded generator of pseudo-random numbers.
///
/// ```
/// use aquifer_testkit::rng::Rng;
///
/// let (mut one, mut same) = (Rng::new(42), Rng::new(42));
/// assert_eq!(one.next_u64(), same.next_u64());
/// assert!(one.below(6) < 6);
/// ```
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// Creates a generator from a seed.
    pub fn new(seed: u64) -> Rng {
        let mut counter = seed;
        let mut split_mix = || {
            counter = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (counter ^ (counter >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        };
        Rng { state: [split_mix(), split_mix(), split_mix(), split_mix()] }
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Returns a number below `bound`, which is not 0. The bias is below `bound` / 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "no number is below 0");
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a number in [0, 1), with 53 random bits.
    pub fn unit_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns true with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit_f64() < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs for a known state, worked out by hand from the definition.
    #[test]
    fn follows_the_definition() {
        let mut rng = Rng { state: [1, 2, 3, 4] };
        assert_eq!(rng.next_u64(), 41_943_041); // rotl(1 + 4, 23) + 1
        // The state is now [7, 0, 262146, 211106232532992].
        assert_eq!(rng.state, [7, 0, 262_146, 211_106_232_532_992]);
        assert_eq!(rng.next_u64(), 58_720_359);
    }

    #[test]
    fn numbers_below_a_bound_are_spread_evenly() {
        let mut rng = Rng::new(1);
        let mut counts = [0u32; 10];
        for _ in 0..100_000 {
            counts[rng.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
    }
}
