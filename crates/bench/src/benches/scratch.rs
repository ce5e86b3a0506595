//! Directories in which contenders make files of their own.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use tempfile::TempDir;

/// A fresh directory, removed with all that is in it when dropped.
pub fn scratch_directory(parent: &Path) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("bench-")
        .suffix(".aquifer-data")
        .tempdir_in(parent)
        .with_context(|| format!("cannot make a directory in {}", parent.display()))
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
