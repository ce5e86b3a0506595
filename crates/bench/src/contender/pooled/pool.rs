//! Files of a pool, through [`aquifer_fs`], with default options except sizes.

use std::path::Path;

use anyhow::{Result, ensure};
use aquifer_fs::{File, Files};
use aquifer_pool::Pool;

use super::kernel::sum;
use super::{Growing, Pair, Records};
use crate::pooled_set::pool_bytes;
use crate::scratch::POOL;

/// The pool of the current directory.
pub fn open_pool() -> Result<Files> {
    Ok(Files::open(POOL)?)
}

fn read_all(file: &File, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
    let read_bytes = file.read_at(bytes, offset_bytes)?;
    ensure!(
        read_bytes == bytes.len(),
        "the file in the pool ends at byte {read_bytes} of a record"
    );
    Ok(())
}

/// An open file. Closed before the pool is.
#[derive(Debug)]
pub struct PooledFile {
    file: File,
}

impl PooledFile {
    /// Opens the pool and the file.
    pub fn open(name: &Path) -> Result<Self> {
        Self::open_in(&open_pool()?, name)
    }

    /// Opens two files of the pool.
    pub fn open_two(one: &Path, other: &Path) -> Result<[Self; 2]> {
        let files = open_pool()?;
        Ok([Self::open_in(&files, one)?, Self::open_in(&files, other)?])
    }

    fn open_in(files: &Files, name: &Path) -> Result<Self> {
        Ok(Self { file: files.options().read(true).write(true).open(name)? })
    }
}

impl Records for PooledFile {
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        read_all(&self.file, offset_bytes, bytes)
    }

    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.file.write_all_at(bytes, offset_bytes)?)
    }
}

const GROWING: &str = "growing";

/// A file that grows in its own pool.
#[derive(Debug)]
pub struct PooledGrowing {
    file: Option<File>,
    files: Files,
    /// Whether stores go through views.
    by_view: bool,
}

impl PooledGrowing {
    /// A pool with room for one and a half files of that length, and an empty file.
    pub fn create(file_bytes: u64, by_view: bool) -> Result<Self> {
        let bytes = pool_bytes(file_bytes + file_bytes / 2, 1);
        let pool = Pool::create(POOL, bytes)?;
        let files = Files::new(pool);
        Ok(Self { file: Some(Self::begin(&files)?), files, by_view })
    }

    fn begin(files: &Files) -> Result<File> {
        Ok(files.options().read(true).append(true).create_new(true).open(GROWING)?)
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("there between calls")
    }
}

impl Growing for PooledGrowing {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        if self.by_view {
            self.file().append_view(bytes.len() as u64)?.write(0, bytes)?
        } else {
            self.file().write_all_at(bytes, 0)?
        }
        Ok(())
    }

    fn begin_again(&mut self) -> Result<()> {
        self.files.remove_file(GROWING)?;
        self.file = None;
        self.file = Some(Self::begin(&self.files)?);
        Ok(())
    }

    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        read_all(self.file(), offset_bytes, bytes)
    }
}

/// Two files whose pages are exchanged.
#[derive(Debug)]
pub struct PooledPair {
    files: [PooledFile; 2],
    file_bytes: u64,
}

impl PooledPair {
    /// Opens the pool and both files.
    pub fn open(names: [&Path; 2], file_bytes: u64) -> Result<Self> {
        Ok(Self { files: PooledFile::open_two(names[0], names[1])?, file_bytes })
    }
}

impl Pair for PooledPair {
    fn exchanges_pages(&self) -> bool {
        true
    }

    fn replace(&mut self) -> Result<()> {
        let [to, from] = &self.files;
        Ok(to.file.exchange_range(0, &from.file, 0, self.file_bytes)?)
    }

    fn sums(&mut self) -> Result<[u64; 2]> {
        let [to, from] = &mut self.files;
        Ok([sum(to, self.file_bytes)?, sum(from, self.file_bytes)?])
    }
}
