//! Files without Aquifer: by system calls, or through a shared mapping.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::{Growing, Pair, Records};
use crate::raw::Map;
use crate::sum::sum_words;

fn open(name: &Path) -> Result<File> {
    let opened = OpenOptions::new().read(true).write(true).open(name);
    opened.with_context(|| format!("cannot open {}", name.display()))
}

/// Records by `pread` and `pwrite`.
#[derive(Debug)]
pub struct CalledFile {
    file: File,
}

impl CalledFile {
    /// Opens the file.
    pub fn open(name: &Path) -> Result<Self> {
        Ok(Self { file: open(name)? })
    }
}

impl Records for CalledFile {
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        Ok(self.file.read_exact_at(bytes, offset_bytes)?)
    }

    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.file.write_all_at(bytes, offset_bytes)?)
    }
}

/// Records copied from and to a shared mapping.
#[derive(Debug)]
pub struct MappedFile {
    map: Map,
}

impl MappedFile {
    /// Maps the whole file.
    pub fn open(name: &Path, file_bytes: u64, populate: bool) -> Result<Self> {
        let (file, len_bytes) = (open(name)?, usize::try_from(file_bytes)?);
        let map = if populate {
            Map::populated(&file, len_bytes, true)?
        } else {
            Map::file(&file, len_bytes, true)?
        };
        Ok(Self { map })
    }
}

impl Records for MappedFile {
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        self.map.copy_out(offset_bytes as usize, bytes);
        Ok(())
    }

    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.map.copy_in(offset_bytes as usize, bytes);
        Ok(())
    }
}

/// The file that grows.
const GROWING: &str = "growing";

fn create() -> Result<File> {
    let options = OpenOptions::new().read(true).write(true).create_new(true).open(GROWING);
    options.with_context(|| format!("cannot make the file {GROWING}"))
}

/// A file that grows by `pwrite` at its end.
#[derive(Debug)]
pub struct CalledGrowing {
    file: File,
    size_bytes: u64,
}

impl CalledGrowing {
    /// An empty file.
    pub fn create() -> Result<Self> {
        Ok(Self { file: create()?, size_bytes: 0 })
    }
}

impl Growing for CalledGrowing {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, self.size_bytes)?;
        self.size_bytes += bytes.len() as u64;
        Ok(())
    }

    fn begin_again(&mut self) -> Result<()> {
        fs::remove_file(GROWING)?;
        *self = Self::create()?;
        Ok(())
    }

    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        Ok(self.file.read_exact_at(bytes, offset_bytes)?)
    }
}

/// A file extended by `ftruncate` and stored to through a mapping of its final length, so that
/// mapping does not count as an append.
#[derive(Debug)]
pub struct MappedGrowing {
    file: File,
    map: Map,
    size_bytes: u64,
    populate: bool,
}

impl MappedGrowing {
    /// An empty file, mapped with its final length. `populate`: one system call populates the
    /// page-table entries of each piece.
    pub fn create(file_bytes: u64, populate: bool) -> Result<Self> {
        let file = create()?;
        let map = Map::file(&file, usize::try_from(file_bytes)?, true)?;
        Ok(Self { file, map, size_bytes: 0, populate })
    }
}

impl Growing for MappedGrowing {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let end_bytes = self.size_bytes + bytes.len() as u64;
        self.file.set_len(end_bytes)?;
        if self.populate {
            self.map.populate_write(self.size_bytes as usize, bytes.len())?;
        }
        self.map.copy_in(self.size_bytes as usize, bytes);
        self.size_bytes = end_bytes;
        Ok(())
    }

    fn begin_again(&mut self) -> Result<()> {
        fs::remove_file(GROWING)?;
        *self = Self::create(self.map.len_bytes() as u64, self.populate)?;
        Ok(())
    }

    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        self.map.copy_out(offset_bytes as usize, bytes);
        Ok(())
    }
}

/// Bytes copied at a time.
const COPY_BYTES: usize = 1 << 20;

/// A file that is copied over another one, through a reused buffer.
pub struct CopiedPair<R> {
    to_and_from: [R; 2],
    file_bytes: u64,
    buffer: Vec<u8>,
}

impl<R: Records> CopiedPair<R> {
    /// Prepares to copy the second file over the first one.
    pub fn new(to_and_from: [R; 2], file_bytes: u64) -> Self {
        Self { to_and_from, file_bytes, buffer: vec![0; COPY_BYTES] }
    }
}

impl<R: Records> Pair for CopiedPair<R> {
    fn replace(&mut self) -> Result<()> {
        let [to, from] = &mut self.to_and_from;
        for offset_bytes in (0..self.file_bytes).step_by(COPY_BYTES) {
            let chunk_bytes = (self.file_bytes - offset_bytes).min(COPY_BYTES as u64) as usize;
            let buffer = &mut self.buffer[..chunk_bytes];
            from.read(offset_bytes, buffer)?;
            to.write(offset_bytes, buffer)?;
        }
        Ok(())
    }

    fn sums(&mut self) -> Result<[u64; 2]> {
        let [to, from] = &mut self.to_and_from;
        Ok([sum(to, self.file_bytes)?, sum(from, self.file_bytes)?])
    }
}

impl Records for Box<dyn Records> {
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        (**self).read(offset_bytes, bytes)
    }

    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        (**self).write(offset_bytes, bytes)
    }
}

/// The sum over the words of a file.
pub fn sum(file: &mut impl Records, file_bytes: u64) -> Result<u64> {
    let mut buffer = vec![0; COPY_BYTES];
    let mut sum = 0_u64;
    for offset_bytes in (0..file_bytes).step_by(COPY_BYTES) {
        let chunk_bytes = (file_bytes - offset_bytes).min(COPY_BYTES as u64) as usize;
        file.read(offset_bytes, &mut buffer[..chunk_bytes])?;
        sum = sum.wrapping_add(sum_words(&buffer[..chunk_bytes]));
    }
    Ok(sum)
}
