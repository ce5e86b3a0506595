//! Whole files of a pool, by path.

use std::path::Path;

use anyhow::Result;
use aquifer_fs::Files as PoolFiles;

use super::pool::open_pool;
use crate::contender::files::{Files, WholeFile};
use crate::raw::{AlignedBuffer, PAGE_BYTES};

/// Each file is opened, read into a reused buffer, and closed.
#[derive(Debug)]
pub struct PoolReads {
    files: PoolFiles,
}

impl PoolReads {
    /// Opens the pool.
    pub fn open() -> Result<Self> {
        Ok(Self { files: open_pool()? })
    }
}

impl Files for PoolReads {
    type Lane<'a> = PoolReadLane<'a>;

    fn lane(&self) -> Result<PoolReadLane<'_>> {
        Ok(PoolReadLane { files: &self.files, buffer: AlignedBuffer::new(PAGE_BYTES) })
    }
}

/// A thread's buffer.
#[derive(Debug)]
pub struct PoolReadLane<'a> {
    files: &'a PoolFiles,
    buffer: AlignedBuffer,
}

impl WholeFile for PoolReadLane<'_> {
    fn by_path<R>(&mut self, path: &Path, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let file = self.files.open_file(path)?;
        let len_bytes = usize::try_from(file.metadata()?.len())?;
        if self.buffer.bytes().len() < len_bytes {
            self.buffer = AlignedBuffer::new(len_bytes.next_multiple_of(PAGE_BYTES));
        }
        let bytes = &mut self.buffer.bytes_mut()[..len_bytes];
        let read_bytes = file.read_at(bytes, 0)?;
        Ok(look(&bytes[..read_bytes]))
    }
}

/// Each file is accessed in place.
#[derive(Debug)]
pub struct PoolViews {
    files: PoolFiles,
}

impl PoolViews {
    /// Opens the pool.
    pub fn open() -> Result<Self> {
        Ok(Self { files: open_pool()? })
    }
}

impl Files for PoolViews {
    type Lane<'a> = &'a PoolFiles;

    fn lane(&self) -> Result<&PoolFiles> {
        Ok(&self.files)
    }
}

impl WholeFile for &PoolFiles {
    fn by_path<R>(&mut self, path: &Path, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let view = self.view(path, ..)?;
        // SAFETY: the files of the set are not written to while they are read.
        let bytes = unsafe { view.as_slice() }.expect("the pool is mapped");
        Ok(look(bytes))
    }
}
