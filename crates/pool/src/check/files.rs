//! Files: explains inconsistencies of references between slots, and calls the file system's checks.

use super::metadata::place_of;
use super::report::{FindingKind, Severity};
use super::slots::Slots;
use super::{Checker, RESTORE, quoted, text};
use crate::error::{PoolError, Result};
use crate::format::directory::{Node, NodeContent};
use crate::format::file::{FileInode, FileKind};
use crate::format::layout::Layout;
use crate::links::LinkInconsistency;
use crate::pool::Pool;
use crate::slots::ReadSlots;

/// The checks that only a file system can do.
///
/// The pool itself compares references between slots, because these decide whether it can be
/// opened. The order of names, the form of attributes, and naming files are up to `aquifer-fs`,
/// which passes this to the check and the repair.
pub trait FileCheck {
    /// Checks the content of an inode's parts: names, attributes, the target of a symbolic link.
    /// Must terminate for any content.
    fn check_parts(
        &self,
        slots: &dyn ReadSlots<Error = PoolError>,
        inode: &FileInode,
        find: &mut dyn FnMut(PartsInconsistency),
    );

    /// Names inodes that no name refers to, or frees them if they are empty. Returns what it did, a
    /// sentence each.
    ///
    /// # Errors
    /// The errors of the pool.
    fn adopt(&self, pool: &Pool, lost: &[u64]) -> Result<Vec<String>>;
}

/// An inconsistency in the parts of an inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartsInconsistency {
    /// The slot where it is.
    pub slot: u64,
    /// What cannot be used.
    pub sort: PartsSort,
    /// What is wrong, as a phrase to follow a colon.
    pub reason: String,
}

/// The kind of content in the parts of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartsSort {
    /// Names in a directory.
    Names,
    /// Extended attributes.
    Attributes,
    /// The target of a symbolic link.
    Target,
    /// The runs of a file.
    Runs,
}

/// The name of a file's kind.
fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Directory => "directory",
        FileKind::Symlink => "symbolic link",
        _ => "file",
    }
}

fn inode_of(slots: &Slots<'_>, number: u64) -> Option<FileInode> {
    FileInode::decode(&slots.read(number)?, number).ok()
}

/// The directory that a leaf belongs to, and a name in it that refers to this inode.
fn name_in(slots: &Slots<'_>, leaf: u64, inode: u64) -> Option<(u64, String)> {
    let node = Node::decode(&slots.read(leaf)?, leaf).ok()?;
    let NodeContent::Leaf(entries) = node.content else { return None };
    let entry = entries.into_iter().find(|entry| entry.inode == inode)?;
    Some((node.owner, quoted(&entry.name)))
}

const RECOUNT: &str = "Run `aquifer pool check --repair`, which counts anew; until then the pool can be read and not written";
const FIND_AGAIN: &str = "Run `aquifer pool check --repair`: what has content gets a name in /lost+found, the rest is freed";

