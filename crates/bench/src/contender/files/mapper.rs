//! Aquifer's mapper.
//!
//! | contender | mapping cache | unmapping |
//! |---|---|---|
//! | `mapper` | on | default |
//! | `mapper_async` | off | many at a time (default) |
//! | `mapper_sync` | off | immediately |

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Result, bail};
use aquifer::mapper::{Advice, Prefetch, Unmap};
use aquifer::{FileAccess, FileView, Mapper, Stores, ViewOptions};

use super::{Files, Mapped, Maps, Stored, WholeFile};
use crate::job::Source;
use crate::raw::PAGE_BYTES;

/// Calls `look` with the content of a view.
fn look_at<R>(view: &FileView, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
    // SAFETY: the bench's files are not modified while they are read.
    Ok(view.read(|bytes| look(unsafe { bytes.as_slice() }))?)
}

fn with_cache(source: &Source) -> Result<Mapper> {
    let builder = match source.cache_bytes {
        0 => Mapper::builder(),
        bytes => Mapper::builder().mapping_cache_bytes(bytes),
    };
    Ok(builder.build()?)
}

/// Whole files through one mapper.
pub struct MapperFiles {
    mapper: Mapper,
}

impl MapperFiles {
    /// The default mapper, or one with a cache of as many bytes as the job says.
    pub fn new(source: &Source) -> Result<Self> {
        Ok(Self { mapper: with_cache(source)? })
    }

    /// A mapper without a cache.
    pub fn without_cache(unmap: Unmap) -> Result<Self> {
        Ok(Self { mapper: Mapper::builder().mapping_cache_bytes(0).unmap(unmap).build()? })
    }
}

impl Files for MapperFiles {
    type Lane<'a> = MapperLane<'a>;

    fn lane(&self) -> Result<MapperLane<'_>> {
        Ok(MapperLane { mapper: &self.mapper })
    }

    fn settle(&self) -> Result<()> {
        Ok(self.mapper.forget_all()?)
    }

    fn details(&self) -> BTreeMap<String, f64> {
        let cache = self.mapper.stats().cache;
        [("cache_hits", cache.hits), ("cache_misses", cache.misses)]
            .map(|(name, count)| (name.to_owned(), count as f64))
            .into()
    }
}

/// A thread's access to the mapper.
pub struct MapperLane<'a> {
    mapper: &'a Mapper,
}

impl WholeFile for MapperLane<'_> {
    fn by_path<R>(&mut self, path: &Path, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        look_at(&self.mapper.map(path, FileAccess::Read, ..)?, look)
    }

    fn opened<R>(
        &mut self,
        file: &File,
        len_bytes: usize,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        look_at(&self.mapper.map_file(file, FileAccess::Read, ..len_bytes as u64)?, look)
    }
}

/// Whole files through [`Mapper::read_once`].
pub struct ReadOnceFiles {
    mapper: Mapper,
}

impl ReadOnceFiles {
    /// The default mapper, or one with a cache of as many bytes as the job says.
    pub fn new(source: &Source) -> Result<Self> {
        Ok(Self { mapper: with_cache(source)? })
    }
}

impl Files for ReadOnceFiles {
    type Lane<'a> = ReadOnceLane<'a>;

    fn lane(&self) -> Result<ReadOnceLane<'_>> {
        Ok(ReadOnceLane { mapper: &self.mapper })
    }

    fn settle(&self) -> Result<()> {
        Ok(self.mapper.forget_all()?)
    }
}

/// A thread's access to the mapper.
pub struct ReadOnceLane<'a> {
    mapper: &'a Mapper,
}

impl WholeFile for ReadOnceLane<'_> {
    fn by_path<R>(&mut self, path: &Path, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        // SAFETY: the bench's files are not modified while they are read.
        Ok(self.mapper.read_once(path, |bytes| look(unsafe { bytes.as_slice() }))?)
    }

    fn in_directory<R>(
        &mut self,
        directory: &OwnedFd,
        name: &CStr,
        _: &Path,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        let name = OsStr::from_bytes(name.to_bytes());
        // SAFETY: as above.
        Ok(self.mapper.read_once_at(directory, name, |bytes| look(unsafe { bytes.as_slice() }))?)
    }

    fn opened<R>(&mut self, _: &File, _: usize, _: impl FnOnce(&[u8]) -> R) -> Result<R> {
        bail!("files are read once by their names")
    }
}

/// Large files through one mapper.
pub struct MapperMaps {
    mapper: Mapper,
    advises: bool,
}

impl MapperMaps {
    /// The default mapper; `advises` if sequential reads are announced to it.
    pub fn new(advises: bool) -> Result<Self> {
        Ok(Self { mapper: Mapper::builder().build()?, advises })
    }
}

impl Maps for MapperMaps {
    type Map = MapperMap;

    fn map(&self, file: &File, len_bytes: usize) -> Result<MapperMap> {
        let view = self.mapper.map_file(file, FileAccess::Read, ..len_bytes as u64)?;
        Ok(MapperMap { view, mapper: self.mapper.clone(), advises: self.advises })
    }
}

/// A view of a large file.
pub struct MapperMap {
    view: FileView,
    mapper: Mapper,
    advises: bool,
}

impl Mapped for MapperMap {
    type Pending = Option<Prefetch>;

    fn look<R>(&self, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        look_at(&self.view, look)
    }

    fn announce(&self, range: Range<usize>) -> Result<()> {
        if !self.advises {
            return Ok(());
        }
        let range = range.start as u64..range.end as u64;
        Ok(self.view.advise(Advice::Sequential, range)?)
    }

    fn details(&self) -> BTreeMap<String, f64> {
        let ahead = self.mapper.stats().map_ahead;
        let megabytes = ahead.populated_bytes as f64 / 1e6;
        BTreeMap::from([("mapped_ahead_mb".to_owned(), megabytes)])
    }

    fn ask_for(&self, pages: &[u64]) -> Result<Option<Prefetch>> {
        let page_bytes = PAGE_BYTES as u64;
        let range = |&page: &u64| page * page_bytes..(page + 1) * page_bytes;
        let ranges: Vec<_> = pages.iter().map(range).collect();
        Ok(Some(self.view.prefetch(&ranges)?))
    }

    fn wait_for(&self, pending: Option<Prefetch>) -> Result<()> {
        pending.map_or(Ok(()), |prefetch| Ok(prefetch.wait()?))
    }
}

/// A file stored to through a private view.
pub struct WritableFile {
    view: FileView,
}

impl WritableFile {
    /// Maps the first `len_bytes` of the file.
    pub fn open(path: &Path, len_bytes: usize) -> Result<Self> {
        let mapper = Mapper::builder().build()?;
        let exact = ViewOptions::write().stores(Stores::Private);
        Ok(Self { view: mapper.map(path, exact, ..len_bytes as u64)? })
    }
}

impl Stored for WritableFile {
    fn base(&mut self) -> Result<*mut u8> {
        Ok(self.view.as_mut_ptr()?)
    }

    fn flush(&mut self) -> Result<Option<u64>> {
        Ok(Some(self.view.flush()?.bytes_written))
    }
}
