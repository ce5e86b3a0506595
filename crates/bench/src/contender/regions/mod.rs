//! Memory that is made durable as a whole: the interface, and its implementations.
//!
//! | contender | storage | `sync` | a crash during `sync` |
//! |---|---|---|---|
//! | `object` | an object in a pool | `psync` | leaves all of it or none |
//! | `msync` | a shared file mapping | `msync(MS_SYNC)` | leaves only some of the pages |
//! | `memory` | anonymous memory | none | loses everything |

mod anonymous;
mod dirty;
pub mod objects;
pub mod shared_file;

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::job::{Domain, Unavailable};

pub use dirty::DirtyPages;

/// The location of a contender's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// A private directory.
    pub directory: PathBuf,
    /// How bytes become durable there.
    pub domain: Domain,
}

impl Home {
    /// The directory, for contenders that only know files on a device.
    pub fn on_device(&self) -> Result<&Path, Unavailable> {
        match self.domain {
            Domain::PageCache => Ok(&self.directory),
            Domain::Dax => {
                Err(Unavailable("it makes no use of byte-addressable storage".to_owned()))
            }
        }
    }
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

    /// Makes the bytes of these ranges durable.
    fn sync_ranges(&mut self, _ranges: &[Range<u64>]) -> Result<()> {
        Err(Unavailable("it has no call that names what was stored".to_owned()).into())
    }

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

/// How a contender makes regions.
#[derive(Clone, Copy)]
pub struct Regions {
    /// Creates zero-filled regions of these lengths, which must be multiples of a page.
    pub create: MakeRegions,
    /// Opens the regions that `create` made, in this process or another one; `None` if they do not
    /// outlive their process.
    pub open: Option<MakeRegions>,
}

/// Makes a region of each of these lengths.
pub type MakeRegions = fn(&Home, &[usize]) -> Result<Vec<Box<dyn Region>>>;

/// Objects of a pool.
pub const OBJECTS: Regions = Regions { create: objects::create, open: Some(objects::open) };
/// Shared file mappings.
pub const SHARED_FILES: Regions =
    Regions { create: shared_file::create, open: Some(shared_file::open) };
/// Anonymous memory.
pub const ANONYMOUS: Regions = Regions { create: anonymous::create, open: None };

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
        let mut regions = (SHARED_FILES.create)(&home(&directory), &lens_bytes).unwrap();
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
        let regions = shared_file::open(&home(&directory), &lens_bytes).unwrap();
        for (region, value) in regions.iter().zip(1_u64..) {
            let last = region.base().wrapping_add(region.len_bytes() - 8);
            // SAFETY: as above.
            assert_eq!(unsafe { last.cast::<u64>().read_volatile() }, value);
        }
    }
}
