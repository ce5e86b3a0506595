//! `aquifer find`: finds files of a pool by their properties.
//!
//! The tests are those of `find`, spelled with one dash as there ([`with_two_dashes`]); all of them
//! must hold.

use std::ffi::OsString;
use std::io::{BufWriter, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::str::FromStr;
use std::time::SystemTime;

use anyhow::{Context, Result};
use aquifer::Files;
use aquifer::fs::{FileKind, Metadata};
use serde::Serialize;

use super::entry::Entry;
use super::failure::{At, Failures};
use super::glob::Glob;
use super::place::last_name;
use super::walk::{Step, Walk};
use super::{PATHS_HELP, Place, Pools, place};
use crate::access::ReadAccess;
use crate::output::{self, CANNOT_WRITE};

/// Arguments of `aquifer find`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{PATHS_HELP}"))]
pub struct Args {
    /// Trees to search; symbolic links are not followed
    #[arg(required = true, value_parser = place::parser(), value_name = "POOL:/PATH")]
    places: Vec<Place>,

    /// The name matches this pattern, with *, ? and [a-z] as in a shell
    #[arg(long, value_name = "PATTERN", allow_hyphen_values = true)]
    name: Option<OsString>,

    /// The same, ignoring case
    #[arg(long, value_name = "PATTERN", allow_hyphen_values = true)]
    iname: Option<OsString>,

    /// The path in the pool matches this pattern; * also matches slashes
    #[arg(long, value_name = "PATTERN", allow_hyphen_values = true)]
    path: Option<OsString>,

    /// The kind: f for files, d for directories, l for symbolic links; several separated by commas
    #[arg(long = "type", value_name = "f|d|l", value_delimiter = ',')]
    kinds: Vec<KindLetter>,

    /// The length, rounded up to its unit: 10k exactly, +1M more, -512c less; c is bytes, k KiB,
    /// M MiB, G GiB, and no unit 512 bytes
    #[arg(long, value_name = "[+-]N[ckMG]", allow_hyphen_values = true)]
    size: Option<Length>,

    /// Modified more recently than this file of a pool
    #[arg(long, value_parser = place::parser(), value_name = "POOL:/PATH")]
    newer: Option<Place>,

    /// An empty file or directory
    #[arg(long)]
    empty: bool,

    /// At most this many levels below the path
    #[arg(long, value_name = "N")]
    maxdepth: Option<u64>,

    /// At least this many levels below the path
    #[arg(long, value_name = "N", default_value_t = 0)]
    mindepth: u64,

    /// End each name with a NUL, for `xargs -0`
    #[arg(long)]
    print0: bool,

    /// Print one JSON object with the fields of `aquifer stat`
    #[arg(long, conflicts_with = "print0")]
    json: bool,

    #[command(flatten)]
    access: ReadAccess,
}

const EXAMPLES: &str = "\
Examples:
  aquifer find data.pool:/ -name '*.log' -size +1M
  aquifer find data.pool:/photos -type f -newer data.pool:/last-backup
  aquifer find data.pool:/ -name '*.tmp' -print0 | xargs -0 aquifer rm

Prints the files that pass all tests, as POOL:/PATH, which other commands accept. Options may have one dash or two.";

/// Options that `find` spells with one dash, and whether they take a value.
const LONG_OPTIONS: [(&str, bool); 10] = [
    ("name", true),
    ("iname", true),
    ("path", true),
    ("type", true),
    ("size", true),
    ("newer", true),
    ("maxdepth", true),
    ("mindepth", true),
    ("empty", false),
    ("print0", false),
];

/// The command line with the options of `find` rewritten to two dashes.
pub fn with_two_dashes(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    if arguments.get(1).is_none_or(|command| command != "find") {
        return arguments;
    }
    let mut at = 2;
    while at < arguments.len() && arguments[at] != "--" {
        let bytes = arguments[at].as_bytes();
        let name = bytes.strip_prefix(b"--").or_else(|| bytes.strip_prefix(b"-"));
        let known = LONG_OPTIONS
            .iter()
            .find(|(option, _)| name.is_some_and(|name| name == option.as_bytes()));
        at += 1;
        if let Some((option, takes_value)) = known {
            arguments[at - 1] = OsString::from_vec(format!("--{option}").into_bytes());
            at += usize::from(*takes_value);
        }
    }
    arguments
}

/// A kind of file, as named by `find`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KindLetter(FileKind);

impl FromStr for KindLetter {
    type Err = String;

    fn from_str(text: &str) -> Result<KindLetter, String> {
        match text {
            "f" => Ok(KindLetter(FileKind::File)),
            "d" => Ok(KindLetter(FileKind::Directory)),
            "l" => Ok(KindLetter(FileKind::Symlink)),
            "p" => Ok(KindLetter(FileKind::Fifo)),
            "s" => Ok(KindLetter(FileKind::Socket)),
            "c" => Ok(KindLetter(FileKind::CharDevice)),
            "b" => Ok(KindLetter(FileKind::BlockDevice)),
            _ => Err("write f for files, d for directories, l for symbolic links, p for named \
                      pipes, s for sockets, c or b for devices"
                .to_owned()),
        }
    }
}

/// A length to compare with, in units to which lengths are rounded up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Length {
    wanted: std::cmp::Ordering,
    count: u64,
    unit_bytes: u64,
}

impl FromStr for Length {
    type Err = String;

