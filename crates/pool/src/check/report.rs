//! What the check says: findings, each a few sentences that need no source code to be understood.

use std::fmt;
use std::path::PathBuf;

use uuid::Uuid;

use crate::format::layout::Layout;
use crate::media::{ByteRange, PersistenceDomain};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// Nothing is wrong; it is said because somebody who looks may wonder.
    Note,
    /// Nothing is lost, and [`repair`](super::repair) makes it right; often opening the pool for writing does.
    Repairable,
    /// Something is lost or cannot be believed.
    Damage,
}

impl Severity {
    /// In one word.
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

/// What a finding is about; the names are for programs and stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// There is no pool in the file.
    NotAPool,
    /// The pool is of a version that this program does not know.
    FutureVersion,
    /// A copy of the superblock cannot be used.
    Superblock,
    /// The two copies are of different pools.
    SuperblocksContradict,
    /// A crash came between the writes of the two copies.
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
    /// The address of an object is none that it can have.
    Address,
    /// The address ranges of two objects overlap.
    SharedAddresses,
    /// Acknowledged records are missing from the log.
    LogLoss,
    /// A record was cut off by a crash.
    TornRecord,
    /// A record says what cannot be.
    Record,
    /// Content that was copied beside the log is not what the log says.
    CopiedContent,
    /// The log has records that are not at their place yet.
    Unreplayed,
    /// Pages that count as never used are not zero.
    UsedFreshPage,
    /// Bytes that mean nothing are not zero.
    ReservedBytes,
    /// The pool was not closed by those who had it open.
    NotClosed,
    /// Shared memory was left by those who had it open.
    SharedMemory,
    /// The media cannot be read there.
    Unreadable,
    /// A slot leads to one that is no part of the same file.
    Part,
    /// Nothing leads to a part of a file.
    LostPart,
    /// A name leads to what it cannot lead to.
    Name,
    /// A directory has its names in disorder, has too many names itself, or is inside of itself.
    Directory,
    /// The runs of a file are not all there.
    FilePages,
    /// Links or names are miscounted.
    Links,
    /// No name leads to a file that is to have one.
    LostFile,
    /// Extended attributes cannot be read.
    Attributes,
    /// Where a symbolic link leads cannot be read.
    Target,
    /// Files without names wait to be freed.
    Orphans,
}

impl FindingKind {
    /// The name that programs know.
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
        }
    }
}

/// Something that the check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What it is about.
    pub kind: FindingKind,
    /// Where on media, if it is at a place.
    pub place: Option<ByteRange>,
    /// The inode that it is about, if it is about one.
    pub inode: Option<u64>,
    /// What was found, and where.
    pub what: String,
    /// What that means for who uses the pool.
    pub meaning: String,
    /// What to do.
    pub advice: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}. {}. {}.", self.severity, self.what, self.meaning, self.advice)
    }
}

/// What is known of a pool that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedPool {
    /// Names the pool.
    pub uuid: Uuid,
    /// Version of its format.
    pub format_version: u32,
    /// When it was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Where its parts lie.
    pub layout: Layout,
    /// The generation of its log.
    pub generation: u64,
    /// The first record that recovery would replay.
    pub tail_lsn: u64,
    /// Where the log ends.
    pub end_lsn: u64,
    /// Why it ends there.
    pub end_reason: String,
    /// Records between the two.
    pub records: u64,
    /// Objects that can be believed.
    pub inodes: u64,
    /// Files.
    pub files: u64,
    /// Directories, the root among them.
    pub directories: u64,
    /// Symbolic links.
    pub symbolic_links: u64,
    /// Slots that belong to files: nodes of directories, run lists, attributes, long targets.
    pub parts: u64,
    /// Pages that objects and files name.
    pub used_pages: u64,
    /// Pages of data that nobody names.
    pub free_pages: u64,
    /// Of those, pages that were never used.
    pub fresh_pages: u64,
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckReport {
    /// The file.
    pub path: PathBuf,
    /// Its length.
    pub len_bytes: u64,
    /// What makes its bytes durable.
    pub domain: PersistenceDomain,
    /// Whether processes have the pool open for writing. Then this is a snapshot of something that changes, and
    /// a finding may be of the change and gone when one looks again.
    pub is_in_use: bool,
    /// The pool, as far as a superblock could be read.
    pub pool: Option<CheckedPool>,
    /// What was found, the worst first.
    pub findings: Vec<Finding>,
    /// Findings that are not listed because there are very many.
    pub unlisted: u64,
}

impl CheckReport {
    /// The worst there is; `None` if nothing was found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }

    /// Whether nothing has to be repaired before the pool can be opened for writing, as far as it is sound.
    pub fn can_be_written(&self) -> bool {
        self.findings.iter().all(|finding| finding.kind != FindingKind::Links)
    }

    /// Whether nothing is lost or beyond belief.
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

/// Findings under construction: many are kept, all are counted.
#[derive(Debug, Default)]
pub(super) struct Findings {
    listed: Vec<Finding>,
    unlisted: u64,
}

/// More findings than anybody reads.
const MOST_LISTED: usize = 1000;

impl Findings {
    pub fn add(&mut self, finding: Finding) {
        if self.listed.len() < MOST_LISTED {
            self.listed.push(finding);
            return;
        }
        self.unlisted += 1;
        // The worst are always among those that are listed.
        if let Some(milder) =
            self.listed.iter_mut().find(|listed| listed.severity < finding.severity)
        {
            *milder = finding;
        }
    }

    pub fn has_damage(&self) -> bool {
        self.listed.iter().any(|finding| finding.severity == Severity::Damage)
    }

    /// The listed ones, the worst first, and how many are not.
    pub fn into_parts(mut self) -> (Vec<Finding>, u64) {
        self.listed.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        (self.listed, self.unlisted)
    }
}
