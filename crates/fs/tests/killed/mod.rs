//! The random work of a process that gets killed, as a function of a seed, and the states that it
//! may leave.
//!
//! Each process has a private directory with files, links and directories, and shares another one
//! with the others: there they replace whole files and append records to a log. Each reports every
//! completed step, so its killer knows the state of the private directory, up to the step during
//! which it was killed.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use aquifer_fs::{FallocateMode, File, FileKind, Files, FsError, RenameMode, SetMode, SpecialFile};
use aquifer_testkit::rng::Rng;

use crate::scratch::names;

/// Files of the shared directory; each repeats one byte.
pub const SHARED: u64 = 3;
/// The log that all processes append to.
pub const LOG: &str = "shared/log";

const DIRECTORIES: u64 = 3;
const NAMES: u64 = 4;
const ATTRIBUTE: &str = "user.a";
const PAGE: usize = 4096;

/// A directory of a process (0 for the one that holds the others), and a name in it.
pub type Place = (u64, u64);

fn path_of(own: &str, (directory, name): Place) -> String {
    match directory {
        0 => format!("{own}/{name}"),
        _ => format!("{own}/d{directory}/{name}"),
    }
}

/// Content of a file: which byte, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Content {
    byte: u8,
    len: usize,
}

impl Content {
    fn random(rng: &mut Rng) -> Content {
        let most = if rng.chance(0.5) { 100 } else { 30_000 };
        Content { byte: 1 + rng.below(255) as u8, len: 1 + rng.below(most) as usize }
    }

    fn bytes(self) -> Vec<u8> {
        vec![self.byte; self.len]
    }

    fn whole_pages(self) -> usize {
        self.len.next_multiple_of(PAGE)
    }
}

/// How the bytes of a file are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Append,
    Write {
        offset: usize,
    },
    WriteAtomic {
        offset: usize,
    },
    SetLen,
    PunchHole {
        offset: usize,
    },
    ZeroRange {
        offset: usize,
    },
    KeepSize {
        offset: usize,
    },
    /// Pages from this one on.
    Collapse {
        page: usize,
    },
    Insert {
        page: usize,
    },
    /// The content in two places at once.
    WriteRanges {
        offset: usize,
    },
    SetAttribute,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Replaces a name by a new file, created under another name or without one.
    Put {
        at: Place,
        content: Content,
        is_unnamed: bool,
    },
    Change {
        at: Place,
        change: Change,
        content: Content,
    },
    /// Exchanges the first pages.
    Swap {
        one: Place,
        other: Place,
    },
    Remove {
        at: Place,
    },
    Rename {
        from: Place,
        to: Place,
    },
    /// Leaves a whiteout.
    Whiteout {
        from: Place,
        to: Place,
    },
    Exchange {
        one: Place,
        other: Place,
    },
    Link {
        from: Place,
        to: Place,
    },
    Symlink {
        at: Place,
        target: u8,
    },
    /// Makes a device.
    Special {
        at: Place,
        rdev: u64,
    },
    MakeDirectory {
        directory: u64,
    },
    RemoveDirectory {
        directory: u64,
    },
    MoveDirectory {
        from: u64,
        to: u64,
    },
    /// Replaces a file of the shared directory.
    Publish {
        file: u64,
        content: Content,
    },
    /// Adds a record to the log.
    Record {
        len: usize,
    },
    /// Opens a file, removes it, and keeps it open.
    Orphan {
        content: Content,
    },
}

/// A step, and what else the process does in its turn.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    pub step: Step,
    pub syncs: bool,
    /// The shared file that it reads.
    pub looks_at: u64,
}

fn place(rng: &mut Rng) -> Place {
    let directory = if rng.chance(0.6) { 0 } else { rng.below(DIRECTORIES) };
    (directory, rng.below(NAMES))
}

fn directory(rng: &mut Rng) -> u64 {
    1 + rng.below(DIRECTORIES - 1)
}

impl Turn {
    pub fn random(rng: &mut Rng) -> Turn {
        Turn { step: Step::random(rng), syncs: rng.chance(0.02), looks_at: rng.below(SHARED) }
    }
}