    fn from_str(text: &str) -> Result<Length, String> {
        use std::cmp::Ordering::{Equal, Greater, Less};

        let (wanted, rest) = match text.split_at_checked(1) {
            Some(("+", rest)) => (Greater, rest),
            Some(("-", rest)) => (Less, rest),
            _ => (Equal, text),
        };
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let unit_bytes = match &rest[digits..] {
            "" | "b" => Some(512),
            "c" => Some(1),
            "w" => Some(2),
            "k" => Some(1 << 10),
            "M" => Some(1 << 20),
            "G" => Some(1 << 30),
            _ => None,
        };
        match (rest[..digits].parse(), unit_bytes) {
            (Ok(count), Some(unit_bytes)) => Ok(Length { wanted, count, unit_bytes }),
            _ => Err(format!("`{text}` is not a length; write for example 10k, +1M or -512c")),
        }
    }
}

impl Length {
    fn fits(self, bytes: u64) -> bool {
        bytes.div_ceil(self.unit_bytes).cmp(&self.count) == self.wanted
    }
}

/// The tests to apply.
struct Tests<'a> {
    args: &'a Args,
    globs: Vec<Glob>,
    path: Option<Glob>,
    newer: Option<SystemTime>,
}

impl Tests<'_> {
    fn of<'a>(args: &'a Args, pools: &mut Pools) -> Result<Tests<'a>> {
        let glob = |pattern: &OsString, folds| Glob::new(pattern.as_bytes(), folds);
        let globs = args.name.iter().map(|pattern| glob(pattern, false));
        let globs = globs.chain(args.iname.iter().map(|pattern| glob(pattern, true))).collect();
        let newer = match &args.newer {
            Some(place) => {
                let metadata = pools.files(place)?.symlink_metadata(place.path()).at(place)?;
                Some(metadata.modified().at(place)?)
            }
            None => None,
        };
        let path = args.path.as_ref().map(|pattern| glob(pattern, false));
        Ok(Tests { args, globs, path, newer })
    }

    fn hold(&self, place: &Place, metadata: &Metadata, depth: u64) -> bool {
        let name = last_name(place.path()).unwrap_or("/".into());
        let path = place.path().as_os_str().as_bytes();
        let bytes = if metadata.is_dir() { 0 } else { metadata.len() };
        let kinds = &self.args.kinds;
        depth >= self.args.mindepth
            && self.globs.iter().all(|glob| glob.matches(name.as_bytes()))
            && self.path.as_ref().is_none_or(|glob| glob.matches(path))
            && (kinds.is_empty() || kinds.contains(&KindLetter(metadata.file_type().kind())))
            && self.args.size.is_none_or(|length| length.fits(bytes))
            && self.newer.is_none_or(|time| metadata.modified().is_ok_and(|other| other > time))
            && (!self.args.empty || (metadata.is_empty() && !metadata.is_symlink()))
    }
}

#[derive(Serialize)]
struct Report {
    entries: Vec<Entry>,
}

/// Prints the matching files.
pub fn run(args: &Args) -> Result<()> {
    let mut pools = Pools::to_read(&args.access);
    let tests = Tests::of(args, &mut pools)?;
    let mut failures = Failures::default();
    let mut entries = Vec::new();
    let mut output = BufWriter::new(std::io::stdout().lock());
    for start in &args.places {
        let files = match pools.files(start) {
            Ok(files) => files,
            Err(error) => {
                failures.note(Err(error))?;
                continue;
            }
        };
        for step in Walk::new(&files, start, args.maxdepth.unwrap_or(u64::MAX)) {
            let found = match step {
                Ok(Step::Meet { place, metadata, depth }) => {
                    tests.hold(&place, &metadata, depth).then_some((place, metadata))
                }
                Ok(Step::Leave { .. }) => None,
                Err(error) => {
                    failures.note(Err(error))?;
                    None
                }
            };
            match found {
                Some((place, metadata)) if args.json => {
                    entries.push(entry(&files, &place, &metadata)?);
                }
                Some((place, _)) => {
                    let mut line = place.to_bytes();
                    line.push(if args.print0 { 0 } else { b'\n' });
                    output.write_all(&line).context(CANNOT_WRITE)?;
                }
                None => {}
            }
        }
    }
    output.flush().context(CANNOT_WRITE)?;
    drop(output);
    if args.json {
        output::print_json(&Report { entries }, true)?;
    }
    failures.end()
}

fn entry(files: &Files, place: &Place, metadata: &Metadata) -> Result<Entry> {
    Entry::of(files, place, &last_name(place.path()).unwrap_or("/".into()), metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_one_dash_or_two() {
        let lines = |line: &str| {
            let words = line.split(' ').map(OsString::from);
            let words: Vec<_> = with_two_dashes(words);
            words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(lines("aquifer find p:/ -name -type -type f"), {
            "aquifer find p:/ --name -type --type f"
        });
        assert_eq!(
            lines("aquifer find p:/ --name x -print0"),
            "aquifer find p:/ --name x --print0"
        );
        assert_eq!(lines("aquifer find -- -name"), "aquifer find -- -name");
        assert_eq!(lines("aquifer ls -name"), "aquifer ls -name");
        assert_eq!(lines("aquifer"), "aquifer");
    }

    #[test]
    fn lengths_are_rounded_up_to_units() {
        let fits = |text: &str, bytes| text.parse::<Length>().unwrap().fits(bytes);
        assert!(fits("1k", 1) && fits("1k", 1024) && !fits("1k", 1025) && !fits("1k", 0));
        assert!(fits("+1M", (1 << 20) + 1) && !fits("+1M", 1 << 20));
        assert!(fits("-2k", 1024) && !fits("-2k", 1025));
        assert!(fits("0", 0) && fits("1", 512) && fits("5c", 5));
        for wrong in ["", "+", "x", "1x", "1.5k", "--1", "9999999999999999999999"] {
            assert!(wrong.parse::<Length>().is_err(), "{wrong}");
        }
    }
}
