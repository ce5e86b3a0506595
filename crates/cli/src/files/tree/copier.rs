//! Copying trees.
//!
//! # What is preserved
//! Content with its holes, permissions, owners if the user may change them, times, extended
//! attributes and access control lists that both sides support, symbolic links as such, named
//! pipes, sockets and devices, and hard links.
//!
//! # Visibility during the copy
//! A file gets its name when it is complete, in one atomic step that also replaces an existing file
//! of that name. So other processes, and an interruption at any moment, find only complete files:
//! the old ones or the new ones. Directories appear immediately, inaccessible to other users until
//! they are complete, and are merged with existing ones.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use aquifer_sys::interrupt;
use serde::Serialize;

use super::{Attributes, Content, Item, Kind, New, Tree};
use crate::files::failure::Failures;
use crate::{output, progress};

/// Bytes copied between two checks for an interruption.
const CHUNK_BYTES: usize = 1 << 20;

/// What was copied.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub files: u64,
    pub directories: u64,
    pub symlinks: u64,
    /// Named pipes, sockets and devices.
    pub special_files: u64,
    /// Additional names of files already copied.
    pub hard_links: u64,
    /// Bytes copied, excluding holes.
    pub copied_bytes: u64,
    /// Attributes that the destination does not support.
    pub lost_attributes: u64,
}

/// The options of a copy.
#[derive(Debug, Clone, Copy, Default)]
pub struct Choices {
    /// Whether directories are copied, with their content.
    pub recursive: bool,
    /// Whether an existing file is kept, which is an error.
    pub no_clobber: bool,
    /// Whether each name is printed.
    pub verbose: bool,
}

/// A directory whose content is being copied.
struct Open {
    source: PathBuf,
    target: PathBuf,
    item: Item,
    attributes: Attributes,
    /// Names still to be copied, last first.
    names: Vec<OsString>,
}

/// Copies from one tree to another.
pub struct Copier<'a, S, T> {
    from: &'a S,
    to: &'a T,
    choices: Choices,
    /// The file of the pool being copied to or from: never copied, never replaced.
    pool: Option<(u64, u64)>,
    /// Files with several names, and their path in the target.
    linked: HashMap<(u64, u64), PathBuf>,
    buffer: Vec<u8>,
    counts: Counts,
    failures: Failures,
    bar: progress::Bytes,
    total_bytes: u64,
}

impl<'a, S: Tree, T: Tree> Copier<'a, S, T> {
    /// A copier that has copied nothing yet.
    pub fn new(from: &'a S, to: &'a T, choices: Choices, bar: progress::Bytes) -> Self {
        Copier {
            from,
            to,
            choices,
            pool: None,
            linked: HashMap::new(),
            buffer: vec![0; CHUNK_BYTES],
            counts: Counts::default(),
            failures: Failures::default(),
            bar,
            total_bytes: 0,
        }
    }

    /// Excludes the file with this identity from the copy.
    pub fn spare(&mut self, pool: Option<(u64, u64)>) {
        self.pool = pool;
    }

    /// Adds the files at a path to the total of the progress bar; unreadable ones are not counted.
    pub fn foresee(&mut self, source: &Path) {
        let mut ahead = vec![source.to_owned()];
        while let Some(path) = ahead.pop() {
            let follows = !self.choices.recursive;
            let Ok(Some(item)) = self.from.item(&path, follows) else { continue };
            match item.kind {
                Kind::File => self.total_bytes += item.len_bytes,
                Kind::Directory if self.choices.recursive && interrupt::check().is_ok() => {
                    let names = self.from.names(&path).unwrap_or_default();
                    ahead.extend(names.iter().map(|name| path.join(name)));
                }
                _ => {}
            }
        }
    }

    /// Notes the outcome of another step of the same command.
    ///
    /// # Errors
    /// A failure that stops the command.
    pub fn note(&mut self, outcome: Result<()>) -> Result<()> {
        let (bar, failures) = (&self.bar, &mut self.failures);
        bar.aside(|| failures.note(outcome))
    }

    /// Returns what was copied and the failures. Removes the progress bar.
    pub fn end(mut self) -> (Counts, Failures) {
        // Something is left only if a failure has stopped the command.
        self.counts.files -= self.to.settle(true).len() as u64;
        self.bar.clear();
        (self.counts, self.failures)
    }

    /// Copies `source` to `target` recursively. Failures inside a directory are printed and
    /// skipped.
    ///
    /// # Errors
    /// A failure that stops the command.
    pub fn copy(&mut self, source: &Path, target: &Path) -> Result<()> {
        self.copy_items(source, target)?;
        self.settle(true)
    }

