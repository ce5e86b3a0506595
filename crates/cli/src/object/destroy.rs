//! `aquifer object destroy`: asks for confirmation first, if run on a terminal.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use aquifer::Objects;
use aquifer_sys::units::Bytes;

use super::describe;
use super::keys::{self, KeyArgs, ONE_KEY_HELP};
use crate::access::Access;
use crate::output;

/// Arguments of `aquifer object destroy`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{ONE_KEY_HELP}"))]
pub struct Args {
    /// Path of the pool
    pool: PathBuf,

    /// Name of the object
    name: OsString,

    #[command(flatten)]
    key: KeyArgs,

    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,

    #[command(flatten)]
    access: Access,
}

const EXAMPLES: &str = "\
Examples:
  aquifer object destroy data.pool graph
  aquifer object destroy data.pool graph --yes --key-file ~/.graph.key

Needs the write key, if the object has one. No process may have the object attached.";

/// Destroys the object.
pub fn run(args: &Args) -> Result<()> {
    let name = args.name.as_bytes();
    let key = args.key.key()?;
    let objects = Objects::new(args.access.open(&args.pool)?);
    let object = describe::one(&objects, name)?;
    let (shown, size) = (object.shown_name(), Bytes(object.size_bytes));
    if !args.yes {
        let question = format!("permanently destroy {shown} ({size}) in {}?", args.pool.display());
        ensure!(is_confirmed(&question)?, "not confirmed; {shown} was not destroyed");
    }
    keys::with(&key).destroy(&objects, name).map_err(keys::explain)?;
    output::print(&format!("destroyed {shown} ({size})\n"))
}

fn is_confirmed(question: &str) -> Result<bool> {
    let input = std::io::stdin();
    ensure!(
        input.is_terminal(),
        "there is no terminal for a confirmation; pass --yes to destroy the object without one"
    );
    let mut terminal = std::io::stderr();
    write!(terminal, "{question} [y/N] ")?;
    terminal.flush()?;
    let mut answer = String::new();
    input.read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
