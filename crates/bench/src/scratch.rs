//! Private directories for contenders' files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use aquifer_pool::Pool;
use tempfile::TempDir;

use crate::raw::sync_file_system;

/// The name of a pool in its directory.
pub const POOL: &str = "pool";

/// A fresh directory, removed with its content when dropped.
#[derive(Debug)]
pub struct Scratch(TempDir);

/// Creates a scratch directory.
pub fn scratch_directory(parent: &Path) -> Result<Scratch> {
    tempfile::Builder::new()
        .prefix("bench-")
        .suffix(".aquifer-data")
        .tempdir_in(parent)
        .map(Scratch)
        .with_context(|| format!("cannot make a directory in {}", parent.display()))
}

impl Scratch {
    /// The path of the directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Removes the files of the previous contender.
    pub fn empty(&self) -> Result<()> {
        for entry in fs::read_dir(self.path())? {
            let path = entry?.path();
            let removed =
                if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.with_context(|| format!("cannot remove {}", path.display()))?;
        }
        Ok(())
    }

    /// The same, and leaves nothing for the file system to write later.
    pub fn empty_and_sync(&self) -> Result<()> {
        self.empty()?;
        Ok(sync_file_system(self.path())?)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A contender that was killed with a pool open leaves shared memory, which opening and
        // closing the pool removes.
        drop(Pool::open(self.path().join(POOL)));
    }
}
