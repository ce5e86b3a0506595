//! Checks a pool, and repairs what can be repaired without loss.
//!
//! [`check`] reads a whole pool and changes nothing, whatever its state and whether or not it is
//! open. It follows the steps of recovery, on copies:
//!
//! ```text
//!   superblocks ── which copy counts          both are checked
//!      │
//!   log ── from the tail to its end           and why it ends there: a crash, or loss
//!      │
//!   slots ── as the last record leaves them   each by itself, then all together (owners, links)
//!      │
//!   files ── names, attributes                by the file system ([`FileCheck`])
//!      │
//!   run time ── locks, shared memory          which processes have it open, or died with it open
//! ```
//!
//! If a step cannot read something, the next steps continue without it: without a superblock the
//! check ends, but a damaged head, inode or record leaves all others to be checked.
//!
//! # A pool that is open
//! An open pool is checked as it lies on media, where metadata lags behind the shared memory of its
//! processes and changes during the check. If damage is found then, the check runs again, a few
//! times: a change that was in progress is complete by that time.
//!
//! A check takes no locks, so it does not prevent other processes from opening the pool. It detects
//! afterwards that a process has done so, and runs again as the check of an open pool.
//!
//! # Files
//! References between slots are compared here, because opening the pool for writing compares them
//! as well and both must come to the same result; this needs nothing but the formats. What only the
//! readers of files know is left to the file system: the pool does not depend on `aquifer-fs`,
//! which passes a [`FileCheck`] to [`check_with`] and [`repair_with`].
//!
//! # Repair
//! [`repair`] makes only changes that lose nothing: it rewrites a damaged superblock from the other
//! copy, replays the log, removes unused shared memory, recounts links, frees unreferenced parts,
//! and names files that have lost their names in `/lost+found`. Everything else would be a guess
//! about the content of an object, and is refused with the reason.

mod files;
mod log;
mod metadata;
mod repair;
mod report;
mod run_time;
mod slots;
mod superblocks;

use std::path::{Path, PathBuf};

pub use files::{FileCheck, PartsInconsistency, PartsSort};
pub use repair::{RefusedRepair, RepairReport, repair, repair_on, repair_with};
pub use report::{CheckReport, CheckedPool, Finding, FindingKind, Severity};

use crate::error::Result;
use crate::media::{self, ByteRange, Media};
use crate::segment_place::Places;
use report::Findings;
use run_time::Presence;

/// What to check.
#[derive(Debug, Clone, Default)]
pub struct CheckOptions {
    /// Also reads the pages that count as never used, which must be zero. Takes as long as reading
    /// the pool.
    pub fresh_pages: bool,
    /// The directory of the shared memory: as
    /// [`OpenOptions::segment_directory`](crate::OpenOptions::segment_directory).
    pub segment_directory: Option<PathBuf>,
    /// Overrides the life that the media are in: for tests of power cuts.
    #[doc(hidden)]
    pub boot: Option<u64>,
}

/// How often a pool that changes is checked.
const ATTEMPTS: usize = 5;

/// Checks the pool in a file or device. Writes nothing.
///
/// # Errors
/// [`PoolError::NotOpened`](crate::PoolError::NotOpened) if it cannot be read at all. Everything
/// that is wrong with the pool is in the report.
///
/// ```no_run
/// let report = aquifer_pool::check::check("/var/lib/data.pool", &Default::default())?;
/// println!("{report}");
/// assert!(report.is_sound());
/// # Ok::<(), aquifer_pool::PoolError>(())
/// ```
pub fn check(path: impl AsRef<Path>, options: &CheckOptions) -> Result<CheckReport> {
    let media = media::open(path.as_ref(), false, None)?;
    Ok(check_on(&*media, options))
}

/// Checks the pool on media that no open pool uses. Writes nothing.
pub fn check_on(media: &dyn Media, options: &CheckOptions) -> CheckReport {
    check_while(media, options, None, Presence::of(media))
}

/// [`check_on`], with `files` checking the content of files.
pub fn check_with(media: &dyn Media, options: &CheckOptions, files: &dyn FileCheck) -> CheckReport {
    check_while(media, options, Some(files), Presence::of(media))
}

