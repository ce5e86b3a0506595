//! `aquifer ls`: lists the names in a directory of a pool.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::Result;
use aquifer::Files;
use aquifer_sys::units::Bytes;
use clap::builder::{OsStringValueParser, TypedValueParser};
use serde::Serialize;

use super::entry::{self, Device, Entry};
use super::failure::{At, Failures};
use super::names::sorted_names;
use super::place::last_name;
use super::{PATHS_HELP, Place, Pools};
use crate::access::ReadAccess;
use crate::output;

/// Arguments of `aquifer ls`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true, after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Directories, whose entries are listed, and files; a pool alone stands for its root
    #[arg(required = true, value_parser = place_or_pool(), value_name = "POOL[:/PATH]")]
    places: Vec<Place>,

    /// Long format: also permissions, links, owner, group, length in bytes (number of entries for a
    /// directory) and time of modification
    #[arg(short)]
    long: bool,

    /// Include names that begin with a dot
    #[arg(short, long)]
    all: bool,

    /// List subdirectories recursively
    #[arg(short = 'R', long)]
    recursive: bool,

    /// List directories themselves, not their entries
    #[arg(short, long)]
    directory: bool,

    /// Show lengths like 1.5 MiB
    #[arg(short, long)]
    human_readable: bool,

    /// Also show inode numbers
    #[arg(short, long)]
    inode: bool,

    /// Sort by time, newest first
    #[arg(short = 't', conflicts_with = "by_size")]
    by_time: bool,

    /// Sort by length, longest first
    #[arg(short = 'S')]
    by_size: bool,

    /// Reverse the order
    #[arg(short, long)]
    reverse: bool,

    /// Print one JSON object: one list of all entries, with the fields of `aquifer stat`
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    access: ReadAccess,

    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

const EXAMPLES: &str = "\
Examples:
  aquifer ls data.pool                                          names in the root
  aquifer ls -lh data.pool:/logs                                with lengths and times, in UTC
  aquifer ls -R --json data.pool:/ | jq -r '.entries[].path'    for programs

On a terminal, unprintable bytes of names are escaped; otherwise names are written unchanged.";

fn place_or_pool() -> impl TypedValueParser<Value = Place> {
    OsStringValueParser::new().try_map(Place::parse_or_root)
}

#[derive(Serialize)]
struct Report {
    entries: Vec<Entry>,
}

/// Prints the listing.
pub fn run(args: &Args) -> Result<()> {
    let mut listing =
        Listing { args, pools: Pools::to_read(&args.access), entries: Vec::new(), is_later: false };
    let mut failures = Failures::default();
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    for place in &args.places {
        match listing.look(place) {
            Ok((entry, true)) if !args.directory => directories.push((place.clone(), entry)),
            Ok((entry, _)) => files.push(entry),
            Err(error) => failures.note(Err(error))?,
        }
    }
    listing.show(None, files)?;
    let with_headers = args.recursive || args.places.len() > 1;
    for (place, _) in directories {
        listing.directory(&place, with_headers, &mut failures)?;
    }
    if args.json {
        output::print_json(&Report { entries: listing.entries }, true)?;
    }
    failures.end()
}

struct Listing<'a> {
    args: &'a Args,
    pools: Pools,
    /// Collected for JSON, which is printed at the end.
    entries: Vec<Entry>,
    /// Whether something has been printed.
    is_later: bool,
}

