//! Ordinary files: the interfaces, and who offers them.
//!
//! | interface | what | contenders |
//! |---|---|---|
//! | [`Files`] | a whole file for a moment | `mmap`, `mmap_populate`, `read`, and the mapper in its forms |
//! | [`Maps`] | one large file whose pages are read | `mmap` in its forms, the mapper |
//! | [`Stored`] | one large file that is stored to | `msync`, the mapper |
//!
//! All of them hand out plain slices, so that reaching the bytes is all that differs. Nobody but the bench
//! knows of its files, and it does not change them while they are looked at.

mod mapper;
mod plain;

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Result, bail};

use super::{System, Unavailable};

pub use plain::ReadLoop;

/// Files that are looked at one after the other.
pub trait Files: Sync {
    /// One thread's access to them.
    type Lane<'a>: WholeFile
    where
        Self: 'a;

    /// Starts a thread's access.
    fn lane(&self) -> Result<Self::Lane<'_>>;

    /// Does the work that has been put off, as the end of the program would.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// Figures of its own, for the report.
    fn details(&self) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }
}

/// One thread's access to files.
pub trait WholeFile {
    /// Lets `look` see all of the file of that name. Nothing of it is kept but what a cache keeps.
    fn by_path<R>(&mut self, path: &Path, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let file = plain::open(path)?;
        let len_bytes = plain::length(&file)?;
        self.opened(&file, len_bytes, look)
    }

    /// The same with the file of a name in a directory, which is open and has this path: by whichever is better.
    fn in_directory<R>(
        &mut self,
        _directory: &OwnedFd,
        name: &CStr,
        path: &Path,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        let _ = name;
        self.by_path(path, look)
    }

    /// The same with a file that is open and stays so, where the kernel opens it.
    fn opened<R>(
        &mut self,
        _file: &File,
        _len_bytes: usize,
        _look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        Err(Unavailable("its files have no descriptor".to_owned()).into())
    }
}

/// What to do with files.
pub trait VisitFiles {
    /// What that gives.
    type Output;

    /// Does it.
    fn visit<F: Files>(self, files: &F) -> Result<Self::Output>;
}

/// Prepares a contender and hands it to `visit`. A cache of mappings may keep `cache_bytes` of files; without that it
/// keeps what it keeps by default.
pub fn with_files<V: VisitFiles>(
    system: System,
    cache_bytes: Option<u64>,
    visit: V,
) -> Result<V::Output> {
    match system {
        System::Mmap => visit.visit(&plain::MappedFiles { populate: false }),
        System::MmapPopulate => visit.visit(&plain::MappedFiles { populate: true }),
        System::Read => visit.visit(&plain::ReadFiles),
        System::Mapper | System::MapperAsync | System::MapperSync => {
            visit.visit(&mapper::MapperFiles::new(system, cache_bytes)?)
        }
        System::MapperReadOnce => visit.visit(&mapper::ReadOnceFiles::new(cache_bytes)?),
        other => bail!("{} does not look at whole files", other.name()),
    }
}

/// Maps large files to read from.
pub trait Maps {
    /// A mapped file.
    type Map: Mapped;

    /// Maps the first `len_bytes` of the file.
    fn map(&self, file: &File, len_bytes: usize) -> Result<Self::Map>;
}

/// A large file that is read from.
pub trait Mapped: Sync {
    /// Pages that were asked for.
    type Pending: Default;

    /// Lets `look` see all of it.
    fn look<R>(&self, look: impl FnOnce(&[u8]) -> R) -> Result<R>;

    /// Says that this range will be read from its start to its end, where the contender has a word for that.
    fn announce(&self, _range: Range<usize>) -> Result<()> {
        Ok(())
    }

    /// Asks for pages that will be read soon, where the contender can.
    fn ask_for(&self, _pages: &[u64]) -> Result<Self::Pending> {
        Ok(Self::Pending::default())
    }

    /// Waits for pages that were asked for, where the contender has something to wait for.
    fn wait_for(&self, _pending: Self::Pending) -> Result<()> {
        Ok(())
    }

    /// Figures of its own, for the report.
    fn details(&self) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }
}

/// What to do with a way to map files.
pub trait VisitMaps {
    /// What that gives.
    type Output;

    /// Does it.
    fn visit<M: Maps>(self, maps: &M) -> Result<Self::Output>;
}

/// Prepares a contender and hands it to `visit`.
pub fn with_maps<V: VisitMaps>(system: System, visit: V) -> Result<V::Output> {
    match system {
        System::Mmap
        | System::MmapPopulate
        | System::MmapRandom
        | System::MmapSequential
        | System::MmapWillneed
        | System::MmapWillneedAhead => visit.visit(&plain::PlainMaps { system }),
        System::Mapper | System::MapperUnadvised => {
            visit.visit(&mapper::MapperMaps::new(system == System::Mapper)?)
        }
        other => bail!("{} does not map large files", other.name()),
    }
}

/// A large file that is stored to and then made durable.
pub trait Stored {
    /// First byte of the file; what is stored there is in the file after [`Stored::flush`].
    fn base(&mut self) -> Result<*mut u8>;

    /// Makes every store durable. Says how many bytes it wrote, where it knows.
    fn flush(&mut self) -> Result<Option<u64>>;
}

/// Opens a file to store to.
pub fn stored(system: System, path: &Path, len_bytes: usize) -> Result<Box<dyn Stored>> {
    match system {
        System::Msync => Ok(Box::new(plain::SharedMap::open(path, len_bytes)?)),
        System::Mapper => Ok(Box::new(mapper::WritableFile::open(path, len_bytes)?)),
        other => bail!("{} does not store to files", other.name()),
    }
}
