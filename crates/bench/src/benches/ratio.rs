//! Ratios of two rows of a report.
//!
//! A ratio is above 1 when Aquifer is better, and it exists only if both rows do. If several forms
//! of a contender represent "mmap", the best of them is used for each metric.

use std::collections::BTreeMap;

use crate::contender::Contender;
use crate::report::Row;

/// The figure of a row that a ratio compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// The median.
    Median,
    /// The 99.9th percentile.
    P999,
    /// One of the details, of which less is better.
    Detail(&'static str),
}

/// The definition of a ratio: the best of `others` over `ours`.
#[derive(Debug, Clone)]
pub struct Ratio {
    /// Its name in the report.
    pub name: String,
    /// The contenders to compare with; the best of them counts.
    pub others: &'static [&'static Contender],
    /// Their metric.
    pub other_metric: String,
    /// The contender being rated.
    pub ours: &'static Contender,
    /// Its metric.
    pub our_metric: String,
    /// The figure to compare.
    pub figure: Figure,
}

impl Ratio {
    /// Both sides on the same metric, by median.
    pub fn new(
        name: impl Into<String>,
        others: &'static [&'static Contender],
        ours: &'static Contender,
        metric: impl Into<String>,
    ) -> Self {
        let metric = metric.into();
        Self {
            name: name.into(),
            others,
            other_metric: metric.clone(),
            ours,
            our_metric: metric,
            figure: Figure::Median,
        }
    }

    fn of(&self, rows: &[Row]) -> Option<f64> {
        let figure = |contender: &Contender, metric: &str| {
            let row =
                rows.iter().find(|row| row.system == contender.name && row.metric == metric)?;
            match self.figure {
                Figure::Median => Some(row.median),
                Figure::P999 => row.p999,
                Figure::Detail(name) => row.details.get(name).copied(),
            }
        };
        let ours = figure(self.ours, &self.our_metric)?;
        let best = self
            .others
            .iter()
            .filter_map(|other| figure(other, &self.other_metric))
            .min_by(f64::total_cmp)?;
        Some(best / ours)
    }
}

/// The ratios whose rows exist.
pub fn ratios(definitions: &[Ratio], rows: &[Row]) -> BTreeMap<String, f64> {
    definitions.iter().filter_map(|ratio| Some((ratio.name.clone(), ratio.of(rows)?))).collect()
}

/// The geometric mean; 1 if there are no values.
pub fn geometric_mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1) as f64;
    (values.map(f64::ln).sum::<f64>() / count).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contenders::{MAPPING, MMAP, MMAP_RANDOM, MMAP_WILLNEED, PAGES};
    use crate::report::Round;

    fn row(system: &str, median: f64, p999: f64) -> Row {
        let tails = Round { tails: [None, Some(p999)], ..Round::default() };
        Row::of(system, "read", "ns", vec![median], vec![tails])
    }

    #[test]
    fn a_ratio_takes_the_best_of_the_others_and_needs_both_sides() {
        let rows =
            [row("mmap", 80.0, 100.0), row("mmap_random", 60.0, 300.0), row("mapping", 30.0, 50.0)];
        let others: &[&Contender] = &[MMAP, MMAP_RANDOM, MMAP_WILLNEED];
        let median = Ratio::new("m", others, MAPPING, "read");
        let tail = Ratio { name: "t".into(), figure: Figure::P999, ..median.clone() };
        let absent = Ratio::new("a", &[MMAP], PAGES, "read");
        let other_metric = Ratio::new("w", &[MMAP], MAPPING, "write");
        let found = ratios(&[median, tail, absent, other_metric], &rows);
        assert_eq!(found, BTreeMap::from([("m".to_owned(), 2.0), ("t".to_owned(), 2.0)]));
    }

    #[test]
    fn geometric_means() {
        assert!((geometric_mean([2.0, 8.0].into_iter()) - 4.0).abs() < 1e-12);
        assert!((geometric_mean([].into_iter()) - 1.0).abs() < 1e-12);
    }
}
