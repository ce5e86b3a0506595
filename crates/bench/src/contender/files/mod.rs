//! Ordinary files: the interfaces, and their implementations.
//!
//! | interface | what | contenders |
//! |---|---|---|
//! | [`Files`] | whole files accessed briefly | `mmap`, `mmap_populate`, `read`, and the mapper in its forms |
//! | [`Maps`] | one large file whose pages are read | `mmap` in its forms, the mapper |
//! | [`Stored`] | one large file that is stored to | `msync`, the mapper |
//!
//! All of them provide plain slices, so that they differ only in how the bytes are reached. Only
//! the bench uses its files, and it does not modify them while they are read.

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

/// Files accessed one after the other.
pub trait Files: Sync {
    /// One thread's access to them.
    type Lane<'a>: WholeFile
    where
        Self: 'a;

    /// Starts a thread's access.
    fn lane(&self) -> Result<Self::Lane<'_>>;

    /// Does the deferred work, as at the program's exit.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// Additional figures for the report.
    fn details(&self) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }
}

/// One thread's access to files.
pub trait WholeFile {
    /// Calls `look` with the content of the file of that name. Nothing is kept except by a cache.
    fn by_path<R>(&mut self, path: &Path, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let file = plain::open(path)?;
        let len_bytes = plain::length(&file)?;
        self.opened(&file, len_bytes, look)
    }

    /// The same for a file in an open directory, by name or by path, whichever is faster.
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

    /// The same for a file that is open and stays open, for contenders that use the kernel's files.
    fn opened<R>(
        &mut self,
        _file: &File,
        _len_bytes: usize,
        _look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        Err(Unavailable("its files have no descriptor".to_owned()).into())
    }
}

/// Work on files.
pub trait VisitFiles {
    /// Its result.
    type Output;

    /// Does the work.
    fn visit<F: Files>(self, files: &F) -> Result<Self::Output>;
}

/// Opens a contender and passes it to `visit`. `cache_bytes` is the size of a cache of mappings;
/// `None` is its default.
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
    /// Requested pages.
    type Pending: Default;

    /// Calls `look` with the content of the file.
    fn look<R>(&self, look: impl FnOnce(&[u8]) -> R) -> Result<R>;

    /// Announces that this range will be read sequentially, if the contender supports that.
    fn announce(&self, _range: Range<usize>) -> Result<()> {
        Ok(())
    }

    /// Requests pages that will be read soon, if the contender supports that.
    fn ask_for(&self, _pages: &[u64]) -> Result<Self::Pending> {
        Ok(Self::Pending::default())
    }

    /// Waits for requested pages, if the contender supports that.
    fn wait_for(&self, _pending: Self::Pending) -> Result<()> {
        Ok(())
    }

    /// Additional figures for the report.
    fn details(&self) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }
}

/// Work on a way to map files.
pub trait VisitMaps {
    /// Its result.
    type Output;

    /// Does the work.
    fn visit<M: Maps>(self, maps: &M) -> Result<Self::Output>;
}

/// Opens a contender and passes it to `visit`.
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
    /// First byte of the file; stores there are in the file after [`Stored::flush`].
    fn base(&mut self) -> Result<*mut u8>;

    /// Makes every store durable. Returns the number of bytes written, if known.
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
