//! Crash states: whatever a power cut leaves, the tree is as it was at one moment after the last sync, no file has a byte that it
//! never had there, and what was synced is there.
//!
//! A history is a run of random operations on a tiny pool, whose pages are freed and reused all the time. After each operation
//! everything is read and kept: [`Snapshot`]. Every operation is one change of the metadata, so the tree after a crash is that of
//! a snapshot, not older than the last one that a sync covered and not newer than the operation under way. Content is written in
//! place, so each byte may be what it was in *any* of these snapshots. Each operation writes bytes of its own value: a byte of another
//! file, or of an earlier owner of the page, is none of those.

mod scratch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use aquifer_fs::{Allocate, File, FileOptions, Files, FsError, RenameMode, SetMode};
use aquifer_pool::check::{CheckOptions, check_on};
use aquifer_pool::format::file::FileKind;
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{CreateOptions, Mutant, OpenOptions, Pool};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::crash::{
    CrashFailure, CrashMedia, CrashState, Explored, Mark, Plan, Recording, Verdict, explore,
};
use aquifer_testkit::rng::Rng;
use scratch::soundness;

const POOL_BYTES: u64 = 512 << 10;
/// The number of the machine's start; each power cut raises it.
const BOOT: u64 = 1;
/// Made by a check whose recovery was crashed.
const AFTER: &str = "/after";

/// Inode and incarnation: names a file for ever.
type Identity = (u64, u64);

/// Everything that a path says, but for bytes and times.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    identity: Identity,
    kind: FileKind,
    links: u32,
    mode: u32,
    size_bytes: u64,
    target: Option<PathBuf>,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// All files at one moment.
#[derive(Debug, Clone, Default)]
struct Snapshot {
    entries: BTreeMap<PathBuf, Entry>,
    contents: BTreeMap<Identity, Vec<u8>>,
}

impl Snapshot {
    fn take(files: &Files) -> Result<Snapshot, FsError> {
        let (mut snapshot, mut left) = (Snapshot::default(), vec![PathBuf::from("/")]);
        while let Some(directory) = left.pop() {
            for name in scratch::names(files, &directory)? {
                let path = directory.join(name);
                let metadata = files.symlink_metadata(&path)?;
                let identity = (metadata.number(), metadata.incarnation());
                let mut attributes = BTreeMap::new();
                match metadata.kind() {
                    FileKind::Directory => left.push(path.clone()),
                    FileKind::File => {
                        for name in files.attributes(&path)? {
                            let value = files.attribute(&path, &name)?;
                            attributes.insert(name, value);
                        }
                        let content = scratch::read_all(files, &path)?;
                        snapshot.contents.insert(identity, content);
                    }
                    _ => {}
                }
                let target = match metadata.is_symlink() {
                    true => Some(files.read_link(&path)?),
                    false => None,
                };
                let entry = Entry {
                    identity,
                    kind: metadata.kind(),
                    links: metadata.links(),
                    mode: metadata.mode(),
                    size_bytes: metadata.len(),
                    target,
                    attributes,
                };
                snapshot.entries.insert(path, entry);
            }
        }
        Ok(snapshot)
    }
}

/// What an operation has made durable, once it is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Durable {
    /// All names, and the content of all files.
    All,
    /// All names, and the content of this file.
    Content(Identity),
}

/// The snapshot with index *id* was taken after operation *id*.
#[derive(Default)]
struct History {
    snapshots: Vec<Snapshot>,
    operations: Vec<String>,
    /// Of operations that are acknowledged.
    durable: BTreeMap<u64, Durable>,
}

fn options(boot: u64, mutant: Option<Mutant>) -> OpenOptions {
    let boot = Some(boot);
    OpenOptions { exclusive: true, background: false, boot, mutant, ..OpenOptions::default() }
}

fn open(media: &Arc<CrashMedia>, boot: u64, mutant: Option<Mutant>) -> Result<Files, FsError> {
    Ok(Files::new(Pool::open_on(media.clone(), &options(boot, mutant))?))
}

