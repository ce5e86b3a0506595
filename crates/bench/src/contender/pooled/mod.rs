//! Files of a pool, and the same files of the kernel: the interfaces, and who offers them.
//!
//! | interface | what | contenders |
//! |---|---|---|
//! | [`Files`](super::files::Files) | a whole file for a moment | `read`, `mmap`, `mmap_populate`, `pool`, `view` |
//! | [`Records`] | parts of one open file, read and overwritten | `syscalls`, `mmap`, `mmap_populate`, `pool` |
//! | [`Growing`] | a file that gets longer | the same, and `view` |
//! | [`Pair`] | one file that takes the content of another | as for records, and `pool_copy` |
//! | [`Names`] | files made, looked up, removed | `syscalls`, `pool` |
//!
//! All are handed the directory of a [`PooledSet`](crate::pooled_set): the kernel's files are in it, and the pool is one more
//! file there. Names are the same in both, and have one component: children work in that directory, so that no path is longer
//! for one of them.

mod kernel;
mod names;
mod pool;
mod whole;

use std::path::Path;

use anyhow::{Result, bail};

use super::System;
use super::files::{VisitFiles, with_files};

pub use pool::open_pool;

/// One open file, in parts.
pub trait Records {
    /// Fills `bytes` from this offset of the file.
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()>;

    /// Overwrites the file from this offset on; it does not get longer.
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

    /// Removes the file, and begins another one.
    fn begin_again(&mut self) -> Result<()>;

    /// Fills `bytes` from this offset of the file: for checks.
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()>;
}

/// Makes an empty file in the current directory, which gets `file_bytes` long at most. A pool is made for it that has room for
/// one and a half of it.
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
    /// Gives the first the content of the second. What that has then is undefined.
    fn replace(&mut self) -> Result<()>;

    /// The sums over the words of both.
    fn sums(&mut self) -> Result<[u64; 2]>;
}

/// Opens the first two files of the set.
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

/// Files that come and go.
pub trait Names {
    /// Makes an empty file, looks it up by name, and removes it. Says how long it was found to be.
    fn create_stat_remove(&mut self, name: &Path) -> Result<u64>;
}

/// Makes a directory of that name in the current directory, or in the pool there.
pub fn names(system: System, directory: &Path) -> Result<Box<dyn Names>> {
    Ok(match system {
        System::Syscalls => Box::new(names::KernelNames::create(directory)?),
        System::Pool => Box::new(names::PoolNames::create(directory)?),
        other => bail!("{} does not make files", other.name()),
    })
}

/// Prepares a contender that looks at whole files by their names, and hands it to `visit`.
pub fn with_whole_files<V: VisitFiles>(system: System, visit: V) -> Result<V::Output> {
    match system {
        System::Pool => visit.visit(&whole::PoolReads::open()?),
        System::View => visit.visit(&whole::PoolViews::open()?),
        other => with_files(other, None, visit),
    }
}
