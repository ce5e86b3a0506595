//! The objects of a bucket, as a tree to copy from or to.
//!
//! A directory is what the keys below it have in common; its name ends with a slash, so that it is told from an object of
//! the same name. One listing serves the whole tree below a directory. Short objects are opened ahead of the copier, and
//! written behind it: latency would otherwise be most of the time.
//!
//! Of a file only its content is kept. A copy of an object gets the time of the object, the user as its owner, and the
//! permissions of a new file.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, Read};
use std::ops::{Bound, Range};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Error, Result, anyhow, bail};
use aquifer::fs::SpecialFile;
use aquifer::remote::store::{Finishing, Opening, RemoteReader, Upload};
use aquifer::remote::{RemoteError, RemoteStore};

use super::{Attributes, Content, Item, Kind, New, Tree};
use crate::files::failure::shown;
use crate::remote::{ObjectReader, TierWay, failed};

/// Most objects opened ahead, or being placed.
const MOST_AT_ONCE: usize = 32;
/// Most bytes of objects being placed, and the length up to which an object is read ahead.
const PLACING_BYTES: u64 = 64 << 20;
const SHORT_BYTES: u64 = 1 << 20;
/// Zeros written at a time, where a file has a hole.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A bucket, or one object of an HTTP server.
pub struct Stored {
    store: RemoteStore,
    replaces: bool,
    /// The mode of new files, and their owner.
    mode: u32,
    owner: (u32, u32),
    source: RefCell<Source>,
    placing: Rc<RefCell<Placing>>,
    tier: Option<TierWay>,
}

/// What is known of objects to be read.
#[derive(Default)]
struct Source {
    /// Prefixes that were listed, and what they have: lengths and times by key.
    listed: Vec<String>,
    objects: BTreeMap<String, (u64, SystemTime)>,
    opened: HashMap<String, Ahead>,
}

enum Ahead {
    Opening(Opening),
    Open(RemoteReader),
}

/// Objects whose last request is under way, with their lengths.
#[derive(Default)]
struct Placing {
    objects: VecDeque<(Finishing, u64)>,
    bytes: u64,
}

impl Stored {
    pub fn new(store: RemoteStore, replaces: bool) -> Result<Stored> {
        let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
        Ok(Stored {
            store,
            replaces,
            mode: 0o666 & !umask()?,
            owner: (user.as_raw(), group.as_raw()),
            source: RefCell::default(),
            placing: Rc::default(),
            tier: None,
        })
    }

    /// Objects are read with a tier.
    pub fn with_tier(mut self, tier: Option<TierWay>) -> Stored {
        self.tier = tier;
        self
    }

    fn file(&self, len_bytes: u64, modified: SystemTime) -> Item {
        Item { len_bytes, accessed: modified, modified, ..self.item_of(Kind::File, self.mode) }
    }

    fn directory(&self) -> Item {
        // A user with permission to read a file may search the directory.
        self.item_of(Kind::Directory, self.mode | (self.mode & 0o444) >> 2)
    }

    fn item_of(&self, kind: Kind, mode: u32) -> Item {
        let now = SystemTime::now();
        let ((uid, gid), identity) = (self.owner, (0, 0));
        Item {
            kind,
            mode,
            uid,
            gid,
            len_bytes: 0,
            accessed: now,
            modified: now,
            links: 1,
            identity,
        }
    }

    /// Lists what is below a prefix, unless it is known.
    fn list(&self, prefix: &str) -> Result<()> {
        let mut source = self.source.borrow_mut();
        if source.listed.iter().any(|listed| is_below(prefix, listed)) {
            return Ok(());
        }
        for object in self.store.list(prefix).map_err(failed)? {
            source.objects.insert(object.key, (object.len_bytes, object.modified));
        }
        source.listed.push(prefix.to_owned());
        Ok(())
    }

    fn has_below(&self, prefix: &str) -> Result<bool> {
        self.list(prefix)?;
        let source = self.source.borrow();
        Ok(below(&source.objects, prefix).next().is_some())
    }

    /// Starts opening the short objects that follow a key in the listing.
    fn open_ahead(&self, source: &mut Source, key: &str) {
        // With a tier, objects are opened as devices, one at a time.
        let is_listed = source.listed.iter().any(|listed| is_below(key, listed));
        if !is_listed || self.tier.is_some() {
            return;
        }
        let Source { objects, opened, listed } = source;
        let after = objects.range::<str, _>((Bound::Excluded(key), Bound::Unbounded));
        let next = after.take(MOST_AT_ONCE).filter(|(key, (len_bytes, _))| {
            *len_bytes <= SHORT_BYTES && listed.iter().any(|listed| is_below(key, listed))
        });
        for (key, _) in next {
            if opened.len() < MOST_AT_ONCE && !opened.contains_key(key) {
                // If it fails, it is opened again when its turn comes.
                if let Ok(opening) = self.store.start_reading(key, SHORT_BYTES) {
                    opened.insert(key.clone(), Ahead::Opening(opening));
                }
            }
        }
    }
}

