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

use anyhow::{Context, Result};
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Subcommand};

pub use demo::demo;

use crate::contender::Contender;
use crate::options::Common;
use crate::report::Report;
use declaration::Entry;

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

Out-of-core benches limit memory with a control group, which needs root or a delegated group:
  systemd-run --user --scope -p Delegate=yes aquifer bench out-of-core";

/// A bench as chosen on the command line, with its options.
#[derive(Clone)]
pub struct Chosen {
    bench: &'static Entry,
    /// The options that all benches have.
    pub common: Common,
    matches: ArgMatches,
}

impl Chosen {
    /// Runs it.
    pub fn run(&self) -> Result<Report> {
        (self.bench.run)(&self.common, &self.matches)
    }
}

impl std::fmt::Debug for Chosen {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.bench.name)
    }
}

impl FromArgMatches for Chosen {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let chosen = matches.subcommand().and_then(|(name, matches)| {
            Some((ALL.iter().find(|bench| bench.name == name)?, matches))
        });
        let (bench, matches) =
            chosen.ok_or_else(|| Error::raw(ErrorKind::MissingSubcommand, "no bench is named"))?;
        let common = Common::from_arg_matches(matches)?;
        Ok(Self { bench, common, matches: matches.clone() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for Chosen {
    fn augment_subcommands(command: Command) -> Command {
        command.subcommands(ALL.iter().map(Entry::command))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        ALL.iter().any(|bench| bench.name == name)
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
