//! The report of a check: findings, each a few sentences that can be understood without the source
//! code.

use std::fmt;
use std::path::PathBuf;

use uuid::Uuid;

use aquifer_format::layout::Layout;
use aquifer_pool::media::{ByteRange, PersistenceDomain};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// Nothing is wrong, but the state may look unusual.
    Note,
    /// Nothing is lost, and [`repair`](super::repair) fixes it; often opening the pool for writing
    /// does.
    Repairable,
    /// Something is lost or cannot be trusted.
    Damage,
}

impl Severity {
    /// The name, in one word.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Repairable => "repairable",
            Severity::Damage => "damage",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// The kind of a finding; the names are for programs and do not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// The file has no pool.
    NotAPool,
    /// The pool has a format version that this program does not know.
    FutureVersion,
    /// A copy of the superblock cannot be used.
    Superblock,
    /// The two copies are of different pools.
    SuperblocksContradict,
    /// A crash happened between the writes of the two copies.
    SuperblocksDiffer,
    /// The file is shorter than its pool.
    Truncated,
    /// The file is longer than its pool.
    LongerFile,
    /// The head cannot be used.
    Head,
    /// An inode cannot be used.
    Inode,
    /// An inode names pages that cannot be its content.
    MisplacedRun,
    /// Two inodes name the same page.
    SharedPages,
    /// Two inodes have the same name.
    SameName,
    /// The address of an object is not valid.
    Address,
    /// The address ranges of two objects overlap.
    SharedAddresses,
    /// Acknowledged records are missing from the log.
    LogLoss,
    /// A record was cut off by a crash.
    TornRecord,
    /// A record is inconsistent.
    Record,
    /// Content that was copied beside the log does not match the log.
    CopiedContent,
    /// The log has records that are not applied yet.
    Unreplayed,
    /// Pages that count as never used are not zero.
    UsedFreshPage,
    /// Reserved bytes are not zero.
    ReservedBytes,
    /// The pool was not closed by the processes that had it open.
    NotClosed,
    /// The processes that had the pool open left shared memory.
    SharedMemory,
    /// The media cannot be read at this place.
    Unreadable,
    /// A slot refers to a slot that is no part of the same file.
    Part,
    /// No slot refers to a part of a file.
    LostPart,
    /// A name refers to something that it must not refer to.
    Name,
    /// A directory has its names in disorder, has several names itself, or is inside of itself.
    Directory,
    /// The runs of a file are incomplete.
    FilePages,
    /// Links or names are miscounted.
    Links,
    /// A file that must have a name has none.
    LostFile,
    /// Extended attributes cannot be read.
    Attributes,
    /// The target of a symbolic link cannot be read.
    Target,
    /// Files without names are not freed yet.
    Orphans,
    /// The state that was saved when the pool was closed does not match the slots.
    SavedState,
}

impl FindingKind {
    /// The stable name for programs.
    pub fn name(self) -> &'static str {
        match self {
            FindingKind::NotAPool => "not-a-pool",
            FindingKind::FutureVersion => "future-version",
            FindingKind::Superblock => "superblock",
            FindingKind::SuperblocksContradict => "superblocks-contradict",
            FindingKind::SuperblocksDiffer => "superblocks-differ",
            FindingKind::Truncated => "truncated",
            FindingKind::LongerFile => "longer-file",
            FindingKind::Head => "head",
            FindingKind::Inode => "inode",
            FindingKind::MisplacedRun => "misplaced-run",
            FindingKind::SharedPages => "shared-pages",
            FindingKind::SameName => "same-name",
            FindingKind::Address => "address",
            FindingKind::SharedAddresses => "shared-addresses",
            FindingKind::LogLoss => "log-loss",
            FindingKind::TornRecord => "torn-record",
            FindingKind::Record => "record",
            FindingKind::CopiedContent => "copied-content",
            FindingKind::Unreplayed => "unreplayed",
            FindingKind::UsedFreshPage => "used-fresh-page",
            FindingKind::ReservedBytes => "reserved-bytes",
            FindingKind::NotClosed => "not-closed",
            FindingKind::SharedMemory => "shared-memory",
            FindingKind::Unreadable => "unreadable",
            FindingKind::Part => "part",
            FindingKind::LostPart => "lost-part",
            FindingKind::Name => "name",
            FindingKind::Directory => "directory",
            FindingKind::FilePages => "file-pages",
            FindingKind::Links => "links",
            FindingKind::LostFile => "lost-file",
            FindingKind::Attributes => "attributes",
            FindingKind::Target => "link-target",
            FindingKind::Orphans => "orphans",
            FindingKind::SavedState => "saved-state",
        }
    }
}

