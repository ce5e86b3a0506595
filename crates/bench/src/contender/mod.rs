//! What a contender is, and the interfaces and implementations behind its roles.
//!
//! A [`PageFile`] is the data file, opened in a contender's way; each thread accesses it through
//! a [`Lane`].
//! The interface is static (generic, inlined) so that a contender whose access is one load pays for
//! one load. Every contender must return the bytes of the file, however it gets them; the workloads
//! check that.
//!
//! Contenders that make stores durable have separate interfaces, in [`stores`] (commits) and
//! [`regions`] (memory that is made durable as a whole); so do those for ordinary files, in
//! [`files`], for files in pools, in [`pooled`], for stores that are opened, in [`open`], for directories that
//! may be mounts, in [`mounted`], and for objects of servers, in `remote`.

pub mod anonymous;
pub mod aquifer;
pub mod direct;
pub mod files;
pub mod mmap;
pub mod mounted;
pub mod open;
pub mod pooled;
pub mod regions;
#[cfg(feature = "remote")]
pub mod remote;
pub mod rows;
pub mod stores;
pub mod user_cache;

use std::collections::BTreeMap;
use std::ops::Range;

use ::aquifer::Bytes;
use anyhow::{Context, Result};

use crate::job::{Job, Measured};
use crate::raw::PAGE_BYTES;

/// A compared system: what it is, and how each kind of work opens it. All declarations are in
/// [`contenders`](crate::contenders).
pub struct Contender {
    /// The name in reports and on the command line.
    pub name: &'static str,
    /// What it is, in one line.
    pub about: &'static str,
    /// The work it can do.
    pub roles: Roles,
}

/// The kinds of work, each with the function that opens a contender for it. A contender that cannot
/// run on a machine says why with [`Unavailable`](crate::job::Unavailable).
pub struct Roles {
    /// Random pages of a data file, and searches in a graph file: runs the job on a [`PageFile`].
    pub pages: Option<Run>,
    /// Rows of a data file, in batches.
    pub rows: Option<Run>,
    /// Times the parts of a miss.
    pub anatomy: Option<Run>,
    /// Whole files, each accessed briefly: runs the job on [`Files`](files::Files).
    pub files: Option<Run>,
    /// One large file that is read from: runs the job on [`Maps`](files::Maps).
    pub maps: Option<Run>,
    /// One large file that is stored to and made durable.
    pub stored: Option<files::OpenStored>,
    /// Durable commits to arrays of cells.
    pub commits: Option<stores::Commits>,
    /// Memory that is made durable as a whole.
    pub regions: Option<regions::Regions>,
    /// One file whose records are read and overwritten.
    pub records: Option<pooled::OpenRecords>,
    /// A file that grows.
    pub growing: Option<pooled::CreateGrowing>,
    /// A file that takes the content of another one.
    pub pair: Option<pooled::OpenPair>,
    /// Files that are created, looked up and removed.
    pub names: Option<pooled::CreateNames>,
    /// A store of names that is opened.
    pub open: Option<open::Opening>,
    /// A directory that programs work in.
    pub home: Option<mounted::Home>,
    /// An object of a server.
    #[cfg(feature = "remote")]
    pub remote: Option<remote::Way>,
}

/// Opens the contender and runs a job with it.
pub type Run = fn(&Job) -> Result<Measured>;

impl Roles {
    /// No work at all, for declarations to start from.
    pub const NONE: Self = Self {
        pages: None,
        rows: None,
        anatomy: None,
        files: None,
        maps: None,
        stored: None,
        commits: None,
        regions: None,
        records: None,
        growing: None,
        pair: None,
        names: None,
        open: None,
        home: None,
        #[cfg(feature = "remote")]
        remote: None,
    };
}

impl Contender {
    /// One of its roles; an error if it does not have that one.
    pub fn role<R: Copy>(&self, role: Option<R>) -> Result<R> {
        role.with_context(|| format!("{} cannot do this work", self.name))
    }
}

impl PartialEq for Contender {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl std::fmt::Debug for Contender {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name)
    }
}

/// A data file, opened for access by pages.
pub trait PageFile: Sync {
    /// One thread's access to it.
    type Lane<'a>: Lane
    where
        Self: 'a;

    /// Starts a thread's access.
    fn lane(&self) -> Result<Self::Lane<'_>>;

    /// Makes every store durable.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Whether a resident page is in the kernel's page cache.
    fn uses_page_cache(&self) -> bool {
        false
    }

    /// The whole file as addresses, for contenders that map it.
    fn contiguous(&self) -> Option<&dyn Contiguous> {
        None
    }

    /// Reads in an order of its own choice, for contenders that have such calls.
    fn visitor(&self) -> Option<&dyn Visitor> {
        None
    }

    /// Additional figures for the report.
    fn details(&self) -> Result<BTreeMap<String, f64>> {
        Ok(BTreeMap::new())
    }
}

/// One thread's access to a data file.
pub trait Lane {
    /// Calls `look` with the page. The pointer is valid for a whole page and 8-byte aligned while
    /// `look` runs; accesses may fault. The last result counts: `look` is called again if the page
    /// changed while it ran.
    fn page<R>(&mut self, page: u64, look: impl FnMut(*const u8) -> R) -> Result<R>;

    /// Calls `look` with pages that are all known in advance, each once and in any order.
    fn batch(&mut self, pages: &[u64], mut look: impl FnMut(u64, *const u8)) -> Result<()> {
        pages.iter().try_for_each(|&page| self.page(page, |memory| look(page, memory)))
    }

    /// Stores one byte. It is durable after [`PageFile::flush`].
    fn store(&mut self, page: u64, offset_bytes: usize, value: u8) -> Result<()>;
}

/// A file whose bytes have addresses.
pub trait Contiguous: Sync {
    /// Address of the first byte.
    fn base(&self) -> *const u8;

    /// Announces that these byte ranges (start and length, any alignment, sorted) will be read
    /// soon. Does nothing for contenders that represent programs without prefetch.
    fn prefetch(&self, ranges: &[(u64, u64)]) -> Result<()>;

    /// How many accesses the program announces at a time, if it sorts them first.
    fn sorted_group(&self) -> Option<usize> {
        None
    }
}

/// A file that is read range by range, in an order that it chooses itself.
pub trait Visitor: Sync {
    /// Calls `look` with the index and the bytes of each range (start and length, none empty), or
    /// of its pieces, all at multiples of 4 bytes. An error of `look` ends it.
    fn visit(
        &self,
        ranges: &[(u64, u64)],
        look: &mut dyn FnMut(usize, Bytes<'_>) -> Result<()>,
    ) -> Result<()>;
}

/// Byte ranges (start and length, sorted by start) widened to whole pages, overlapping ones merged.
fn whole_pages(ranges: &[(u64, u64)]) -> Vec<Range<u64>> {
    let page = PAGE_BYTES as u64;
    let mut whole = Vec::<Range<u64>>::with_capacity(ranges.len());
    for &(start, len_bytes) in ranges {
        let (from, to) = (start / page * page, (start + len_bytes).next_multiple_of(page));
        match whole.last_mut() {
            Some(last) if from <= last.end => last.end = last.end.max(to),
            _ => whole.push(from..to),
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_whole_pages() {
        let found = whole_pages(&[(10, 16), (4090, 16), (20_000, 4), (40_000, 5000)]);
        assert_eq!(found, [0..8192, 16_384..20_480, 36_864..45_056]);
        assert_eq!(whole_pages(&[]), []);
    }
}
