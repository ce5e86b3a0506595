//! References between slots that do not fit together: what the check says of each kind, and what a
//! repair does about it, decided in one place, [`explain`].

use aquifer_format::directory::{Node, NodeContent};
use aquifer_format::file::{FileInode, FileKind};
use aquifer_format::layout::Layout;
use aquifer_format::links::LinkInconsistency;
use aquifer_format::slot_bytes::SlotBytes;

use super::metadata::place_of;
use super::report::{FindingKind, Severity};
use super::slots::Slots;
use super::{Checker, RESTORE, quoted, text};

/// An inconsistency in words, and its repair.
pub(super) struct Explanation {
    kind: FindingKind,
    what: String,
    meaning: &'static str,
    pub mend: Mend,
}

/// What a repair does about an inconsistency.
pub(super) enum Mend {
    /// Nothing: which side is right could only be guessed.
    Refuse,
    /// Corrects a number in the inode.
    Recount(Box<dyn Fn(&mut FileInode)>),
    /// Frees the slot.
    Free,
    /// Names the inode, or frees it if it has no content.
    Name,
}

impl Mend {
    fn recount(correct: impl Fn(&mut FileInode) + 'static) -> Mend {
        Mend::Recount(Box::new(correct))
    }

    fn severity(&self) -> Severity {
        match self {
            Mend::Refuse => Severity::Damage,
            Mend::Recount(_) | Mend::Free | Mend::Name => Severity::Repairable,
        }
    }

    fn advice(&self) -> &'static str {
        match self {
            Mend::Refuse => RESTORE,
            Mend::Recount(_) => {
                "Run `aquifer pool check --repair`, which counts anew; until then the pool can be \
                 read and not written"
            }
            Mend::Free => "Run `aquifer pool check --repair`, which frees it",
            Mend::Name => {
                "Run `aquifer pool check --repair`: what has content gets a name in /lost+found, \
                 the rest is freed"
            }
        }
    }
}

/// Explains an inconsistency; `read` gives the slots that have names and sizes for the text.
pub(super) fn explain(
    inconsistency: &LinkInconsistency,
    read: &dyn Fn(u64) -> Option<SlotBytes>,
) -> Explanation {
    let name_to = |leaf, inode| match name_in(read, leaf, inode) {
        Some((directory, name)) => format!("The name {name} in directory {directory}"),
        None => format!("A name in slot {leaf}"),
    };
    let (kind, what, meaning, mend) = match *inconsistency {
        LinkInconsistency::NoPart { from, to } => (
            FindingKind::Part,
            format!("Slot {from} leads to slot {to}, and there is no such part"),
            "The file or directory that slot belongs to cannot be read whole; others can be read, \
             and nothing can be changed",
            Mend::Refuse,
        ),
        LinkInconsistency::ForeignPart { from, to, owner } => (
            FindingKind::Part,
            format!("Slot {from} leads to slot {to}, which belongs to inode {owner}"),
            "It is another file's, so neither file can be trusted; what leads there is an error to \
             read, and nothing can be changed",
            Mend::Refuse,
        ),
        LinkInconsistency::SharedPart { slot } => (
            FindingKind::Part,
            format!("Several slots lead to slot {slot}, or one does more than once"),
            "The file or directory has some of its parts twice and may lack others; nothing can be \
             changed",
            Mend::Refuse,
        ),
        LinkInconsistency::LostPart { slot, owner } => (
            FindingKind::LostPart,
            format!("Nothing leads to slot {slot}, a part of inode {owner}"),
            "It takes space and does no harm",
            Mend::Free,
        ),
        LinkInconsistency::NoInode { leaf, inode } => (
            FindingKind::Name,
            format!("{} leads to slot {inode}, where there is no file", name_to(leaf, inode)),
            "What had that name is gone; nothing can be changed",
            Mend::Refuse,
        ),
        LinkInconsistency::Kind { leaf, inode } => (
            FindingKind::Name,
            format!(
                "{} says that inode {inode} is something else than it is",
                name_to(leaf, inode)
            ),
            "Nothing says which of them is right, so what the name leads to is an error to read, \
             and nothing can be changed",
            Mend::Refuse,
        ),
        LinkInconsistency::SeveralNames { directory } => (
            FindingKind::Directory,
            format!("More names lead to directory {directory} than can"),
            "A directory has one name, and the root has none; all that is in it can be read, and \
             nothing can be changed",
            Mend::Refuse,
        ),
        LinkInconsistency::Circle { directory } => (
            FindingKind::Directory,
            format!("Directory {directory} is inside of itself"),
            "No path leads from the root to what is in it; nothing can be changed",
            Mend::Refuse,
        ),
        LinkInconsistency::NoRoot => (
            FindingKind::Directory,
            "There is no root directory".to_owned(),
            "No path leads anywhere; objects can be read, and nothing can be changed",
            Mend::Refuse,
        ),
        LinkInconsistency::Pages { inode, stated, found } => (
            FindingKind::FilePages,
            format!("Inode {inode} says that it has {stated} pages, and its runs have {found}"),
            "Runs of the file are missing, or are too many, so it cannot be read; nothing can be \
             changed",
            Mend::Refuse,
        ),
        LinkInconsistency::Links { inode, stated, found } => (
            FindingKind::Links,
            format!("Inode {inode} says that {stated} links lead to it, and there are {found}"),
            "With too few it would be freed while it has a name, with too many never",
            Mend::recount(move |inode| inode.links = found),
        ),
        LinkInconsistency::Entries { directory, stated, found } => (
            FindingKind::Links,
            format!("Directory {directory} says that it has {stated} names, and there are {found}"),
            "It could be removed with names in it, or never",
            Mend::recount(move |inode| inode.entries = found),
        ),
        LinkInconsistency::Parent { directory, stated, found } => (
            FindingKind::Links,
            format!(
                "Directory {directory} says that it is in directory {stated}, and it is in {found}"
            ),
            "`..` leads to the wrong place there",
            Mend::recount(move |inode| inode.parent = found),
        ),
        LinkInconsistency::LostInode { inode } => (
            FindingKind::LostFile,
            match inode_of(read, inode) {
                Some(found) if found.kind == FileKind::Directory => {
                    format!("No name leads to directory {inode}, with {} names", found.entries)
                }
                Some(found) => format!(
                    "No name leads to inode {inode}, a {} of {} bytes",
                    kind_name(found.kind),
                    found.size_bytes
                ),
                None => format!("No name leads to inode {inode}"),
            },
            "No path leads there; it takes space and does no harm",
            Mend::Name,
        ),
    };
    Explanation { kind, what, meaning, mend }
}

