//! Shared code of `put`, `get` and `cp`: options, the target of each source, the final report.

use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use aquifer_sys::interrupt::{self, Interrupted};
use serde::Serialize;

use super::Place;
use super::failure::Failures;
use super::place::last_name;
use super::tree::{Choices, Copier, Counts, Kind, Tree};
use crate::{output, progress};

/// The help text after the examples of each of them.
pub const HELP: &str = "\
A copy keeps content and holes, permissions, times, symbolic links, hard links among the copied files, extended attributes if both \
sides support them, access control lists among them, and owners if you may change them. With -r, named pipes, sockets and devices \
are copied as such.

A file gets its name only when it is complete, in one step that also replaces the previous file of that name. So neither Ctrl-C nor \
a power cut leaves a partial file under the name. A command that is killed leaves nothing else in a pool; outside a pool it can leave \
a file whose name begins with `.aquifer-`, which can be removed.";

/// The help text of those that copy to and from object stores.
pub const STORE_HELP: &str = "\
An object holds only the content of a file. A name in an object store that ends with a slash, or a bucket, is a directory to copy \
into; directories that are empty are not copied there, and symbolic links, devices, sockets and pipes are errors. Large files are \
uploaded in parts. An object appears when it is complete, and what was uploaded of it is removed after an error or Ctrl-C; a command \
that is killed leaves parts, which a rule of the bucket can remove. With --no-clobber the store itself is asked to create each object \
only if there is none of its name. A copy of an object has its time, and the permissions of a new file.";

/// Options of all of them.
#[derive(Debug, clap::Args)]
pub struct CopyArgs {
    /// Copy directories with their content
    #[arg(short, long, short_alias = 'R', short_alias = 'a')]
    recursive: bool,

    /// Do not replace existing files: that is an error
    #[arg(short, long)]
    no_clobber: bool,

    /// Treat DEST as the name of the copy, even if it is a directory
    #[arg(short = 'T', long)]
    no_target_directory: bool,

    /// Print each copy
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
    /// Whether existing files are replaced.
    #[cfg(feature = "remote")]
    pub fn replaces(&self) -> bool {
        !self.no_clobber
    }

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
        if to.is_flat() {
            return Self::target_key(source, (to, destination), is_one_of_several);
        }
        let there = to.item(destination, true)?;
        let is_directory = there.is_some_and(|there| there.kind == Kind::Directory);
        if is_directory && !self.no_target_directory {
            // `.`, so that a preceding symbolic link is followed.
            return Ok(destination.join(last_name(source).unwrap_or(".".into())));
        }
        if is_one_of_several {
            bail!(
                "{}: Not a directory; several sources can only be copied to a directory",
                to.show(destination)
            );
        }
        if let Some(parent) = destination.parent().filter(|parent| *parent != Path::new(""))
            && to.item(parent, true)?.is_none()
        {
            bail!("{}: No such file or directory; create it first", to.show(parent));
        }
        let wants_directory = destination.as_os_str().as_bytes().ends_with(b"/");
        let copies_directory =
            from.item(source, true)?.is_some_and(|item| item.kind == Kind::Directory);
        if wants_directory && !is_directory && !copies_directory {
            bail!("{}: No such file or directory; create it first", to.show(destination));
        }
        Ok(destination.to_owned())
    }

    /// In an object store the name alone tells a directory: it ends with a slash, or is the whole bucket.
    fn target_key<T: Tree>(
        source: &Path,
        (to, destination): (&T, &Path),
        is_one_of_several: bool,
    ) -> Result<PathBuf> {
        let bytes = destination.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.ends_with(b"/") {
            return Ok(
                last_name(source).map_or(destination.to_owned(), |name| destination.join(name))
            );
        }
        if is_one_of_several {
            bail!(
                "{}: several sources can only be copied to a name that ends with a slash",
                to.show(destination)
            );
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
            error.context(format!("stopped; {}", copied(&counts)))
        });
    }
    Ok(Done { counts, failures, json: args.json })
}

fn copied(counts: &Counts) -> String {
    match counts.files + counts.symlinks + counts.special_files + counts.hard_links {
        1 => "one file was copied completely".to_owned(),
        files => format!("{} files were copied completely", output::count(files)),
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
            output::warn(&format!("{lost} could not be copied: the target does not support them"));
        }
        if self.json {
            let failed = self.failures.count();
            output::print_json(&Report { counts: self.counts, failed }, true)?;
        }
        self.failures.end()
    }
}
