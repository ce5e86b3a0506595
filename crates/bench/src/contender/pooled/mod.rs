//! Files of a pool, and the same files of the kernel: the interfaces, and their implementations.
//!
//! | interface | what | contenders |
//! |---|---|---|
//! | [`Files`](super::files::Files) | whole files accessed briefly | `read`, `mmap`, `mmap_populate`, `pool`, `view` |
//! | [`Records`] | parts of one open file, read and overwritten | `syscalls`, `mmap`, `mmap_populate`, `pool` |
//! | [`Growing`] | a file that gets longer | the same, and `view` |
//! | [`Pair`] | one file that takes the content of another | as for records, and `pool_copy` |
//! | [`Names`] | files created, looked up, removed | `syscalls`, `pool` |
//!
//! All are given the directory of a [`PooledSet`](crate::pooled_set), which contains the kernel's
//! files and the pool. Names are the same in both and have one component: children run in that
//! directory, so that paths are equally long for all contenders.

mod kernel;
mod names;
mod pool;
mod whole;

use std::path::Path;

use anyhow::{Result, bail};

use super::System;
use super::files::{VisitFiles, with_files};

pub use pool::open_pool;

/// One open file, accessed in parts.
pub trait Records {
    /// Fills `bytes` from this offset of the file.
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()>;

    /// Overwrites the file from this offset on; its length stays the same.
    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()>;
}

/// Opens the file of that name for reading and writing.
pub fn records(system: System, name: &Path, file_bytes: u64) -> Result<Box<dyn Records>> {
    Ok(match system {
        System::Syscalls => Box::new(kernel::CalledFile::open(name)?),
        System::Mmap => Box::new(kernel::MappedFile::open(name, file_bytes, false)?),
        System::MmapPopulate => Box::new(kernel::MappedFile::open(name, file_bytes, true)?),
        System::Pool => Box::new(pool::PooledFile::open(name)?),
        other => bail!("{} does not read and write records", other.name()),
    })
}

/// A file that gets longer, piece by piece.
pub trait Growing {
    /// Writes `bytes` at the end.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Removes the file, and starts a new one.
    fn begin_again(&mut self) -> Result<()>;

    /// Fills `bytes` from this offset of the file: for verification.
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()>;
}

/// Creates an empty file in the current directory, for at most `file_bytes`. A pool for it has room
/// for one and a half times that.
pub fn growing(system: System, file_bytes: u64) -> Result<Box<dyn Growing>> {
    Ok(match system {
        System::Syscalls => Box::new(kernel::CalledGrowing::create()?),
        System::Mmap => Box::new(kernel::MappedGrowing::create(file_bytes, false)?),
        System::MmapPopulate => Box::new(kernel::MappedGrowing::create(file_bytes, true)?),
        System::Pool => Box::new(pool::PooledGrowing::create(file_bytes, false)?),
        System::View => Box::new(pool::PooledGrowing::create(file_bytes, true)?),
        other => bail!("{} does not append to files", other.name()),
    })
}

/// Two files of one length.
pub trait Pair {
    /// Replaces the content of the first by that of the second, whose content is undefined
    /// afterwards.
    fn replace(&mut self) -> Result<()>;

    /// The sums over the words of both.
    fn sums(&mut self) -> Result<[u64; 2]>;
}

/// Opens two files of the set for [`Pair`].
pub fn pair(system: System, names: [&Path; 2], file_bytes: u64) -> Result<Box<dyn Pair>> {
    Ok(match system {
        System::Pool => Box::new(pool::PooledPair::open(names, file_bytes)?),
        System::PoolCopy => {
            let [to, from] = names;
            let records = pool::PooledFile::open_two(to, from)?;
            Box::new(kernel::CopiedPair::new(records, file_bytes))
        }
        System::Syscalls | System::Mmap | System::MmapPopulate => {
            let [to, from] = names.map(|name| records(system, name, file_bytes));
            Box::new(kernel::CopiedPair::new([to?, from?], file_bytes))
        }
        other => bail!("{} does not replace files", other.name()),
    })
}

/// Creating and removing files.
pub trait Names {
    /// Creates an empty file, looks it up by name, and removes it. Returns the length found.
    fn create_stat_remove(&mut self, name: &Path) -> Result<u64>;
}

/// Creates a directory of that name in the current directory, or in the pool there.
pub fn names(system: System, directory: &Path) -> Result<Box<dyn Names>> {
    Ok(match system {
        System::Syscalls => Box::new(names::KernelNames::create(directory)?),
        System::Pool => Box::new(names::PoolNames::create(directory)?),
        other => bail!("{} does not make files", other.name()),
    })
}

/// Opens a contender that accesses whole files by name, and passes it to `visit`.
pub fn with_whole_files<V: VisitFiles>(system: System, visit: V) -> Result<V::Output> {
    match system {
        System::Pool => visit.visit(&whole::PoolReads::open()?),
        System::View => visit.visit(&whole::PoolViews::open()?),
        other => with_files(other, None, visit),
    }
}
