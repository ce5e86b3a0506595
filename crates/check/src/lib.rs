//! Checks a pool with its files and objects, and repairs what can be repaired without loss.
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
//!   files ── names, attributes                what only the readers of files know
//!      │
//!   run time ── locks, shared memory          which processes have it open, or died with it open
//! ```
//!
//! If a step cannot read something, the next steps continue without it: without a superblock the
//! check ends, but a damaged head, inode or record leaves all others to be checked.
//!
//! References between slots are compared with the code that opening the pool for writing runs
//! ([`aquifer_format::links`]), so that both come to the same result.
//!
//! # A pool that is open
//! An open pool is checked as it lies on media, where metadata lags behind the shared memory of its
//! processes and changes during the check. If damage is found then, the check runs again, a few
//! times: a change that was in progress is complete by that time.
//!
//! A check takes no locks, so it does not prevent other processes from opening the pool. It detects
//! afterwards that a process has done so, and runs again as the check of an open pool.
//!
//! # Repair
//! [`repair`] makes only changes that lose nothing: it rewrites a damaged superblock from the other
//! copy, discards a saved state that does not match the slots, replays the log, removes unused shared memory, recounts links, frees unreferenced parts,
//! and names files that have lost their names in `/lost+found`. Everything else would be a guess
//! about the content of an object, and is refused with the reason.
//!
//! ```no_run
//! let report = aquifer_check::check("/var/lib/data.pool", &Default::default())?;
//! println!("{report}");
//! assert!(report.is_sound());
//! # Ok::<(), aquifer_pool::PoolError>(())
//! ```

mod files;
mod links;
mod log;
mod metadata;
mod repair;
mod report;
mod run_time;
mod saved;
mod slots;
mod superblocks;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_format::ByteRange;
use aquifer_pool::Result;
use aquifer_pool::internals::Presence;
use aquifer_pool::media::{self, Media};

pub use repair::{RefusedRepair, RepairReport, repair};
pub use report::{CheckReport, CheckedPool, Finding, FindingKind, Severity};

use report::Findings;

/// What to check.
#[derive(Debug, Clone, Default)]
pub struct CheckOptions {
    /// Also reads the pages that count as never used, which must be zero. Takes as long as reading
    /// the pool.
    pub fresh_pages: bool,
    /// The directory of the shared memory: as
    /// [`PoolOptions::segment_directory`](aquifer_pool::PoolOptions::segment_directory).
    pub segment_directory: Option<PathBuf>,
    /// Overrides the life that the media are in: for tests of power cuts.
    #[doc(hidden)]
    pub boot: Option<u64>,
}

/// The pool to check or repair: a path, or media that no open pool of this process uses.
pub struct Source(Place);

enum Place {
    Path(PathBuf),
    Media(Arc<dyn Media>),
}

impl Source {
    fn media(self, is_writable: bool) -> Result<Arc<dyn Media>> {
        match self.0 {
            Place::Path(path) => Ok(media::open(&path, is_writable, None)?),
            Place::Media(media) => Ok(media),
        }
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for Source {
    fn from(path: &P) -> Source {
        Source(Place::Path(path.as_ref().to_path_buf()))
    }
}

impl From<Arc<dyn Media>> for Source {
    fn from(media: Arc<dyn Media>) -> Source {
        Source(Place::Media(media))
    }
}

impl<M: Media + 'static> From<Arc<M>> for Source {
    fn from(media: Arc<M>) -> Source {
        Source(Place::Media(media))
    }
}

/// How often a pool that changes is checked.
const ATTEMPTS: usize = 5;

/// Checks a pool. Writes nothing.
///
/// # Errors
/// [`PoolError::NotOpened`](aquifer_pool::PoolError::NotOpened) if the file or device cannot be read
/// at all. Everything that is wrong with the pool is in the report.
pub fn check(pool: impl Into<Source>, options: &CheckOptions) -> Result<CheckReport> {
    let media = pool.into().media(false)?;
    Ok(check_while(&*media, options, Presence::of(&*media)))
}

fn check_while(media: &dyn Media, options: &CheckOptions, mut presence: Presence) -> CheckReport {
    let mut attempt = 1;
    loop {
        let mut findings = Findings::default();
        let pool = Checker { media, options, findings: &mut findings, presence: &presence }.run();
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
            format_version: aquifer_format::FORMAT_VERSION,
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
            special_files: metadata.links.special_files,
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
