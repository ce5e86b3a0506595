//! The output of a bench: one JSON object, or the same as a table.
//!
//! A row is one contender and one metric.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;
use serde_json::Value;

use crate::stats::median;
use aquifer_host::Machine;

/// The result of one bench.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Name of the bench.
    pub bench: &'static str,
    /// The machine it ran on.
    pub machine: Machine,
    /// Sizes, rounds, limits: everything needed to repeat it.
    pub config: BTreeMap<&'static str, Value>,
    /// One for each contender and metric.
    pub rows: Vec<Row>,
    /// Name to value; above 1 means Aquifer is better.
    pub ratios: BTreeMap<String, f64>,
    /// Notes needed to judge the figures: contenders that cannot run here, missing permissions.
    pub notes: Vec<String>,
}

/// One contender and one metric. All quantities are in `unit`.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The contender.
    pub system: String,
    /// What was measured; the suffix `_2t` means two threads.
    pub metric: String,
    /// Unit of `median`, `p99`, `p999` and `values`.
    pub unit: &'static str,
    /// Median over the rounds of a round's mean.
    pub median: f64,
    /// Median over the rounds of the 99th percentile of single accesses, if they were timed.
    pub p99: Option<f64>,
    /// The same for the 99.9th percentile.
    pub p999: Option<f64>,
    /// The number of rounds.
    pub rounds: usize,
    /// The mean of each round.
    pub values: Vec<f64>,
    /// Medians of additional figures that the contender reports.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, f64>,
}

/// Median of each figure that all rounds report under the same name.
pub fn median_details(rounds: &[BTreeMap<String, f64>]) -> BTreeMap<String, f64> {
    let mut values = BTreeMap::<&str, Vec<f64>>::new();
    for (name, value) in rounds.iter().flatten() {
        values.entry(name).or_default().push(*value);
    }
    values
        .into_iter()
        .filter_map(|(name, values)| Some((name.to_owned(), median(&values)?)))
        .collect()
}

impl Report {
    /// The report as a table.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let machine = &self.machine;
        let _ = writeln!(
            text,
            "{}: {}, {} cores, {}, {} on {}",
            self.bench,
            machine.cpu,
            machine.cores,
            machine.kernel,
            machine.file_system,
            machine.device
        );
        let config: Vec<_> =
            self.config.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let _ = writeln!(text, "{}\n", config.join(", "));

        let header = ["metric", "system", "unit", "median", "p99", "p99.9"].map(str::to_owned);
        let mut lines = vec![header];
        for row in &self.rows {
            let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
            lines.push([
                row.metric.clone(),
                row.system.clone(),
                row.unit.to_owned(),
                number(row.median),
                optional(row.p99),
                optional(row.p999),
            ]);
        }
        text.push_str(&aligned(&lines, 3));
        if !self.ratios.is_empty() {
            text.push('\n');
            let lines: Vec<_> = self
                .ratios
                .iter()
                .map(|(name, value)| [name.clone(), format!("{value:.2}")])
                .collect();
            text.push_str(&aligned(&lines, 1));
        }
        for note in &self.notes {
            let _ = writeln!(text, "\nnote: {note}");
        }
        text
    }
}

/// Columns of equal width: the first `left` are left-aligned, the others right-aligned.
pub fn aligned<const N: usize>(lines: &[[String; N]], left: usize) -> String {
    let mut text = String::new();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: Vec<_> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    for line in lines {
        let mut row = String::new();
        for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let _ = if column < left {
                write!(row, "{gap}{cell:<width$}")
            } else {
                write!(row, "{gap}{cell:>width$}")
            };
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// Three significant digits, grouped by thousands.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        size if size < 10.0 => 2,
        size if size < 100.0 => 1,
        _ => 0,
    };
    let plain = format!("{value:.digits$}");
    let (whole, fraction) =
        plain.split_once('.').map_or((plain.as_str(), None), |(w, f)| (w, Some(f)));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |rest| ("-", rest));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    match fraction {
        Some(fraction) => format!("{sign}{grouped}.{fraction}"),
        None => format!("{sign}{grouped}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(number(0.123), "0.12");
        assert_eq!(number(45.678), "45.7");
        assert_eq!(number(1_234_567.8), "1,234,568");
        assert_eq!(number(-1234.0), "-1,234");
        assert_eq!(number(123.0), "123");
    }

    #[test]
    fn columns_line_up() {
        let lines = [["a", "1"], ["long", "22"]].map(|line| line.map(str::to_owned));
        assert_eq!(aligned(&lines, 1), "a      1\nlong  22\n");
    }
}
