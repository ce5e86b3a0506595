//! Copying trees.
//!
//! # What is kept
//! Content with its holes, permissions, owners where this user may give files away, times, extended attributes that both sides can
//! have, symbolic links as they are, and which names are names of one file.
//!
//! # What others see
//! A file gets its name when it is whole, in one step that also replaces what has that name. So whoever looks, and whoever stops
//! the command at any moment, finds whole files only: the old ones or the new ones. Directories are there at once, closed to others
//! until everything is in them, and merged with those that are there.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use aquifer_host::interrupt;
use serde::Serialize;

use super::{Attributes, Content, Item, Kind, New, Tree};
use crate::files::failure::Failures;
use crate::{output, progress};

/// Bytes that are copied between two looks at whether to go on.
const CHUNK_BYTES: usize = 1 << 20;

/// What was copied.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub files: u64,
    pub directories: u64,
    pub symlinks: u64,
    /// Names of files that another name had been copied of.
    pub hard_links: u64,
    /// Bytes that were copied: those in holes are not.
    pub copied_bytes: u64,
    /// Attributes that the destination cannot have.
    pub lost_attributes: u64,
}

/// What to do where there is a choice.
#[derive(Debug, Clone, Copy, Default)]
pub struct Choices {
    /// Whether directories are copied, with what is in them.
    pub recursive: bool,
    /// Whether files that are there stay, and are an error.
    pub no_clobber: bool,
    /// Whether each name is said.
    pub verbose: bool,
}

/// A directory whose content is being copied.
struct Open {
    source: PathBuf,
    target: PathBuf,
    item: Item,
    attributes: Attributes,
    /// Still to be copied, last first.
    names: Vec<OsString>,
}

/// Copies from one tree to another.
pub struct Copier<'a, S, T> {
    from: &'a S,
    to: &'a T,
    choices: Choices,
    /// The file of the pool that is copied to or from: never copied, never replaced.
    pool: Option<(u64, u64)>,
    /// Files with several names, and which one they have in the target.
    linked: HashMap<(u64, u64), PathBuf>,
    buffer: Vec<u8>,
    counts: Counts,
    failures: Failures,
    bar: progress::Bytes,
    total_bytes: u64,
}

impl<'a, S: Tree, T: Tree> Copier<'a, S, T> {
    /// Nothing is copied yet.
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

    /// Leaves the file that this identity is of alone.
    pub fn spare(&mut self, pool: Option<(u64, u64)>) {
        self.pool = pool;
    }

    /// Adds what is at a path to what the bar counts towards; what cannot be looked at is not counted.
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

    /// Notes the outcome of something else that belongs to the same command.
    ///
    /// # Errors
    /// What ends everything.
    pub fn note(&mut self, outcome: Result<()>) -> Result<()> {
        let (bar, failures) = (&self.bar, &mut self.failures);
        bar.aside(|| failures.note(outcome))
    }

    /// What was copied, and whether all of it was. The bar goes away.
    pub fn end(self) -> (Counts, Failures) {
        self.bar.clear();
        (self.counts, self.failures)
    }

