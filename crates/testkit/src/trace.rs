//! Access traces: endless iterators over page numbers, made from a seed.
//!
//! | trace | structure | what it stresses |
//! |---|---|---|
//! | [`zipf`] | popularity falls with a power of the rank | policies blind to frequency |
//! | [`uniform`] | none | nothing: every policy hits with frames / pages |
//! | [`scan`] | every page once | nothing hits; policies that admit a scan |
//! | [`loop_`] | the same pages in order, repeatedly | LRU and CLOCK hit nothing if it does not fit |
//! | [`zipf_with_scans`] | popular pages with scans in between | policies that lose popularity in a scan |
//!
//! ```
//! use aquifer_testkit::trace;
//!
//! let pages: Vec<u64> = trace::zipf(1000, 1.0, 7).take(10_000).collect();
//! assert!(pages.iter().all(|&page| page < 1000));
//! assert_eq!(trace::loop_(3).take(5).collect::<Vec<_>>(), [0, 1, 2, 0, 1]);
//! ```

use crate::rng::Rng;

/// Pages below `pages`; the one of rank r is accessed with probability proportional to r^-`theta`.
/// Exact: the distribution is tabulated (8 bytes a page). Neighbouring ranks are scattered.
pub fn zipf(pages: u64, theta: f64, seed: u64) -> impl Iterator<Item = u64> + Clone {
    assert!(pages > 0, "a trace needs pages");
    let mut cumulative = Vec::with_capacity(pages as usize);
    let mut total = 0.0;
    for rank in 1..=pages {
        total += (rank as f64).powf(-theta);
        cumulative.push(total);
    }
    let stride = stride_coprime_to(pages);
    let mut rng = Rng::new(seed);
    std::iter::repeat_with(move || {
        let at = rng.unit_f64() * total;
        let rank = cumulative.partition_point(|&upto| upto <= at) as u128;
        (rank * u128::from(stride) % u128::from(pages)) as u64
    })
}

/// Pages below `pages`, all equally likely.
pub fn uniform(pages: u64, seed: u64) -> impl Iterator<Item = u64> + Clone {
    let mut rng = Rng::new(seed);
    std::iter::repeat_with(move || rng.below(pages))
}

/// Every page once, from 0 on.
pub fn scan() -> impl Iterator<Item = u64> + Clone {
    0..
}

/// The pages below `pages` in order, repeatedly.
pub fn loop_(pages: u64) -> impl Iterator<Item = u64> + Clone {
    (0..pages).cycle()
}

/// Repeats: `popular` accesses as in [`zipf`], then `scanned` pages from `pages` on that were never
/// accessed before.
pub fn zipf_with_scans(
    pages: u64,
    theta: f64,
    popular: u64,
    scanned: u64,
    seed: u64,
) -> impl Iterator<Item = u64> + Clone {
    let mut zipf = zipf(pages, theta, seed);
    let mut fresh = pages..;
    (0..popular + scanned)
        .cycle()
        .filter_map(move |step| if step < popular { zipf.next() } else { fresh.next() })
}

/// Returns a number near `pages` over the golden ratio that is coprime to `pages`, so that its
/// multiples modulo `pages` are a permutation that scatters neighbours.
fn stride_coprime_to(pages: u64) -> u64 {
    let golden = (pages as f64 * 0.618_033_988_749_895) as u64;
    (golden.max(1)..).find(|&stride| greatest_common_divisor(stride, pages) == 1).unwrap_or(1)
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    #[test]
    fn zipf_has_the_frequencies_it_promises() {
        const ACCESSES: usize = 200_000;
        for theta in [0.0, 0.8, 1.0, 1.2] {
            let mut counts: HashMap<u64, u32> = HashMap::new();
            for page in zipf(100, theta, 3).take(ACCESSES) {
                *counts.entry(page).or_default() += 1;
            }
            let total: f64 = (1..=100).map(|rank| f64::from(rank).powf(-theta)).sum();
            let stride = stride_coprime_to(100);
            for rank in [1u32, 2, 10, 50] {
                let page = u64::from(rank - 1) * stride % 100;
                let share = f64::from(counts[&page]) / ACCESSES as f64;
                let expected = f64::from(rank).powf(-theta) / total;
                assert!(
                    (share / expected - 1.0).abs() < 0.1,
                    "theta {theta}, rank {rank}: {share}"
                );
            }
        }
    }

    #[test]
    fn seeds_name_traces() {
        let first = |seed| zipf(1000, 0.8, seed).take(100).collect::<Vec<_>>();
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn scattering_loses_no_page() {
        for pages in [1, 2, 3, 10, 97, 1000] {
            let stride = stride_coprime_to(pages);
            let reached: HashSet<u64> = (0..pages).map(|rank| rank * stride % pages).collect();
            assert_eq!(reached.len() as u64, pages);
        }
    }

    #[test]
    fn scans_between_popular_accesses_are_fresh() {
        let trace: Vec<u64> = zipf_with_scans(50, 1.0, 10, 5, 1).take(60).collect();
        let scanned: Vec<u64> = trace.iter().copied().filter(|&page| page >= 50).collect();
        assert_eq!(scanned, (50..70).collect::<Vec<_>>());
        assert!(trace[10..15].iter().all(|&page| page >= 50));
    }
}
