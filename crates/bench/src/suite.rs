//! Reports in a directory: `bench all` makes them, `bench all --compare` compares two directories, and
//! `bench scoreboard` makes a page of one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use crate::report::{Report, aligned, number};
use crate::stats::{Bootstrap, median};
use aquifer_sys::interrupt;

/// The runs that have other names than their benches.
const VARIANTS: &[(&str, &[&str])] =
    &[("out-of-core-zram", &["out-of-core", "--device", "zram", "--size", "1GiB"])];

/// Arguments of `aquifer bench all`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  aquifer bench all                               every bench; goes on after a stop where it was
  aquifer bench all --out after --only hit,flush  two of them, reports in another directory
  aquifer bench all --compare before after        which figures changed by more than their noise
  aquifer bench scoreboard aquifer-bench-results  all ratios as a page in Markdown")]
pub struct AllArgs {
    /// Directory for the reports, a JSON file for each bench. A bench that has one there is not run again
    #[arg(long, value_name = "DIR", default_value = "aquifer-bench-results")]
    out: PathBuf,

    /// Only these benches, separated by commas
    #[arg(long, value_name = "BENCH,…", value_delimiter = ',')]
    only: Vec<String>,

    /// Directory for the data files of the benches [default: each bench's own]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// How often everything is measured [default: each bench's own]
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,

    /// Measure further rounds until each floor is certainly met or missed
    #[arg(long)]
    until_sure: bool,

    /// Small data, few accesses, one round: shows that it works, and nothing about speed
    #[arg(long)]
    quick: bool,

    /// Run nothing, and compare the reports in two directories
    #[arg(long, num_args = 2, value_names = ["OLD", "NEW"], conflicts_with_all = ["out", "dir", "rounds", "until_sure", "quick"])]
    compare: Option<Vec<PathBuf>>,

    /// Print the comparison as JSON
    #[arg(long, requires = "compare")]
    json: bool,
}

/// Arguments of `aquifer bench scoreboard`.
#[derive(Debug, Clone, Args)]
pub struct ScoreboardArgs {
    /// Directory with the reports of `bench all`
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Runs the benches of these names that have no report yet, or compares reports; returns a text to print.
pub fn all(args: &AllArgs, benches: &[&'static str]) -> Result<String> {
    let variants = VARIANTS.iter().map(|(name, _)| *name);
    let names: Vec<_> = benches.iter().copied().chain(variants).collect();
    for name in &args.only {
        ensure!(
            names.contains(&&**name),
            "`{name}` is no bench: --only takes {}",
            names.join(", ")
        );
    }
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|only| only == name);
    if let Some([old, new]) = args.compare.as_deref() {
        let changes: Vec<_> = changes(&reports(old)?, &reports(new)?)
            .into_iter()
            .filter(|one| wanted(&one.run))
            .collect();
        return if args.json {
            Ok(serde_json::to_string_pretty(&changes)? + "\n")
        } else {
            Ok(table(&changes))
        };
    }
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    let _signals = interrupt::Guard::install();
    let (mut text, mut failed) = (String::new(), Vec::new());
    for name in names.into_iter().filter(|name| wanted(name)) {
        let target = args.out.join(format!("{name}.json"));
        if target.exists() {
            eprintln!("{name}: is in {}", target.display());
            continue;
        }
        let started = Instant::now();
        let done = run_one(args, name, &target);
        interrupt::check()?;
        let took = Duration::from_secs(started.elapsed().as_secs());
        match done {
            Ok(()) => eprintln!("{name}: {}", humantime::format_duration(took)),
            Err(error) => {
                eprintln!("{name}: {error:#}");
                failed.push(name);
            }
        }
    }
    let _ = writeln!(text, "The reports are in {}.", args.out.display());
    ensure!(
        failed.is_empty(),
        "{text}failed: {}. The same command runs only these again",
        failed.join(", ")
    );
    Ok(text)
}

/// Runs one bench in a process of its own, and keeps its report.
fn run_one(args: &AllArgs, name: &str, target: &Path) -> Result<()> {
    let variant = VARIANTS.iter().find(|(variant, _)| *variant == name);
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("bench");
    match variant {
        Some((_, arguments)) => command.args(*arguments),
        None => command.arg(name),
    };
    if let Some(dir) = &args.dir {
        command.arg("--dir").arg(dir);
    }
    if let Some(rounds) = args.rounds {
        command.args(["--rounds", &rounds.to_string()]);
    }
    let switches = [(args.until_sure, "--until-sure"), (args.quick, "--quick"), (true, "--json")];
    command.args(switches.into_iter().filter(|(set, _)| *set).map(|(_, name)| name));
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        bail!("the bench ended with {}", output.status);
    }
    serde_json::from_slice::<Report>(&output.stdout).context("the report is unreadable")?;
    let partial = target.with_extension("partial");
    fs::write(&partial, &output.stdout)?;
    Ok(fs::rename(partial, target)?)
}

/// The reports in a directory, by the name of their run.
fn reports(directory: &Path) -> Result<BTreeMap<String, Report>> {
    let mut found = BTreeMap::new();
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let mut report: Report = serde_json::from_slice(&fs::read(&path)?)
            .with_context(|| format!("{} is no report of a bench", path.display()))?;
        report.judge_floors();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        found.insert(name, report);
    }
    ensure!(
        !found.is_empty(),
        "no reports are in {}: `aquifer bench all` makes them",
        directory.display()
    );
    Ok(found)
}

/// How a figure or a ratio changed.
#[derive(Debug, Serialize)]
struct Change {
    run: String,
    metric: String,
    /// Empty for a ratio.
    system: String,
    old: f64,
    new: f64,
    /// The new one over the old one.
    quotient: f64,
    /// The 95 % interval of the quotient, if both have at least three rounds.
    interval: Option<[f64; 2]>,
}