impl Step {
    fn random(rng: &mut Rng) -> Step {
        let (at, to, content) = (place(rng), place(rng), Content::random(rng));
        match rng.below(24) {
            0..4 => Step::Put { at, content, is_unnamed: rng.chance(0.5) },
            4..11 => {
                let offset = rng.below(40_000) as usize;
                let page = rng.below(4) as usize;
                let change = match rng.below(12) {
                    0 | 1 => Change::Append,
                    2 => Change::Write { offset },
                    3 => Change::WriteAtomic { offset },
                    4 => Change::SetLen,
                    5 => Change::PunchHole { offset },
                    6 => Change::ZeroRange { offset },
                    7 => Change::KeepSize { offset },
                    8 => Change::Collapse { page },
                    9 => Change::Insert { page },
                    10 => Change::WriteRanges { offset },
                    _ => Change::SetAttribute,
                };
                Step::Change { at, change, content }
            }
            11 => Step::Swap { one: at, other: to },
            12 => Step::Remove { at },
            13 if rng.chance(0.4) => Step::Whiteout { from: at, to },
            13 => Step::Rename { from: at, to },
            14 => Step::Exchange { one: at, other: to },
            15 => Step::Link { from: at, to },
            16 if rng.chance(0.5) => Step::Special { at, rdev: content.byte.into() },
            16 => Step::Symlink { at, target: content.byte },
            17 | 18 => Step::MakeDirectory { directory: directory(rng) },
            19 => {
                if rng.chance(0.5) {
                    Step::RemoveDirectory { directory: directory(rng) }
                } else {
                    Step::MoveDirectory { from: directory(rng), to: directory(rng) }
                }
            }
            20 => Step::Orphan { content },
            21 | 22 => Step::Record { len: 1 + rng.below(500) as usize },
            _ => Step::Publish { file: rng.below(SHARED), content },
        }
    }
}

// ---- the process --------------------------------------------------------------------------------

/// A working process.
pub struct Worker {
    files: Files,
    own: String,
    number: u8,
    log: File,
    recorded: u32,
    kept: Vec<File>,
}

/// Accepts only errors about names and the kinds of files that they refer to.
fn is_fine(step: Step, outcome: Result<(), FsError>) {
    const FINE: [i32; 7] = [
        libc::ENOENT,
        libc::EEXIST,
        libc::ENOTEMPTY,
        libc::EINVAL,
        libc::EISDIR,
        libc::ENOTDIR,
        libc::ENXIO,
    ];
    match outcome {
        Err(error) if FINE.contains(&error.errno()) => {}
        outcome => outcome.unwrap_or_else(|error| panic!("{step:?}: {error}")),
    }
}

impl Worker {
    pub fn new(files: Files, own: &str, number: u8) -> Worker {
        let log = files.options().append(true).open(LOG).unwrap();
        Worker { files, own: own.to_owned(), number, log, recorded: 0, kept: Vec::new() }
    }

    pub fn take(&mut self, turn: Turn) {
        is_fine(turn.step, self.step(turn.step));
        if turn.syncs {
            self.files.sync().unwrap();
        }
        let shared = format!("shared/{}", turn.looks_at);
        if let Ok(content) = read_open(&self.files, &shared) {
            assert_uniform(&content, &shared);
        }
    }