impl Listing<'_> {
    /// The entry at a place from the command line, and whether to list it as a directory.
    fn look(&mut self, place: &Place) -> Result<(Entry, bool)> {
        let files = self.pools.files(place)?;
        let link = files.symlink_metadata(place.path()).at(place)?;
        // Like `ls`: a link to a directory is followed, unless the link itself is to be described.
        let follows = link.is_symlink() && !self.args.long && !self.args.directory;
        let is_directory =
            link.is_dir() || (follows && files.metadata(place.path()).is_ok_and(|at| at.is_dir()));
        let name = last_name(place.path()).unwrap_or("/".into());
        let entry = Entry::of(&files, place, &name, &link)?;
        Ok((entry.named(place.path()), is_directory))
    }

    fn directory(
        &mut self,
        start: &Place,
        with_headers: bool,
        failures: &mut Failures,
    ) -> Result<()> {
        let files = self.pools.files(start)?;
        let mut ahead = vec![start.clone()];
        while let Some(directory) = ahead.pop() {
            let (entries, mut below) = match self.entries_in(&files, &directory, failures) {
                Ok(found) => found,
                Err(error) => {
                    failures.note(Err(error))?;
                    continue;
                }
            };
            self.show(with_headers.then_some(&directory), entries)?;
            if self.args.recursive {
                below.reverse();
                ahead.append(&mut below);
            }
        }
        Ok(())
    }

    /// The entries of a directory, and those of them that are directories.
    fn entries_in(
        &self,
        files: &Files,
        directory: &Place,
        failures: &mut Failures,
    ) -> Result<(Vec<Entry>, Vec<Place>)> {
        let (mut entries, mut below) = (Vec::new(), Vec::new());
        for name in sorted_names(files, directory)? {
            if name.as_bytes().starts_with(b".") && !self.args.all {
                continue;
            }
            let place = directory.with_path(directory.path().join(&name));
            match describe(files, &place, &name) {
                Ok((entry, is_directory)) => {
                    entries.push(entry);
                    below.extend(is_directory.then_some(place));
                }
                Err(error) => failures.note(Err(error))?,
            }
        }
        Ok((entries, below))
    }

    fn sort(&self, entries: &mut [Entry]) {
        if self.args.by_time {
            entries.sort_by_key(|entry| std::cmp::Reverse(entry.modified_ns()));
        } else if self.args.by_size {
            entries.sort_by_key(|entry| std::cmp::Reverse(entry.len()));
        }
        if self.args.reverse {
            entries.reverse();
        }
    }

    fn show(&mut self, header: Option<&Place>, mut entries: Vec<Entry>) -> Result<()> {
        if entries.is_empty() && header.is_none() {
            return Ok(());
        }
        self.sort(&mut entries);
        if self.args.json {
            self.entries.append(&mut entries);
            return Ok(());
        }
        let escapes = std::io::stdout().is_terminal();
        let shown = |bytes: &[u8]| {
            if escapes { output::escaped(bytes).into_bytes() } else { bytes.to_vec() }
        };
        let mut text = Vec::new();
        if let Some(header) = header {
            if self.is_later {
                text.push(b'\n');
            }
            text.extend(shown(&header.to_bytes()));
            text.extend_from_slice(b":\n");
        }
        for (columns, entry) in self.columns(&entries).iter().zip(&entries) {
            text.extend_from_slice(columns.as_bytes());
            text.extend(shown(entry.raw_name()));
            if let Some(target) = entry.raw_target().filter(|_| self.args.long) {
                text.extend_from_slice(b" -> ");
                text.extend(shown(target));
            }
            text.push(b'\n');
        }
        self.is_later = true;
        output::print_bytes(&text)
    }

    /// The columns before each name.
    fn columns(&self, entries: &[Entry]) -> Vec<String> {
        let mut rows: Vec<Vec<String>> = vec![Vec::new(); entries.len()];
        for (row, entry) in rows.iter_mut().zip(entries) {
            if self.args.inode {
                row.push(entry.inode().to_string());
            }
            if self.args.long {
                let (uid, gid) = entry.owner();
                let len = match entry.device() {
                    // In the place of the length, as `ls` does.
                    Some(Device { major, minor }) => format!("{major}, {minor}"),
                    None if self.args.human_readable && entry.kind() != "directory" => {
                        Bytes(entry.len()).to_string()
                    }
                    None => entry.len().to_string(),
                };
                row.push(entry.permissions().to_owned());
                row.extend([entry.links().to_string(), uid.to_string(), gid.to_string(), len]);
                row.push(entry::moment(entry.modified_ns()));
            }
        }
        let count = rows.first().map_or(0, Vec::len);
        let widths: Vec<usize> = (0..count)
            .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$} "));
            cells.collect::<String>()
        };
        rows.iter().map(line).collect()
    }
}

fn describe(files: &Files, place: &Place, name: &OsStr) -> Result<(Entry, bool)> {
    let metadata = files.symlink_metadata(place.path()).at(place)?;
    let entry = Entry::of(files, place, name, &metadata)?.named(Path::new(name));
    Ok((entry, metadata.is_dir()))
}
