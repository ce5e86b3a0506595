//! What a bench declares, and what follows from that for the command line.

use std::fmt::Write as _;

use anyhow::Result;
use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::contender::Contender;
use crate::options::Common;
use crate::report::Report;

/// The declaration of a bench.
pub trait Bench {
    /// Its options, in addition to those that all benches have.
    type Options: Args;
    /// The name in reports and on the command line.
    const NAME: &'static str;
    /// What it does, in one line.
    const ABOUT: &'static str;
    /// The contenders, in lists that may overlap.
    const CONTENDERS: Contenders;

    /// Runs it.
    fn run(common: &Common, options: &Self::Options) -> Result<Report>;
}

/// The lists of contenders of a bench, which may overlap.
pub type Contenders = &'static [&'static [&'static Contender]];

/// A bench, without the type of its options.
pub struct Entry {
    /// See [`Bench`], as for the other fields.
    pub name: &'static str,
    about: &'static str,
    /// Its contenders.
    pub contenders: Contenders,
    options: fn(Command) -> Command,
    /// Runs it with the options found on the command line.
    pub run: fn(&Common, &ArgMatches) -> Result<Report>,
}

impl Entry {
    /// The entry of a bench.
    pub const fn of<B: Bench>() -> Self {
        Self {
            name: B::NAME,
            about: B::ABOUT,
            contenders: B::CONTENDERS,
            options: B::Options::augment_args,
            run: |common, matches| B::run(common, &B::Options::from_arg_matches(matches)?),
        }
    }

    /// Its subcommand, with all options, and the contenders in the long help.
    pub fn command(&self) -> Command {
        let command = (self.options)(Common::augment_args(Command::new(self.name)));
        let examples = command.get_after_help().map(|help| format!("{help}\n\n"));
        let mut contenders = String::from("Contenders:");
        for contender in each(self.contenders) {
            let _ = write!(contenders, "\n  {:<20} {}", contender.name, contender.about);
        }
        let help = examples.unwrap_or_default() + &contenders;
        command.about(self.about).long_about(None).after_long_help(help)
    }
}

/// The contenders of these lists, each once.
pub fn each(lists: Contenders) -> Vec<&'static Contender> {
    let mut found = Vec::<&Contender>::new();
    for contender in lists.iter().copied().flatten() {
        if !found.contains(contender) {
            found.push(contender);
        }
    }
    found
}