fn check_while(
    media: &dyn Media,
    options: &CheckOptions,
    files: Option<&dyn FileCheck>,
    mut presence: Presence,
) -> CheckReport {
    let mut attempt = 1;
    loop {
        let mut findings = Findings::default();
        let pool =
            Checker { media, options, files, findings: &mut findings, presence: &presence }.run();
        if presence.has_begun(media) {
            continue;
        }
        if presence.is_in_use() && findings.has_damage() && attempt < ATTEMPTS {
            attempt += 1;
            continue;
        }
        let (findings, unlisted) = findings.into_parts();
        return CheckReport {
            path: media.path().to_path_buf(),
            len_bytes: media.len_bytes(),
            domain: media.domain(),
            is_in_use: presence.is_in_use(),
            pool,
            findings,
            unlisted,
        };
    }
}

/// One pass over a pool.
struct Checker<'a> {
    media: &'a dyn Media,
    options: &'a CheckOptions,
    files: Option<&'a dyn FileCheck>,
    findings: &'a mut Findings,
    presence: &'a Presence,
}

impl Checker<'_> {
    /// Where the shared memory of the pool's processes may lie.
    fn places(&self) -> Places {
        Places::new(self.options.segment_directory.as_deref(), self.media.path())
    }

    fn run(&mut self) -> Option<CheckedPool> {
        let superblock = self.check_superblocks()?;
        let log = self.check_log(&superblock);
        let metadata = self.check_metadata(&superblock, &log);
        self.check_run_time(&superblock);
        Some(CheckedPool {
            uuid: superblock.uuid,
            format_version: crate::format::FORMAT_VERSION,
            created_ns: superblock.created_ns,
            layout: superblock.layout,
            generation: superblock.generation,
            tail_lsn: superblock.tail_lsn,
            end_lsn: log.end_lsn,
            end_reason: log.end_reason,
            records: log.records,
            inodes: metadata.inodes,
            files: metadata.links.files,
            directories: metadata.links.directories,
            symbolic_links: metadata.links.symbolic_links,
            parts: metadata.links.parts,
            used_pages: metadata.used_pages,
            free_pages: metadata.free_pages,
            fresh_pages: metadata.fresh_pages,
        })
    }

    fn find(
        &mut self,
        severity: Severity,
        kind: FindingKind,
        place: impl Into<Option<ByteRange>>,
        text: [String; 3],
    ) -> &mut Self {
        let [what, meaning, advice] = text;
        let place = place.into();
        self.findings.add(Finding { severity, kind, place, inode: None, what, meaning, advice });
        self
    }

    fn find_of_inode(
        &mut self,
        severity: Severity,
        kind: FindingKind,
        inode: u64,
        place: impl Into<Option<ByteRange>>,
        text: [String; 3],
    ) {
        let [what, meaning, advice] = text;
        let (place, inode) = (place.into(), Some(inode));
        self.findings.add(Finding { severity, kind, place, inode, what, meaning, advice });
    }

    /// Reads a range. A failure is a finding, and gives `None`.
    fn read(&mut self, range: ByteRange, of: &str) -> Option<Vec<u8>> {
        let mut bytes = vec![0; range.len_bytes as usize];
        if range.end_bytes() > self.media.len_bytes() {
            return None; // Reported once, for the whole file.
        }
        match self.media.read_at(range.offset_bytes, &mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) => {
                self.find(
                    Severity::Damage,
                    FindingKind::Unreadable,
                    range,
                    text(
                        format!("{of} cannot be read ({error})"),
                        "The disk, or what it is reached by, has failed there",
                        "Copy what can be read to another disk",
                    ),
                );
                None
            }
        }
    }
}

/// The three texts of a finding: what was found, what it means, what to do.
fn text(
    what: impl Into<String>,
    meaning: impl Into<String>,
    advice: impl Into<String>,
) -> [String; 3] {
    [what.into(), meaning.into(), advice.into()]
}

/// A byte position in words.
fn at(range: ByteRange) -> String {
    format!("at byte {}", range.offset_bytes)
}

/// The name of an object as text.
fn quoted(name: &[u8]) -> String {
    format!("\"{}\"", name.escape_ascii())
}

const RESTORE: &str = "Restore the pool from a copy; what can be read meanwhile can be read by \
 opening it for reading";