    /// Copies what is at `source` to `target`, with everything in it. What fails of what is in it is said and left out.
    ///
    /// # Errors
    /// What ends everything.
    pub fn copy(&mut self, source: &Path, target: &Path) -> Result<()> {
        let mut above = Vec::new();
        let begun = self.begin(source.to_owned(), target.to_owned(), !self.choices.recursive);
        self.push(begun, &mut above)?;
        while let Some(open) = above.last_mut() {
            interrupt::check()?;
            match open.names.pop() {
                Some(name) => {
                    let (source, target) = (open.source.join(&name), open.target.join(&name));
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

    /// Copies one thing; of a directory, only that it is there.
    fn begin(&mut self, source: PathBuf, target: PathBuf, follow: bool) -> Result<Option<Open>> {
        let Some(item) = self.from.item(&source, follow)? else {
            bail!("{}: there is nothing of this name", self.from.show(&source));
        };
        if Some(item.identity) == self.pool {
            let shown = self.from.show(&source);
            self.bar.aside(|| output::warn(&format!("{shown} is the pool itself: left out")));
            return Ok(None);
        }
        if item.kind == Kind::Directory && !self.choices.recursive {
            bail!("{}: this is a directory; -r copies it", self.from.show(&source));
        }
        if self.choices.verbose {
            let said = format!("{} -> {}\n", self.from.show(&source), self.to.show(&target));
            self.bar.aside(|| output::print(&said))?;
        }
        match item.kind {
            Kind::Directory => return self.begin_directory(source, target, item).map(Some),
            Kind::File => self.copy_file(&source, &target, &item, follow)?,
            Kind::Link => self.copy_link(&source, &target, &item)?,
            Kind::Other => bail!(
                "{}: this is no file, directory or symbolic link: a pool cannot hold it",
                self.from.show(&source)
            ),
        }
        Ok(None)
    }

    fn begin_directory(&mut self, source: PathBuf, target: PathBuf, item: Item) -> Result<Open> {
        let mut names = self.from.names(&source)?;
        names.reverse();
        let attributes = self.from.attributes(&source)?;
        // The root of a pool, or the directory that the user named, may be at the end of a symbolic link.
        match self.to.item(&target, false)? {
            None => {
                self.to.make_directory(&target)?;
                self.counts.directories += 1;
            }
            Some(there) if there.kind == Kind::Directory => {}
            Some(_) => bail!(
                "{}: this is there and no directory; remove it, or copy to another name",
                self.to.show(&target)
            ),
        }
        Ok(Open { source, target, item, attributes, names })
    }

    /// Whether something can come to have the name.
    fn check_target(&self, target: &Path) -> Result<()> {
        match self.to.item(target, false)? {
            Some(there) if there.kind == Kind::Directory => bail!(
                "{}: this is a directory, and what is copied is none; remove it, or copy to another name",
                self.to.show(target)
            ),
            Some(_) if self.choices.no_clobber => {
                bail!("{}: something of this name is there already", self.to.show(target))
            }
            Some(there) if Some(there.identity) == self.pool => {
                bail!("{}: this is the pool itself; copy to another name", self.to.show(target))
            }
            Some(there) if self.is_special(&there, target) => bail!(
                "{}: this is a device, a socket or a pipe; `aquifer cat` writes to one",
                self.to.show(target)
            ),
            _ => Ok(()),
        }
    }

    /// Whether this is no file that could be replaced, or leads to such a thing, as `/dev/stdout` does.
    fn is_special(&self, there: &Item, target: &Path) -> bool {
        match there.kind {
            Kind::Link => {
                let end = self.to.item(target, true).ok().flatten();
                end.is_some_and(|end| end.kind == Kind::Other)
            }
            kind => kind == Kind::Other,
        }
    }

    fn copy_link(&mut self, source: &Path, target: &Path, item: &Item) -> Result<()> {
        self.check_target(target)?;
        let new = self.to.make_link(&self.from.target(source)?, target)?;
        new.finish(item, &Attributes::new())?;
        new.place(!self.choices.no_clobber)?;
        self.counts.symlinks += 1;
        Ok(())
    }

    fn copy_file(&mut self, source: &Path, target: &Path, item: &Item, follow: bool) -> Result<()> {
        self.check_target(target)?;
        if let Some(original) = self.linked.get(&item.identity).filter(|_| item.links > 1) {
            self.link(original, target)?;
            self.counts.hard_links += 1;
            self.count(item.len_bytes);
            return Ok(());
        }
        let attributes = self.from.attributes(source)?;
        let content = self.from.open(source, follow)?;
        let new = self.to.make_file(target)?;
        self.copy_content(&content, &new, item.len_bytes)?;
        self.counts.lost_attributes += new.finish(item, &attributes)?;
        new.place(!self.choices.no_clobber)?;
        self.counts.files += 1;
        if item.links > 1 {
            self.linked.insert(item.identity, target.to_owned());
        }
        Ok(())
    }

    /// Makes another name of what was copied before.
    fn link(&self, original: &Path, target: &Path) -> Result<()> {
        let identity = |path| self.to.item(path, false).map(|item| item.map(|item| item.identity));
        // Of two names of one file, renaming would leave both.
        if identity(original)? == identity(target)? {
            return Ok(());
        }
        self.to.make_name(original, target)?.place(!self.choices.no_clobber)
    }

    /// Copies all that is no hole.
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
                    // It has become shorter.
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

    /// Notes that so much of what the bar counts towards is done.
    fn count(&mut self, bytes: u64) {
        self.bar.add_towards(bytes, self.total_bytes);
    }
}

/// An error that says that a tree cannot be copied into itself.
pub fn into_itself(source: &str, target: &str) -> anyhow::Error {
    anyhow!("{source} cannot be copied into itself, to {target}; copy it to somewhere else")
}
