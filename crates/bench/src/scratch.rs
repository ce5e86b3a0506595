//! Directories in which contenders make files of their own.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use aquifer_pool::{OpenOptions, Pool};
use tempfile::TempDir;

use crate::pooled_set::POOL;

/// A fresh directory, removed with all that is in it when dropped.
#[derive(Debug)]
pub struct Scratch(TempDir);

/// Makes one.
pub fn scratch_directory(parent: &Path) -> Result<Scratch> {
    tempfile::Builder::new()
        .prefix("bench-")
        .suffix(".aquifer-data")
        .tempdir_in(parent)
        .map(Scratch)
        .with_context(|| format!("cannot make a directory in {}", parent.display()))
}

impl Scratch {
    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A contender that was killed with a pool open leaves shared memory, which goes with the next one who closes the pool.
        drop(Pool::open(self.path().join(POOL), &OpenOptions::default()));
    }
}

/// Removes what the contender before left there.
pub fn empty(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let removed =
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}
