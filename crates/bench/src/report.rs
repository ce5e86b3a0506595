//! The output of a bench: one JSON object, or the same as a table.
//!
//! A row is one contender and one metric.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::floors::{self, Verdict};
use crate::stats::{Bootstrap, median};
use aquifer_sys::machine::Machine;

/// The result of one bench.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// Name of the bench.
    pub bench: Cow<'static, str>,
    /// The commit of the program, with `-changed` if there were changes beside it; empty if unknown.
    #[serde(default)]
    pub commit: String,
    /// The day on which it was measured.
    #[serde(default)]
    pub date: String,
    /// The arguments of the program.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// The machine it ran on.
    pub machine: Machine,
    /// Sizes, rounds, limits: everything needed to repeat it.
    pub config: BTreeMap<Cow<'static, str>, Value>,
    /// One for each contender and metric.
    pub rows: Vec<Row>,
    /// Name to value; above 1 means that Aquifer is better, unless [`floors::smaller_is_better`].
    pub ratios: BTreeMap<String, f64>,
    /// The 95 % interval of each ratio, by a bootstrap over the rounds. Empty with fewer than three rounds.
    #[serde(default)]
    pub intervals: BTreeMap<String, [f64; 2]>,
    /// The ratios that have a floor.
    #[serde(default)]
    pub floors: BTreeMap<String, Judged>,
    /// Notes needed to judge the figures: contenders that cannot run here, missing permissions.
    pub notes: Vec<String>,
    /// Computes the ratios of rows.
    #[serde(skip)]
    pub compare: Compare,
}

/// A floor, and whether it is met.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// The value that the ratio must reach.
    pub floor: f64,
    /// The verdict on the ratio.
    pub verdict: Verdict,
}

/// Computes the ratios of a bench from its rows.
#[derive(Default)]
pub struct Compare(Option<Ratios>);

type Ratios = Box<dyn Fn(&[Row]) -> BTreeMap<String, f64>>;

impl Compare {
    /// By this function.
    pub fn by(ratios: impl Fn(&[Row]) -> BTreeMap<String, f64> + 'static) -> Self {
        Self(Some(Box::new(ratios)))
    }

    fn of(&self, rows: &[Row]) -> BTreeMap<String, f64> {
        self.0.as_ref().map_or_else(BTreeMap::new, |ratios| ratios(rows))
    }
}

impl std::fmt::Debug for Compare {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Compare")
    }
}

/// The figures of one round beside its mean.
#[derive(Debug, Clone, Default)]
pub struct Round {
    /// The 99th and 99.9th percentiles of single accesses, if they were timed.
    pub tails: [Option<f64>; 2],
    /// Additional figures.
    pub details: BTreeMap<String, f64>,
}

/// One contender and one metric. All quantities are in `unit`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The contender.
    pub system: String,
    /// What was measured; the suffix `_2t` means two threads.
    pub metric: String,
    /// Unit of `median`, `p99`, `p999` and `values`.
    pub unit: Cow<'static, str>,
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
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, f64>,
    /// The figures of each round, beside `values`.
    #[serde(skip)]
    pub each: Vec<Round>,
}

impl Row {
    /// The row of these rounds.
    pub fn of(
        system: impl Into<String>,
        metric: impl Into<String>,
        unit: impl Into<Cow<'static, str>>,
        values: Vec<f64>,
        each: Vec<Round>,
    ) -> Self {
        let tail = |which: usize| {
            median(&each.iter().filter_map(|round| round.tails[which]).collect::<Vec<_>>())
        };
        Self {
            system: system.into(),
            metric: metric.into(),
            unit: unit.into(),
            median: median(&values).unwrap_or(f64::NAN),
            p99: tail(0),
            p999: tail(1),
            rounds: values.len(),
            details: median_details(&each),
            values,
            each,
        }
    }

    /// A row with a single value, for the tests of ratios.
    #[cfg(test)]
    pub fn single(system: &str, metric: &str, value: f64) -> Self {
        Self::of(system, metric, "ns", vec![value], vec![Round::default()])
    }

    /// The row as if these rounds had been measured.
    fn resampled(&self, rounds: &[usize]) -> Self {
        // A row that is computed, and not measured in rounds, has one value.
        let value = |&round: &usize| self.values[round % self.values.len()];
        let values = rounds.iter().map(value).collect();
        let each = rounds.iter().filter_map(|&round| self.each.get(round).cloned()).collect();
        Self::of(&*self.system, &*self.metric, self.unit.clone(), values, each)
    }

    fn is_same(&self, other: &Self) -> bool {
        self.system == other.system && self.metric == other.metric
    }
}