impl Change {
    /// Returns `true` if it is more than noise: the interval, widened by 2 %, does not contain 1.
    fn is_certain(&self) -> bool {
        self.interval.is_some_and(|[low, high]| low > 1.02 || high < 0.98)
    }
}

fn changes(old: &BTreeMap<String, Report>, new: &BTreeMap<String, Report>) -> Vec<Change> {
    let mut found = Vec::new();
    for (run, (old, new)) in old.iter().filter_map(|(run, old)| Some((run, (old, new.get(run)?)))) {
        for (name, &value) in &new.ratios {
            let Some(&before) = old.ratios.get(name) else { continue };
            let interval = (|| {
                let ([old_low, old_high], [low, high]) =
                    (old.intervals.get(name)?, new.intervals.get(name)?);
                Some([low / old_high, high / old_low])
            })();
            found.push(Change {
                run: run.clone(),
                metric: name.clone(),
                system: String::new(),
                old: before,
                new: value,
                quotient: value / before,
                interval,
            });
        }
        for row in &new.rows {
            let same = |other: &&crate::report::Row| {
                other.metric == row.metric && other.system == row.system && other.unit == row.unit
            };
            let Some(before) = old.rows.iter().find(same) else { continue };
            found.push(Change {
                run: run.clone(),
                metric: format!("{} ({})", row.metric, row.unit),
                system: row.system.clone(),
                old: before.median,
                new: row.median,
                quotient: row.median / before.median,
                interval: quotient_interval(&before.values, &row.values),
            });
        }
    }
    found
}

/// The 95 % interval of the quotient of two medians.
fn quotient_interval(old: &[f64], new: &[f64]) -> Option<[f64; 2]> {
    let medians = |values: &[f64], seed| -> Vec<f64> {
        let picked = |rounds: Vec<usize>| {
            median(&rounds.into_iter().map(|round| values[round]).collect::<Vec<_>>())
        };
        Bootstrap::seeded(values.len(), seed).filter_map(picked).collect()
    };
    let (old, new) = (medians(old, 1), medians(new, 2));
    let quotients: Vec<_> = old.iter().zip(&new).map(|(old, new)| new / old).collect();
    (!quotients.is_empty()).then(|| Bootstrap::interval(quotients))
}

fn table(changes: &[Change]) -> String {
    let mut certain: Vec<_> = changes.iter().filter(|change| change.is_certain()).collect();
    certain.sort_by(|a, b| (&a.run, &a.metric).cmp(&(&b.run, &b.metric)));
    let header = ["bench", "figure or ratio", "system", "old", "new", "new/old", "95 % interval"];
    let mut lines = vec![header.map(str::to_owned)];
    for change in &certain {
        let [low, high] = change.interval.unwrap_or([f64::NAN; 2]);
        lines.push([
            change.run.clone(),
            change.metric.clone(),
            change.system.clone(),
            number(change.old),
            number(change.new),
            format!("{:.2}", change.quotient),
            format!("{low:.2} to {high:.2}"),
        ]);
    }
    let mut text = if certain.is_empty() { String::new() } else { aligned(&lines, 3) };
    let unsure = changes.iter().filter(|change| change.interval.is_none()).count();
    let _ = writeln!(
        text,
        "{} of {} figures and ratios changed by more than their noise; {unsure} have too few rounds to tell.",
        certain.len(),
        changes.len(),
    );
    text
}

/// All ratios of the reports in a directory, as a page in Markdown.
pub fn scoreboard(args: &ScoreboardArgs) -> Result<String> {
    let reports = reports(&args.directory)?;
    let mut text = String::from(
        "# Scoreboard\n\n\
         Every ratio of every bench, as `aquifer bench scoreboard` prints it from the reports of `aquifer bench all`. Above 1 \
         Aquifer is better,\nunless a line says that smaller is better. A floor is *met* if the whole 95 % interval (a bootstrap \
         over the interleaved rounds) is on its\nside, *missed* if none of it is, and else *unsure*. What each bench does is in \
         [bench.md](bench.md).\n",
    );
    for (run, report) in &reports {
        let machine = &report.machine;
        let of = |what: &str| if what.is_empty() { "unknown".to_owned() } else { what.to_owned() };
        let _ = write!(
            text,
            "\n## {run}\n\n{}, {} cores, {}, {} on {}; {}, commit {}\n",
            machine.cpu,
            machine.cores,
            machine.kernel,
            machine.file_system,
            machine.device,
            of(&report.date),
            of(&report.commit),
        );
        if report.ratios.is_empty() {
            text.push_str("\nIt has no ratios.\n");
            continue;
        }
        text.push_str("\n| ratio | measured | 95 % interval | floor | |\n|---|---|---|---|---|\n");
        for (name, &value) in &report.ratios {
            let [name, value, interval, floor, verdict] = report.ratio_cells(name, value);
            let _ = writeln!(text, "| `{name}` | {value} | {interval} | {floor} | {verdict} |");
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_beyond_the_noise_are_certain() {
        let change = |old: &[f64], new: &[f64]| Change {
            run: String::new(),
            metric: String::new(),
            system: String::new(),
            old: 1.0,
            new: 1.0,
            quotient: 1.0,
            interval: quotient_interval(old, new),
        };
        let old = [10.0, 10.2, 10.1, 9.9, 10.0];
        assert!(change(&old, &[12.0, 12.1, 11.9, 12.2, 12.0]).is_certain());
        assert!(!change(&old, &[10.1, 9.9, 10.3, 10.0, 9.8]).is_certain());
        assert!(!change(&old, &[12.0, 12.0]).is_certain(), "two rounds tell nothing");
    }
}
