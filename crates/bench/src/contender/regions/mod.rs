//! Memory that is made durable as a whole: the interface, and its implementations.
//!
//! | contender | storage | `sync` | a crash during `sync` |
//! |---|---|---|---|
//! | `object` | an object in a pool | `psync` | leaves all of it or none |
//! | `msync` | a shared file mapping | `msync(MS_SYNC)` | leaves only some of the pages |
//! | `memory` | anonymous memory | none | loses everything |

mod anonymous;
mod dirty;
mod objects;
mod shared_file;

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::{System, Unavailable};

pub use dirty::DirtyPages;

/// The location of a contender's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// A private directory.
    pub directory: PathBuf,
    /// How bytes become durable there.
    pub domain: Domain,
}

/// The persistence domain a contender assumes for the storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Domain {
    /// The actual one: files in a page cache, over a device that has to be flushed.
    PageCache,
    /// Forced: memory in which flushed cache lines are durable. That is not true of a tmpfs, but
    /// has the same cost.
    Dax,
}

/// The amount one `sync` wrote.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Pages detected as stored to.
    pub pages: u64,
    /// Bytes written for them.
    pub bytes: u64,
}

/// A range of memory that can be made durable.
pub trait Region: Send {
    /// First byte; page-aligned.
    fn base(&self) -> *mut u8;

    /// Length in bytes.
    fn len_bytes(&self) -> usize;

    /// Makes every store made so far durable.
    fn sync(&mut self) -> Result<()>;

    /// The same; returns what was written, if this contender can tell.
    fn sync_counted(&mut self) -> Result<Written>;

    /// Keeps this many other pages of the region's file dirty in the page cache. Does nothing while
    /// they are dirty.
    fn keep_dirty(&mut self, _pages: usize) -> Result<()> {
        Err(Unavailable("it has no file in which other pages could be dirty".to_owned()).into())
    }

    /// Does the work that previous syncs have deferred.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Closes the region cleanly.
    fn close(self: Box<Self>) -> Result<()>;
}

/// Creates zero-filled regions of these lengths, which must be multiples of a page.
pub fn create(system: System, home: &Home, lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    match system {
        System::Object => objects::create(home, lens_bytes),
        System::Msync => shared_file::create(home, lens_bytes),
        System::Memory => anonymous::create(lens_bytes),
        other => bail!("{} has no memory to be made durable", other.name()),
    }
}

/// Opens the regions that [`create`] made, in this process or another one.
pub fn open(system: System, home: &Home, lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    match system {
        System::Object => objects::open(home, lens_bytes),
        System::Msync => shared_file::open(home, lens_bytes),
        other => bail!("{} does not outlive its process", other.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::PAGE_BYTES;

    fn home(directory: &tempfile::TempDir) -> Home {
        Home { directory: directory.path().to_owned(), domain: Domain::PageCache }
    }

    #[test]
    fn a_shared_file_is_there_after_closing() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let lens_bytes = [4 * PAGE_BYTES, PAGE_BYTES];
        let mut regions = create(System::Msync, &home(&directory), &lens_bytes).unwrap();
        for (region, value) in regions.iter_mut().zip(1_u64..) {
            let last = region.base().wrapping_add(region.len_bytes() - 8);
            // SAFETY: the last word of a writable mapping that only this test uses.
            unsafe { last.cast::<u64>().write_volatile(value) };
            let written = region.sync_counted().unwrap();
            // Without cachestat (before 6.5) this is zero.
            assert!(written.pages <= 4, "{written:?}");
        }
        for region in regions {
            region.close().unwrap();
        }
        let regions = open(System::Msync, &home(&directory), &lens_bytes).unwrap();
        for (region, value) in regions.iter().zip(1_u64..) {
            let last = region.base().wrapping_add(region.len_bytes() - 8);
            // SAFETY: as above.
            assert_eq!(unsafe { last.cast::<u64>().read_volatile() }, value);
        }
    }

    #[test]
    fn memory_does_not_last_and_says_so() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let regions = create(System::Memory, &home(&directory), &[PAGE_BYTES]).unwrap();
        assert_eq!(regions[0].len_bytes(), PAGE_BYTES);
        assert!(open(System::Memory, &home(&directory), &[PAGE_BYTES]).is_err());
        assert!(create(System::Lmdb, &home(&directory), &[PAGE_BYTES]).is_err());
    }
}
