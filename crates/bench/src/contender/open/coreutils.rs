//! `cat` and `mkdir`: the least that such commands cost.

use std::process::Command;

use anyhow::{Context, Result};

use super::{FILE, Opening, TEXT};

/// Files of the kernel.
pub const OPEN_COREUTILS: Opening = Opening {
    create: |directory, _| Ok(std::fs::write(directory.join(FILE), TEXT)?),
    open: None,
    print: || Ok(with("cat", FILE)),
    make: |name| Ok(with("mkdir", name)),
    unmake,
    file: FILE,
};

fn with(program: &str, argument: &str) -> Command {
    let mut command = Command::new(program);
    command.arg(argument);
    command
}

fn unmake(names: &[String]) -> Result<()> {
    let remove = |name: &String| std::fs::remove_dir(name).with_context(|| name.clone());
    names.iter().try_for_each(remove)
}
