//! Shared code of the tests of writable views: a view with a plain model of its file, and small
//! file systems.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use aquifer_testkit::rng::Rng;

use super::PAGE;
use crate::private::{PrivateFile, PrivateOptions};
use crate::writable::Place;
use aquifer_vm::{Arena, TrackerForm};

/// Addresses for a mapping of at least `len_bytes`.
pub(crate) fn place(len_bytes: u64) -> Box<dyn Place> {
    Box::new(Arena::global().unwrap().allocate(len_bytes as usize).unwrap())
}

pub(crate) fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// The forms of tracking that work here; prints the others as skipped.
pub(crate) fn forms() -> Vec<TrackerForm> {
    let works = |form: &TrackerForm| {
        let available = form.available();
        available.inspect_err(|error| println!("skipped {}: {error}", form.name())).is_ok()
    };
    [TrackerForm::Scan, TrackerForm::Compare].into_iter().filter(works).collect()
}

/// Settings for the gaps that are written along: by the file's folios, none, and some.
pub(crate) const GAPS: [Option<u64>; 3] = [None, Some(0), Some(3)];

pub(crate) fn options(form: TrackerForm, gap_pages: Option<u64>) -> PrivateOptions {
    PrivateOptions { form: Some(form), gap_pages, ..PrivateOptions::default() }
}

/// A file with a view of a part of it, and its expected content after the next flush.
pub(crate) struct Subject {
    #[expect(dead_code, reason = "removed when it is dropped")]
    pub directory: tempfile::TempDir,
    pub path: PathBuf,
    pub view: PrivateFile,
    /// The range of the view, in bytes of the file.
    pub range: Range<u64>,
    pub file: Vec<u8>,
    /// Pages of the file that were stored to.
    pub dirty: BTreeSet<u64>,
}

impl Subject {
    pub fn new(file_bytes: u64, range: Range<u64>, options: PrivateOptions) -> Subject {
        Subject::new_in(&std::env::temp_dir(), file_bytes, range, options)
    }

    pub fn new_in(
        parent: &Path,
        file_bytes: u64,
        range: Range<u64>,
        options: PrivateOptions,
    ) -> Subject {
        let directory = tempfile::tempdir_in(parent).unwrap();
        let path = directory.path().join("data");
        let mut rng = Rng::new(file_bytes);
        let pattern: Vec<u8> = (0..999).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
        let mut file = pattern.repeat(file_bytes as usize / pattern.len() + 1);
        file.truncate(file_bytes as usize);
        std::fs::write(&path, &file).unwrap();
        let place = place(range.end - range.start + PAGE);
        let view = PrivateFile::new(place, &open(&path), &path, range.clone(), options).unwrap();
        Subject { directory, path, view, range, file, dirty: BTreeSet::new() }
    }

    /// Stores bytes at an offset of the view.
    pub fn store(&mut self, offset: u64, bytes: &[u8]) {
        self.view.write_at(offset, bytes).unwrap();
        let at = self.range.start + offset;
        self.file[at as usize..][..bytes.len()].copy_from_slice(bytes);
        self.dirty.extend(at / PAGE..=(at + bytes.len() as u64 - 1) / PAGE);
    }

