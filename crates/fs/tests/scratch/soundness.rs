//! Whether the metadata of all files are consistent: an independent check of the invariants of
//! [`aquifer_fs`].
//!
//! From the root, every slot is reachable on exactly one path, and every slot in use is reachable
//! (inodes without links and their slots count as reachable). A directory has the right counts of
//! names and subdirectories, and the right parent; a file has as many links as names, and every
//! page has one owner.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_format::directory::{Found, Tree};
use aquifer_format::{byte_chain, file_table};
use aquifer_fs::{FsError, attributes};
use aquifer_pool::format::file::{FileInode, FileKind, ROOT_INODE};
use aquifer_pool::format::run::Run;
use aquifer_pool::format::slot::Slot;
use aquifer_pool::{MetadataView, Pool, ReadSlots};

/// What has been reached so far.
#[derive(Default)]
struct Reached {
    /// Each slot, with the inode that owns it.
    slots: BTreeMap<u64, u64>,
    /// First page, last page, owner.
    runs: Vec<(u64, u64, u64)>,
    /// How many names refer to each inode that is no directory.
    names: BTreeMap<u64, u32>,
    inconsistencies: Vec<String>,
}

/// All inconsistencies; empty if the pool is sound.
pub fn inconsistencies(pool: &Pool) -> Vec<String> {
    let slots = pool.layout().slots();
    let orphans = pool.orphans().unwrap_or_default();
    let outcome = pool.look(|view| {
        let mut reached = Reached::default();
        match reached.all(view, slots, &orphans) {
            Ok(()) => reached.inconsistencies,
            Err(error) => vec![error.to_string()],
        }
    });
    outcome.unwrap_or_else(|error| vec![error.to_string()])
}

pub fn assert_sound(pool: &Pool) {
    let inconsistencies = inconsistencies(pool);
    assert!(
        inconsistencies.is_empty(),
        "the files of the pool do not fit together: {inconsistencies:#?}"
    );
}

impl Reached {
    fn inconsistency(&mut self, inconsistency: String) {
        self.inconsistencies.push(inconsistency);
    }

    fn slot(&mut self, number: u64, owner: u64) -> bool {
        let before = self.slots.insert(number, owner);
        if let Some(before) = before {
            self.inconsistency(format!("slot {number} belongs to inodes {before} and {owner}"));
        }
        before.is_none()
    }

    fn all(&mut self, view: &MetadataView<'_>, slots: u64, orphans: &[u64]) -> Result<(), FsError> {
        let mut left = vec![(ROOT_INODE, ROOT_INODE)];
        while let Some((number, parent)) = left.pop() {
            if self.slot(number, number) {
                let names = self.directory(view, number, parent)?;
                left.extend(names);
            }
        }
        self.names.extend(orphans.iter().map(|number| (*number, 0)));
        for (number, names) in self.names.clone() {
            self.slot(number, number);
            self.other(view, number, names)?;
        }
        for number in 1..slots {
            let is_free = matches!(Slot::decode(&view.slot(number)?, number), Ok(Slot::Free(_)));
            if !self.slots.contains_key(&number) && !is_free {
                self.inconsistency(format!("slot {number} is in use, and nothing leads to it"));
            }
        }
        self.runs.sort_unstable();
        let shared: Vec<String> = (self.runs.windows(2))
            .filter(|pair| pair[0].1 > pair[1].0)
            .map(|pair| format!("pages are named twice: {pair:?}"))
            .collect();
        self.inconsistencies.extend(shared);
        Ok(())
    }

    fn inode(
        &mut self,
        view: &MetadataView<'_>,
        number: u64,
    ) -> Result<Option<FileInode>, FsError> {
        let inode = match FileInode::decode(&view.slot(number)?, number) {
            Ok(inode) => inode,
            Err(error) => {
                self.inconsistency(format!("inode {number}: {error}"));
                return Ok(None);
            }
        };
        let mut parts = BTreeSet::new();
        attributes::check(&inode, view, |slot| _ = parts.insert(slot))?;
        parts.into_iter().for_each(|slot| _ = self.slot(slot, number));
        Ok(Some(inode))
    }

    /// Checks a directory and its names; returns its subdirectories.
    fn directory(
        &mut self,
        view: &MetadataView<'_>,
        number: u64,
        parent: u64,
    ) -> Result<Vec<(u64, u64)>, FsError> {
        let Some(inode) = self.inode(view, number)? else { return Ok(Vec::new()) };
        if inode.kind != FileKind::Directory || inode.parent != parent {
            self.inconsistency(format!("inode {number} is no directory of {parent}: {inode:?}"));
            return Ok(Vec::new());
        }
        let (mut inside, mut nodes, mut inconsistencies) = (Vec::new(), Vec::new(), Vec::new());
        let mut files = Vec::new();
        let tree = Tree { owner: number, seed: inode.seed, root: inode.part };
        let checked = tree.check(view, |found| match found {
            Found::Slot(slot) => nodes.push(slot),
            Found::Inconsistency(inconsistency) => inconsistencies.push(inconsistency.to_string()),
            Found::Entry(entry) if entry.kind == FileKind::Directory => {
                inside.push((entry.inode, number));
            }
            Found::Entry(entry) => files.push((entry.inode, entry.kind)),
        })?;
        nodes.into_iter().for_each(|slot| _ = self.slot(slot, number));
        self.inconsistencies.extend(inconsistencies);
        for (file, kind) in files {
            *self.names.entry(file).or_default() += 1;
            let found = FileInode::decode(&view.slot(file)?, file).map(|inode| inode.kind);
            if found.as_ref().ok() != Some(&kind) {
                self.inconsistency(format!(
                    "a name in {number} says that {file} is a {kind:?}: {found:?}"
                ));
            }
        }
        if (inode.entries, inode.links) != (checked.entries, 2 + inside.len() as u32) {
            self.inconsistency(format!(
                "directory {number} counts otherwise: {inode:?}, {checked:?}"
            ));
        }
        Ok(inside)
    }

    /// Checks a file or symbolic link with this many names.
    fn other(&mut self, view: &MetadataView<'_>, number: u64, names: u32) -> Result<(), FsError> {
        let Some(inode) = self.inode(view, number)? else { return Ok(()) };
        if inode.links != names {
            self.inconsistency(format!(
                "inode {number} has {names} names and {} links",
                inode.links
            ));
        }
        let mut parts = Vec::new();
        if inode.kind == FileKind::Symlink && inode.part != 0 {
            byte_chain::check(view, number, inode.part, |slot| parts.push(slot))?;
        }
        if inode.kind == FileKind::File {
            let mut runs: Vec<Run> = Vec::new();
            // An orphan that is being reaped has lost some of its runs, and `pages` counts only the
            // rest.
            file_table::check(&inode, view, |slot| parts.push(slot), |run| runs.push(run))?;
            let own = runs.into_iter().filter(|run| !run.is_hole());
            self.runs.extend(own.map(|run| (run.start_page, run.end_page(), number)));
        }
        parts.into_iter().for_each(|slot| _ = self.slot(slot, number));
        Ok(())
    }
}