/// Whether a key is a prefix or below it.
fn is_below(key: &str, prefix: &str) -> bool {
    let rest = key.strip_prefix(prefix);
    prefix.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The objects below a prefix, with the rest of their keys.
fn below<'a, T>(
    objects: &'a BTreeMap<String, T>,
    prefix: &str,
) -> impl Iterator<Item = (&'a str, &'a T)> {
    let start = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    objects
        .range(start.clone()..)
        .map_while(move |(key, object)| Some((key.strip_prefix(&start)?, object)))
}

/// The key of a path, and whether it is the name of a directory.
fn key_of(path: &Path) -> Result<(&str, bool)> {
    let Some(text) = path.to_str() else {
        bail!("{}: keys of objects are UTF-8; rename it", shown(path));
    };
    let key = text.strip_suffix('/').unwrap_or(text);
    Ok((key, key.is_empty() || key.len() < text.len()))
}

fn umask() -> Result<u32> {
    // Asking the system for it would change it for a moment.
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    Ok(mask.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok()).unwrap_or(0o22))
}

impl Tree for Stored {
    type File = StoredFile;
    type New = StoredNew;

    fn is_flat(&self) -> bool {
        true
    }

    fn settle(&self, all: bool) -> Vec<Error> {
        let mut failures = Vec::new();
        loop {
            let mut placing = self.placing.borrow_mut();
            let is_full = placing.objects.len() >= MOST_AT_ONCE || placing.bytes >= PLACING_BYTES;
            if !all && !is_full {
                return failures;
            }
            let Some((object, bytes)) = placing.objects.pop_front() else { return failures };
            placing.bytes -= bytes;
            failures.extend(object.wait().err().map(failed));
        }
    }

    fn show(&self, path: &Path) -> String {
        match key_of(path) {
            Ok((key, is_directory)) => {
                let mut url = self.store.url_of(key);
                if is_directory && !url.ends_with('/') {
                    url.push('/');
                }
                url
            }
            Err(_) => shown(path),
        }
    }