    /// Writes to the file as another process would.
    pub fn write_to_file(&mut self, at: u64, bytes: &[u8]) {
        open(&self.path).write_all_at(bytes, at).unwrap();
        self.file[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    /// The number of bytes of the pages stored to that belong to the view.
    pub fn dirty_view_bytes(&self) -> u64 {
        let bytes = |page: &u64| {
            let (start, end) = (page * PAGE, (page + 1) * PAGE);
            end.min(self.range.end) - start.max(self.range.start)
        };
        self.dirty.iter().map(bytes).sum()
    }

    /// Compares the file with the model.
    #[track_caller]
    pub fn check(&self, what: &str) {
        let there = std::fs::read(&self.path).unwrap();
        assert_eq!(there.len(), self.file.len(), "{what}");
        if there == self.file {
            return;
        }
        let differs = there.iter().zip(&self.file).position(|(there, model)| there != model);
        assert_eq!(
            differs,
            None,
            "{what}: first byte that differs, of page {:?}",
            differs.map(|at| at as u64 / PAGE)
        );
    }
}

/// Commands that undo changes to the machine, run in reverse order when dropped.
pub(crate) struct Undo(Vec<Vec<String>>);

impl Undo {
    /// Runs a command, and records the one that undoes it. `None` if it fails.
    fn run(&mut self, command: &[&str], undo: &[&str]) -> Option<String> {
        let output = Command::new(command[0]).args(&command[1..]).output().ok()?;
        if !output.status.success() {
            return None;
        }
        if !undo.is_empty() {
            self.0.push(undo.iter().map(|word| word.to_string()).collect());
        }
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        for command in self.0.drain(..).rev() {
            let _ = Command::new(&command[0]).args(&command[1..]).status();
        }
    }
}

/// A small file system.
pub(crate) struct SmallFileSystem {
    // Unmounted before the directory is removed.
    _undo: Undo,
    directory: tempfile::TempDir,
}

/// The kind of a small file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// tmpfs of 8 MiB.
    Tmpfs,
    /// A device of 16 MiB.
    Ext4,
    /// The same, with a journal.
    Ext4Journal,
    /// A device of 64 MiB with less room than that: see [`SmallFileSystem::device`].
    Ext4OnSparse,
}

impl SmallFileSystem {
    /// `None`, and prints so, if it cannot be made.
    pub fn new(kind: Kind) -> Option<SmallFileSystem> {
        let made = SmallFileSystem::try_new(kind);
        if made.is_none() {
            println!("skipped: {kind:?} cannot be made and mounted here");
        }
        made
    }

    fn try_new(kind: Kind) -> Option<SmallFileSystem> {
        let directory = tempfile::tempdir().unwrap();
        let mut undo = Undo(Vec::new());
        let outer = directory.path().to_str().unwrap().to_owned();
        let size = match kind {
            Kind::Tmpfs => "size=8M",
            Kind::Ext4 | Kind::Ext4Journal | Kind::Ext4OnSparse => "size=20M",
        };
        undo.run(&["mount", "-t", "tmpfs", "-o", size, "none", &outer], &["umount", "-l", &outer])?;
        let inner = format!("{outer}/inner");
        std::fs::create_dir(&inner).ok()?;
        if kind != Kind::Tmpfs {
            let backing = format!("{outer}/backing");
            let len = if kind == Kind::Ext4OnSparse { 64 << 20 } else { 16 << 20 };
            File::create(&backing).ok()?.set_len(len).ok()?;
            // No journal where the device fails: it would be aborted permanently.
            let journal = if kind == Kind::Ext4Journal { "has_journal" } else { "^has_journal" };
            undo.run(&["mkfs.ext4", "-q", "-F", "-O", journal, &backing], &[])?;
            let unmount = ["umount", "-l", inner.as_str()];
            undo.run(&["mount", "-o", "loop,errors=continue", &backing, &inner], &unmount)?;
        }
        Some(SmallFileSystem { _undo: undo, directory })
    }

    /// The directory of its files.
    pub fn root(&self) -> PathBuf {
        self.directory.path().join("inner")
    }

    /// The file system as it is found after a power cut at this moment: a copy of its device, mounted.
    pub fn after_a_power_cut(&self) -> SmallFileSystem {
        let directory = tempfile::tempdir().unwrap();
        let copy = directory.path().join("backing");
        std::fs::copy(self.device().join("backing"), &copy).unwrap();
        let inner = directory.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        let mut undo = Undo(Vec::new());
        let (copy, inner) = (copy.to_str().unwrap(), inner.to_str().unwrap());
        undo.run(&["mount", "-o", "loop", copy, inner], &["umount", "-l", inner]).unwrap();
        SmallFileSystem { _undo: undo, directory }
    }

    /// The directory in which the backing store's space can be used up.
    pub fn device(&self) -> PathBuf {
        self.directory.path().to_owned()
    }
}

/// Fills a file system until it is dropped.
pub(crate) struct Ballast(PathBuf);

impl Ballast {
    pub fn fill(root: &Path) -> Ballast {
        let path = root.join("ballast");
        let ballast = Ballast(path);
        let mut file = File::create(&ballast.0).unwrap();
        let mut piece = vec![1u8; 1 << 16];
        while piece.len() >= 512 {
            if std::io::Write::write_all(&mut file, &piece).is_err() || file.sync_data().is_err() {
                piece.truncate(piece.len() / 2);
            }
        }
        ballast
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        // Truncate first: a child that another test has just forked may have the file open, and
        // would keep its blocks in use.
        let _ = File::options().write(true).open(&self.0).and_then(|file| file.set_len(0));
        let _ = std::fs::remove_file(&self.0);
    }
}
