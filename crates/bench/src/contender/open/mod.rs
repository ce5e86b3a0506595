//! Stores of names that are opened: a pool, a database, and, for commands, files of the kernel.
//!
//! Each is in the current directory and has the same content: one short file ([`FILE`], [`TEXT`]),
//! and names, [`NAMES_A_DIRECTORY`] in each directory.

mod coreutils;
mod pool;
#[cfg(feature = "databases")]
mod sqlite;

use std::path::Path;
use std::process::Command;

use anyhow::Result;

#[cfg(not(feature = "databases"))]
use super::stores::not_built;

pub use coreutils::OPEN_COREUTILS;
pub use pool::{OPEN_POOL, program};
#[cfg(feature = "databases")]
pub use sqlite::OPEN_SQLITE;

/// Stands for the database in a program without databases.
#[cfg(not(feature = "databases"))]
pub const OPEN_SQLITE: Opening = Opening {
    create: |_, _| Ok(()),
    open: Some(|_| Err(not_built::reason().into())),
    print: || Err(not_built::reason().into()),
    make: |_| Err(not_built::reason().into()),
    unmake: |_| Ok(()),
    file: "names.sqlite",
};

/// The name of the file that commands print.
pub const FILE: &str = "h";
/// Its content.
pub const TEXT: &str = "the quick brown fox jumps over the lazy dog\n";
/// The most names in one directory.
pub const NAMES_A_DIRECTORY: u64 = 1000;

/// How a contender is opened. All functions but `create` work in the current directory.
#[derive(Debug, Clone, Copy)]
pub struct Opening {
    /// Creates it in a directory, with so many names, and closes it.
    pub create: fn(&Path, u64) -> Result<()>,
    /// Opens it for writing, or for reading only, and reads the attributes of its root. `None` for
    /// contenders that are only commands.
    pub open: Option<Open>,
    /// The command that prints [`FILE`].
    pub print: fn() -> Result<Command>,
    /// The command that makes a directory, or what corresponds to it, of this name.
    pub make: fn(&str) -> Result<Command>,
    /// Checks that these are there, and removes them.
    pub unmake: fn(&[String]) -> Result<()>,
    /// The file that it is in.
    pub file: &'static str,
}

/// Opens a store of the current directory.
pub type Open = fn(writes: bool) -> Result<Box<dyn Opened>>;

/// An open store; dropping it closes it.
pub trait Opened {
    /// The number of names in the first directory: all contenders must find the same.
    fn names(&self) -> Result<u64>;
}
