//! Creating, looking up and removing files.

use std::ffi::CStr;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result};
use aquifer_fs::node::{Cookie, Node, Nodes};
use aquifer_fs::{Files, Metadata};

use super::Names;
use super::pool::open_pool;
use crate::raw::{len_at, open_directory};

/// By system calls: `open`, `close`, `stat`, `unlink`, by paths from the current directory.
#[derive(Debug)]
pub struct KernelNames {
    directory: PathBuf,
    open: OwnedFd,
}

impl KernelNames {
    /// Creates the directory.
    pub fn create(directory: &Path) -> Result<Self> {
        fs::create_dir(directory)
            .with_context(|| format!("cannot make the directory {}", directory.display()))?;
        Ok(Self { directory: directory.to_owned(), open: open_directory(directory)? })
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

    fn create(&mut self, name: &Path) -> Result<()> {
        Ok(fs::write(name, "x")?)
    }

    fn look_up(&mut self, name: &CStr) -> Result<u64> {
        Ok(len_at(&self.open, name)?)
    }

    fn list(&mut self) -> Result<u64> {
        // Its metadata are found by `fstatat` in the directory.
        let entries = fs::read_dir(&self.directory)?.map(|entry| entry?.metadata());
        Ok(entries.map(|found| found.map(|found| found.len())).sum::<io::Result<u64>>()?)
    }
}

/// In a pool.
#[derive(Debug)]
pub struct PoolNames {
    files: Files,
    nodes: Nodes,
    directory: PathBuf,
    node: Node,
}

impl PoolNames {
    /// Opens the pool, and creates the directory in it.
    pub fn create(directory: &Path) -> Result<Self> {
        let files = open_pool()?;
        files.create_dir(directory)?;
        let (nodes, node) = (files.nodes(), files.metadata(directory)?.node());
        Ok(Self { files, nodes, directory: directory.to_owned(), node })
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

    fn create(&mut self, name: &Path) -> Result<()> {
        Ok(self.files.write(name, "x")?)
    }

    fn look_up(&mut self, name: &CStr) -> Result<u64> {
        Ok(self.nodes.lookup(self.node, name.to_bytes())?.len())
    }

    fn list(&mut self) -> Result<u64> {
        let mut len_bytes = 0;
        // Behind `.` and `..`, which have no metadata in the kernel's list either.
        self.nodes.read_dir_plus(self.node, Cookie(2), |_, entries| {
            let found = entries.iter().filter_map(|entry| entry.metadata.as_ref());
            len_bytes += found.map(Metadata::len).sum::<u64>();
            ControlFlow::Continue(())
        })?;
        Ok(len_bytes)
    }
}
