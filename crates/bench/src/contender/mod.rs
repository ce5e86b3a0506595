//! The compared systems, behind one small interface.
//!
//! A [`Contender`] opens the data file in its own way; each thread accesses it through a [`Lane`].
//! The interface is static (generic, inlined) so that a contender whose access is one load pays for
//! one load. Every contender must return the bytes of the file, however it gets them; the workloads
//! check that.
//!
//! Contenders that make stores durable have separate interfaces, in [`stores`] (commits) and
//! [`regions`] (memory that is made durable as a whole); so do those for ordinary files, in
//! [`files`], and for files in pools, in [`pooled`].

mod anonymous;
mod aquifer;
mod direct;
pub mod files;
mod mmap;
pub mod pooled;
pub mod regions;
pub mod stores;
mod user_cache;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::raw::PAGE_BYTES;

pub use mmap::MmapFile;

/// The contenders, with their names in reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum System {
    /// A file mapping without advice: the usual use of mmap.
    Mmap,
    /// A file mapping with `MADV_RANDOM`.
    MmapRandom,
    /// The same, with vectored `MADV_WILLNEED` for accesses known in advance.
    MmapWillneed,
    /// A file mapping populated when it is created.
    MmapPopulate,
    /// A file mapping with `MADV_SEQUENTIAL`.
    MmapSequential,
    /// A file mapping, with vectored `MADV_WILLNEED` for the accesses after the next ones.
    MmapWillneedAhead,
    /// `open`, `fstat` and `pread` of the whole file into a reused buffer.
    Read,
    /// `openat` in the file's directory and `read` into 64 KiB until a short read.
    ReadLoop,
    /// `pread` and `pwrite` with `O_DIRECT`: no cache at all.
    PreadDirect,
    /// quick_cache over `pread` with `O_DIRECT`: the cache a program would otherwise use.
    UserCache,
    /// Anonymous memory that holds a copy: the lowest cost of a hit.
    Anonymous,
    /// Aquifer's mapping with its defaults: the backend it chooses, bare loads and stores.
    Mapping,
    /// The same with the kernel backend.
    MappingKernel,
    /// The same with the user backend.
    MappingUser,
    /// The user backend, each access preceded by a touch.
    MappingTouch,
    /// The default mapping, with accesses known in advance touched together.
    MappingBatched,
    /// Aquifer's page guards: optimistic reads, exclusive guards for stores.
    Pages,
    /// The same, with pages known in advance acquired together.
    PagesBatched,
    /// A persistent object of Aquifer, made durable by `psync`.
    Object,
    /// LMDB, with its default flags.
    Lmdb,
    /// SQLite with a write-ahead log and `synchronous=FULL`.
    Sqlite,
    /// redb with its default durability.
    Redb,
    /// libpmemobj: a transaction that logs each range before it is stored to.
    Libpmemobj,
    /// The same, logging whole records.
    LibpmemobjRecords,
    /// A shared file mapping made durable by `msync`. A crash in between leaves only some of the
    /// stores.
    Msync,
    /// Aquifer's mapper with its defaults, including its cache of mappings.
    Mapper,
    /// The same, without advice about how a file will be used.
    MapperUnadvised,
    /// The same without that cache: dropped mappings are unmapped many at a time.
    MapperAsync,
    /// The same without that cache, with every mapping unmapped when it is dropped.
    MapperSync,
    /// Aquifer's `read_once`: reads or maps, whichever is cheaper for a file of that length.
    MapperReadOnce,
    /// Files of the kernel by system calls: `pread`, `pwrite`, `open`, `stat`, `unlink`.
    Syscalls,
    /// Files of an Aquifer pool, read and written without system calls.
    Pool,
    /// The same by copying the bytes, where another form of Aquifer is cheaper.
    PoolCopy,
    /// Files of an Aquifer pool, accessed in place.
    View,
    /// Plain memory.
    Memory,
    /// Appending to a preallocated log and flushing the device: the lower bound of a commit's cost.
    LogAlone,
}

