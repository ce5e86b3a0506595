//! What only the readers of files know: whether the names of a directory lie where lookups find
//! them, and whether attributes, targets and runs can be read. References between slots are compared
//! before ([`links`](super::links)).

use aquifer_format::byte_chain;
use aquifer_format::directory::{Found, InconsistencyKind, Tree};
use aquifer_format::file::{FileInode, FileKind};
use aquifer_format::file_table;
use aquifer_format::layout::Layout;
use aquifer_format::run::MAX_PAGES;
use aquifer_fs::internals::{MAX_PATH_BYTES, target};
use aquifer_fs::{FsError, attributes};

use super::links::inode_of;
use super::metadata::place_of;
use super::report::{FindingKind, Severity};
use super::slots::Slots;
use super::{Checker, RESTORE, text};

impl Checker<'_> {
    /// Checks all inodes with parts.
    pub(super) fn check_parts(&mut self, layout: &Layout, slots: &Slots<'_>, inodes: &[u64]) {
        let read = |number| slots.read(number);
        for inode in inodes.iter().filter_map(|&number| inode_of(&read, number)) {
            let mut find = |slot: u64, kind, what: String, reason: String, meaning: &str| {
                let place = place_of(layout, slot.min(layout.slots() - 1));
                let words = text(format!("{what}: {reason}"), meaning, RESTORE);
                self.find_of_inode(Severity::Damage, kind, inode.number, place, words);
            };
            match inode.kind {
                FileKind::Directory => check_names(slots, &inode, |slot, reason| {
                    find(
                        slot,
                        FindingKind::Directory,
                        format!("The names of directory {} are not in order", inode.number),
                        reason,
                        "Some may not be found, though they are there; all others are",
                    );
                }),
                FileKind::Symlink => {
                    if let Err(reason) = check_target(slots, &inode) {
                        find(
                            inode.number,
                            FindingKind::Target,
                            format!("Where symbolic link {} leads cannot be read", inode.number),
                            reason,
                            "It cannot be followed; nothing else is touched by that",
                        );
                    }
                }
                _ => {
                    if let Err(reason) = check_length(slots, &inode) {
                        find(
                            inode.number,
                            FindingKind::FilePages,
                            format!("Inode {} has more pages than a file can have", inode.number),
                            reason,
                            "It cannot be read; nothing else is touched by that",
                        );
                    }
                }
            }
            if let Err(reason) = check_attributes(slots, &inode) {
                find(
                    inode.number,
                    FindingKind::Attributes,
                    format!("The attributes of inode {} cannot be read", inode.number),
                    reason,
                    "Its content is not touched by that",
                );
            }
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
                "A process that had them open when they were removed was killed",
                "Nothing to do: the next process that opens the pool for its files frees them",
            ),
        );
    }
}

/// Checks that lookups find the names of a directory; calls `find` with a slot and a reason.
fn check_names(slots: &Slots<'_>, directory: &FileInode, mut find: impl FnMut(u64, String)) {
    let number = directory.number;
    let tree = Tree { owner: number, seed: directory.seed, root: directory.part };
    let checked = tree.check(slots, |found| {
        if let Found::Inconsistency(inconsistency) = found
            && is_of_order(&inconsistency.kind)
        {
            find(inconsistency.slot, inconsistency.to_string());
        }
    });
    if let Err(error) = checked {
        find(number, error.to_string());
    }
}

/// Whether an inconsistency of a tree can be found only by reading its names: the comparison of
/// links finds the others.
fn is_of_order(kind: &InconsistencyKind) -> bool {
    !matches!(
        kind,
        InconsistencyKind::Format(_) | InconsistencyKind::Owner { .. } | InconsistencyKind::Twice
    )
}

fn check_target(slots: &Slots<'_>, link: &FileInode) -> Result<(), String> {
    let target = target(slots, link).map_err(reason_of)?;
    if target.len() as u64 != link.size_bytes {
        return Err(format!("it has {} bytes in place of {}", target.len(), link.size_bytes));
    }
    if target.contains(&0) || target.len() > MAX_PATH_BYTES {
        Err("it cannot be a path".to_owned())
    } else {
        Ok(())
    }
}

fn check_length(slots: &Slots<'_>, file: &FileInode) -> Result<(), String> {
    let mut pages = 0_u64;
    let add = |run: aquifer_format::run::Run| pages = pages.saturating_add(run.pages);
    // The comparison of links finds all other inconsistencies of the table.
    let _ = file_table::check(file, slots, |_| (), add);
    if pages > MAX_PAGES { Err(format!("it has {pages} pages with its holes")) } else { Ok(()) }
}

fn check_attributes(slots: &Slots<'_>, inode: &FileInode) -> Result<(), String> {
    let checked = match inode.links {
        // A removal in several transactions gives the first slots back first, so the rest may start
        // within an attribute.
        0 => byte_chain::check(slots, inode.number, inode.attributes, |_| ())
            .map(drop)
            .map_err(FsError::from),
        _ => attributes::check(inode, slots, |_| ()),
    };
    checked.map_err(reason_of)
}

/// The inconsistency, without the advice: the report has its own.
fn reason_of(error: FsError) -> String {
    match error {
        FsError::Damaged { structure, reason } => format!("{structure}: {reason}"),
        other => other.to_string(),
    }
}