/// Median of each figure that rounds report under the same name.
fn median_details(rounds: &[Round]) -> BTreeMap<String, f64> {
    let mut values = BTreeMap::<&str, Vec<f64>>::new();
    for (name, value) in rounds.iter().flat_map(|round| &round.details) {
        values.entry(name).or_default().push(*value);
    }
    values
        .into_iter()
        .filter_map(|(name, values)| Some((name.to_owned(), median(&values)?)))
        .collect()
}

impl Report {
    /// Computes the ratios, their intervals, and which floors they meet.
    pub fn judge(&mut self) {
        self.ratios = self.compare.of(&self.rows);
        let rounds = self.rows.iter().map(|row| row.values.len()).max().unwrap_or(0);
        let mut found = BTreeMap::<String, Vec<f64>>::new();
        for picked in Bootstrap::of(rounds) {
            let rows: Vec<_> = self.rows.iter().map(|row| row.resampled(&picked)).collect();
            for (name, value) in self.compare.of(&rows) {
                found.entry(name).or_default().push(value);
            }
        }
        self.intervals =
            found.into_iter().map(|(name, values)| (name, Bootstrap::interval(values))).collect();
        self.judge_floors();
    }

    /// Compares the ratios, as they are, with today's floors.
    pub fn judge_floors(&mut self) {
        let judged = |name: &String| {
            let floor = floors::of(&self.variant(), name)?;
            let interval = self.intervals.get(name).copied();
            Some((name.clone(), Judged { floor: floor.value(), verdict: floor.judge(interval) }))
        };
        self.floors = self.ratios.keys().filter_map(judged).collect();
    }

    /// The name under which its floors are listed: on a device in memory they are others.
    fn variant(&self) -> Cow<'_, str> {
        match self.machine.device.contains("zram") {
            true => format!("{}-zram", self.bench).into(),
            false => (&*self.bench).into(),
        }
    }

    /// Returns `true` if no verdict is unsure.
    pub fn is_decided(&self) -> bool {
        self.floors.values().all(|judged| judged.verdict != Verdict::Unsure)
    }

    /// Adds the rounds of another run of the same bench. Rows that only one of both has are left out.
    pub fn absorb(&mut self, other: Self) {
        let both = self.rows.iter().filter_map(|row| {
            let more = other.rows.iter().find(|more| row.is_same(more))?;
            let values = [&*row.values, &*more.values].concat();
            let each = [&*row.each, &*more.each].concat();
            Some(Row::of(&*row.system, &*row.metric, row.unit.clone(), values, each))
        });
        self.rows = both.collect();
        let new = other.notes.into_iter().filter(|note| !self.notes.contains(note));
        self.notes.extend(new.collect::<Vec<_>>());
        let rounds = self.rows.iter().map(|row| row.rounds).max().unwrap_or(0);
        self.config.insert("rounds".into(), rounds.into());
        self.judge();
    }

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
                row.unit.clone().into_owned(),
                number(row.median),
                optional(row.p99),
                optional(row.p999),
            ]);
        }
        text.push_str(&aligned(&lines, 3));
        if !self.ratios.is_empty() {
            text.push('\n');
            let header = ["ratio", "measured", "95 % interval", "floor", ""].map(str::to_owned);
            let lines = self.ratios.iter().map(|(name, &value)| self.ratio_cells(name, value));
            let lines: Vec<_> = std::iter::once(header).chain(lines).collect();
            text.push_str(&aligned(&lines, 1));
        }
        for note in &self.notes {
            let _ = writeln!(text, "\nnote: {note}");
        }
        text
    }

    /// A ratio, its interval, its floor and the verdict, as text.
    pub fn ratio_cells(&self, name: &str, value: f64) -> [String; 5] {
        let range = |[low, high]: &[f64; 2]| format!("{} to {}", ratio(*low), ratio(*high));
        let interval = self.intervals.get(name).map(range).unwrap_or_default();
        let smaller = floors::smaller_is_better(name);
        let bound =
            |floor: f64| if smaller { format!("≤ {}", ratio(floor)) } else { ratio(floor) };
        let (floor, verdict) = match self.floors.get(name) {
            Some(judged) => (bound(judged.floor), judged.verdict.name().to_owned()),
            None if smaller => (String::new(), "smaller is better".to_owned()),
            None => (String::new(), String::new()),
        };
        [name.to_owned(), ratio(value), interval, floor, verdict]
    }
}

/// A ratio: two decimals, or three significant digits of a large one.
fn ratio(value: f64) -> String {
    if value < 10.0 { format!("{value:.2}") } else { number(value) }
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
