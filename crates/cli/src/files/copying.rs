//! Shared code of `put`, `get` and `cp`: options, the target of each source, the final report.

use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use aquifer_host::interrupt::{self, Interrupted};
use serde::Serialize;

use super::Place;
use super::failure::Failures;
use super::place::last_name;
use super::tree::{Choices, Copier, Counts, Kind, Tree};
use crate::{output, progress};

/// The help text after the examples of each of them.
pub const HELP: &str = "\
Kept are content with its holes, permissions, times, symbolic links, which names are names of one file, extended attributes \
where both sides can have them, and owners where you may give files away.

A file gets its name when it is whole, in one step that also replaces what had that name; so neither Ctrl-C nor a power cut leaves \
half a file under it. A command that is killed leaves nothing else in a pool; outside of pools it can leave a name that begins with \
`.aquifer-`, which can be removed.";

/// Options of all of them.
#[derive(Debug, clap::Args)]
pub struct CopyArgs {
    /// Copy directories, with everything in them
    #[arg(short, long, short_alias = 'R', short_alias = 'a')]
    recursive: bool,

    /// Keep what is there: it is an error to copy over it
    #[arg(short, long)]
    no_clobber: bool,

    /// DEST is the name of the copy, also where it is a directory
    #[arg(short = 'T', long)]
    no_target_directory: bool,

    /// Print each name
    #[arg(short, long, conflicts_with = "json")]
    verbose: bool,

    /// Print what was copied as one JSON object
    #[arg(long)]
    json: bool,
}

/// The JSON output.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    counts: Counts,
    /// Items that could not be copied.
    failed: u64,
}

impl CopyArgs {
    fn choices(&self) -> Choices {
        Choices { recursive: self.recursive, no_clobber: self.no_clobber, verbose: self.verbose }
    }

    /// The path of a source's copy: inside the destination if that is a directory, else the
    /// destination itself.
    fn target<S: Tree, T: Tree>(
        &self,
        (from, source): (&S, &Path),
        (to, destination): (&T, &Path),
        is_one_of_several: bool,
    ) -> Result<PathBuf> {
        let there = to.item(destination, true)?;
        let is_directory = there.is_some_and(|there| there.kind == Kind::Directory);
        if is_directory && !self.no_target_directory {
            // `.`, so that a preceding symbolic link is followed.
            return Ok(destination.join(last_name(source).unwrap_or(".".into())));
        }
        if is_one_of_several {
            bail!(
                "{}: this is not a directory, and several things are to be copied there",
                to.show(destination)
            );
        }
        if let Some(parent) = destination.parent().filter(|parent| *parent != Path::new(""))
            && to.item(parent, true)?.is_none()
        {
            bail!("{}: there is no such directory; make it first", to.show(parent));
        }
        let wants_directory = destination.as_os_str().as_bytes().ends_with(b"/");
        let copies_directory =
            from.item(source, true)?.is_some_and(|item| item.kind == Kind::Directory);
        if wants_directory && !is_directory && !copies_directory {
            bail!("{}: there is no such directory; make it first", to.show(destination));
        }
        Ok(destination.to_owned())
    }
}

/// Copies from one tree to another. `check` is called with each source and its target. The file
/// `pool` is never copied or replaced.
pub fn copy<S: Tree, T: Tree>(
    args: &CopyArgs,
    (from, sources): (&S, &[PathBuf]),
    (to, destination): (&T, &Path),
    pool: Option<(u64, u64)>,
    check: impl Fn(&Path, &Path) -> Result<()>,
) -> Result<Done> {
    let _signals = interrupt::Guard::install();
    let mut copier = Copier::new(from, to, args.choices(), progress::Bytes::new("copying"));
    copier.spare(pool);
    if std::io::stderr().is_terminal() {
        sources.iter().for_each(|source| copier.foresee(source));
    }
    let mut outcome = Ok(());
    for source in sources {
        let target = args.target((from, source), (to, destination), sources.len() > 1);
        let target = target.and_then(|target| check(source, &target).map(|()| target));
        outcome = match target {
            Ok(target) => copier.copy(source, &target),
            Err(error) => copier.note(Err(error)),
        };
        if outcome.is_err() {
            break;
        }
    }
    let (counts, failures) = copier.end();
    if let Err(error) = outcome {
        return Err(if error.is::<Interrupted>() {
            anyhow!("interrupted; {}", copied(&counts))
        } else {
            error.context(format!("stopped after {}", copied(&counts)))
        });
    }
    Ok(Done { counts, failures, json: args.json })
}

fn copied(counts: &Counts) -> String {
    match counts.files + counts.symlinks + counts.hard_links {
        1 => "one file was copied whole".to_owned(),
        files => format!("{} files were copied whole", output::count(files)),
    }
}

/// The identity of a pool's file: device and inode number.
pub fn identity(place: &Place) -> Option<(u64, u64)> {
    let metadata = std::fs::metadata(place.pool()).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// The result of copying.
#[must_use]
pub struct Done {
    counts: Counts,
    failures: Failures,
    json: bool,
}

impl Done {
    /// Prints the result.
    pub fn end(self) -> Result<()> {
        if self.counts.lost_attributes > 0 {
            let lost = output::several(self.counts.lost_attributes, "extended attribute");
            output::warn(&format!("{lost} could not be kept where the copy is"));
        }
        if self.json {
            let failed = self.failures.count();
            output::print_json(&Report { counts: self.counts, failed }, true)?;
        }
        self.failures.end()
    }
}
