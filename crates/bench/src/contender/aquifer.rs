//! Aquifer: mappings with either backend, with and without touching first, and `Pages`.
//!
//! Each contender has its own cache. Its budget is that of every other contender with a private
//! cache or, where the kernel backend serves, that of one in the page cache: this backend has neither
//! frames nor their tables. Nothing else is set: policy, page size and threads have their defaults.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Deref, Range};
use std::sync::Arc;

use anyhow::Result;
use aquifer::device::FileDevice;
use aquifer::{Backend, Bytes, Cache, CacheError, MapOptions, Mapping, MappingMut, PageId, Pages};

use super::{Contiguous, Lane, PageFile, Visitor, whole_pages};
use crate::job::{Source, Unavailable};
use crate::raw::{PAGE_BYTES, huge_mapped_bytes};

fn open(source: &Source) -> Result<(Cache, Arc<FileDevice>)> {
    let cache = Cache::builder().budget_bytes(source.cache_bytes).build()?;
    let device = FileDevice::options().writable(source.writable).open(&source.path)?;
    Ok((cache, Arc::new(device)))
}

/// Figures of the cache that explain the others.
fn cache_details(cache: &Cache) -> BTreeMap<String, f64> {
    let stats = cache.stats();
    [
        ("misses", stats.misses),
        ("evictions", stats.evictions),
        ("stalls", stats.stalls),
        ("signals", stats.signals),
        ("written_pages", stats.written_pages),
        ("write_backs", stats.write_backs),
    ]
    .map(|(name, count)| (name.to_owned(), count as f64))
    .into()
}

/// How a mapping is accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Loads and stores through the pointer; the miss is a fault.
    Bare,
    /// [`Mapping::touch`] first, so that a miss is a call.
    Touch,
    /// [`Mapping::touch_many`] first where accesses are known in advance.
    Batched,
    /// [`Mapping::visit_many`] where accesses are known in advance.
    Visited,
}

/// The mapping of a data file, writable for workloads that store.
enum Mapped {
    Read(Mapping),
    Write(MappingMut),
}

impl Mapped {
    fn writable(&self) -> Option<&MappingMut> {
        match self {
            Mapped::Read(_) => None,
            Mapped::Write(mapping) => Some(mapping),
        }
    }
}

impl Deref for Mapped {
    type Target = Mapping;
    fn deref(&self) -> &Mapping {
        match self {
            Mapped::Read(mapping) => mapping,
            Mapped::Write(mapping) => mapping,
        }
    }
}

/// The data file as a [`Mapping`].
pub struct MappedFile {
    cache: Cache,
    mapping: Mapped,
    style: Style,
}

impl MappedFile {
    /// Maps the file through this backend. [`Unavailable`] where the system does not have it.
    pub fn open(backend: Backend, style: Style, source: &Source) -> Result<Self> {
        let (cache, device) = open(source)?;
        let options = MapOptions::new().backend(backend);
        let refused = |error| match error {
            CacheError::BackendUnsupported { .. } => Unavailable(format!("{error}")).into(),
            other => anyhow::Error::from(other),
        };
        let mapping = if source.writable {
            cache.map_mut_with(device, options).map(Mapped::Write)
        } else {
            cache.map_with(device, options).map(Mapped::Read)
        };
        let mapping = mapping.map_err(refused)?;
        if backend != Backend::Auto && mapping.backend() != backend {
            let reason = format!("the {} backend is not to be had here", backend.name());
            return Err(Unavailable(reason).into());
        }
        if mapping.backend() == Backend::Kernel && source.page_cache_bytes > 0 {
            cache.resize(source.page_cache_bytes)?;
        }
        Ok(Self { cache, mapping, style })
    }
}

impl PageFile for MappedFile {
    type Lane<'a> = MappedLane<'a>;

    fn lane(&self) -> Result<MappedLane<'_>> {
        let (mapping, writable) = (&*self.mapping, self.mapping.writable());
        let base = mapping.as_ptr();
        Ok(MappedLane { style: self.style, mapping, writable, base, ranges: Vec::new() })
    }

    fn flush(&self) -> Result<()> {
        Ok(self.mapping.writable().map_or(Ok(()), MappingMut::flush_all)?)
    }

    fn contiguous(&self) -> Option<&dyn Contiguous> {
        Some(self)
    }

    fn visitor(&self) -> Option<&dyn Visitor> {
        (self.style == Style::Visited).then_some(self as _)
    }

    fn details(&self) -> Result<BTreeMap<String, f64>> {
        let mut details = cache_details(&self.cache);
        let user = f64::from(u8::from(self.mapping.backend() == Backend::User));
        details.insert("user_backend".to_owned(), user);
        let huge_bytes = huge_mapped_bytes(self.mapping.as_ptr(), self.mapping.len())?;
        details.insert("huge_mapped_bytes".to_owned(), huge_bytes as f64);
        Ok(details)
    }
}

impl Visitor for MappedFile {
    fn visit(
        &self,
        ranges: &[(u64, u64)],
        look: &mut dyn FnMut(usize, Bytes<'_>) -> Result<()>,
    ) -> Result<()> {
        let ranges = ranges.iter().map(|&(start, len_bytes)| start..start + len_bytes);
        let mut failed = None;
        self.mapping.visit_many(ranges, |visited| match look(visited.index, visited.bytes) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        })?;
        failed.map_or(Ok(()), Err)
    }
}

