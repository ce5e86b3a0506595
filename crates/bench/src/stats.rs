//! Medians over rounds and quantiles of single accesses.
//!
//! Latencies span five orders of magnitude (a hit takes nanoseconds, a stall milliseconds), so they
//! are counted in buckets that grow with the value: each power of two is divided into 32, which
//! bounds the error of a quantile at about 3 %. A histogram is a fixed array; recording does not
//! allocate.

use crate::rng::Rng;

/// The number of buckets per power of two, as a power of two.
const SUB_BITS: u32 = 5;
const SUB: usize = 1 << SUB_BITS;
/// Values below `SUB` have a bucket each; every further power of two of a `u64` has `SUB`.
const BUCKETS: usize = SUB * (64 - SUB_BITS as usize + 1);

/// Counts of latencies in nanoseconds.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Box<[u64]>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS].into_boxed_slice(), total: 0 }
    }
}

impl Histogram {
    /// Counts `times` accesses of this latency.
    #[inline]
    pub fn record(&mut self, latency_ns: u64, times: u64) {
        self.counts[bucket_of(latency_ns)] += times;
        self.total += times;
    }

    /// Adds the counts of another thread.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
    }

    /// The latency that this share (0 to 1) of the accesses did not exceed; `None` without accesses.
    pub fn quantile_ns(&self, share: f64) -> Option<f64> {
        if self.total == 0 {
            return None;
        }
        let rank = ((share * self.total as f64).ceil() as u64).clamp(1, self.total);
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                let (low, width) = bounds_of(bucket);
                return Some(low as f64 + (width - 1) as f64 / 2.0);
            }
        }
        unreachable!("the ranks add up to the total")
    }
}

#[inline]
fn bucket_of(value: u64) -> usize {
    if value < SUB as u64 {
        return value as usize;
    }
    let shift = 63 - value.leading_zeros() - SUB_BITS;
    // The leading one selects the group, the five bits after it the bucket in the group.
    SUB * (shift as usize + 1) + ((value >> shift) as usize - SUB)
}

/// Lowest value of a bucket, and how many values share it.
fn bounds_of(bucket: usize) -> (u64, u64) {
    if bucket < SUB {
        return (bucket as u64, 1);
    }
    let shift = bucket / SUB - 1;
    (((SUB + bucket % SUB) as u64) << shift, 1 << shift)
}

/// The middle value, or the mean of the two middle values. `None` if there are no values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        count if count % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Random selections of rounds, with repetition: a bootstrap. All rows of a report are selected alike,
/// because their rounds are interleaved.
pub struct Bootstrap {
    rounds: usize,
    left: u32,
    rng: Rng,
}

impl Bootstrap {
    /// Selections of this many rounds; none of fewer than three, which give no interval.
    pub fn of(rounds: usize) -> Self {
        Self::seeded(rounds, 1)
    }

    /// The same with a seed, for selections that are independent of each other.
    pub fn seeded(rounds: usize, seed: u64) -> Self {
        Self { rounds, left: if rounds < 3 { 0 } else { 1000 }, rng: Rng::new(seed) }
    }

    /// The 95 % interval of values that were computed from the selections.
    pub fn interval(mut values: Vec<f64>) -> [f64; 2] {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
        [at(0.025), at(0.975)]
    }
}

impl Iterator for Bootstrap {
    type Item = Vec<usize>;

    fn next(&mut self) -> Option<Vec<usize>> {
        self.left = self.left.checked_sub(1)?;
        Some((0..self.rounds).map(|_| self.rng.below(self.rounds as u64) as usize).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_covers_the_values_of_the_rounds_and_no_others() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0];
        let medians = Bootstrap::of(5)
            .map(|picked| median(&picked.iter().map(|&round| values[round]).collect::<Vec<_>>()));
        let [low, high] = Bootstrap::interval(medians.map(Option::unwrap).collect());
        assert!((1.0..=2.0).contains(&low) && (4.0..=5.0).contains(&high), "{low} to {high}");
        let same = Bootstrap::of(5).map(|_| 7.0).collect();
        assert_eq!(Bootstrap::interval(same), [7.0, 7.0]);
        assert_eq!(Bootstrap::of(2).count(), 0);
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn buckets_are_contiguous_and_cover_every_value() {
        let mut next = 0_u64;
        for bucket in 0..BUCKETS {
            let (low, width) = bounds_of(bucket);
            assert_eq!(low, next, "bucket {bucket}");
            assert_eq!(bucket_of(low), bucket);
            assert_eq!(bucket_of(low + (width - 1)), bucket);
            next = low.wrapping_add(width);
        }
        assert_eq!(next, 0, "the last bucket ends with the last value");
    }

    #[test]
    fn quantiles_follow_a_sorted_list() {
        let mut rng = Rng::new(5);
        let mut histogram = Histogram::default();
        let mut values = Vec::new();
        for _ in 0..10_000 {
            let magnitude = rng.below(30);
            let value = rng.next() >> (63 - magnitude);
            histogram.record(value, 1);
            values.push(value);
        }
        values.sort_unstable();
        for share in [0.0, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let rank = ((share * 10_000.0_f64).ceil() as usize).clamp(1, 10_000);
            let exact = values[rank - 1] as f64;
            let found = histogram.quantile_ns(share).unwrap();
            assert!((found - exact).abs() <= exact / 32.0 + 1.0, "{share}: {found} for {exact}");
        }
    }

    #[test]
    fn merging_adds_and_nothing_has_no_quantile() {
        let mut first = Histogram::default();
        assert_eq!(first.quantile_ns(0.5), None);
        let mut second = Histogram::default();
        first.record(10, 1);
        second.record(20, 9);
        first.merge(&second);
        assert_eq!(first.quantile_ns(0.1), Some(10.0));
        assert_eq!(first.quantile_ns(0.2), Some(20.0));
    }
}
