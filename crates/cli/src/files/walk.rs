//! Walks a tree of a pool without recursion: a tree can be deeper than the stack.

use std::ffi::OsString;

use anyhow::Result;
use aquifer::Files;
use aquifer::fs::Metadata;

use super::Place;
use super::failure::At;

/// A step of the walk.
#[allow(clippy::large_enum_variant, reason = "one at a time, taken apart at once")]
pub enum Step {
    /// An item at this depth below the start; a directory comes before its content.
    Meet { place: Place, metadata: Metadata, depth: u64 },
    /// The content of a directory is complete.
    Leave { depth: u64 },
}

/// A walk through a tree. Names are visited in byte order.
pub struct Walk<'a> {
    files: &'a Files,
    start: Option<Place>,
    /// The parent directories of the current item, each with the names still to visit, last first.
    above: Vec<(Place, Vec<OsString>)>,
    max_depth: u64,
}

impl<'a> Walk<'a> {
    /// Starts at a place; a symbolic link there is not followed.
    pub fn new(files: &'a Files, start: &Place, max_depth: u64) -> Walk<'a> {
        Walk { files, start: Some(start.clone()), above: Vec::new(), max_depth }
    }

    fn meet(&mut self, place: Place) -> Result<Step> {
        let metadata = self.files.symlink_metadata(place.path()).at(&place)?;
        let depth = self.above.len() as u64;
        if metadata.is_dir() && depth < self.max_depth {
            let mut names = sorted_names(self.files, &place)?;
            names.reverse();
            self.above.push((place.clone(), names));
        } else if metadata.is_dir() {
            self.above.push((place.clone(), Vec::new()));
        }
        Ok(Step::Meet { place, metadata, depth })
    }
}

impl Iterator for Walk<'_> {
    type Item = Result<Step>;

    fn next(&mut self) -> Option<Result<Step>> {
        if let Some(start) = self.start.take() {
            return Some(self.meet(start));
        }
        let (directory, names) = self.above.last_mut()?;
        match names.pop() {
            Some(name) => {
                let place = directory.with_path(directory.path().join(name));
                Some(self.meet(place))
            }
            None => {
                self.above.pop();
                Some(Ok(Step::Leave { depth: self.above.len() as u64 }))
            }
        }
    }
}

/// The names in a directory, in byte order.
pub fn sorted_names(files: &Files, directory: &Place) -> Result<Vec<OsString>> {
    let entries = files.read_dir(directory.path()).at(directory)?;
    let names: aquifer::fs::Result<Vec<_>> =
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
    let mut names = names.at(directory)?;
    names.sort();
    Ok(names)
}
