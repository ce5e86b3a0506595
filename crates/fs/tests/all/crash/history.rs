//! The history of a program's operations, and the states that a crash may leave.
//!
//! After each operation everything is read and kept: [`Snapshot`]. Every operation is one change of
//! the metadata, so the tree after a crash is that of a snapshot, not older than the last one
//! covered by a sync and not newer than the current operation. Content is written in place, so each
//! byte may be as in *any* of these snapshots. Each operation writes its own byte value, so a byte
//! of another file, or of an earlier owner of the page, matches none of them. After a crash, free
//! space must still read as zeros when it is allocated as zeros.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use aquifer_check::CheckOptions;
use aquifer_crashkit::{CrashMedia, CrashState, Mark, Marks, Verdict};
use aquifer_fs::{FallocateMode, File, Files, FsError};
use aquifer_pool::format::file::FileKind;
use aquifer_pool::format::superblock::KNOWN_FEATURES;
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Mutant, Pool, PoolOptions};

use crate::scratch::{self, soundness};

const POOL_BYTES: u64 = 512 << 10;
/// The boot number of the machine; each power cut raises it.
pub const BOOT: u64 = 1;
/// Created by a check whose recovery was crashed.
const AFTER: &str = "/after";

/// Inode and generation: identifies a file forever.
pub type Identity = (u64, u64);

/// All metadata of a path except times; without content.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    identity: Identity,
    kind: FileKind,
    links: u64,
    mode: u32,
    size_bytes: u64,
    rdev: u64,
    target: Option<PathBuf>,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// All files at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
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
                let identity = (metadata.ino(), metadata.generation());
                let mut attributes = BTreeMap::new();
                let node = metadata.node();
                for name in files.nodes().attributes(node)? {
                    let value = files.nodes().attribute(node, &name)?;
                    attributes.insert(name, value);
                }
                match metadata.file_type().kind() {
                    FileKind::Directory => left.push(path.clone()),
                    FileKind::File => {
                        let content = scratch::read_all(files, &path)?;
                        snapshot.contents.insert(identity, content);
                    }
                    _ => {}
                }
                let target =
                    if metadata.is_symlink() { Some(files.read_link(&path)?) } else { None };
                let entry = Entry {
                    identity,
                    kind: metadata.file_type().kind(),
                    links: metadata.nlink(),
                    mode: metadata.mode() & 0o7777,
                    size_bytes: metadata.len(),
                    rdev: metadata.rdev(),
                    target,
                    attributes,
                };
                snapshot.entries.insert(path, entry);
            }
        }
        Ok(snapshot)
    }
}

/// What an operation has made durable when it is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durable {
    /// All names, and the content of all files.
    All,
    /// All names, and the content of this file.
    Content(Identity),
}

/// The snapshot with index *id* was taken after operation *id*.
#[derive(Default)]
pub struct History {
    snapshots: Vec<Snapshot>,
    pub operations: Vec<String>,
    /// The durable parts of acknowledged operations.
    durable: BTreeMap<u64, Durable>,
    /// Whether no operation writes content in place.
    is_whole: bool,
}

fn options(boot: u64, mutant: Option<Mutant>) -> PoolOptions {
    Pool::options().exclusive(true).background(false).boot(boot).mutant(mutant)
}

pub fn open(media: &Arc<CrashMedia>, boot: u64, mutant: Option<Mutant>) -> Result<Files, FsError> {
    Ok(Files::new(options(boot, mutant).open_on(media.clone())?))
}

/// Takes a snapshot, including the content of open files without a name: a crash may undo their
/// removal.
fn observe(files: &Files, handles: &[File]) -> Result<Snapshot, FsError> {
    let mut snapshot = Snapshot::take(files)?;
    for file in handles {
        let metadata = file.metadata()?;
        let mut content = vec![0; metadata.len() as usize];
        file.read_at(&mut content, 0)?;
        snapshot.contents.insert(identity(file), content);
    }
    Ok(snapshot)
}

pub fn identity(file: &File) -> Identity {
    let metadata = file.metadata().unwrap();
    (metadata.ino(), metadata.generation())
}

/// Creates a tiny pool on recording media, all of it durable; `fill` creates its content.
pub fn fresh_media(domain: PersistenceDomain, fill: impl FnOnce(&Files)) -> Arc<CrashMedia> {
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, domain).unwrap());
    let small = options(BOOT, None).inodes(127).log_bytes(64 << 10).features(KNOWN_FEATURES);
    let files = Files::new(small.create_on(fresh.clone()).unwrap());
    fill(&files);
    drop(files);
    Arc::new(CrashMedia::from_image(&fresh.image(), domain).unwrap())
}

