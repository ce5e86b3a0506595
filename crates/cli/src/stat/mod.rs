//! `aquifer stat`: the state and activity of the caches of running processes; or of files of a
//! pool, if the argument has the form `POOL:/PATH`, which a cache name cannot have.
//!
//! A program makes its cache visible with `CacheBuilder::publish`; `aquifer::publish` defines where
//! and how. This module reads the samples, skips those of dead processes, and computes rates from
//! two samples.

mod sample;
mod show;

use std::collections::HashMap;
use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::error::ErrorKind;
use serde::Serialize;

use crate::access::ReadAccess;
use crate::files::{self, Place, StatArgs};
use crate::output;
use sample::Sample;

/// Arguments of `aquifer stat`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer stat                      all caches of your processes (as root: of all users)
  aquifer stat 4711                 the caches of one process
  aquifer stat orders --watch 1     caches of one name, every second, with rates
  aquifer stat --json --watch 5     one JSON object per line
  aquifer stat --openmetrics        as text that Prometheus reads
  aquifer stat data.pool:/logs      a directory of a pool

A program makes its cache visible with
  Cache::builder().publish(\"orders\")")]
pub struct Args {
    /// Show only the caches of this process or name, or files of a pool [default: all caches]
    #[arg(value_name = "PID|NAME|POOL:/PATH")]
    targets: Vec<OsString>,

    /// Print repeatedly, at this interval in seconds, from 0.1 to 86400
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    watch: Option<Duration>,

    /// With --watch: stop after printing this many times
    #[arg(long, value_name = "N", requires = "watch")]
    count: Option<u64>,

    /// Follow symbolic links in a pool
    #[arg(short = 'L', long)]
    dereference: bool,

    #[command(flatten)]
    access: ReadAccess,

    /// Print one JSON object; with --watch, one per line
    #[arg(long)]
    json: bool,

    /// Print OpenMetrics text, as Prometheus reads it; for caches
    #[arg(long, conflicts_with_all = ["json", "watch"])]
    openmetrics: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 =
        text.parse().map_err(|_| "not a number; write for example 0.5".to_owned())?;
    if (0.1..=86400.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("must be from 0.1 to 86400".to_owned())
    }
}

/// A sample and its rates.
#[derive(Serialize)]
struct Seen {
    #[serde(flatten)]
    sample: Sample,
    /// Counts per second.
    rates: HashMap<String, f64>,
    /// Whether the rates are since the cache was created, rather than since the previous sample.
    rates_since_start: bool,
}

#[derive(Serialize)]
struct Caches<'a> {
    caches: Vec<&'a Seen>,
}

/// What to show.
enum Target {
    Caches(Option<String>),
    Files(Vec<Place>),
}

impl Args {
    /// Exits the process if the command line is invalid.
    fn target(&self) -> Target {
        let wrong = |kind, text: String| -> ! {
            let mut command = clap::Command::new("aquifer").bin_name("aquifer stat");
            command = <Args as clap::Args>::augment_args(command);
            command.error(kind, text).exit()
        };
        if self.targets.iter().any(|target| Place::is_one(target)) {
            if self.watch.is_some() {
                let text = "--watch is for caches, not for files of a pool";
                wrong(ErrorKind::ArgumentConflict, text.to_owned());
            }
            if self.openmetrics {
                let text = "--openmetrics is for caches, not for files of a pool";
                wrong(ErrorKind::ArgumentConflict, text.to_owned());
            }
            let places = self.targets.iter().cloned().map(Place::parse).collect();
            let places: Result<_, String> = places;
            return Target::Files(
                places.unwrap_or_else(|text| wrong(ErrorKind::ValueValidation, text)),
            );
        }
        if self.dereference {
            let text = "--dereference is for files of a pool: POOL:/PATH";
            wrong(ErrorKind::ArgumentConflict, text.to_owned());
        }
        if self.access.is_given() {
            let text = "--shared-memory is for files of a pool: POOL:/PATH";
            wrong(ErrorKind::ArgumentConflict, text.to_owned());
        }
        match &self.targets[..] {
            [] => Target::Caches(None),
            [target] => match target.to_str() {
                Some(target) => Target::Caches(Some(target.to_owned())),
                None => wrong(ErrorKind::InvalidUtf8, "names of caches are UTF-8".to_owned()),
            },
            [_, more, ..] => wrong(
                ErrorKind::TooManyValues,
                format!("`{}`: only one process or name can be given", more.to_string_lossy()),
            ),
        }
    }
}

/// Prints once, or until interrupted.
pub fn run(args: &Args) -> Result<()> {
    let target = match args.target() {
        Target::Files(places) => {
            let how = StatArgs { follow: args.dereference, json: args.json, access: &args.access };
            return files::run_stat(how, &places);
        }
        Target::Caches(target) => target,
    };
    if args.openmetrics {
        return output::print(&show::open_metrics(&sample::all(target.as_deref())));
    }
    let mut seen = HashMap::new();
    let mut left = args.count.unwrap_or(if args.watch.is_some() { u64::MAX } else { 1 });
    while left > 0 {
        update(&mut seen, sample::all(target.as_deref()));
        let mut caches: Vec<&Seen> = seen.values().collect();
        caches.sort_by_key(|seen| seen.sample.key());
        if caches.is_empty() && args.watch.is_none() {
            return explain_nothing(target.as_deref(), args.json);
        }
        if args.json {
            output::print_json(&Caches { caches }, args.watch.is_none())?;
        } else {
            output::print(&show::caches(&caches))?;
        }
        left -= 1;
        if let Some(pause) = args.watch.filter(|_| left > 0) {
            std::thread::sleep(pause);
        }
    }
    Ok(())
}

fn explain_nothing(target: Option<&str>, json: bool) -> Result<()> {
    if let Some(target) = target {
        bail!("no running cache of process or name `{target}`; `aquifer stat` lists all caches");
    }
    if json {
        return output::print_json(&Caches { caches: vec![] }, true);
    }
    output::print(
        "No running cache. A program makes its cache visible with Cache::builder().publish(\"name\").\n",
    )
}

/// Replaces the samples by new ones, and drops caches that no longer exist.
fn update(seen: &mut HashMap<sample::Key, Seen>, samples: Vec<Sample>) {
    let mut before = std::mem::take(seen);
    for sample in samples {
        let key = sample.key();
        let next = match before.remove(&key) {
            None => Seen { rates: sample.rates_since(None), sample, rates_since_start: true },
            // Not published again since the last sample: keep the old one.
            Some(old) if old.sample.uptime_ms >= sample.uptime_ms => old,
            Some(old) => Seen {
                rates: sample.rates_since(Some(&old.sample)),
                sample,
                rates_since_start: false,
            },
        };
        seen.insert(key, next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_bounded() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "x", "NaN", "1e9", "inf"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rates_are_between_different_samples() {
        let sample = |uptime_ms, misses| {
            let mut sample = sample::tests::example();
            sample.uptime_ms = uptime_ms;
            sample.counters.insert("misses".to_owned(), misses);
            sample
        };
        let mut seen = HashMap::new();
        let mut rate = |sample: Sample| {
            let key = sample.key();
            update(&mut seen, vec![sample]);
            (seen[&key].rates["misses"], seen[&key].rates_since_start)
        };
        assert_eq!(rate(sample(2000, 100)), (50.0, true));
        assert_eq!(rate(sample(3000, 400)), (300.0, false));
        assert_eq!(rate(sample(3000, 400)), (300.0, false));
        assert_eq!(rate(sample(5000, 400)), (0.0, false));
        update(&mut seen, vec![]);
        assert!(seen.is_empty());
    }
}