impl System {
    /// The name in reports and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mmap => "mmap",
            Self::MmapRandom => "mmap_random",
            Self::MmapWillneed => "mmap_willneed",
            Self::MmapPopulate => "mmap_populate",
            Self::MmapSequential => "mmap_sequential",
            Self::MmapWillneedAhead => "mmap_willneed_ahead",
            Self::Read => "read",
            Self::ReadLoop => "read_loop",
            Self::PreadDirect => "pread_direct",
            Self::UserCache => "user_cache",
            Self::Anonymous => "anonymous",
            Self::Mapping => "mapping",
            Self::MappingKernel => "mapping_kernel",
            Self::MappingUser => "mapping_user",
            Self::MappingTouch => "mapping_touch",
            Self::MappingBatched => "mapping_batched",
            Self::Pages => "pages",
            Self::PagesBatched => "pages_batched",
            Self::Object => "object",
            Self::Lmdb => "lmdb",
            Self::Sqlite => "sqlite",
            Self::Redb => "redb",
            Self::Libpmemobj => "libpmemobj",
            Self::LibpmemobjRecords => "libpmemobj_records",
            Self::Msync => "msync",
            Self::Mapper => "mapper",
            Self::MapperUnadvised => "mapper_unadvised",
            Self::MapperAsync => "mapper_async",
            Self::MapperSync => "mapper_sync",
            Self::MapperReadOnce => "mapper_read_once",
            Self::Syscalls => "syscalls",
            Self::Pool => "pool",
            Self::PoolCopy => "pool_copy",
            Self::View => "view",
            Self::Memory => "memory",
            Self::LogAlone => "log_alone",
        }
    }
}

/// The parameters for opening a contender.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Source {
    /// The data file.
    pub path: PathBuf,
    /// Its length in pages of [`PAGE_BYTES`].
    pub pages: u64,
    /// Whether there will be stores.
    pub writable: bool,
    /// The budget for a contender's private cache, bookkeeping included. For mappers, 0 is their
    /// default.
    pub cache_bytes: u64,
    /// Whether page tables are kept to base pages, so that all contenders have the same translation
    /// cost.
    pub base_pages: bool,
}

/// A contender cannot run on this machine or file system. Not a failure: it becomes a note in the
/// report.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// An opened data file.
pub trait Contender: Sync {
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

    /// The whole file as addresses, for contenders that map it.
    fn contiguous(&self) -> Option<&dyn Contiguous> {
        None
    }

    /// Additional figures for the report.
    fn details(&self) -> Result<BTreeMap<String, f64>> {
        Ok(BTreeMap::new())
    }
}

/// One thread's access to a contender.
pub trait Lane {
    /// Calls `look` with the page. The pointer is valid for a whole page and 8-byte aligned while
    /// `look` runs; accesses may fault. The last result counts: `look` is called again if the page
    /// changed while it ran.
    fn page<R>(&mut self, page: u64, look: impl FnMut(*const u8) -> R) -> Result<R>;

    /// Calls `look` with pages that are all known in advance, each once and in any order.
    fn batch(&mut self, pages: &[u64], mut look: impl FnMut(u64, *const u8)) -> Result<()> {
        pages.iter().try_for_each(|&page| self.page(page, |memory| look(page, memory)))
    }

    /// Stores one byte. It is durable after [`Contender::flush`].
    fn store(&mut self, page: u64, offset_bytes: usize, value: u8) -> Result<()>;
}

/// A file whose bytes have addresses.
pub trait Contiguous: Sync {
    /// Address of the first byte.
    fn base(&self) -> *const u8;

    /// Announces that these byte ranges (start and length, any alignment, sorted) will be read
    /// soon. Does nothing for contenders that represent programs without prefetch.
    fn prefetch(&self, ranges: &[(u64, u64)]) -> Result<()>;
}

/// Work on an open contender.
pub trait Visit {
    /// Its result.
    type Output;

    /// Does the work.
    fn visit<C: Contender>(self, contender: &C) -> Result<Self::Output>;
}

/// Opens a contender and passes it to `visit`.
pub fn with<V: Visit>(system: System, source: &Source, visit: V) -> Result<V::Output> {
    match system {
        System::Mmap | System::MmapRandom | System::MmapWillneed => {
            visit.visit(&MmapFile::open(system, source)?)
        }
        System::PreadDirect => visit.visit(&direct::DirectFile::open(source)?),
        System::UserCache => visit.visit(&user_cache::UserCache::open(source)?),
        System::Anonymous => visit.visit(&anonymous::Anonymous::open(source)?),
        System::Mapping
        | System::MappingKernel
        | System::MappingUser
        | System::MappingTouch
        | System::MappingBatched => visit.visit(&aquifer::MappedFile::open(system, source)?),
        System::Pages | System::PagesBatched => {
            visit.visit(&aquifer::PagedFile::open(system, source)?)
        }
        other => bail!("{} does not read data files", other.name()),
    }
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