    fn step(&mut self, step: Step) -> Result<(), FsError> {
        let files = &self.files;
        let path = |place: Place| path_of(&self.own, place);
        let directory = |number: u64| format!("{}/d{number}", self.own);
        match step {
            Step::Put { at, content, is_unnamed: false } => {
                let new = format!("{}/new", self.own);
                files.create_file(&new)?.write_all_at(&content.bytes(), 0)?;
                files.rename(&new, path(at))
            }
            Step::Put { at, content, is_unnamed: true } => {
                let new = files.options().write(true).create_unnamed()?;
                new.write_all_at(&content.bytes(), 0)?;
                new.link_over(path(at))
            }
            Step::Change { at, change, content } => self.change(&path(at), change, content),
            Step::Swap { one, other } => {
                let one = files.options().write(true).open(path(one))?;
                let other = files.options().write(true).open(path(other))?;
                one.exchange_range(0, &other, 0, PAGE as u64)
            }
            Step::Remove { at } => files.remove_file(path(at)),
            Step::Rename { from, to } => files.rename(path(from), path(to)),
            Step::Whiteout { from, to } => {
                files.rename_with(path(from), path(to), RenameMode::Whiteout)
            }
            Step::Exchange { one, other } => {
                files.rename_with(path(one), path(other), RenameMode::Exchange)
            }
            Step::Link { from, to } => files.hard_link(path(from), path(to)),
            Step::Symlink { at, target } => files.symlink(dangling(target), path(at)),
            Step::Special { at, rdev } => {
                files.create_special(path(at), SpecialFile::CharDevice(rdev), 0o600)
            }
            Step::MakeDirectory { directory: number } => files.create_dir(directory(number)),
            Step::RemoveDirectory { directory: number } => files.remove_dir(directory(number)),
            Step::MoveDirectory { from, to } => files.rename(directory(from), directory(to)),
            Step::Publish { file, content } => {
                let new = files.options().write(true).create_unnamed()?;
                for part in 0..3 {
                    new.write_all_at(&content.bytes(), part * content.len as u64)?;
                }
                new.link_over(format!("shared/{file}"))
            }
            Step::Record { len } => {
                let record = record(self.number, self.recorded, len);
                self.log.write_all_at(&record, 0)?;
                self.recorded += 1;
                Ok(())
            }
            Step::Orphan { content } => {
                let orphan = format!("{}/orphan", self.own);
                let open = files.create_file(&orphan)?;
                files.remove_file(&orphan)?;
                open.write_all_at(&content.bytes(), 0)?;
                self.kept.truncate(3);
                self.kept.insert(0, open);
                Ok(())
            }
        }
    }

    fn change(&self, path: &str, change: Change, content: Content) -> Result<(), FsError> {
        let mut options = self.files.options();
        match change {
            Change::Append => options.append(true).create(true),
            _ => options.write(true),
        };
        let file = options.open(path)?;
        let len = content.len as u64;
        let allocate = |mode, offset| file.allocate(mode, offset as u64, len);
        match change {
            Change::Append => file.write_all_at(&content.bytes(), 0).map(drop),
            Change::Write { offset } => {
                file.write_all_at(&content.bytes(), offset as u64).map(drop)
            }
            Change::WriteAtomic { offset } => file.write_atomic(&content.bytes(), offset as u64),
            Change::SetLen => file.set_len(len),
            Change::PunchHole { offset } => allocate(FallocateMode::PunchHole, offset),
            Change::ZeroRange { offset } => allocate(FallocateMode::ZeroRange, offset),
            Change::KeepSize { offset } => allocate(FallocateMode::KeepSize, offset),
            Change::Collapse { page } | Change::Insert { page } => {
                let mode = match change {
                    Change::Collapse { .. } => FallocateMode::CollapseRange,
                    _ => FallocateMode::InsertRange,
                };
                file.allocate(mode, (page * PAGE) as u64, content.whole_pages() as u64)
            }
            Change::WriteRanges { offset } => {
                let [first, second] = places_of(offset, content);
                let bytes = content.bytes();
                file.write_atomic_ranges(&[(first as u64, &bytes), (second as u64, &bytes)])
            }
            Change::SetAttribute => file.set_attribute(ATTRIBUTE, [content.byte; 20], SetMode::Any),
        }
    }
}

/// Where [`Change::WriteRanges`] writes.
fn places_of(offset: usize, content: Content) -> [usize; 2] {
    [offset, offset / 2 + 3 * content.len]
}

fn dangling(target: u8) -> PathBuf {
    format!("nowhere/{target}").into()
}

/// Reads all of a file that other processes may replace during the call: an open file keeps its
/// content.
pub fn read_open(files: &Files, path: &str) -> Result<Vec<u8>, FsError> {
    let file = files.options().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let mut content = vec![0; file.metadata()?.len() as usize];
    let got = file.read_at(&mut content, 0)?;
    content.truncate(got);
    Ok(content)
}

pub fn assert_uniform(content: &[u8], path: &str) {
    assert!(
        !content.is_empty() && content.iter().all(|byte| *byte == content[0]),
        "{path} is mixed"
    );
}

// ---- the log ------------------------------------------------------------------------------------

const MARK: u8 = 0xa5;

