//! Stands for the databases in a program that was built without them.

use std::path::Path;

use anyhow::Result;

use super::{CellStore, DeviceStore, See};
use crate::cells::{CellArray, Transaction};
use crate::job::Unavailable;

/// A store that does not exist.
pub enum NotBuilt {}

/// Why there is none.
pub fn reason() -> Unavailable {
    let build = "cargo build --release --package aquifer-bench";
    Unavailable(format!("this program was built without the databases; build it again: {build}"))
}

impl DeviceStore for NotBuilt {
    fn create(_: &Path, _: &CellArray) -> Result<Self> {
        Err(reason().into())
    }

    fn open(_: &Path, _: &CellArray) -> Result<Self> {
        Err(reason().into())
    }
}

impl CellStore for NotBuilt {
    fn commit(&mut self, _: &Transaction) -> Result<()> {
        match *self {}
    }

    fn scan(&mut self, _: &mut See<'_>) -> Result<()> {
        match *self {}
    }

    fn close(self: Box<Self>) -> Result<()> {
        match *self {}
    }
}