    fn item(&self, path: &Path, _follow: bool) -> Result<Option<Item>> {
        let (key, is_directory) = key_of(path)?;
        if is_directory {
            // A bucket is there also if it is empty.
            let is_there = self.has_below(key)? || key.is_empty();
            return Ok(is_there.then(|| self.directory()));
        }
        if let Some(&(len_bytes, modified)) = self.source.borrow().objects.get(key) {
            return Ok(Some(self.file(len_bytes, modified)));
        }
        match self.store.read(key) {
            Ok(reader) => {
                let (len_bytes, modified) = (reader.len_bytes(), reader.modified());
                let mut source = self.source.borrow_mut();
                source.objects.insert(key.to_owned(), (len_bytes, modified));
                // One of a tier has threads: it is opened when it is its turn.
                if self.tier.is_none() {
                    source.opened.insert(key.to_owned(), Ahead::Open(reader));
                }
                Ok(Some(self.file(len_bytes, modified)))
            }
            Err(RemoteError::NotFound { .. }) if self.store.lists() => {
                Ok(self.has_below(key)?.then(|| self.directory()))
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn names(&self, directory: &Path) -> Result<Vec<OsString>> {
        let (prefix, _) = key_of(directory)?;
        self.list(prefix)?;
        let source = self.source.borrow();
        let mut names: Vec<OsString> = Vec::new();
        for (rest, (len_bytes, _)) in below(&source.objects, prefix) {
            let name = match rest.split_once('/') {
                Some((directory, _)) => format!("{directory}/"),
                None => rest.to_owned(),
            };
            // An empty object may be there only to show that there is a directory: one that has others below it, or whose
            // key ends with a slash, which listings leave out.
            let marks = *len_bytes == 0 && !rest.contains('/') && {
                let key =
                    if prefix.is_empty() { rest.to_owned() } else { format!("{prefix}/{rest}") };
                below(&source.objects, &key).next().is_some()
                    || self.store.find(&key).map_err(failed)?.is_none()
            };
            if !marks && names.last().is_none_or(|last| *last != *name) {
                names.push(name.into());
            }
        }
        Ok(names)
    }

    fn target(&self, link: &Path) -> Result<PathBuf> {
        bail!("{}: is no symbolic link", self.show(link))
    }

    fn open(&self, path: &Path, _follow: bool) -> Result<StoredFile> {
        let (key, _) = key_of(path)?;
        let mut source = self.source.borrow_mut();
        let reader = match source.opened.remove(key) {
            Some(Ahead::Open(reader)) => ObjectReader::Store(reader),
            Some(Ahead::Opening(opening)) => {
                self.open_ahead(&mut source, key);
                ObjectReader::Store(opening.wait().map_err(failed)?)
            }
            None if self.tier.is_some() => {
                ObjectReader::open(&self.store, key, self.tier.as_ref()).map_err(failed)?
            }
            None => {
                let opening = self.store.start_reading(key, SHORT_BYTES);
                self.open_ahead(&mut source, key);
                ObjectReader::Store(opening.and_then(Opening::wait).map_err(failed)?)
            }
        };
        let known = source.objects.get(key).map(|object| object.0);
        if known.is_some_and(|known| known != reader.len_bytes()) {
            bail!("{}: has changed since it was listed; copy it again", self.show(path));
        }
        Ok(StoredFile { len_bytes: reader.len_bytes(), reader: RefCell::new(reader) })
    }

    fn attributes(&self, _path: &Path, _follow: bool) -> Result<Attributes> {
        Ok(Attributes::new())
    }

    fn make_file(&self, name: &Path, len_bytes: u64) -> Result<StoredNew> {
        let (key, is_directory) = key_of(name)?;
        if is_directory {
            bail!("{}: names no object; give the copy a name", self.show(name));
        }
        let upload = self.store.upload(key, len_bytes, self.replaces).map_err(failed)?;
        Ok(StoredNew {
            upload: RefCell::new(upload),
            written_bytes: 0.into(),
            placing: self.placing.clone(),
        })
    }

    fn make_link(&self, _target: &Path, name: &Path) -> Result<StoredNew> {
        Err(cannot_hold("a symbolic link", &self.show(name)))
    }

    fn make_special(&self, _special: SpecialFile, name: &Path) -> Result<StoredNew> {
        Err(cannot_hold("a device, a socket or a pipe", &self.show(name)))
    }

    fn make_name(&self, _original: &Path, name: &Path) -> Result<StoredNew> {
        Err(cannot_hold("a hard link", &self.show(name)))
    }

    fn make_directory(&self, _path: &Path) -> Result<()> {
        Ok(())
    }

    fn finish_directory(
        &self,
        _path: &Path,
        _item: &Item,
        _attributes: &Attributes,
    ) -> Result<u64> {
        Ok(0)
    }
}

fn cannot_hold(what: &str, name: &str) -> Error {
    anyhow!("{name}: the source is {what}, which an object store cannot hold; left out")
}

/// An object being read.
pub struct StoredFile {
    reader: RefCell<ObjectReader>,
    len_bytes: u64,
}

impl Content for StoredFile {
    fn next_data(&self, offset_bytes: u64, _len_bytes: u64) -> io::Result<Option<Range<u64>>> {
        Ok((offset_bytes < self.len_bytes).then_some(offset_bytes..self.len_bytes))
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let mut reader = self.reader.borrow_mut();
        if reader.position() != offset_bytes {
            reader.set_range(offset_bytes..u64::MAX);
        }
        reader.read(bytes)
    }

    fn explain(&self, error: io::Error) -> Error {
        let error = match error.downcast::<RemoteError>() {
            Ok(error) => return failed(error),
            Err(error) => error,
        };
        match error.downcast::<Arc<RemoteError>>() {
            Ok(error) => failed(error),
            Err(error) => error.into(),
        }
    }
}

/// An object being written.
pub struct StoredNew {
    upload: RefCell<Upload>,
    written_bytes: std::cell::Cell<u64>,
    placing: Rc<RefCell<Placing>>,
}

impl New for StoredNew {
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        // A hole of the source.
        self.set_len(offset_bytes)?;
        self.written_bytes.set(offset_bytes + bytes.len() as u64);
        self.upload.borrow_mut().write(bytes).map_err(failed)
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        let mut upload = self.upload.borrow_mut();
        while self.written_bytes.get() < len_bytes {
            let left = len_bytes - self.written_bytes.get();
            let zeros = &ZEROS[..left.min(ZEROS.len() as u64) as usize];
            upload.write(zeros).map_err(failed)?;
            self.written_bytes.set(self.written_bytes.get() + zeros.len() as u64);
        }
        Ok(())
    }

    fn finish(&self, _item: &Item, attributes: &Attributes) -> Result<u64> {
        Ok(attributes.len() as u64)
    }

    fn place(self, _replace: bool) -> Result<()> {
        let finishing = self.upload.into_inner().start_finishing().map_err(failed)?;
        let mut placing = self.placing.borrow_mut();
        placing.bytes += self.written_bytes.get();
        placing.objects.push_back((finishing, self.written_bytes.get()));
        Ok(())
    }
}