    /// Notes the failures of files that were being placed.
    fn settle(&mut self, all: bool) -> Result<()> {
        let mut outcome = Ok(());
        for failure in self.to.settle(all) {
            self.counts.files -= 1;
            let noted = self.note(Err(failure));
            outcome = outcome.and(noted);
        }
        outcome
    }

    fn copy_items(&mut self, source: &Path, target: &Path) -> Result<()> {
        let mut above = Vec::new();
        let begun = self.begin(source.to_owned(), target.to_owned(), !self.choices.recursive);
        self.push(begun, &mut above)?;
        while let Some(open) = above.last_mut() {
            interrupt::check()?;
            match open.names.pop() {
                Some(name) => {
                    // A tree may mark names of directories by a slash.
                    let plain = plain_name(&name);
                    let (source, target) = (open.source.join(&name), open.target.join(plain));
                    let begun = self.begin(source, target, false);
                    self.push(begun, &mut above)?;
                }
                None => {
                    let Some(open) = above.pop() else { break };
                    let finished =
                        self.to.finish_directory(&open.target, &open.item, &open.attributes);
                    let outcome = finished.map(|lost| self.counts.lost_attributes += lost);
                    self.note(outcome)?;
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, begun: Result<Option<Open>>, above: &mut Vec<Open>) -> Result<()> {
        match begun {
            Ok(open) => {
                above.extend(open);
                Ok(())
            }
            Err(error) => self.note(Err(error)),
        }
    }

    /// Copies one item; a directory is only created.
    fn begin(&mut self, source: PathBuf, target: PathBuf, follow: bool) -> Result<Option<Open>> {
        let Some(item) = self.from.item(&source, follow)? else {
            bail!("{}: No such file or directory", self.from.show(&source));
        };
        if Some(item.identity) == self.pool {
            let shown = self.from.show(&source);
            self.bar.aside(|| output::warn(&format!("{shown} is the pool itself; left out")));
            return Ok(None);
        }
        if item.kind == Kind::Directory && !self.choices.recursive {
            bail!("{}: Is a directory; -r copies it", self.from.show(&source));
        }
        if self.choices.verbose {
            let said = format!("{} -> {}\n", self.from.show(&source), self.to.show(&target));
            self.bar.aside(|| output::print(&said))?;
        }
        match item.kind {
            Kind::Directory => return self.begin_directory(source, target, item).map(Some),
            Kind::File => self.copy_file(&source, &target, &item, follow)?,
            // A device that the user names is copied by what it leads to, as a link is.
            Kind::Link => self.copy_other(&source, &target, &item)?,
            Kind::Special(_) if self.choices.recursive => {
                self.copy_other(&source, &target, &item)?
            }
            Kind::Special(_) => bail!(
                "{}: is a device, a socket or a pipe; -r copies it as such",
                self.from.show(&source)
            ),
            Kind::Other => bail!("{}: of a kind that a pool cannot hold", self.from.show(&source)),
        }
        Ok(None)
    }

    fn begin_directory(&mut self, source: PathBuf, target: PathBuf, item: Item) -> Result<Open> {
        let mut names = self.from.names(&source)?;
        names.reverse();
        let attributes = self.from.attributes(&source, true)?;
        // The root of a pool, or the directory that the user named, may be the target of a symbolic
        // link.
        let there = if self.to.is_flat() { None } else { self.to.item(&target, false)? };
        match there {
            None if self.to.is_flat() => {}
            None => {
                self.to.make_directory(&target)?;
                self.counts.directories += 1;
            }
            Some(there) if there.kind == Kind::Directory => {}
            Some(_) => bail!(
                "{}: Not a directory; remove it, or copy to another name",
                self.to.show(&target)
            ),
        }
        Ok(Open { source, target, item, attributes, names })
    }

    /// Checks that the target's name can be used.
    fn check_target(&self, item: &Item, target: &Path) -> Result<()> {
        if self.to.is_flat() {
            // An existing object is found when the new one is placed.
            return Ok(());
        }
        match self.to.item(target, false)? {
            Some(there) if there.kind == Kind::Directory => bail!(
                "{}: Is a directory, and the source is not; remove it, or copy to another name",
                self.to.show(target)
            ),
            Some(_) if self.choices.no_clobber => {
                bail!("{}: File exists", self.to.show(target))
            }
            Some(there) if Some(there.identity) == self.pool => {
                bail!("{}: is the pool itself; copy to another name", self.to.show(target))
            }
            // One special file replaces another.
            Some(_) if matches!(item.kind, Kind::Special(_)) => Ok(()),
            Some(there) if self.is_special(&there, target) => bail!(
                "{}: is a device, a socket or a pipe; write to it with `aquifer cat`",
                self.to.show(target)
            ),
            _ => Ok(()),
        }
    }

    /// Whether the target is not a replaceable file, or links to such an item, as `/dev/stdout`
    /// does.
    fn is_special(&self, there: &Item, target: &Path) -> bool {
        match there.kind {
            Kind::Link => {
                let end = self.to.item(target, true).ok().flatten();
                end.is_some_and(|end| matches!(end.kind, Kind::Special(_) | Kind::Other))
            }
            kind => matches!(kind, Kind::Special(_) | Kind::Other),
        }
    }

    /// Copies a symbolic link or a special file.
    fn copy_other(&mut self, source: &Path, target: &Path, item: &Item) -> Result<()> {
        self.check_target(item, target)?;
        if self.link_again(item, target)? {
            return Ok(());
        }
        let attributes = self.from.attributes(source, false)?;
        let new = match item.kind {
            Kind::Special(special) => self.to.make_special(special, target)?,
            _ => self.to.make_link(&self.from.target(source)?, target)?,
        };
        self.counts.lost_attributes += new.finish(item, &attributes)?;
        new.place(!self.choices.no_clobber)?;
        match item.kind {
            Kind::Special(_) => self.counts.special_files += 1,
            _ => self.counts.symlinks += 1,
        }
        self.note_name(item, target);
        Ok(())
    }

    fn copy_file(&mut self, source: &Path, target: &Path, item: &Item, follow: bool) -> Result<()> {
        self.check_target(item, target)?;
        if self.link_again(item, target)? {
            self.count(item.len_bytes);
            return Ok(());
        }
        let attributes = self.from.attributes(source, follow)?;
        let content = self.from.open(source, follow)?;
        let new = self.to.make_file(target, item.len_bytes)?;
        self.copy_content(&content, &new, item.len_bytes)?;
        self.counts.lost_attributes += new.finish(item, &attributes)?;
        new.place(!self.choices.no_clobber)?;
        self.counts.files += 1;
        self.note_name(item, target);
        self.settle(false)
    }

    /// Creates another name of what was copied before under one of its names; false if it was not.
    fn link_again(&mut self, item: &Item, target: &Path) -> Result<bool> {
        let Some(original) = self.linked.get(&item.identity).filter(|_| item.links > 1) else {
            return Ok(false);
        };
        self.link(original, target)?;
        self.counts.hard_links += 1;
        Ok(true)
    }

    fn note_name(&mut self, item: &Item, target: &Path) {
        if item.links > 1 && !self.to.is_flat() {
            self.linked.insert(item.identity, target.to_owned());
        }
    }

    /// Creates another name of a file copied before.
    fn link(&self, original: &Path, target: &Path) -> Result<()> {
        let identity = |path| self.to.item(path, false).map(|item| item.map(|item| item.identity));
        // A rename between two names of one file would leave both.
        if identity(original)? == identity(target)? {
            return Ok(());
        }
        self.to.make_name(original, target)?.place(!self.choices.no_clobber)
    }

    /// Copies everything except holes.
    fn copy_content(&mut self, from: &S::File, to: &T::New, len_bytes: u64) -> Result<()> {
        let (mut next, mut end_bytes) = (0, 0);
        while let Some(range) =
            from.next_data(next, len_bytes).map_err(|error| from.explain(error))?
        {
            self.count(range.start - next);
            next = range.start;
            while next < range.end {
                interrupt::check()?;
                let wanted = (range.end - next).min(self.buffer.len() as u64) as usize;
                let got = from
                    .read_at(&mut self.buffer[..wanted], next)
                    .map_err(|error| from.explain(error))?;
                if got == 0 {
                    // The file has been truncated.
                    return Ok(());
                }
                to.write_at(&self.buffer[..got], next)?;
                next += got as u64;
                end_bytes = next;
                self.counts.copied_bytes += got as u64;
                self.count(got as u64);
            }
        }
        if end_bytes < len_bytes {
            self.count(len_bytes - next.min(len_bytes));
            to.set_len(len_bytes)?;
        }
        Ok(())
    }

    /// Advances the progress bar.
    fn count(&mut self, bytes: u64) {
        self.bar.add_towards(bytes, self.total_bytes);
    }
}

fn plain_name(name: &OsStr) -> &OsStr {
    name.as_bytes().strip_suffix(b"/").map_or(name, OsStr::from_bytes)
}

/// The error for copying a tree into itself.
pub fn into_itself(source: &str, target: &str) -> anyhow::Error {
    anyhow!("{source} cannot be copied into itself, to {target}; copy it elsewhere")
}
