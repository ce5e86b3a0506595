//! `aquifer cp`: copies files and trees inside a pool or between pools.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Result, bail};

use super::copying::{self, CopyArgs, HELP};
use super::operands::Operands;
use super::tree::{Kind, Pooled, Tree, into_itself};
use super::{PATHS_HELP, Place, Pools};
use crate::access::Access;

/// Arguments of `aquifer cp`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "aquifer cp [OPTIONS] <POOL:/SOURCE>... <POOL:/DEST>")]
#[command(after_help = format!("{EXAMPLES}\n\n{HELP}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Files and trees to copy, all from one pool; and last the target directory, or the name of the copy
    #[arg(required = true, num_args = 1.., value_names = NAMES)]
    operands: Vec<OsString>,

    #[command(flatten)]
    copy: CopyArgs,

    #[command(flatten)]
    access: Access,
}

const NAMES: [&str; 2] = ["POOL:/SOURCE", "POOL:/DEST"];

const EXAMPLES: &str = "\
Examples:
  aquifer cp data.pool:/today data.pool:/yesterday      copy a file
  aquifer cp -r data.pool:/photos data.pool:/backup     copy a tree
  aquifer cp -r data.pool:/photos other.pool:/          copy to another pool";

/// Copies, and makes the copy durable.
pub fn run(args: &Args) -> Result<()> {
    let operands = Operands { command: "cp", names: NAMES, all: &args.operands };
    let (sources, destination) = operands.divide(Place::parse, Place::parse)?;
    let (first, sources) = super::of_one_pool(&sources)?;
    let mut pools = Pools::to_write(&args.access);
    let to = Pooled::new(pools.files(&destination)?, &destination);
    let is_same = first.is_in_pool_of(&destination);
    let from = if is_same {
        Pooled::new(pools.files(&destination)?, first)
    } else {
        Pooled::new(Pools::to_read(&args.access.to_read()).files(first)?, first)
    };
    let done = copying::copy(
        &args.copy,
        (&from, &sources),
        (&to, destination.path()),
        None,
        |source, target| if is_same { check(&to, source, target) } else { Ok(()) },
    );
    // Also sync what was copied before an error or an interruption.
    let synced = pools.sync();
    done.and_then(|done| synced.and_then(|()| done.end()))
}

/// Fails if something would be copied over or into itself.
fn check(pool: &Pooled, source: &Path, target: &Path) -> Result<()> {
    let Some(item) = pool.item(source, true)? else { return Ok(()) };
    let is_itself = |path: &Path| {
        Ok::<_, anyhow::Error>(
            pool.item(path, true)?.map(|there| there.identity) == Some(item.identity),
        )
    };
    if item.kind != Kind::Directory {
        if is_itself(target)? {
            bail!("{} and {} are the same file", pool.show(source), pool.show(target));
        }
        return Ok(());
    }
    let mut above = target.parent().unwrap_or(Path::new("/")).to_owned();
    if is_itself(target)? {
        return Err(into_itself(&pool.show(source), &pool.show(target)));
    }
    let root = pool.item(Path::new("/"), true)?.map(|root| root.identity);
    loop {
        if is_itself(&above)? {
            return Err(into_itself(&pool.show(source), &pool.show(target)));
        }
        match pool.item(&above, true)? {
            Some(there) if Some(there.identity) != root => above.push(".."),
            _ => return Ok(()),
        }
    }
}