/// The name of a file's kind.
fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Directory => "directory",
        FileKind::Symlink => "symbolic link",
        FileKind::Fifo => "named pipe",
        FileKind::Socket => "socket",
        FileKind::CharDevice => "character device",
        FileKind::BlockDevice => "block device",
        _ => "file",
    }
}

/// Decodes the inode of a file.
pub(super) fn inode_of(read: &dyn Fn(u64) -> Option<SlotBytes>, number: u64) -> Option<FileInode> {
    FileInode::decode(&read(number)?, number).ok()
}

/// The directory that a leaf belongs to, and a name in it that refers to this inode.
fn name_in(
    read: &dyn Fn(u64) -> Option<SlotBytes>,
    leaf: u64,
    inode: u64,
) -> Option<(u64, String)> {
    let node = Node::decode(&read(leaf)?, leaf).ok()?;
    let NodeContent::Leaf(entries) = node.content else { return None };
    let entry = entries.into_iter().find(|entry| entry.inode == inode)?;
    Some((node.owner, quoted(&entry.name)))
}

impl Checker<'_> {
    pub(super) fn explain_link_inconsistency(
        &mut self,
        layout: &Layout,
        slots: &Slots<'_>,
        inconsistency: &LinkInconsistency,
    ) {
        let slot = inconsistency.slot();
        let Explanation { kind, what, meaning, mend } =
            explain(inconsistency, &|number| slots.read(number));
        let words = text(what, meaning, mend.advice());
        self.find_of_inode(mend.severity(), kind, slot, place_of(layout, slot), words);
    }
}

#[cfg(test)]
mod tests {
    use LinkInconsistency::*;
    use aquifer_format::links::Extent;

    use super::*;

    /// The format says how bad an inconsistency is, which decides whether a pool can be opened for
    /// writing; the repair must cover exactly what is not damage.
    #[test]
    fn what_is_repaired_is_what_the_format_says_can_be() {
        let (stated, found, owner) = (1, 2, 3);
        for inconsistency in [
            NoPart { from: 4, to: 5 },
            ForeignPart { from: 4, to: 5, owner },
            SharedPart { slot: 4 },
            LostPart { slot: 4, owner },
            NoInode { leaf: 4, inode: 5 },
            Kind { leaf: 4, inode: 5 },
            SeveralNames { directory: 4 },
            Circle { directory: 4 },
            NoRoot,
            Pages { inode: 4, stated, found },
            Links { inode: 4, stated: 1, found: 2 },
            Entries { directory: 4, stated, found },
            Parent { directory: 4, stated, found },
            LostInode { inode: 4 },
        ] {
            let mend = explain(&inconsistency, &|_| None).mend;
            let is_covered = match inconsistency.extent() {
                Extent::Contradiction => matches!(mend, Mend::Refuse),
                Extent::Miscount => matches!(mend, Mend::Recount(_)),
                Extent::Loss => matches!(mend, Mend::Free | Mend::Name),
            };
            assert!(is_covered, "{inconsistency:?}");
        }
    }
}
