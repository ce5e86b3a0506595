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

pub mod mapper;
pub mod plain;

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::Result;

use crate::job::Unavailable;

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

/// Maps large files to read from.
pub trait Maps {
    /// A mapped file.
    type Map: Mapped;

    /// How pages that are known in advance are requested.
    fn requests(&self) -> Requests {
        Requests::OneBatchAhead
    }

    /// Maps the first `len_bytes` of the file.
    fn map(&self, file: &File, len_bytes: usize) -> Result<Self::Map>;
}

/// How pages that are known in advance are requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requests {
    /// Not at all: consecutive faults.
    Never,
    /// All of them, then they are read.
    AllAtOnce,
    /// In batches, one batch ahead of the reads.
    OneBatchAhead,
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

/// Maps the first bytes of a file, given their number, to store to them.
pub type OpenStored = fn(&Path, usize) -> Result<Box<dyn Stored>>;

/// A large file that is stored to and then made durable.
pub trait Stored {
    /// First byte of the file; stores there are in the file after [`Stored::flush`].
    fn base(&mut self) -> Result<*mut u8>;

    /// Makes every store durable. Returns the number of bytes written, if known.
    fn flush(&mut self) -> Result<Option<u64>>;
}
