//! A pool, through the library and by the commands of `aquifer`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use aquifer_fs::Files;
use aquifer_pool::Pool;
use aquifer_sys::interrupt;

use super::{FILE, NAMES_A_DIRECTORY, Opened, Opening, TEXT};
use crate::data::check_space;
use crate::job::Unavailable;
use crate::scratch::POOL;

/// Names the program whose commands are run; by default the one beside this program.
const PROGRAM_VARIABLE: &str = "AQUIFER_PROGRAM";

/// The length of a pool with few names: the default number of slots, and a log of 16 MiB.
const POOL_BYTES: u64 = 64 << 20;
/// The most names in such a pool.
const FEW_NAMES: u64 = 10_000;

/// A pool.
pub const OPEN_POOL: Opening = Opening {
    create,
    open: Some(open),
    print: || command(&["cat"], FILE),
    make: |name| command(&["mkdir"], name),
    unmake,
    file: POOL,
};

fn create(directory: &Path, names: u64) -> Result<()> {
    let path = directory.join(POOL);
    let pool = if names <= FEW_NAMES {
        Pool::create(path, POOL_BYTES)?
    } else {
        // A name takes a slot, and a tenth of one in the tree of its directory.
        let slots = names + names / 4;
        let bytes = (slots * 512 + (512 << 20)).next_multiple_of(2 << 20);
        check_space(directory, bytes)?;
        Pool::options().inodes(slots).create(path, bytes)?
    };
    let files = Files::new(pool);
    files.write(FILE, TEXT)?;
    for first in (0..names).step_by(NAMES_A_DIRECTORY as usize) {
        interrupt::check()?;
        let folder = folder(first / NAMES_A_DIRECTORY);
        files.create_dir(&folder)?;
        for name in first..names.min(first + NAMES_A_DIRECTORY) {
            files.create_file(folder.join(format!("{name:07}")))?;
        }
    }
    Ok(files.sync()?)
}

fn folder(number: u64) -> PathBuf {
    format!("{number:04}").into()
}

struct OpenPool(Files);

fn open(writes: bool) -> Result<Box<dyn Opened>> {
    let files = Files::new(Pool::options().read_only(!writes).open(POOL)?);
    files.metadata("/")?;
    Ok(Box::new(OpenPool(files)))
}

impl Opened for OpenPool {
    fn names(&self) -> Result<u64> {
        Ok(self.0.read_dir(folder(0))?.count() as u64)
    }
}

fn command(arguments: &[&str], name: &str) -> Result<Command> {
    let mut command = Command::new(program()?);
    command.args(arguments).arg(format!("{POOL}:/{name}"));
    Ok(command)
}

/// The program whose commands are run.
pub fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(PROGRAM_VARIABLE) {
        return Ok(path.into());
    }
    let this = std::env::current_exe()?;
    let path = this.parent().context("this program is in no directory")?.join("aquifer");
    if !path.exists() {
        let reason = format!("there is no {}; {PROGRAM_VARIABLE} names another", path.display());
        return Err(Unavailable(reason).into());
    }
    Ok(path)
}

fn unmake(names: &[String]) -> Result<()> {
    let files = Files::open(POOL)?;
    for name in names {
        files.remove_dir(name)?;
    }
    Ok(())
}
