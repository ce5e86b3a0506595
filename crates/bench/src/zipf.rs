//! Zipf's distribution: the item of rank `r` is chosen in proportion to `1 / r^s`.
//!
//! By bisection in the table of cumulated weights: exact for any exponent, and drawing is not
//! timed. The assignment of ranks to items is shuffled, so that popular items are not neighbours.

use crate::rng::Rng;

/// The exponent of common storage benchmarks (YCSB).
pub const EXPONENT: f64 = 0.99;

/// A distribution over `0..items`.
#[derive(Debug, Clone)]
pub struct Zipf {
    cumulated: Vec<f64>,
    item_of_rank: Vec<u32>,
}

impl Zipf {
    /// The distribution over `items` items (at least one) with this exponent; `seed` determines
    /// which are popular.
    pub fn new(items: u32, exponent: f64, seed: u64) -> Self {
        assert!(items > 0, "nothing to choose from");
        let mut sum = 0.0;
        let cumulated = (1..=items).map(|rank| {
            sum += f64::from(rank).powf(-exponent);
            sum
        });
        let cumulated = cumulated.collect();
        let item_of_rank = Rng::new(seed).shuffled(items);
        Self { cumulated, item_of_rank }
    }

    /// Draws an item.
    pub fn draw(&self, rng: &mut Rng) -> u32 {
        let total = self.cumulated.last().expect("at least one item");
        // 53 random bits: the precision of a double between 0 and 1.
        let at = (rng.next() >> 11) as f64 / (1_u64 << 53) as f64 * total;
        let rank = self.cumulated.partition_point(|&up_to| up_to <= at);
        self.item_of_rank[rank.min(self.item_of_rank.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popularity_falls_with_the_rank() {
        let zipf = Zipf::new(1000, EXPONENT, 7);
        let mut rng = Rng::new(3);
        let mut counts = vec![0_u32; 1000];
        let draws = 200_000;
        for _ in 0..draws {
            counts[zipf.draw(&mut rng) as usize] += 1;
        }
        let total: f64 = (1..=1000).map(|rank| f64::from(rank).powf(-EXPONENT)).sum();
        for rank in [1, 2, 10, 100] {
            let expected = f64::from(draws) * f64::from(rank).powf(-EXPONENT) / total;
            let found = f64::from(counts[zipf.item_of_rank[rank as usize - 1] as usize]);
            // Five standard deviations of a Poisson count.
            assert!((found - expected).abs() < 5.0 * expected.sqrt(), "{rank}: {found} {expected}");
        }
    }

    #[test]
    fn one_item_is_always_chosen() {
        let zipf = Zipf::new(1, EXPONENT, 1);
        let mut rng = Rng::new(1);
        assert!((0..100).all(|_| zipf.draw(&mut rng) == 0));
    }
}
