//! The names in a directory of a pool.

use std::ffi::OsString;

use anyhow::Result;
use aquifer::Files;

use super::Place;
use super::failure::At;

/// The names in a directory, in byte order.
pub fn sorted_names(files: &Files, directory: &Place) -> Result<Vec<OsString>> {
    let entries = files.read_dir(directory.path()).at(directory)?;
    let names: aquifer::fs::Result<Vec<_>> =
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
    let mut names = names.at(directory)?;
    names.sort();
    Ok(names)
}
