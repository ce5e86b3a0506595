//! Files of a pool, and the same files of the kernel: the interfaces, and their implementations.
//!
//! | interface | what | contenders |
//! |---|---|---|
//! | [`Files`](super::files::Files) | whole files accessed briefly | `read`, `mmap`, `mmap_populate`, `pool`, `view` |
//! | [`Records`] | ranges of one open file, read and overwritten | `syscalls`, `mmap`, `mmap_populate`, `pool` |
//! | [`Growing`] | a file that gets longer | the same, and `view` |
//! | [`Pair`] | one file that takes the content of another | as for records, and `pool_copy` |
//! | [`Names`] | files created, looked up, removed | `syscalls`, `pool` |
//!
//! All are given the directory of a [`PooledSet`](crate::pooled_set), which contains the kernel's
//! files and the pool. Names are the same in both and have one component: children run in that
//! directory, so that paths are equally long for all contenders.

pub mod kernel;
pub mod names;
pub mod pool;
pub mod whole;

use std::ffi::CStr;
use std::path::Path;

use anyhow::Result;

pub use pool::open_pool;

/// One open file, accessed in ranges.
pub trait Records {
    /// Fills `bytes` from this offset of the file.
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()>;

    /// Overwrites the file from this offset on; its length stays the same.
    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()>;
}

/// Opens a file of that name and length for reading and writing.
pub type OpenRecords = fn(&Path, u64) -> Result<Box<dyn Records>>;

/// Opens two files to copy the content of the second over the first, in chunks.
pub fn copied_pair(open: OpenRecords, names: [&Path; 2], file_bytes: u64) -> Result<Box<dyn Pair>> {
    let [to, from] = names.map(|name| open(name, file_bytes));
    Ok(Box::new(kernel::CopiedPair::new([to?, from?], file_bytes)))
}

/// Creates an empty file in the current directory, for at most this many bytes. A pool for it has
/// room for one and a half times that.
pub type CreateGrowing = fn(u64) -> Result<Box<dyn Growing>>;

/// A file that gets longer, piece by piece.
pub trait Growing {
    /// Writes `bytes` at the end.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Removes the file, and starts a new one.
    fn begin_again(&mut self) -> Result<()>;

    /// Fills `bytes` from this offset of the file: for verification.
    fn read(&mut self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()>;
}

/// Opens two files of the set, of this length.
pub type OpenPair = fn([&Path; 2], u64) -> Result<Box<dyn Pair>>;

/// Two files of one length.
pub trait Pair {
    /// Replaces the content of the first by that of the second, whose content is undefined
    /// afterwards.
    fn replace(&mut self) -> Result<()>;

    /// Whether pages of the pool are exchanged, so that no data is written.
    fn exchanges_pages(&self) -> bool {
        false
    }

    /// The sums over the words of both.
    fn sums(&mut self) -> Result<[u64; 2]>;
}

/// Creates a directory of that name in the current directory, or in the pool there.
pub type CreateNames = fn(&Path) -> Result<Box<dyn Names>>;

/// Creating and removing files.
pub trait Names {
    /// Creates an empty file, looks it up by name, and removes it. Returns the length found.
    fn create_stat_remove(&mut self, name: &Path) -> Result<u64>;

    /// Creates a file with one byte.
    fn create(&mut self, name: &Path) -> Result<()>;

    /// The length of a file in the directory, by its name there and without a path.
    fn look_up(&mut self, name: &CStr) -> Result<u64>;

    /// The sum of the lengths of all files in the directory, with all their metadata.
    fn list(&mut self) -> Result<u64>;
}
