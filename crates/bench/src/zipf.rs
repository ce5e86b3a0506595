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

/// The ranks of a distribution, from 0, without tables: for many items in little memory.
///
/// The approximation of Gray et al. (Quickly Generating Billion-Record Synthetic Databases, SIGMOD
/// 1994), as in YCSB: exact for the first two ranks, close for the others.
#[derive(Debug, Clone, Copy)]
pub struct Ranks {
    items: f64,
    exponent: f64,
    sum: f64,
    eta: f64,
}

impl Ranks {
    /// The ranks of `items` items with an exponent below 1.
    pub fn new(items: u64, exponent: f64) -> Self {
        assert!(items > 2 && exponent < 1.0, "the approximation holds for these only");
        let count = items as f64;
        let sum = sum_of_weights(items, exponent);
        let first_two = 1.0 + 2_f64.powf(-exponent);
        let eta = (1.0 - (2.0 / count).powf(1.0 - exponent)) / (1.0 - first_two / sum);
        Self { items: count, exponent, sum, eta }
    }

    /// Draws a rank.
    pub fn draw(&self, rng: &mut Rng) -> u64 {
        let at = (rng.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let weight = at * self.sum;
        if weight < 1.0 {
            return 0;
        }
        if weight < 1.0 + 2_f64.powf(-self.exponent) {
            return 1;
        }
        let share = (self.eta * at - self.eta + 1.0).powf(1.0 / (1.0 - self.exponent));
        (self.items * share).min(self.items - 1.0) as u64
    }
}

/// The sum of `rank^-exponent` over all ranks from 1: the first ones one by one, the rest by the
/// integral, whose error is below 1e-9 there.
fn sum_of_weights(items: u64, exponent: f64) -> f64 {
    let single = items.min(10_000);
    let sum: f64 = (1..=single).map(|rank| (rank as f64).powf(-exponent)).sum();
    let power = 1.0 - exponent;
    let integral = |to: f64| to.powf(power) / power;
    sum + integral(items as f64 + 0.5) - integral(single as f64 + 0.5)
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
    fn ranks_without_tables_are_those_of_the_tables() {
        assert!(
            (sum_of_weights(50_000, EXPONENT)
                - (1..=50_000).map(|rank| f64::from(rank).powf(-EXPONENT)).sum::<f64>())
            .abs()
                < 1e-6
        );
        let ranks = Ranks::new(100_000, EXPONENT);
        let mut rng = Rng::new(3);
        let draws = 200_000;
        let mut below = [0_u32; 5];
        for _ in 0..draws {
            let rank = ranks.draw(&mut rng);
            assert!(rank < 100_000);
            for (index, count) in below.iter_mut().enumerate() {
                *count += u32::from(rank < 10_u64.pow(index as u32 + 1));
            }
        }
        for (index, &count) in below.iter().enumerate() {
            let up_to = 10_u64.pow(index as u32 + 1);
            let share = sum_of_weights(up_to, EXPONENT) / sum_of_weights(100_000, EXPONENT);
            let found = f64::from(count) / f64::from(draws);
            assert!((found - share).abs() < 0.02, "ranks below {up_to}: {found}, expected {share}");
        }
    }

    #[test]
    fn one_item_is_always_chosen() {
        let zipf = Zipf::new(1, EXPONENT, 1);
        let mut rng = Rng::new(1);
        assert!((0..100).all(|_| zipf.draw(&mut rng) == 0));
    }
}
