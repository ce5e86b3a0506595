//! Pools for tests, their files as plain values, and whether they are sound.
#![allow(dead_code, reason = "each test uses a part")]

pub mod soundness;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use aquifer_check::{CheckOptions, Severity, check};
use aquifer_fs::{Files, FsError};
use aquifer_pool::format::file::FileKind;
use aquifer_pool::{Pool, PoolOptions};

/// A directory (in memory if possible) with a pool in it, both removed on drop.
pub struct Scratch {
    pub directory: tempfile::TempDir,
    pub path: PathBuf,
}

impl Scratch {
    /// Creates the directory and the pool.
    pub fn with_pool(len_bytes: u64, options: &PoolOptions) -> Scratch {
        let directory = aquifer_testkit::scratch::in_memory();
        let path = directory.path().join("pool");
        drop(options.create(&path, len_bytes).expect("a new pool"));
        Scratch { directory, path }
    }

    pub fn open(&self) -> Files {
        Files::open(&self.path).expect("the pool opens")
    }

    /// Asserts that a check of the closed pool finds nothing.
    pub fn assert_clean(&self) {
        let report = check(&self.path, &CheckOptions { fresh_pages: true, ..Default::default() });
        let report = report.expect("the pool can be read");
        assert_eq!(report.worst().filter(|worst| *worst > Severity::Note), None, "{report}");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Opening the pool removes the shared memory that killed processes have left.
        drop(Pool::open(&self.path));
    }
}

/// A file as a plain value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    File { content: Vec<u8> },
    Directory,
    Link { target: PathBuf },
    Special { kind: FileKind, rdev: u64 },
}

/// A whole tree, by path.
pub type Tree = BTreeMap<PathBuf, Node>;

/// Reads all of a file. Only for files that fit in memory.
pub fn read_all(files: &Files, path: impl AsRef<Path>) -> Result<Vec<u8>, FsError> {
    let file = files.options().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let mut content = vec![0; file.metadata()?.len() as usize];
    let got = file.read_at(&mut content, 0)?;
    assert_eq!(got, content.len(), "a file was read to its end");
    Ok(content)
}

/// Returns the names in a directory, sorted. Fails if a name is listed twice.
pub fn names(files: &Files, path: impl AsRef<Path>) -> Result<Vec<OsString>, FsError> {
    let mut names = Vec::new();
    for entry in files.read_dir(path)? {
        names.push(entry?.file_name());
    }
    names.sort_unstable_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "a name was listed twice");
    Ok(names)
}

/// Reads everything that has a name.
pub fn tree(files: &Files) -> Result<Tree, FsError> {
    let (mut tree, mut left) = (Tree::new(), vec![PathBuf::from("/")]);
    while let Some(directory) = left.pop() {
        for name in names(files, &directory)? {
            let path = directory.join(name);
            let metadata = files.symlink_metadata(&path)?;
            let node = match metadata.file_type().kind() {
                kind if kind.is_special() => Node::Special { kind, rdev: metadata.rdev() },
                FileKind::Directory => {
                    left.push(path.clone());
                    Node::Directory
                }
                FileKind::Symlink => Node::Link { target: files.read_link(&path)? },
                _ => Node::File { content: read_all(files, &path)? },
            };
            tree.insert(path, node);
        }
    }
    Ok(tree)
}
