//! Aquifer's persistent objects, one per region, all in one pool.
//!
//! All options are the defaults, except sizes and, for the forced `Dax` domain, the domain. This is
//! the only file of the benches that knows how pools and objects are created, attached and synced.

use std::fs::OpenOptions as FileOptions;
use std::ops::Range;
use std::path::PathBuf;

use anyhow::Result;
use aquifer_object::{Attachment, Objects};
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Pool, PoolOptions};

use super::{DirtyPages, Home, Region, Written};
use crate::job::Domain;
use crate::raw::PAGE_BYTES;
use crate::scratch::POOL;

/// The object with the pages unrelated to a commit.
const OTHER: &str = "other";
/// Its length.
const OTHER_BYTES: u64 = 4 << 20;

struct ObjectRegion {
    attachment: Attachment,
    other: Option<DirtyPages>,
    path: PathBuf,
    /// Closed after the attachment.
    objects: Objects,
}

fn path_of(home: &Home) -> PathBuf {
    home.directory.join(POOL)
}

fn open_options(home: &Home) -> PoolOptions {
    let domain = match home.domain {
        Domain::PageCache => None,
        Domain::Dax => Some(PersistenceDomain::Dax),
    };
    domain.into_iter().fold(Pool::options(), PoolOptions::domain)
}

fn name_of(index: usize) -> String {
    format!("region-{index}")
}

/// Creates a pool for objects of this length together.
pub fn create_pool(home: &Home, content_bytes: u64) -> Result<Objects> {
    // Every object may put one large commit aside; the log takes a quarter.
    let pool_bytes = 3 * content_bytes + OTHER_BYTES + (64 << 20);
    Ok(Objects::new(open_options(home).create(path_of(home), pool_bytes)?))
}

/// Opens that pool.
pub fn open_pool(home: &Home) -> Result<Objects> {
    Ok(Objects::new(open_options(home).open(path_of(home))?))
}

/// Creates a pool with one object for each length.
pub fn create(home: &Home, lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    let content_bytes: u64 = lens_bytes.iter().map(|&len_bytes| len_bytes as u64).sum();
    let objects = create_pool(home, content_bytes)?;
    for (index, &len_bytes) in lens_bytes.iter().enumerate() {
        objects.create(name_of(index), len_bytes as u64)?;
    }
    attach(home, &objects, lens_bytes.len())
}

/// Attaches the objects of that pool.
pub fn open(home: &Home, lens_bytes: &[usize]) -> Result<Vec<Box<dyn Region>>> {
    attach(home, &open_pool(home)?, lens_bytes.len())
}

fn attach(home: &Home, objects: &Objects, count: usize) -> Result<Vec<Box<dyn Region>>> {
    let attach = |index: usize| -> Result<Box<dyn Region>> {
        Ok(Box::new(ObjectRegion {
            attachment: objects.attach_mut(name_of(index))?,
            other: None,
            path: path_of(home),
            objects: objects.clone(),
        }))
    };
    (0..count).map(attach).collect()
}

impl Region for ObjectRegion {
    fn base(&self) -> *mut u8 {
        self.attachment.start().as_ptr()
    }

    fn len_bytes(&self) -> usize {
        self.attachment.len_bytes() as usize
    }

    fn sync(&mut self) -> Result<()> {
        Ok(self.attachment.psync()?)
    }

    fn sync_ranges(&mut self, ranges: &[Range<u64>]) -> Result<()> {
        Ok(self.attachment.psync_ranges(ranges)?)
    }

    fn sync_counted(&mut self) -> Result<Written> {
        let before = self.attachment.statistics();
        self.sync()?;
        let after = self.attachment.statistics();
        Ok(Written { pages: after.pages - before.pages, bytes: after.bytes - before.bytes })
    }

    fn settle(&mut self) -> Result<()> {
        Ok(self.objects.pool().checkpoint()?)
    }

    fn keep_dirty(&mut self, pages: usize) -> Result<()> {
        if self.other.as_ref().is_none_or(|other| other.pages() != pages) {
            let size_bytes = (pages * PAGE_BYTES) as u64;
            let info = self.objects.create(OTHER, size_bytes)?;
            let file = FileOptions::new().read(true).write(true).open(&self.path)?;
            // The object is never attached, so no other writer writes there.
            self.other = Some(DirtyPages::new(file, info.media_offset_bytes, pages)?);
        }
        Ok(self.other.as_ref().expect("made above").refresh()?)
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(self.attachment.detach()?)
    }
}
