//! Everything in a tree of a pool, one after the other, without recursion: a tree can be deeper than a stack.

use std::ffi::OsString;

use anyhow::Result;
use aquifer::Files;
use aquifer::fs::Metadata;

use super::Place;
use super::failure::At;

/// What is met on the way.
#[allow(clippy::large_enum_variant, reason = "one at a time, taken apart at once")]
pub enum Step {
    /// Something, at this depth below the place where it began; directories before what is in them.
    Meet { place: Place, metadata: Metadata, depth: u64 },
    /// All that is in the directory has been met.
    Leave { depth: u64 },
}

/// A way through a tree. Names are met in the order of their bytes.
pub struct Walk<'a> {
    files: &'a Files,
    start: Option<Place>,
    /// Names still to be met, last first, of the directories on the way to here.
    above: Vec<(Place, Vec<OsString>)>,
    max_depth: u64,
}

impl<'a> Walk<'a> {
    /// From a place on; a symbolic link there is not followed.
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

/// The names in a directory, in the order of their bytes.
pub fn sorted_names(files: &Files, directory: &Place) -> Result<Vec<OsString>> {
    let entries = files.read_dir(directory.path()).at(directory)?;
    let names: aquifer::fs::Result<Vec<_>> =
        entries.map(|entry| entry.map(|entry| entry.into_file_name())).collect();
    let mut names = names.at(directory)?;
    names.sort();
    Ok(names)
}