impl History {
    /// Starts with the current files, which are durable.
    pub fn begin(media: &CrashMedia, files: &Files) -> History {
        let mut history = History::default();
        history.snapshots.push(observe(files, &[]).unwrap());
        history.operations.push("nothing".to_owned());
        history.durable.insert(0, Durable::All);
        media.begin(0);
        media.acknowledge(0);
        history
    }

    /// The same for operations none of which writes content in place: the content of a file is
    /// that of a snapshot.
    pub fn of_whole_contents(self) -> History {
        History { is_whole: true, ..self }
    }

    /// The number of the last operation.
    pub fn last(&self) -> u64 {
        self.operations.len() as u64 - 1
    }

    /// Records the result of an operation.
    pub fn note(
        &mut self,
        media: &CrashMedia,
        domain: PersistenceDomain,
        (files, handles): (&Files, &[File]),
        (text, outcome): (String, Result<Option<Durable>, FsError>),
    ) {
        let refused = outcome.as_ref().err().map(|error| format!(", refused: {error}"));
        if let Err(error) = &outcome {
            assert!(!matches!(error, FsError::Damaged { .. }), "{text}: {error}");
        }
        self.operations.push(text + &refused.unwrap_or_default());
        self.snapshots.push(observe(files, handles).unwrap());
        // A process that dies loses none of its completed operations.
        let dies = domain == PersistenceDomain::Volatile;
        if let Some(durable) = if dies { Some(Durable::All) } else { outcome.ok().flatten() } {
            self.durable.insert(self.last(), durable);
            media.acknowledge(self.last());
        }
    }
}

/// If only the process dies, all its operations are there.
pub fn check_killed(media: &CrashMedia, domain: PersistenceDomain, history: &History) {
    let media = Arc::new(CrashMedia::from_image(&media.image(), domain).unwrap());
    let files = open(&media, BOOT, None).unwrap();
    let found = Snapshot::take(&files).unwrap();
    let last = history.snapshots.last().unwrap();
    let operations = &history.operations;
    assert_eq!(found.entries, last.entries, "killed after {operations:#?}");
    for (identity, content) in &found.contents {
        assert!(last.contents[identity] == *content, "killed after {operations:#?}");
    }
    soundness::assert_sound(files.pool());
}

/// Recovers a crash state and compares it with what the marks allow.
pub fn check(
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
    let report = aquifer_check::check(
        media.clone(),
        &CheckOptions { boot: Some(boot), ..Default::default() },
    )
    .unwrap();
    if !report.is_sound() {
        return Err(format!("before recovery: {report}").into());
    }
    let files = open(&media, boot, mutant)?;
    let inconsistencies = soundness::inconsistencies(files.pool());
    if !inconsistencies.is_empty() || !files.pool().orphans()?.is_empty() {
        return Err(format!("not sound: {inconsistencies:?}").into());
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
    // The pool keeps working, and reuses free space.
    if !files.exists(AFTER)? {
        match files.create_file(AFTER).and_then(|file| file.write_all_at(&[255; 6000], 0)) {
            Err(error) if error.errno() != libc::ENOSPC => return Err(error.into()),
            _ => files.sync()?,
        }
    }
    let recording = media.recording();
    check_zeros(&files)?;
    drop(files);
    Ok(Some(recording))
}

/// Free space that is allocated as zeros is zero, whatever its previous owner.
fn check_zeros(files: &Files) -> Result<(), Box<dyn std::error::Error>> {
    files.pool().checkpoint()?;
    let space = files.space()?;
    if space.free_slots < 8 || space.free_bytes == 0 {
        return Ok(());
    }
    let zeros = files.create_file("/zeros")?;
    zeros.allocate(FallocateMode::Extend, 0, space.free_bytes)?;
    let content = scratch::read_all(files, "/zeros")?;
    match content.iter().position(|byte| *byte != 0) {
        Some(at) => Err(format!("new space has {} at {at}", content[at]).into()),
        None => Ok(()),
    }
}

/// Finds the snapshot that this matches, except for content written in place.
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
    marks: &Marks,
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
        if history.is_whole {
            return Err(format!("inode {identity:?} has the content of no moment since {floor}"));
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