/// Everything, with the content of files that are open and have no name any more: a crash may undo that they were removed.
fn observe(program: &Program) -> Result<Snapshot, FsError> {
    let mut snapshot = Snapshot::take(program.files())?;
    for file in &program.handles {
        let metadata = file.metadata()?;
        let mut content = vec![0; metadata.len() as usize];
        file.read_at(&mut content, 0)?;
        snapshot.contents.insert((metadata.number(), metadata.incarnation()), content);
    }
    Ok(snapshot)
}

/// A program at work.
struct Program {
    media: Arc<CrashMedia>,
    mutant: Option<Mutant>,
    files: Option<Files>,
    handles: Vec<File>,
    rng: Rng,
}

impl Program {
    fn files(&self) -> &Files {
        self.files.as_ref().unwrap()
    }

    fn path(&mut self) -> String {
        let directory = ["", "/d", "/d/e"][self.rng.below(3) as usize];
        format!("{directory}/{}", ["a", "b", "c", "d", "e"][self.rng.below(5) as usize])
    }

    /// A place in a file, and a length.
    fn range(&mut self) -> (u64, u64) {
        let offset = match self.rng.below(3) {
            0 => self.rng.below(20_000),
            1 => self.rng.below(5) * 4096,
            _ => 0,
        };
        let len = match self.rng.below(3) {
            0 => 1 + self.rng.below(300),
            1 => 4096 * (1 + self.rng.below(3)),
            _ => 1 + self.rng.below(12_000),
        };
        (offset, len)
    }

    /// A handle to some file that is there, new or kept.
    fn file(&mut self) -> Result<File, FsError> {
        if !self.handles.is_empty() && self.rng.chance(0.3) {
            let index = self.rng.below(self.handles.len() as u64) as usize;
            return Ok(self.handles[index].clone());
        }
        let options = FileOptions::new().read(true).write(true);
        let mut opened = self.open(&options);
        for _ in 0..10 {
            if opened.is_err() {
                opened = self.open(&options);
            }
        }
        opened
    }

    fn open(&mut self, options: &FileOptions) -> Result<File, FsError> {
        let path = self.path();
        let file = self.files().open_with(path, options)?;
        if self.rng.chance(0.2) {
            self.handles.truncate(2);
            self.handles.insert(0, file.clone());
        }
        Ok(file)
    }

