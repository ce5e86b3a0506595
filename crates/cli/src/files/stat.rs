//! `aquifer stat` of files: the fields of their inodes, and whether they are locked.

use anyhow::Result;
use aquifer::Files;
use aquifer::fs::LockMode;
use aquifer_sys::units::Bytes;
use serde::Serialize;

use super::entry::{self, Device, Entry};
use super::failure::{At, Failures};
use super::place::last_name;
use super::{Place, Pools};
use crate::access::ReadAccess;
use crate::output;

/// How the files are shown.
#[derive(Debug, Clone, Copy)]
pub struct StatArgs<'a> {
    pub follow: bool,
    pub json: bool,
    pub access: &'a ReadAccess,
}

#[derive(Serialize)]
struct Report {
    entries: Vec<Shown>,
}

#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    entry: Entry,
    /// The mode in which a process has locked the whole file.
    locked: Option<&'static str>,
    /// The first range that a process has locked.
    locked_range: Option<LockedRange>,
}

#[derive(Serialize)]
struct LockedRange {
    start: u64,
    /// `None` if the range is unbounded.
    end: Option<u64>,
    locked: &'static str,
}

fn mode_name(mode: LockMode) -> &'static str {
    match mode {
        LockMode::Shared => "shared",
        LockMode::Exclusive => "exclusive",
    }
}

impl Shown {
    fn of(files: &Files, place: &Place, entry: Entry) -> Result<Shown> {
        if entry.kind() != "file" {
            return Ok(Shown { entry, locked: None, locked_range: None });
        }
        let file = files.options().read(true).open(place.path()).at(place)?;
        let range = file.range_lock_conflict(.., LockMode::Exclusive).at(place)?;
        Ok(Shown {
            entry,
            locked: file.lock_conflict(LockMode::Exclusive).at(place)?.map(mode_name),
            locked_range: range.map(|held| LockedRange {
                start: held.range.start,
                end: Some(held.range.end).filter(|end| *end < u64::MAX),
                locked: mode_name(held.mode),
            }),
        })
    }

    fn locks(&self) -> Option<String> {
        let range =
            self.locked_range.as_ref().map(|LockedRange { start, end, locked }| match end {
                Some(end) => format!("bytes {start} to {} {locked}", end - 1),
                None => format!("bytes from {start} on {locked}"),
            });
        let parts: Vec<String> = self.locked.map(str::to_owned).into_iter().chain(range).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// Prints the files.
pub fn run(args: StatArgs<'_>, places: &[Place]) -> Result<()> {
    let mut pools = Pools::to_read(args.access);
    let mut failures = Failures::default();
    let mut entries = Vec::new();
    for place in places {
        match look(args, &mut pools, place) {
            Ok(shown) if args.json => entries.push(shown),
            Ok(shown) => output::print(&to_text(place, &shown))?,
            Err(error) => failures.note(Err(error))?,
        }
    }
    if args.json {
        output::print_json(&Report { entries }, true)?;
    }
    failures.end()
}

fn look(args: StatArgs<'_>, pools: &mut Pools, place: &Place) -> Result<Shown> {
    let files = pools.files(place)?;
    let metadata = if args.follow {
        files.metadata(place.path())
    } else {
        files.symlink_metadata(place.path())
    };
    let name = last_name(place.path()).unwrap_or("/".into());
    let entry = Entry::of(&files, place, &name, &metadata.at(place)?)?;
    Shown::of(&files, place, entry)
}

fn to_text(place: &Place, shown: &Shown) -> String {
    let entry = &shown.entry;
    let (uid, gid) = entry.owner();
    let len = match entry.kind() {
        "directory" => output::several(entry.len(), "name"),
        _ if entry.len() < 1024 => Bytes(entry.len()).to_string(),
        _ => format!("{}: {} bytes", Bytes(entry.len()), output::count(entry.len())),
    };
    let [accessed, changed, created] = entry.other_times_ns().map(entry::moment);
    let mut lines = vec![
        ("kind", entry.kind().to_owned()),
        ("length", len),
        ("allocated", Bytes(entry.allocated_bytes()).to_string()),
        ("inode", entry.inode().to_string()),
        ("links", entry.links().to_string()),
        ("permissions", format!("{} ({:o})", entry.permissions(), entry.mode())),
        ("owner", format!("user {uid}, group {gid}")),
        ("modified", entry::moment(entry.modified_ns())),
        ("accessed", accessed),
        ("changed", changed),
        ("created", created),
    ];
    if let Some(target) = entry.raw_target() {
        lines.insert(1, ("target", output::escaped(target)));
    }
    if let Some(Device { major, minor }) = entry.device() {
        lines.insert(1, ("device", format!("major {major}, minor {minor}")));
    }
    if entry.is_immutable() {
        lines.push(("immutable", "yes".to_owned()));
    }
    lines.extend(shown.locks().map(|locks| ("locked", locks)));
    let lines: Vec<_> = lines.into_iter().map(|(name, value)| [name.to_owned(), value]).collect();
    format!("{}\n{}", place.show(), output::columns(&lines))
}
