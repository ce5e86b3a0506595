//! The benches: each is declared once, in a file of its own, with its name, what it does, its options
//! and its contenders. The command line, its help, `--only` and the report follow from that.
//!
//! To add one, implement [`Bench`](declaration::Bench) in a new file and name it in [`ALL`].

mod bfs;
mod compute;
mod cyclic;
mod declaration;
mod demo;
mod fault;
mod files;
mod graph_run;
mod hit;
mod mount;
mod open;
mod out_of_core;
mod psync;
mod ratio;
mod recover;
#[cfg(feature = "remote")]
mod remote;
mod rows;
mod setting;
mod stage;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Subcommand};

use crate::contender::Contender;
use crate::options::Common;
use crate::suite::{self, AllArgs, ScoreboardArgs};
use declaration::Entry;
use stage::DEFAULT_ROUNDS;

/// All benches, in the order of the help.
static ALL: &[Entry] = &[
    Entry::of::<hit::Hit>(),
    Entry::of::<fault::Fault>(),
    Entry::of::<out_of_core::OutOfCore>(),
    Entry::of::<rows::RowsBench>(),
    Entry::of::<bfs::Bfs>(),
    Entry::of::<cyclic::Cyclic>(),
    Entry::of::<psync::Psync>(),
    Entry::of::<compute::Compute>(),
    Entry::of::<recover::Recover>(),
    Entry::of::<files::mapping_cache::MappingCache>(),
    Entry::of::<files::map_ahead::MapAhead>(),
    Entry::of::<files::unmap::Unmap>(),
    Entry::of::<files::flush::Flush>(),
    Entry::of::<files::search::Search>(),
    Entry::of::<files::pooled::read_once::ReadOnce>(),
    Entry::of::<files::pooled::view::View>(),
    Entry::of::<files::pooled::repetitive::Repetitive>(),
    Entry::of::<files::pooled::append::Append>(),
    Entry::of::<files::pooled::shared::Shared>(),
    Entry::of::<files::pooled::metadata::Metadata>(),
    Entry::of::<files::pooled::pswap::Pswap>(),
    Entry::of::<demo::Demo>(),
    Entry::of::<open::Open>(),
    Entry::of::<mount::Mount>(),
    #[cfg(feature = "remote")]
    Entry::of::<remote::RemoteBench>(),
];

/// The contender of that name, in any bench.
pub fn contender(name: &str) -> Result<&'static Contender> {
    let mut all = ALL.iter().flat_map(|bench| bench.contenders.iter().copied().flatten());
    let found = all.find(|contender| contender.name == name);
    found.copied().with_context(|| format!("no bench has a contender `{name}`"))
}

/// Arguments of `aquifer bench`.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    /// Which bench
    #[command(subcommand)]
    pub bench: Chosen,
}

const EXAMPLES: &str = "\
Examples:
  aquifer bench out-of-core                       2 GiB of data, 256 MiB of memory, this directory's disk
  aquifer bench out-of-core --device zram         the same on a fast device made for the run (root)
  aquifer bench bfs --dir /mnt/nvme --json        graph search on another disk, as one JSON object
  aquifer bench rows                              rows of an embedding table, in batches
  aquifer bench cyclic                            passes over data a little larger than memory
  aquifer bench hit --rounds 9                    what an access to resident memory costs
  aquifer bench psync --dir /mnt/nvme             durable commits beside LMDB, SQLite, redb and libpmemobj
  aquifer bench compute --rates 4                 matrices in persistent objects, made durable four times a second
  aquifer bench recover --only object             how long attaching takes after a crash
  aquifer bench mapping-cache                     ordinary files, mapped over and over
  aquifer bench search --tree ~/src               text search over a source tree
  aquifer bench read-once                         files of a pool, opened, summed and closed
  aquifer bench shared --processes 1,4            processes that share files of a pool
  aquifer bench open --files 1000000              opening a pool, and whole commands
  aquifer bench mount --metrics stat,fsync_4k     a mounted pool beside the file system of the disk
  aquifer bench remote                            an object of a server, beside object_store, s3fs and rclone
  aquifer bench all                               all of them, with reports in a directory
  aquifer bench all --compare OLD NEW             what changed between two such directories
  aquifer bench flush --until-sure                as many rounds as its floors take

Out-of-core benches limit memory with a control group, which needs root or a delegated group:
  systemd-run --user --scope -p Delegate=yes aquifer bench out-of-core";

/// The choice on the command line, with its options.
#[derive(Debug, Clone)]
pub enum Chosen {
    /// A bench.
    One(One),
    /// All of them.
    All(AllArgs),
    /// A page about all of them.
    Scoreboard(ScoreboardArgs),
}

/// A bench, with its options.
#[derive(Clone)]
pub struct One {
    bench: &'static Entry,
    common: Common,
    matches: ArgMatches,
}

impl Chosen {
    /// Runs it, and returns what is to be printed.
    pub fn run(&self) -> Result<String> {
        match self {
            Self::One(one) => one.run(),
            Self::All(args) => {
                suite::all(args, &ALL.iter().map(|bench| bench.name).collect::<Vec<_>>())
            }
            Self::Scoreboard(args) => suite::scoreboard(args),
        }
    }
}

impl One {
    fn run(&self) -> Result<String> {
        let started = Instant::now();
        let mut report = (self.bench.run)(&self.common, &self.matches)?;
        let mut common = self.common.clone();
        let limit = Duration::from_secs(60 * common.limit_minutes);
        while common.until_sure && !report.is_decided() && started.elapsed() < limit {
            common.first_round += common.rounds.unwrap_or(DEFAULT_ROUNDS);
            report.absorb((self.bench.run)(&common, &self.matches)?);
        }
        if common.json {
            Ok(serde_json::to_string_pretty(&report)? + "\n")
        } else {
            Ok(report.to_text())
        }
    }
}

impl std::fmt::Debug for One {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.bench.name)
    }
}

impl FromArgMatches for Chosen {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let missing = || Error::raw(ErrorKind::MissingSubcommand, "no bench is named");
        let (name, matches) = matches.subcommand().ok_or_else(missing)?;
        match name {
            "all" => AllArgs::from_arg_matches(matches).map(Self::All),
            "scoreboard" => ScoreboardArgs::from_arg_matches(matches).map(Self::Scoreboard),
            _ => {
                let bench = ALL.iter().find(|bench| bench.name == name).ok_or_else(missing)?;
                let common = Common::from_arg_matches(matches)?;
                Ok(Self::One(One { bench, common, matches: matches.clone() }))
            }
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for Chosen {
    fn augment_subcommands(command: Command) -> Command {
        let all = AllArgs::augment_args(Command::new("all"))
            .about("All benches, one after the other, or a comparison of two such runs");
        let scoreboard = ScoreboardArgs::augment_args(Command::new("scoreboard"))
            .about("Print all ratios of reports as a page in Markdown");
        command.subcommands(ALL.iter().map(Entry::command)).subcommands([all, scoreboard])
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        matches!(name, "all" | "scoreboard") || ALL.iter().any(|bench| bench.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_declared_once() {
        let mut known = Vec::<&'static Contender>::new();
        for bench in ALL {
            assert_eq!(ALL.iter().filter(|other| other.name == bench.name).count(), 1);
            for contender in bench.contenders.iter().copied().flatten().copied() {
                match known.iter().find(|other| **other == contender) {
                    Some(other) => assert_eq!(other.about, contender.about, "declared twice"),
                    None => known.push(contender),
                }
            }
        }
    }

    #[test]
    fn every_command_is_well_formed() {
        Chosen::augment_subcommands(Command::new("bench")).debug_assert();
    }
}