impl Contiguous for MappedFile {
    fn base(&self) -> *const u8 {
        self.mapping.as_ptr()
    }

    /// Loads the ranges at queue depth, in the calling thread: with as many searching threads as
    /// cores, that is faster than handing the work to the cache's I/O threads.
    fn prefetch(&self, ranges: &[(u64, u64)]) -> Result<()> {
        let ranges = whole_pages(ranges);
        // With the kernel backend a prefetch is a WILLNEED; otherwise the calling thread loads the
        // pages itself, at queue depth.
        if self.mapping.backend() == Backend::Kernel {
            return Ok(self.mapping.prefetch(&ranges)?);
        }
        Ok(self.mapping.touch_many(&ranges)?)
    }
}

/// A thread's access to a mapping.
pub struct MappedLane<'a> {
    style: Style,
    mapping: &'a Mapping,
    writable: Option<&'a MappingMut>,
    base: *const u8,
    ranges: Vec<Range<u64>>,
}

impl Lane for MappedLane<'_> {
    #[inline(always)]
    fn page<R>(&mut self, page: u64, mut look: impl FnMut(*const u8) -> R) -> Result<R> {
        let offset_bytes = page * PAGE_BYTES as u64;
        if self.style == Style::Touch {
            self.mapping.touch(offset_bytes)?;
        }
        Ok(look(self.base.wrapping_add(offset_bytes as usize)))
    }

    fn batch(&mut self, pages: &[u64], mut look: impl FnMut(u64, *const u8)) -> Result<()> {
        if matches!(self.style, Style::Batched | Style::Visited) {
            self.ranges.clear();
            let bytes = PAGE_BYTES as u64;
            self.ranges.extend(pages.iter().map(|page| page * bytes..(page + 1) * bytes));
        }
        if self.style == Style::Batched {
            self.mapping.touch_many(&self.ranges)?;
        }
        if self.style == Style::Visited {
            return Ok(self.mapping.visit_many(self.ranges.iter().cloned(), |visited| {
                look(pages[visited.index], visited.bytes.as_ptr());
                ControlFlow::Continue(())
            })?);
        }
        for &page in pages {
            self.page(page, |memory| look(page, memory))?;
        }
        Ok(())
    }

    #[inline(always)]
    fn store(&mut self, page: u64, offset_bytes: usize, value: u8) -> Result<()> {
        let page_at = page * PAGE_BYTES as u64;
        if self.style == Style::Touch
            && let Some(mapping) = self.writable
        {
            mapping.touch_mut(page_at)?;
        }
        let byte = self.base.wrapping_add(page_at as usize + offset_bytes).cast_mut();
        // SAFETY: inside the mapping (page below `Source::pages`, offset below a page), which is
        // writable for workloads that store; volatile, because the bytes are shared with the
        // device.
        unsafe { byte.write_volatile(value) };
        Ok(())
    }
}

/// How pages known in advance are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// One by one.
    Single,
    /// [`Pages::get_many`].
    Batched,
    /// [`Pages::visit_many`].
    Visited,
}

/// The data file as [`Pages`].
pub struct PagedFile {
    cache: Cache,
    pages: Pages,
    known: Known,
}

impl PagedFile {
    /// Opens the file.
    pub fn open(known: Known, source: &Source) -> Result<Self> {
        let (cache, device) = open(source)?;
        let pages = cache.pages(device)?;
        Ok(Self { cache, pages, known })
    }
}

impl PageFile for PagedFile {
    type Lane<'a> = PagedLane<'a>;

    fn lane(&self) -> Result<PagedLane<'_>> {
        Ok(PagedLane { file: self, ids: Vec::new() })
    }

    fn flush(&self) -> Result<()> {
        Ok(self.pages.flush_all()?)
    }

    fn details(&self) -> Result<BTreeMap<String, f64>> {
        Ok(cache_details(&self.cache))
    }
}

/// A thread's access to pages.
pub struct PagedLane<'a> {
    file: &'a PagedFile,
    ids: Vec<PageId>,
}

impl Lane for PagedLane<'_> {
    #[inline(always)]
    fn page<R>(&mut self, page: u64, mut look: impl FnMut(*const u8) -> R) -> Result<R> {
        Ok(self.file.pages.read(PageId(page), |bytes| look(bytes.as_ptr()))?)
    }

    fn batch(&mut self, pages: &[u64], mut look: impl FnMut(u64, *const u8)) -> Result<()> {
        if self.file.known == Known::Single {
            for &page in pages {
                look(page, self.file.pages.get(PageId(page))?.as_ptr());
            }
            return Ok(());
        }
        self.ids.clear();
        self.ids.extend(pages.iter().copied().map(PageId));
        if self.file.known == Known::Batched {
            for guard in self.file.pages.get_many(&self.ids)? {
                look(guard.id().0, guard.as_ptr());
            }
            return Ok(());
        }
        self.ids.sort_unstable();
        let ids = &self.ids;
        Ok(self.file.pages.visit_many(ids.iter().copied(), |page, bytes| {
            // Each page comes once, however often the batch names it.
            let named = &ids[ids.partition_point(|id| *id < page)..];
            named.iter().take_while(|id| **id == page).for_each(|_| look(page.0, bytes.as_ptr()));
            ControlFlow::Continue(())
        })?)
    }

    fn store(&mut self, page: u64, offset_bytes: usize, value: u8) -> Result<()> {
        self.file.pages.get_mut(PageId(page))?[offset_bytes] = value;
        Ok(())
    }
}