impl Checker<'_> {
    pub(super) fn explain_link_inconsistency(
        &mut self,
        layout: &Layout,
        slots: &Slots<'_>,
        inconsistency: &LinkInconsistency,
    ) {
        let name_to = |leaf, inode| match name_in(slots, leaf, inode) {
            Some((directory, name)) => format!("The name {name} in directory {directory}"),
            None => format!("A name in slot {leaf}"),
        };
        let (severity, kind, what, meaning, advice) = match *inconsistency {
            LinkInconsistency::NoPart { from, to } => (
                Severity::Damage,
                FindingKind::Part,
                format!("Slot {from} leads to slot {to}, and there is no such part"),
                "The file or directory that slot belongs to cannot be read whole; others can be \
                 read, and nothing can be changed",
                RESTORE,
            ),
            LinkInconsistency::ForeignPart { from, to, owner } => (
                Severity::Damage,
                FindingKind::Part,
                format!("Slot {from} leads to slot {to}, which belongs to inode {owner}"),
                "It is another file's, so neither file can be trusted; what leads there is an \
                 error to read, and nothing can be changed",
                RESTORE,
            ),
            LinkInconsistency::SharedPart { slot } => (
                Severity::Damage,
                FindingKind::Part,
                format!("Several slots lead to slot {slot}, or one does more than once"),
                "The file or directory has some of its parts twice and may lack others; nothing \
                 can be changed",
                RESTORE,
            ),
            LinkInconsistency::LostPart { slot, owner } => (
                Severity::Repairable,
                FindingKind::LostPart,
                format!("Nothing leads to slot {slot}, a part of inode {owner}"),
                "It takes space and does no harm",
                "Run `aquifer pool check --repair`, which frees it",
            ),
            LinkInconsistency::NoInode { leaf, inode } => (
                Severity::Damage,
                FindingKind::Name,
                format!("{} leads to slot {inode}, where there is no file", name_to(leaf, inode)),
                "What had that name is gone; nothing can be changed",
                RESTORE,
            ),
            LinkInconsistency::Kind { leaf, inode } => (
                Severity::Damage,
                FindingKind::Name,
                format!(
                    "{} says that inode {inode} is something else than it is",
                    name_to(leaf, inode)
                ),
                "Nothing says which of them is right, so what the name leads to is an error to \
                 read, and nothing can be changed",
                RESTORE,
            ),
            LinkInconsistency::SeveralNames { directory } => (
                Severity::Damage,
                FindingKind::Directory,
                format!("More names lead to directory {directory} than can"),
                "A directory has one name, and the root has none; all that is in it can be read, \
                 and nothing can be changed",
                RESTORE,
            ),
            LinkInconsistency::Circle { directory } => (
                Severity::Damage,
                FindingKind::Directory,
                format!("Directory {directory} is inside of itself"),
                "No path leads from the root to what is in it; nothing can be changed",
                RESTORE,
            ),
            LinkInconsistency::NoRoot => (
                Severity::Damage,
                FindingKind::Directory,
                "There is no root directory".to_owned(),
                "No path leads anywhere; objects can be read, and nothing can be changed",
                RESTORE,
            ),
            LinkInconsistency::Pages { inode, stated, found } => (
                Severity::Damage,
                FindingKind::FilePages,
                format!("Inode {inode} says that it has {stated} pages, and its runs have {found}"),
                "Runs of the file are missing, or are too many, so it cannot be read; nothing \
                 can be changed",
                RESTORE,
            ),
            LinkInconsistency::Links { inode, stated, found } => (
                Severity::Repairable,
                FindingKind::Links,
                format!("Inode {inode} says that {stated} links lead to it, and there are {found}"),
                "With too few it would be freed while it has a name, with too many never",
                RECOUNT,
            ),
            LinkInconsistency::Entries { directory, stated, found } => (
                Severity::Repairable,
                FindingKind::Links,
                format!(
                    "Directory {directory} says that it has {stated} names, and there are {found}"
                ),
                "It could be removed with names in it, or never",
                RECOUNT,
            ),
            LinkInconsistency::Parent { directory, stated, found } => (
                Severity::Repairable,
                FindingKind::Links,
                format!(
                    "Directory {directory} says that it is in directory {stated}, and it is in {found}"
                ),
                "`..` leads to the wrong place there",
                RECOUNT,
            ),
            LinkInconsistency::LostInode { inode } => {
                let what = match inode_of(slots, inode) {
                    Some(found) if found.kind == FileKind::Directory => {
                        format!("No name leads to directory {inode}, with {} names", found.entries)
                    }
                    Some(found) => format!(
                        "No name leads to inode {inode}, a {} of {} bytes",
                        kind_name(found.kind),
                        found.size_bytes
                    ),
                    None => format!("No name leads to inode {inode}"),
                };
                let meaning = "No path leads there; it takes space and does no harm";
                (Severity::Repairable, FindingKind::LostFile, what, meaning, FIND_AGAIN)
            }
        };
        let place = place_of(layout, inconsistency.slot());
        self.find_of_inode(
            severity,
            kind,
            inconsistency.slot(),
            place,
            text(what, meaning, advice),
        );
    }

    /// Lets the file system check all inodes with parts.
    pub(super) fn check_parts(&mut self, layout: &Layout, slots: &Slots<'_>, inodes: &[u64]) {
        let Some(files) = self.files else { return };
        for inode in inodes.iter().filter_map(|&number| inode_of(slots, number)) {
            let number = inode.number;
            files.check_parts(slots, &inode, &mut |inconsistency| {
                let (kind, what, meaning) = match inconsistency.sort {
                    PartsSort::Names => (
                        FindingKind::Directory,
                        format!("The names of directory {number} are not in order"),
                        "Some may not be found, though they are there; all others are",
                    ),
                    PartsSort::Attributes => (
                        FindingKind::Attributes,
                        format!("The attributes of inode {number} cannot be read"),
                        "Its content is not touched by that",
                    ),
                    PartsSort::Target => (
                        FindingKind::Target,
                        format!("Where symbolic link {number} leads cannot be read"),
                        "It cannot be followed; nothing else is touched by that",
                    ),
                    PartsSort::Runs => (
                        FindingKind::FilePages,
                        format!("Inode {number} has more pages than a file can have"),
                        "It cannot be read; nothing else is touched by that",
                    ),
                };
                self.find_of_inode(
                    Severity::Damage,
                    kind,
                    number,
                    place_of(layout, inconsistency.slot.min(layout.slots() - 1)),
                    text(format!("{what}: {}", inconsistency.reason), meaning, RESTORE),
                );
            });
        }
    }

    /// Reports how many inodes without names wait to be freed. While the pool is in use, a process
    /// may have them open.
    pub(super) fn note_orphans(&mut self, orphans: u64) {
        if orphans == 0 || self.presence.is_in_use() {
            return;
        }
        self.find(
            Severity::Note,
            FindingKind::Orphans,
            None,
            text(
                format!("{orphans} files have no name any more and are not freed yet"),
                "Somebody had them open when they were removed, and was killed",
                "Nothing to do: the next process that opens the pool for its files frees them",
            ),
        );
    }
}