/// A record starts with its worker, number and length, which determine the rest.
fn record(worker: u8, number: u32, len: usize) -> Vec<u8> {
    let mut record = vec![MARK, worker];
    record.extend_from_slice(&(len as u16).to_le_bytes());
    record.extend_from_slice(&number.to_le_bytes());
    record.resize(record.len() + len, worker.wrapping_mul(31).wrapping_add(number as u8));
    record
}

/// Counts the records of each worker in the log, which must be complete and in order.
pub fn records(mut log: &[u8]) -> BTreeMap<u8, u32> {
    let mut counts = BTreeMap::new();
    while let Some((head, _)) = log.split_first_chunk::<8>() {
        let [mark, worker, len_low, len_high, number @ ..] = *head;
        let len = usize::from(u16::from_le_bytes([len_low, len_high]));
        let (number, count) = (u32::from_le_bytes(number), counts.entry(worker).or_default());
        assert_eq!((mark, number), (MARK, *count), "a record of worker {worker}");
        let expected = record(worker, number, len);
        let (found, rest) = log.split_at_checked(expected.len()).expect("a whole record");
        assert!(found == expected, "record {number} of worker {worker} is mixed");
        *count += 1;
        log = rest;
    }
    assert!(log.is_empty(), "the last record is cut short");
    counts
}

// ---- what may be there --------------------------------------------------------------------------

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    File { content: Vec<u8>, attribute: Option<Vec<u8>> },
    Link { target: PathBuf },
    Special { rdev: u64 },
}

impl Node {
    fn summary(&self) -> String {
        match self {
            Node::File { content, attribute } => {
                let runs = content.chunk_by(|one, other| one == other);
                let runs: Vec<_> = runs.map(|run| (run[0], run.len())).collect();
                format!("{runs:?} {:?}", attribute.as_ref().map(|value| value[0]))
            }
            Node::Link { target } => format!("{target:?}"),
            Node::Special { rdev } => format!("device {rdev}"),
        }
    }
}

/// The directory of a worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    directories: BTreeSet<u64>,
    /// The first name of the node that each name refers to.
    names: BTreeMap<Place, Place>,
    nodes: BTreeMap<Place, Node>,
}

impl State {
    pub fn summary(&self) -> String {
        let names = self.names.iter().map(|(place, first)| {
            if place == first {
                format!("{place:?} {}", self.nodes[first].summary())
            } else {
                format!("{place:?} = {first:?}")
            }
        });
        format!("{:?}\n  {}", self.directories, names.collect::<Vec<_>>().join("\n  "))
    }

    /// Reads the state from the files. Removes files of unfinished steps.
    pub fn found(files: &Files, own: &str) -> State {
        let mut state = State::default();
        let mut numbers: BTreeMap<u64, Place> = BTreeMap::new();
        let mut add = |state: &mut State, place: Place| {
            let path = path_of(own, place);
            let metadata = files.symlink_metadata(&path).unwrap();
            let first = *numbers.entry(metadata.ino()).or_insert(place);
            state.names.insert(place, first);
            if first != place {
                return;
            }
            let node = match metadata.file_type().kind() {
                FileKind::CharDevice => Node::Special { rdev: metadata.rdev() },
                FileKind::Symlink => Node::Link { target: files.read_link(&path).unwrap() },
                _ => Node::File {
                    content: read_open(files, &path).unwrap(),
                    attribute: match files.attribute(&path, ATTRIBUTE) {
                        Err(FsError::NoAttribute { .. }) => None,
                        value => Some(value.unwrap()),
                    },
                },
            };
            state.nodes.insert(place, node);
        };
        let mut inside: Vec<u64> = Vec::new();
        for name in names(files, own).unwrap() {
            let name = name.to_str().unwrap();
            match (name.parse::<u64>(), name.strip_prefix('d').map(str::parse::<u64>)) {
                (Ok(file), _) => add(&mut state, (0, file)),
                (_, Some(Ok(directory))) => inside.push(directory),
                // A file of an unfinished step.
                _ => files.remove_file(format!("{own}/{name}")).unwrap(),
            }
        }
        for directory in inside {
            state.directories.insert(directory);
            for name in names(files, format!("{own}/d{directory}")).unwrap() {
                add(&mut state, (directory, name.to_str().unwrap().parse().unwrap()));
            }
        }
        state
    }

