//! Deterministic random numbers: every contender gets the same accesses.
//!
//! SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): one addition and one mixing function. Numbers
//! can also be drawn by index, which lets the parent check a child's answer without a copy of it.

/// The finaliser of SplitMix64: a bijection that scatters its argument over 64 bits.
#[inline(always)]
pub const fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of random numbers.
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// The stream of this seed.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The stream of one thread in one round: independent of the others, the same for all
    /// contenders.
    pub const fn for_lane(seed: u64, round: u32, lane: u32) -> Self {
        Self::new(mix(seed ^ mix(((round as u64) << 32) | lane as u64)))
    }

    /// The next number.
    #[inline(always)]
    pub const fn next(&mut self) -> u64 {
        let value = mix(self.state);
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        value
    }

    /// A number below `bound`, by multiplication (the bias is below `bound / 2^64`).
    #[inline(always)]
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next() as u128 * bound as u128) >> 64) as u64
    }

    /// The numbers below `count` in random order (Fisher and Yates).
    pub fn shuffled(&mut self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        for last in (1..order.len()).rev() {
            let other = usize::try_from(self.below(last as u64 + 1)).expect("an index");
            order.swap(last, other);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_values_of_splitmix64() {
        // First outputs of the published generator for seed 1234567.
        let mut rng = Rng::new(1_234_567);
        let expected =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([rng.next(), rng.next(), rng.next()], expected);
    }

    #[test]
    fn lanes_and_rounds_differ() {
        let first = Rng::for_lane(1, 0, 0).next();
        assert_ne!(first, Rng::for_lane(1, 0, 1).next());
        assert_ne!(first, Rng::for_lane(1, 1, 0).next());
        assert_ne!(first, Rng::for_lane(2, 0, 0).next());
        assert_eq!(first, Rng::for_lane(1, 0, 0).next());
    }

    #[test]
    fn shuffling_keeps_every_number() {
        let mut order = Rng::new(4).shuffled(1000);
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
        assert!(Rng::new(4).shuffled(0).is_empty());
    }

    #[test]
    fn below_stays_below_and_reaches_everything() {
        let mut rng = Rng::new(9);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[usize::try_from(rng.below(7)).unwrap()] = true;
        }
        assert_eq!(seen, [true; 7]);
    }
}
