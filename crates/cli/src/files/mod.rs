//! `aquifer ls`, `cat`, `put`, `get`, `cp`, `mv`, `rm`, `mkdir`, `ln`, and `stat` of a file: commands on the files of a
//! pool.
//!
//! They behave like the Unix commands of the same names, with paths like `data.pool:/logs/today`
//! ([`place`]). Commands that only read open the pool read-only; commands that change something
//! make it durable before they end. Pools may be open in other programs at the same time.
//!
//! A command with several paths processes all of them: a failure is printed immediately
//! ([`failure`]), the other paths are processed, and the exit status is 1.

mod cat;
mod copying;
mod cp;
pub mod entry;
mod failure;
mod get;
mod ln;
mod ls;
mod mkdir;
mod mv;
mod names;
mod operands;
mod place;
mod put;
mod rm;
mod spot;
mod stat;
mod transfer;
mod tree;

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Result, bail};
use aquifer::Files;

use crate::access::{Access, ReadAccess};
use failure::Failures;

pub use operands::Misused;
pub use place::{Place, parser as place_parser};
pub use stat::{StatArgs, run as run_stat};

/// The commands on files that are not also commands on something else.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List directories of a pool
    Ls(ls::Args),
    /// Print files of a pool, or objects of object stores
    Cat(cat::Args),
    /// Copy files and trees into a pool or an object store
    Put(put::Args),
    /// Copy files and trees out of a pool or an object store
    Get(get::Args),
    /// Copy files and trees within a pool, or to another pool
    Cp(cp::Args),
    /// Move or rename files and directories of a pool
    Mv(mv::Args),
    /// Remove files and trees from a pool
    Rm(rm::Args),
    /// Create directories in a pool
    Mkdir(mkdir::Args),
    /// Create hard links and symbolic links in a pool
    Ln(ln::Args),
}

/// Runs a command.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Ls(args) => ls::run(args),
        Command::Cat(args) => cat::run(args),
        Command::Put(args) => put::run(args),
        Command::Get(args) => get::run(args),
        Command::Cp(args) => cp::run(args),
        Command::Mv(args) => mv::run(args),
        Command::Rm(args) => rm::run(args),
        Command::Mkdir(args) => mkdir::run(args),
        Command::Ln(args) => ln::run(args),
    }
}

/// The help text after the examples of each command.
const PATHS_HELP: &str = "\
POOL:/PATH is the file of a pool, and an absolute path in the pool. The last `:/` separates them.";

/// Parses permissions.
fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err("permissions are an octal number up to 7777, for example 750".to_owned()),
    }
}

/// Changes something at each place, and makes it durable.
fn change_each(
    access: &Access,
    places: &[Place],
    change: impl Fn(&Files, &Place) -> Result<()>,
) -> Result<()> {
    let mut pools = Pools::to_write(access);
    let mut failures = Failures::default();
    let mut outcome = Ok(());
    for place in places {
        let changed = pools.files(place).and_then(|files| change(&files, place));
        outcome = failures.note(changed);
        if outcome.is_err() {
            break;
        }
    }
    // Also sync what was done before an error or an interruption.
    let synced = pools.sync();
    outcome.and_then(|()| synced.and_then(|()| failures.end()))
}

/// The paths of places in one pool, and the first place.
///
/// # Errors
/// If they are in several pools.
fn of_one_pool(places: &[Place]) -> Result<(&Place, Vec<PathBuf>)> {
    let Some(first) = places.first() else { bail!("no file is given") };
    if let Some(other) = places.iter().find(|other| other.pool() != first.pool()) {
        let [first, other] = [first, other].map(|place| failure::shown(place.pool()));
        bail!("{first} and {other} are different pools; copy from one pool at a time");
    }
    Ok((first, places.iter().map(|place| place.path().to_owned()).collect()))
}

/// How pools are opened.
enum How {
    ToRead(ReadAccess),
    ToWrite(Access),
}

/// The pools of one command, each opened once.
struct Pools {
    how: How,
    opened: HashMap<PathBuf, Files>,
}

impl Pools {
    /// Pools opened read-only.
    fn to_read(access: &ReadAccess) -> Pools {
        Pools { how: How::ToRead(access.clone()), opened: HashMap::new() }
    }

    /// Pools opened for writing.
    fn to_write(access: &Access) -> Pools {
        Pools { how: How::ToWrite(access.clone()), opened: HashMap::new() }
    }

    /// The files of a place's pool.
    fn files(&mut self, place: &Place) -> Result<Files> {
        if let Some(files) = self.opened.get(place.pool()) {
            return Ok(files.clone());
        }
        let files = Files::new(match &self.how {
            How::ToWrite(access) => access.open(place.pool())?,
            How::ToRead(access) => access.open(place.pool())?,
        });
        self.opened.insert(place.pool().to_owned(), files.clone());
        Ok(files)
    }

    /// Makes all changes in all of them durable.
    fn sync(&self) -> Result<()> {
        for files in self.opened.values() {
            files.sync()?;
        }
        Ok(())
    }
}
