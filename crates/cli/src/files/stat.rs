//! `aquifer stat` of files: everything that their inodes say.

use anyhow::Result;
use aquifer_bench::Bytes;
use serde::Serialize;

use super::entry::{self, Entry};
use super::failure::{At, Failures};
use super::place::last_name;
use super::{Place, Pools};
use crate::output;

/// How they are shown.
#[derive(Debug, Clone, Copy)]
pub struct StatArgs {
    pub follow: bool,
    pub json: bool,
}

#[derive(Serialize)]
struct Report {
    entries: Vec<Entry>,
}

/// Prints it.
pub fn run(args: StatArgs, places: &[Place]) -> Result<()> {
    let mut pools = Pools::to_read();
    let mut failures = Failures::default();
    let mut entries = Vec::new();
    for place in places {
        match look(args, &mut pools, place) {
            Ok(entry) if args.json => entries.push(entry),
            Ok(entry) => output::print(&to_text(place, &entry))?,
            Err(error) => failures.note(Err(error))?,
        }
    }
    if args.json {
        output::print_json(&Report { entries }, true)?;
    }
    failures.end()
}

fn look(args: StatArgs, pools: &mut Pools, place: &Place) -> Result<Entry> {
    let files = pools.files(place)?;
    let metadata = match args.follow {
        true => files.metadata(place.path()),
        false => files.symlink_metadata(place.path()),
    };
    let name = last_name(place.path()).unwrap_or("/".into());
    Entry::of(&files, place, &name, &metadata.at(place)?)
}

fn to_text(place: &Place, entry: &Entry) -> String {
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
        ("takes", format!("{} of the pool", Bytes(entry.allocated_bytes()))),
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
        lines.insert(1, ("leads to", output::escaped(target)));
    }
    if entry.is_immutable() {
        lines.push(("immutable", "yes".to_owned()));
    }
    let lines: Vec<_> = lines.into_iter().map(|(name, value)| [name.to_owned(), value]).collect();
    format!("{}\n{}", place.show(), output::columns(&lines))
}