/// One finding of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What it is about.
    pub kind: FindingKind,
    /// Its place on media, if it has one.
    pub place: Option<ByteRange>,
    /// The inode concerned, if any.
    pub inode: Option<u64>,
    /// What was found, and where.
    pub what: String,
    /// What it means for the users of the pool.
    pub meaning: String,
    /// What to do.
    pub advice: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}. {}. {}.", self.severity, self.what, self.meaning, self.advice)
    }
}

/// Facts about a pool that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedPool {
    /// The pool's uuid.
    pub uuid: Uuid,
    /// The version of its format.
    pub format_version: u32,
    /// When it was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// The places of its parts.
    pub layout: Layout,
    /// The generation of its log.
    pub generation: u64,
    /// The first record that recovery would replay.
    pub tail_lsn: u64,
    /// Where the log ends.
    pub end_lsn: u64,
    /// Why it ends there.
    pub end_reason: String,
    /// Records between tail and end.
    pub records: u64,
    /// Valid objects.
    pub inodes: u64,
    /// Files.
    pub files: u64,
    /// Directories, the root among them.
    pub directories: u64,
    /// Symbolic links.
    pub symbolic_links: u64,
    /// Named pipes, sockets and devices.
    pub special_files: u64,
    /// Slots that belong to files: nodes of directories, run lists, attributes, long targets.
    pub parts: u64,
    /// Pages that objects and files name.
    pub used_pages: u64,
    /// Data pages that no inode names.
    pub free_pages: u64,
    /// Free pages that were never used.
    pub fresh_pages: u64,
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckReport {
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub len_bytes: u64,
    /// How its bytes become durable.
    pub domain: PersistenceDomain,
    /// Whether processes have the pool open for writing. Then the report is a snapshot of changing
    /// state, and a finding may concern a change in progress and not appear in the next check.
    pub is_in_use: bool,
    /// The pool, if a superblock could be read.
    pub pool: Option<CheckedPool>,
    /// What was found, the worst first.
    pub findings: Vec<Finding>,
    /// Findings that are not listed because there are too many.
    pub unlisted: u64,
}

impl CheckReport {
    /// The highest severity; `None` if nothing was found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }

    /// Whether a sound pool can be opened for writing without a repair.
    pub fn can_be_written(&self) -> bool {
        self.findings.iter().all(|finding| finding.kind != FindingKind::Links)
    }

    /// Whether nothing is lost and everything can be trusted.
    pub fn is_sound(&self) -> bool {
        self.worst() < Some(Severity::Damage)
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        if self.is_in_use {
            writeln!(
                formatter,
                "{path} is open for writing: this is what it was like at one moment, and not all \
                 of it at the same."
            )?;
        }
        for finding in &self.findings {
            writeln!(formatter, "{finding}")?;
        }
        if self.unlisted > 0 {
            writeln!(formatter, "… and {} findings more.", self.unlisted)?;
        }
        match self.worst() {
            None => write!(formatter, "{path}: nothing is wrong."),
            Some(Severity::Note) => write!(formatter, "{path}: nothing is wrong with it."),
            Some(Severity::Repairable) if self.can_be_written() => {
                write!(formatter, "{path}: nothing is lost; the pool can be used.")
            }
            Some(Severity::Repairable) => {
                write!(
                    formatter,
                    "{path}: nothing is lost; the pool can be written once it is repaired."
                )
            }
            Some(Severity::Damage) => write!(formatter, "{path}: the pool is damaged."),
        }
    }
}

/// Findings under construction: at most [`MOST_LISTED`] are kept, all are counted.
#[derive(Debug, Default)]
pub(super) struct Findings {
    listed: Vec<Finding>,
    unlisted: u64,
}

/// The most findings that are listed.
const MOST_LISTED: usize = 1000;

impl Findings {
    pub fn add(&mut self, finding: Finding) {
        if self.listed.len() < MOST_LISTED {
            self.listed.push(finding);
            return;
        }
        self.unlisted += 1;
        // The most severe findings stay listed.
        if let Some(milder) =
            self.listed.iter_mut().find(|listed| listed.severity < finding.severity)
        {
            *milder = finding;
        }
    }

    pub(crate) fn has_damage(&self) -> bool {
        self.listed.iter().any(|finding| finding.severity == Severity::Damage)
    }

    /// The listed findings, the most severe first, and the number of the others.
    pub fn into_parts(mut self) -> (Vec<Finding>, u64) {
        self.listed.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        (self.listed, self.unlisted)
    }
}
