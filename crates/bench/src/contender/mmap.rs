//! Plain file mappings, with the most effective advice.

use std::collections::BTreeMap;
use std::fs::OpenOptions;

use anyhow::{Context, Result};

use super::{Contiguous, Lane, PageFile, whole_pages};
use crate::job::{Source, Unavailable};
use crate::raw::{Advice, Map, PAGE_BYTES, WillNeed, huge_mapped_bytes};

/// The advice for a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// None: the usual use of mmap.
    Plain,
    /// `MADV_RANDOM`.
    Random,
    /// `MADV_SEQUENTIAL`.
    Sequential,
    /// `MADV_RANDOM`, with vectored `MADV_WILLNEED` for accesses known in advance.
    WillNeed,
    /// The same, in a program that sorts them first and announces `group` of them at a time.
    Sorted { group: usize },
}

/// A shared mapping of the data file.
#[derive(Debug)]
pub struct MmapFile {
    map: Map,
    will_need: Option<WillNeed>,
    sorted_group: Option<usize>,
}

impl MmapFile {
    /// Maps the file with the advice of `form`.
    pub fn open(form: Form, source: &Source) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(source.writable)
            .open(&source.path)
            .with_context(|| format!("cannot open {}", source.path.display()))?;
        let len_bytes = usize::try_from(source.pages)? * PAGE_BYTES;
        let map = Map::file(&file, len_bytes, source.writable)?;
        match form {
            Form::Plain => {}
            Form::Sequential => map.advise(Advice::Sequential)?,
            Form::Random | Form::WillNeed | Form::Sorted { .. } => map.advise(Advice::Random)?,
        }
        if source.base_pages {
            no_huge_pages(&map)?;
        }
        let will_need = match form {
            Form::WillNeed | Form::Sorted { .. } => {
                let will_need = WillNeed::new().map_err(unavailable)?;
                // One real range tells whether this kernel has the vectored call.
                will_need.advise(&[range(map.base(), 0, PAGE_BYTES)]).map_err(unavailable)?;
                Some(will_need)
            }
            Form::Plain | Form::Random | Form::Sequential => None,
        };
        let sorted_group = match form {
            Form::Sorted { group } => Some(group),
            _ => None,
        };
        Ok(Self { map, will_need, sorted_group })
    }

    /// The mapping itself.
    pub fn map(&self) -> &Map {
        &self.map
    }

    #[inline(always)]
    fn address(&self, page: u64) -> *mut u8 {
        debug_assert!((page as usize) < self.map.len_bytes() / PAGE_BYTES);
        // Callers draw page numbers below `Source::pages`, so this stays inside the mapping;
        // otherwise `wrapping_add` gives a bad address without itself being undefined behaviour.
        self.map.base().wrapping_add(page as usize * PAGE_BYTES)
    }
}

fn unavailable(error: std::io::Error) -> Unavailable {
    Unavailable(format!("vectored WILLNEED is refused here: {error}"))
}

fn range(base: *mut u8, offset_bytes: usize, len_bytes: usize) -> libc::iovec {
    libc::iovec { iov_base: base.wrapping_add(offset_bytes).cast(), iov_len: len_bytes }
}

/// Keeps a mapping to base pages; a no-op on kernels without transparent huge pages.
pub fn no_huge_pages(map: &Map) -> Result<()> {
    match map.advise(Advice::NoHugePage) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => Ok(other?),
    }
}

impl PageFile for MmapFile {
    type Lane<'a> = MmapLane<'a>;

    fn lane(&self) -> Result<MmapLane<'_>> {
        Ok(MmapLane { file: self, ranges: Vec::new() })
    }

    fn flush(&self) -> Result<()> {
        // For a shared mapping msync(MS_SYNC) is fsync of the range: data and device flush.
        Ok(self.map.sync()?)
    }

    fn uses_page_cache(&self) -> bool {
        true
    }

    fn contiguous(&self) -> Option<&dyn Contiguous> {
        Some(self)
    }

    fn details(&self) -> Result<BTreeMap<String, f64>> {
        let huge_bytes = huge_mapped_bytes(self.map.base(), self.map.len_bytes() as u64)? as f64;
        Ok(BTreeMap::from([("huge_mapped_bytes".to_owned(), huge_bytes)]))
    }
}

impl Contiguous for MmapFile {
    fn base(&self) -> *const u8 {
        self.map.base()
    }

    fn prefetch(&self, ranges: &[(u64, u64)]) -> Result<()> {
        let Some(will_need) = &self.will_need else {
            return Ok(());
        };
        let vector: Vec<_> = whole_pages(ranges)
            .iter()
            .map(|pages| {
                let len_bytes = (pages.end - pages.start) as usize;
                range(self.map.base(), pages.start as usize, len_bytes)
            })
            .collect();
        Ok(will_need.advise(&vector)?)
    }

    fn sorted_group(&self) -> Option<usize> {
        self.sorted_group
    }
}

/// A thread's access to a mapping.
#[derive(Debug)]
pub struct MmapLane<'a> {
    file: &'a MmapFile,
    ranges: Vec<libc::iovec>,
}

impl Lane for MmapLane<'_> {
    #[inline(always)]
    fn page<R>(&mut self, page: u64, mut look: impl FnMut(*const u8) -> R) -> Result<R> {
        Ok(look(self.file.address(page)))
    }

    fn batch(&mut self, pages: &[u64], mut look: impl FnMut(u64, *const u8)) -> Result<()> {
        if let Some(will_need) = &self.file.will_need {
            self.ranges.clear();
            let base = self.file.map.base();
            let vector =
                pages.iter().map(|&page| range(base, page as usize * PAGE_BYTES, PAGE_BYTES));
            self.ranges.extend(vector);
            will_need.advise(&self.ranges)?;
        }
        for &page in pages {
            look(page, self.file.address(page));
        }
        Ok(())
    }

    #[inline(always)]
    fn store(&mut self, page: u64, offset_bytes: usize, value: u8) -> Result<()> {
        let byte = self.file.address(page).wrapping_add(offset_bytes);
        // SAFETY: inside the mapping (page below `Source::pages`, offset below a page), which is
        // writable for workloads that store; volatile, because the bytes are shared with the
        // device.
        unsafe { byte.write_volatile(value) };
        Ok(())
    }
}