    fn has_directory(&self, place: Place) -> bool {
        place.0 == 0 || self.directories.contains(&place.0)
    }

    /// Removes a name; the node moves to its next name, if it has one.
    fn take(&mut self, place: Place) -> Option<Node> {
        let first = self.names.remove(&place)?;
        let other = self.names.iter().find(|(_, leads)| **leads == first).map(|(name, _)| *name);
        match other {
            None => self.nodes.remove(&first),
            Some(other) if first == place => {
                let node = self.nodes.remove(&first)?;
                self.nodes.insert(other, node.clone());
                let same = self.names.values_mut().filter(|leads| **leads == first);
                same.for_each(|leads| *leads = other);
                Some(node)
            }
            Some(_) => self.nodes.get(&first).cloned(),
        }
    }

    /// Gives a name to a new node.
    fn put(&mut self, place: Place, node: Node) {
        self.take(place);
        self.names.insert(place, place);
        self.nodes.insert(place, node);
    }

    /// Moves names to unused ones, with their nodes.
    fn move_names(&mut self, to_of: impl Fn(Place) -> Place) {
        let nodes = std::mem::take(&mut self.nodes);
        let mut firsts: BTreeMap<Place, Place> = BTreeMap::new();
        let moved: BTreeMap<Place, Place> =
            self.names.iter().map(|(name, first)| (to_of(*name), *first)).collect();
        // The first name of each node after the move.
        self.names.clear();
        for (name, first) in moved {
            let now = *firsts.entry(first).or_insert(name);
            self.names.insert(name, now);
        }
        self.nodes = nodes.into_iter().map(|(first, node)| (firsts[&first], node)).collect();
    }

    fn file(&mut self, place: Place) -> Option<(&mut Vec<u8>, &mut Option<Vec<u8>>)> {
        let first = self.names.get(&place)?;
        match self.nodes.get_mut(first)? {
            Node::File { content, attribute } => Some((content, attribute)),
            Node::Link { .. } | Node::Special { .. } => None,
        }
    }

    /// Applies a completed step.
    pub fn apply(&mut self, step: Step) {
        match step {
            Step::Put { at, content, .. } if self.has_directory(at) => {
                self.put(at, Node::File { content: content.bytes(), attribute: None });
            }
            Step::Change { at, change, content } => self.change(at, change, content),
            Step::Swap { one, other } => {
                let is_same = self.names.get(&one) == self.names.get(&other);
                let page = |content: &[u8]| {
                    let mut page = content[..content.len().min(PAGE)].to_vec();
                    page.resize(PAGE, 0);
                    (!content.is_empty()).then_some(page)
                };
                let first = self.file(one).and_then(|(content, _)| page(content));
                let second = self.file(other).and_then(|(content, _)| page(content));
                if let (Some(first), Some(second), false) = (first, second, is_same) {
                    for (place, page) in [(one, second), (other, first)] {
                        let Some((content, _)) = self.file(place) else { continue };
                        let len = content.len().min(PAGE);
                        content[..len].copy_from_slice(&page[..len]);
                    }
                }
            }
            Step::Remove { at } => drop(self.take(at)),
            Step::Rename { from, to } if self.has_directory(to) => {
                let leads = |place| self.names.get(&place);
                if leads(from).is_some() && leads(from) != leads(to) {
                    self.take(to);
                    self.move_names(|name| if name == from { to } else { name });
                }
            }
            Step::Whiteout { from, to } => {
                let is_moved = self.names.get(&from) != self.names.get(&to);
                let is_there = self.names.contains_key(&from) && self.has_directory(to);
                self.apply(Step::Rename { from, to });
                if is_there && is_moved {
                    self.put(from, Node::Special { rdev: 0 });
                }
            }
            Step::Exchange { one, other } => {
                let leads = |place| self.names.get(&place);
                if leads(one).is_some() && leads(other).is_some() && leads(one) != leads(other) {
                    self.move_names(|name| match name {
                        name if name == one => other,
                        name if name == other => one,
                        name => name,
                    });
                }
            }
            Step::Link { from, to } if self.has_directory(to) => {
                if let (Some(first), None) = (self.names.get(&from), self.names.get(&to)) {
                    self.names.insert(to, *first);
                    self.move_names(|name| name);
                }
            }
            Step::Symlink { at, target }
                if self.has_directory(at) && !self.names.contains_key(&at) =>
            {
                self.put(at, Node::Link { target: dangling(target) });
            }
            Step::Special { at, rdev }
                if self.has_directory(at) && !self.names.contains_key(&at) =>
            {
                self.put(at, Node::Special { rdev });
            }
            Step::MakeDirectory { directory } => _ = self.directories.insert(directory),
            Step::RemoveDirectory { directory } if self.is_empty(directory) => {
                self.directories.remove(&directory);
            }
            Step::MoveDirectory { from, to }
                if self.directories.contains(&from) && self.is_empty(to) && from != to =>
            {
                self.directories.remove(&from);
                self.directories.insert(to);
                self.move_names(
                    |(directory, name)| {
                        if directory == from { (to, name) } else { (directory, name) }
                    },
                );
            }
            _ => {}
        }
    }

