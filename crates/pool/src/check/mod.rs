//! Checking a pool, and repairing what can be repaired without losing anything.
//!
//! [`check`] reads a whole pool and changes nothing, whatever state it is in and whoever has it open. It goes the way
//! that recovery would go, on copies:
//!
//! ```text
//!   superblocks ── which copy counts          both are looked at
//!      │
//!   log ── from the tail to where it ends     and why it ends there: a crash, or loss
//!      │
//!   slots ── as the last record leaves them   each by itself, then all together (owners, links)
//!      │
//!   files ── names, attributes                by who knows of them ([`FileCheck`])
//!      │
//!   run time ── locks, shared memory          who has it open, who died with it
//! ```
//!
//! What one step cannot read, the next ones do without: without a superblock there is nothing else to be said, but
//! a damaged head, inode or record leaves all others to be checked.
//!
//! # A pool that is open
//! is checked as it lies on media, where metadata lags behind what its processes share, and while they change it. If
//! damage is found then, the check runs again, a few times: what was a change in the making is gone.
//!
//! A check locks nothing, so it keeps nobody from opening the pool. That somebody did meanwhile shows afterwards, and the
//! check runs again, as one of a pool that is open.
//!
//! # Files
//! What leads to what is compared here, because whoever opens the pool for writing does that as well, and both have to come to the same
//! answer; nothing but the formats is needed for it. What only their readers have to know is left to them: the pool does not depend on
//! `aquifer-fs`, which passes a [`FileCheck`] to [`check_with`] and [`repair_with`].
//!
//! # Repair
//! [`repair`] does what loses nothing: it writes a damaged superblock anew from the other copy, replays the log,
//! removes shared memory that nobody uses, counts links anew, frees parts that nothing leads to, and gives files that have lost their
//! names new ones in `/lost+found`. Everything else would be a guess about the content of somebody's object, and is
//! refused with the reason.

mod files;
mod log;
mod metadata;
mod repair;
mod report;
mod run_time;
mod slots;
mod superblocks;

use std::path::{Path, PathBuf};

pub use files::{FileCheck, PartsFlaw, PartsSort};
pub use repair::{RefusedRepair, RepairReport, repair, repair_on, repair_with};
pub use report::{CheckReport, CheckedPool, Finding, FindingKind, Severity};

use crate::error::Result;
use crate::media::{self, ByteRange, Media};
use report::Findings;
use run_time::Presence;

/// What to check.
#[derive(Debug, Clone, Default)]
pub struct CheckOptions {
    /// Reads the pages that count as never used as well, which must be zero. Takes as long as reading the pool.
    pub fresh_pages: bool,
    /// Where the processes that had the pool open put what they shared: as [`OpenOptions::segment_directory`](crate::OpenOptions::segment_directory).
    pub segment_directory: Option<PathBuf>,
    /// Takes this for the life that the media are in: for tests of power cuts.
    #[doc(hidden)]
    pub boot: Option<u64>,
}

/// How often a pool that changes is looked at again.
const ATTEMPTS: usize = 5;

/// Checks the pool in a file or device. Writes nothing.
///
/// # Errors
/// [`PoolError::NotOpened`](crate::PoolError::NotOpened) if it cannot be read at all. Whatever is wrong with the pool is in
/// the report.
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

/// [`check_on`], with files looked into by who knows of them.
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

/// One look at a pool.
struct Checker<'a> {
    media: &'a dyn Media,
    options: &'a CheckOptions,
    files: Option<&'a dyn FileCheck>,
    findings: &'a mut Findings,
    presence: &'a Presence,
}

impl Checker<'_> {
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

    /// Reads a range; what cannot be read is a finding, and all of its bytes are zero.
    fn read(&mut self, range: ByteRange, of: &str) -> Option<Vec<u8>> {
        let mut bytes = vec![0; range.len_bytes as usize];
        if range.end_bytes() > self.media.len_bytes() {
            return None; // Said once, of the whole file.
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

/// What was found, what it means, and what to do.
fn text(
    what: impl Into<String>,
    meaning: impl Into<String>,
    advice: impl Into<String>,
) -> [String; 3] {
    [what.into(), meaning.into(), advice.into()]
}

/// A range of bytes, in words.
fn at(range: ByteRange) -> String {
    format!("at byte {}", range.offset_bytes)
}

/// The name of an object as text.
fn quoted(name: &[u8]) -> String {
    format!("\"{}\"", name.escape_ascii())
}

const RESTORE: &str = "Restore the pool from a copy; what can be read meanwhile can be read by \
 opening it for reading";
