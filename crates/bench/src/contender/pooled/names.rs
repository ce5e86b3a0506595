//! Creating, looking up and removing files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use aquifer_fs::Files;

use super::Names;
use super::pool::open_pool;

/// By system calls: `open`, `close`, `stat`, `unlink`, by paths from the current directory.
#[derive(Debug)]
pub struct KernelNames {
    directory: PathBuf,
}

impl KernelNames {
    /// Creates the directory.
    pub fn create(directory: &Path) -> Result<Self> {
        fs::create_dir(directory)
            .with_context(|| format!("cannot make the directory {}", directory.display()))?;
        Ok(Self { directory: directory.to_owned() })
    }
}

impl Drop for KernelNames {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Names for KernelNames {
    fn create_stat_remove(&mut self, name: &Path) -> Result<u64> {
        fs::OpenOptions::new().write(true).create_new(true).open(name)?;
        let len_bytes = fs::metadata(name)?.len();
        fs::remove_file(name)?;
        Ok(len_bytes)
    }
}

/// In a pool.
#[derive(Debug)]
pub struct PoolNames {
    files: Files,
    directory: PathBuf,
}

impl PoolNames {
    /// Opens the pool, and creates the directory in it.
    pub fn create(directory: &Path) -> Result<Self> {
        let files = open_pool()?;
        files.create_dir(directory)?;
        Ok(Self { files, directory: directory.to_owned() })
    }
}

impl Drop for PoolNames {
    fn drop(&mut self) {
        let _ = self.files.remove_dir_all(&self.directory);
    }
}

impl Names for PoolNames {
    fn create_stat_remove(&mut self, name: &Path) -> Result<u64> {
        self.files.options().write(true).create_new(true).open(name)?;
        let len_bytes = self.files.metadata(name)?.len();
        self.files.remove_file(name)?;
        Ok(len_bytes)
    }
}