    fn is_empty(&self, directory: u64) -> bool {
        self.names.keys().all(|(other, _)| *other != directory)
    }

    fn change(&mut self, at: Place, change: Change, new: Content) {
        let is_new = change == Change::Append && !self.names.contains_key(&at);
        if is_new && self.has_directory(at) {
            self.put(at, Node::File { content: Vec::new(), attribute: None });
        }
        let Some((content, attribute)) = self.file(at) else { return };
        let overwrite = |content: &mut Vec<u8>, offset: usize, byte, grows| {
            let end = offset + new.len;
            if grows && end > content.len() {
                content.resize(end, 0);
            }
            let len = content.len();
            content[offset.min(len)..end.min(len)].fill(byte);
        };
        match change {
            Change::Append => content.extend(new.bytes()),
            Change::Write { offset } | Change::WriteAtomic { offset } => {
                overwrite(content, offset, new.byte, true);
            }
            Change::SetLen => content.resize(new.len, 0),
            Change::PunchHole { offset } => overwrite(content, offset, 0, false),
            Change::ZeroRange { offset } => overwrite(content, offset, 0, true),
            Change::KeepSize { .. } => {}
            Change::Collapse { page } => {
                let (start, end) = (page * PAGE, page * PAGE + new.whole_pages());
                if end < content.len() {
                    content.drain(start..end);
                }
            }
            Change::Insert { page } => {
                let start = page * PAGE;
                if start < content.len() {
                    content.splice(start..start, vec![0; new.whole_pages()]);
                }
            }
            Change::WriteRanges { offset } => {
                let [first, second] = places_of(offset, new);
                overwrite(content, first, new.byte, true);
                overwrite(content, second, new.byte, true);
            }
            Change::SetAttribute => *attribute = Some(vec![new.byte; 20]),
        }
    }

    /// Whether this state may be found if the process was killed during `step`.
    pub fn may_be_between(&self, before: &State, step: Step) -> bool {
        let mut after = before.clone();
        after.apply(step);
        if [before, &after].contains(&self) {
            return true;
        }
        let Step::Change { at, change, .. } = step else { return false };
        match change {
            // The file is created first.
            Change::Append => {
                let mut empty = before.clone();
                if !empty.names.contains_key(&at) && empty.has_directory(at) {
                    empty.put(at, Node::File { content: Vec::new(), attribute: None });
                }
                *self == empty
            }
            // Bytes that have pages are overwritten in place, before the size changes.
            Change::Write { .. } | Change::PunchHole { .. } | Change::ZeroRange { .. } => {
                let (mut found, mut was) = (self.clone(), before.clone());
                let contents = (found.file(at), was.file(at), after.file(at));
                let (Some((found_bytes, _)), Some((old, _)), Some((new, _))) = contents else {
                    return false;
                };
                let is_between = found_bytes.len() == old.len()
                    && (found_bytes.iter().zip(&*old).zip(&*new))
                        .all(|((found, old), new)| found == old || found == new);
                // And everything else is unchanged.
                found_bytes.clear();
                old.clear();
                is_between && found == was
            }
            _ => false,
        }
    }
}
