//! `aquifer ln`: hard links and symbolic links in a pool.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, bail};
use aquifer::{Files, FsError};

use super::failure::{At, shown};
use super::place::last_name;
use super::{PATHS_HELP, Place, Pools, place};
use crate::access::Access;

/// Arguments of `aquifer ln`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// The file, as POOL:/PATH; with -s, the target of the link: a path without the pool's name
    #[arg(value_name = "TARGET", allow_hyphen_values = true)]
    target: OsString,

    /// The new name, or the directory to create it in
    #[arg(value_parser = place::parser(), value_name = "POOL:/LINK")]
    link: Place,

    /// Create a symbolic link
    #[arg(short, long)]
    symbolic: bool,

    /// Replace an existing file or link
    #[arg(short, long)]
    force: bool,

    /// Treat LINK as the new name, even if it is a directory
    #[arg(short = 'T', long)]
    no_target_directory: bool,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer ln data.pool:/logs/today data.pool:/current         a hard link
  aquifer ln -s logs/today data.pool:/current                 relative to the link
  aquifer ln -s /logs/today data.pool:/current                from the root of the pool";

/// Creates the link, durably.
pub fn run(args: &Args) -> Result<()> {
    let mut pools = Pools::to_write(&args.access);
    let original = if args.symbolic { check_target(args)? } else { hard_target(args)? };
    let files = pools.files(&args.link)?;
    let link = place_of_link(args, &files, &original);
    match make(args, &files, &original, &link) {
        Err(FsError::Exists { .. }) if args.force => replace(args, &files, &original, &link)?,
        made => made.at(&link)?,
    }
    pools.sync()
}

/// The path of the link's original, which must be in the same pool.
fn hard_target(args: &Args) -> Result<PathBuf> {
    let target = Place::parse(args.target.clone()).map_err(Error::msg)?;
    if !target.is_in_pool_of(&args.link) {
        bail!(
            "{} and {} are in different pools: all names of a file are in one pool",
            target.show(),
            args.link.show()
        );
    }
    Ok(target.path().to_owned())
}

/// The target of a symbolic link, which must not be outside the pool.
fn check_target(args: &Args) -> Result<PathBuf> {
    if let Ok(target) = Place::parse(args.target.clone())
        && target.is_in_pool_of(&args.link)
    {
        bail!(
            "the target of a symbolic link is a path in the same pool, without the pool's name: {}",
            shown(target.path())
        );
    }
    Ok(PathBuf::from(&args.target))
}

fn place_of_link(args: &Args, files: &Files, original: &Path) -> Place {
    let there = args.link.path();
    let is_directory = files.metadata(there).is_ok_and(|there| there.is_dir());
    match last_name(original) {
        Some(name) if is_directory && !args.no_target_directory => {
            args.link.with_path(there.join(name))
        }
        _ => args.link.clone(),
    }
}

fn make(args: &Args, files: &Files, original: &Path, link: &Place) -> aquifer::fs::Result<()> {
    if args.symbolic {
        files.symlink(original, link.path())
    } else {
        files.hard_link(original, link.path())
    }
}

/// Replaces an existing name atomically.
fn replace(args: &Args, files: &Files, original: &Path, link: &Place) -> Result<()> {
    let number = aquifer_sys::random::next_u64().context("cannot generate a temporary name")?;
    let parent = link.path().parent().unwrap_or(Path::new("/"));
    let temporary = link.with_path(parent.join(format!(".aquifer-{number:016x}")));
    make(args, files, original, &temporary).at(&temporary)?;
    let renamed = files.rename(temporary.path(), link.path()).at(link);
    // If both are names of the same file, the rename leaves both; after an error it is left over
    // too.
    match files.remove_file(temporary.path()) {
        Err(FsError::NotFound { .. }) => renamed,
        removed => renamed.and(removed.at(&temporary)),
    }
}