    /// One random operation, which writes this byte if it writes; in words, with what it has made durable.
    fn operate(&mut self, byte: u8) -> (String, Result<Option<Durable>, FsError>) {
        let what = self.rng.below(100);
        let (path, other) = (self.path(), self.path());
        let (offset, len) = self.range();
        let bytes = vec![byte; len as usize];
        let files = self.files().clone();
        let (text, outcome) = match what {
            0..12 => {
                let options = FileOptions::new().read(true).write(true).create(true);
                let options = options.truncate(self.rng.chance(0.3));
                ("make or truncate".to_owned(), self.open(&options).map(drop))
            }
            12..17 => match self.file() {
                Ok(file) => {
                    let text = format!("write_atomic {} at {offset}, {len}", describe(&file));
                    (text, file.write_atomic(&bytes, offset))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            17..22 => match self.file().and_then(|one| Ok((one, self.file()?))) {
                Ok((one, other)) => {
                    let [from, to] = [self.rng.below(3), self.rng.below(3)].map(|page| page * 4096);
                    let (first, second) = (describe(&one), describe(&other));
                    let text = format!("pswap {first} at {from} and {second} at {to}");
                    (text, one.pswap(from, &other, to, 4096 * (1 + self.rng.below(2))))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            22..35 => match self.file() {
                Ok(file) => {
                    let text = format!("write {} at {offset}, {len}", describe(&file));
                    (text, file.write_at(&bytes, offset))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            35..43 => match self.file() {
                Ok(file) => {
                    let text = format!("set_len {} {offset}", describe(&file));
                    (text, file.set_len(offset))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            43..51 => match self.file() {
                Ok(file) => {
                    let mode = [
                        Allocate::Extend,
                        Allocate::KeepSize,
                        Allocate::PunchHole,
                        Allocate::ZeroRange,
                    ][self.rng.below(4) as usize];
                    let text = format!("{mode:?} {} at {offset}, {len}", describe(&file));
                    (text, file.allocate(mode, offset, len))
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            51..55 => match self.file() {
                Ok(file) => {
                    let metadata = file.metadata().unwrap();
                    let identity = (metadata.number(), metadata.incarnation());
                    file.sync_all().unwrap();
                    let text = format!("sync {}", describe(&file));
                    return (text, Ok(Some(Durable::Content(identity))));
                }
                Err(error) => ("open".to_owned(), Err(error)),
            },
            55..60 => {
                files.sync().unwrap();
                return ("sync".to_owned(), Ok(Some(Durable::All)));
            }
            60..68 => (format!("remove {path}"), files.remove_file(&path)),
            68..76 => {
                let mode = match self.rng.below(4) {
                    0 => RenameMode::Exchange,
                    1 => RenameMode::NoReplace,
                    _ => RenameMode::Replace,
                };
                (format!("{mode:?} {path} {other}"), files.rename_with(&path, &other, mode))
            }
            76..80 => (format!("link {path} {other}"), files.hard_link(&path, &other)),
            80..84 => {
                let directory = ["/d", "/d/e"][self.rng.below(2) as usize];
                (format!("create {directory}"), files.create_dir(directory))
            }
            84..86 => (format!("remove directory {path}"), files.remove_dir(&path)),
            86..89 => {
                let target = "t".repeat([5, 900][self.rng.below(2) as usize]);
                (format!("symlink {path}"), files.symlink(target, &path))
            }
            89..93 => {
                let value = vec![byte; self.rng.below(700) as usize];
                let outcome = files.set_attribute(&path, "user.a", value, SetMode::Any);
                (format!("attribute of {path}"), outcome)
            }
            93..95 => {
                (format!("mode of {path}"), files.set_permissions(&path, 0o600 + u32::from(byte)))
            }
            95..98 => {
                files.pool().checkpoint().unwrap();
                ("checkpoint".to_owned(), Ok(()))
            }
            _ => {
                drop(files);
                self.handles.clear();
                self.files = None;
                self.files = Some(open(&self.media, BOOT, self.mutant).unwrap());
                ("reopen".to_owned(), Ok(()))
            }
        };
        (text, outcome.map(|()| None))
    }
}

fn describe(file: &File) -> String {
    let metadata = file.metadata().unwrap();
    format!("{}.{} of {} bytes", metadata.number(), metadata.incarnation(), metadata.len())
}

/// Runs random operations on fresh media, and records them.
fn record(
    seed: u64,
    operations: u64,
    domain: PersistenceDomain,
    mutant: Option<Mutant>,
) -> (Recording, History) {
    assert!(operations < 255, "each operation has a byte of its own");
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, domain).unwrap());
    let create =
        CreateOptions { inodes: Some(127), log_bytes: Some(64 << 10), ..CreateOptions::default() };
    Pool::create_on(fresh.clone(), &create, &options(BOOT, None)).unwrap();
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), domain).unwrap());
    let files = Some(open(&media, BOOT, mutant).unwrap());
    let (handles, rng) = (Vec::new(), Rng::new(seed));
    let mut program = Program { media: media.clone(), mutant, files, handles, rng };
    let mut history = History::default();
    history.snapshots.push(observe(&program).unwrap());
    history.operations.push("nothing".to_owned());
    history.durable.insert(0, Durable::All);
    media.begin(0);
    media.acknowledge(0);
    for id in 1..=operations {
        media.begin(id);
        let (mut text, outcome) = program.operate(id as u8);
        if let Err(error) = &outcome {
            assert!(!matches!(error, FsError::Damaged { .. }), "seed {seed}, {text}: {error}");
            text.push_str(&format!(", refused: {error}"));
        }
        let durable = outcome.ok().flatten();
        history.operations.push(text);
        history.snapshots.push(observe(&program).unwrap());
        // A process that dies loses nothing that it has done.
        let dies = domain == PersistenceDomain::Volatile;
        if let Some(durable) = if dies { Some(Durable::All) } else { durable } {
            history.durable.insert(id, durable);
            media.acknowledge(id);
        }
        if mutant.is_none() && domain != PersistenceDomain::Volatile && id % 16 == 0 {
            check_killed(&media, domain, &history, seed);
        }
    }
    // The program is lost in the crash: what its ending does is not part of the recording.
    let recording = media.recording();
    drop(program);
    (recording, history)
}

/// If only the process dies, everything that it has done is there.
fn check_killed(media: &CrashMedia, domain: PersistenceDomain, history: &History, seed: u64) {
    let media = Arc::new(CrashMedia::from_image(&media.image(), domain).unwrap());
    let files = open(&media, BOOT, None).unwrap();
    let found = Snapshot::take(&files).unwrap();
    let last = history.snapshots.last().unwrap();
    let operations = &history.operations;
    assert_eq!(found.entries, last.entries, "seed {seed}: killed after {operations:#?}");
    for (identity, content) in &found.contents {
        assert!(last.contents[identity] == *content, "seed {seed}: killed after {operations:#?}");
    }
    soundness::assert_sound(files.pool());
}

/// Recovers a crash state and compares it with what the marks allow.
fn check(
    state: &CrashState<'_>,
    history: &History,
    domain: PersistenceDomain,
    mutant: Option<Mutant>,
) -> Verdict {
    let boot = match domain {
        PersistenceDomain::Volatile => BOOT,
        _ => BOOT + 1 + u64::from(state.depth()),
    };
    let media = Arc::new(state.media()?);
    let report = check_on(&*media, &CheckOptions { boot: Some(boot), ..Default::default() });
    if !report.is_sound() {
        return Err(format!("before recovery: {report}").into());
    }
    let files = open(&media, boot, mutant)?;
    let flaws = soundness::flaws(files.pool());
    if !flaws.is_empty() || !files.pool().orphans()?.is_empty() {
        return Err(format!("not sound: {flaws:?}").into());
    }
    let mut found = Snapshot::take(&files)?;
    if let Some(after) = found.entries.remove(&PathBuf::from(AFTER)) {
        let content = found.contents.remove(&after.identity).unwrap_or_default();
        if content.iter().any(|byte| *byte != 255) {
            return Err("what was made after recovery has foreign bytes".into());
        }
    }
    let id = match_with(&found, history, state)?;
    // From here on the caller has seen this state: a second crash must not change it.
    media.mark(Mark::Note(id as u64));
    // The pool works on, and reuses what is free.
    if !files.exists(AFTER)? {
        match files.create_file(AFTER).and_then(|file| file.write_at(&[255; 6000], 0)) {
            Err(error) if error.errno() != libc::ENOSPC => return Err(error.into()),
            _ => files.sync()?,
        }
    }
    let recording = media.recording();
    drop(files);
    Ok(Some(recording))
}

/// The snapshot that this is, give or take content that was written in place.
fn match_with(
    found: &Snapshot,
    history: &History,
    state: &CrashState<'_>,
) -> Result<usize, String> {
    let marks = state.marks();
    let floor = marks.last_acknowledged().unwrap_or(0) as usize;
    let newest = (marks.in_flight().last().copied().unwrap_or(0) as usize).max(floor);
    let (from, to) = match marks.notes().last() {
        Some(shown) => (*shown as usize, *shown as usize),
        None => (floor, newest),
    };
    let around = |id: usize| {
        let operations: Vec<String> = (id.saturating_sub(6)..=newest)
            .map(|id| format!("{id}: {}", history.operations[id]))
            .collect();
        format!("{operations:#?}")
    };
    let mut reason = None;
    for id in (from..=to).rev().filter(|id| history.snapshots[*id].entries == found.entries) {
        match check_contents(found, history, marks, newest) {
            Ok(()) => return Ok(id),
            Err(error) => reason = Some(format!("as after {id}: {error}; {}", around(id))),
        }
    }
    Err(reason.unwrap_or_else(|| {
        let names: Vec<_> = found.entries.iter().map(|(path, e)| (path, e.size_bytes)).collect();
        format!("a tree of no moment from {from} to {to}: {names:?}; {}", around(from))
    }))
}

fn check_contents(
    found: &Snapshot,
    history: &History,
    marks: &aquifer_testkit::crash::Marks,
    newest: usize,
) -> Result<(), String> {
    for (identity, content) in &found.contents {
        let covers = |durable: &Durable| match durable {
            Durable::All => true,
            Durable::Content(file) => file == identity,
        };
        let floor = (history.durable.iter())
            .filter(|(id, durable)| marks.is_acknowledged(**id) && covers(durable))
            .map(|(id, _)| *id as usize)
            .max()
            .unwrap_or(0);
        let versions: Vec<&Vec<u8>> = (history.snapshots[floor..=newest].iter())
            .filter_map(|snapshot| snapshot.contents.get(identity))
            .collect();
        if versions.contains(&content) {
            continue;
        }
        let is_foreign = |(at, byte): &(usize, &u8)| {
            versions.iter().all(|version| version.get(*at) != Some(*byte))
        };
        if let Some((at, byte)) = content.iter().enumerate().find(is_foreign) {
            let had: Vec<_> = versions.iter().map(|version| version.get(at)).collect();
            return Err(format!(
                "inode {identity:?} has {byte} at {at}, and since {floor} it had {had:?} there"
            ));
        }
    }
    Ok(())
}

fn run(
    seed: u64,
    operations: u64,
    domain: PersistenceDomain,
    budget: u64,
    mutant: Option<Mutant>,
) -> Result<Explored, Box<CrashFailure>> {
    let (recording, history) = record(seed, operations, domain, mutant);
    let plan = Plan { depth: 1, budget, seed };
    explore(&recording, plan, |state| check(state, &history, domain, mutant))
}

fn survives(domain: PersistenceDomain) {
    let first = seed(0);
    let mut states = 0;
    for seed in first..first + steps(5) as u64 {
        match run(seed, 80, domain, 400, None) {
            Ok(explored) => states += explored.states(),
            Err(failure) => panic!("seed {seed}: {failure}"),
        }
    }
    println!("{states} crash states on {domain}");
}

#[test]
fn every_crash_state_on_a_disk_recovers() {
    survives(PersistenceDomain::PageCache);
}

#[test]
fn every_crash_state_on_persistent_memory_recovers() {
    survives(PersistenceDomain::Dax);
}

#[test]
fn every_killed_process_in_memory_files_recovers() {
    survives(PersistenceDomain::Volatile);
}

/// Deliberate mistakes of the pool, seen through files.
#[test]
fn mutants_are_caught() {
    let domain = PersistenceDomain::PageCache;
    let mut missed = Vec::new();
    for mutant in [Mutant::CommitBeforeData, Mutant::CountExposed, Mutant::EarlyReuse] {
        let noticed = |seed| {
            // The pool may notice by itself, and refuse to go on.
            match std::panic::catch_unwind(|| run(seed, 80, domain, 1500, Some(mutant))) {
                Ok(outcome) => outcome.err().map(|failure| failure.reason.clone()),
                Err(_) => Some("the work failed".to_owned()),
            }
        };
        match (0..20).find_map(noticed) {
            Some(reason) => println!("{mutant:?}: {reason}"),
            None => missed.push(mutant),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}
