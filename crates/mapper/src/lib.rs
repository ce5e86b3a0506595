//! Ordinary files mapped well: what a program that maps files itself switches to.
//!
//! ```text
//!  map(path) ──▶ stat ──▶ mapping cache ──hit──────────────────────────▶ FileView
//!                              │ miss                                       ▲   │ dropped
//!                              ▼                                            │   ▼
//!                         open, fstat ──▶ heap: addresses ──▶ mmap ─────────┘  parked, later retired ──▶ heap: unmapped
//!                                                                                                       many at a time
//! ```
//!
//! * *Mapping cache* (`parked`): closing a view parks the mapping; mapping the file again finds it, page tables and all.
//!   A parked mapping is never taken for another file: see `identity`.
//! * *Ephemeral heap* (`heap`): addresses for mappings that come and go. They are unmapped many at a time, with one TLB flush
//!   ([`Unmap`]), and never used again before.
//! * *Map-ahead* (`map_ahead`): what is advised to be read in order is mapped by a helper before its reader comes
//!   ([`FileView::advise`]). Where faults are seen, [`window`] says how far to go.
//! * *Exact flush* (`flush`): a view that can be stored to is private, and a flush writes the pages that were stored to and
//!   no others; an ordinary shared mapping is there as well ([`FileAccess`]).
//! * *Prefetch* (`prefetch`): many ranges at once, at the queue depth of the device ([`FileView::prefetch`]).
//! * *Read once* ([`read_once`]): a file looked at once is read or mapped, whichever costs less ([`Mapper::read_once`]).
//! * *Many files* (`small`): more small files than a process may have mappings are read into memory that many share.
//! * *Resident budget* (`budget`): what is streamed through drops behind, [`MapperBuilder::resident_budget_bytes`].
//! * *Faults as errors*: [`FileView::read`] survives a file that is cut short or cannot be read, and says which byte.
//!
//! # What a program may not do
//! Addresses of a view belong to the mapper: no `munmap`, `mprotect`, `mremap` or `madvise` on them.
//!
//! # Threads and processes
//! A [`Mapper`] and its views are shared between threads freely. In a forked child everything is inert: calls fail
//! with [`MapError::Forked`], and the child makes a mapper of its own.
//!
//! ```
//! use aquifer_mapper::{FileAccess, Mapper};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("notes");
//! # std::fs::write(&path, "some text")?;
//! let mapper = Mapper::builder().build()?;
//! let view = mapper.map(&path, FileAccess::Read, ..)?;
//! let text = view.read(|bytes| bytes.to_vec())?;
//! assert_eq!(text, b"some text");
//! drop(view); //                                      parked
//! mapper.map(&path, FileAccess::Read, 5..)?; //       and found again
//! assert_eq!(mapper.stats().cache.hits, 1);
//! # Ok(())
//! # }
//! ```

mod advice;
mod budget;
mod by_device;
mod descriptors;
mod error;
mod flush;
mod identity;
mod map_ahead;
mod mapped;
mod page_buffer;
mod parked;
mod populate;
mod prefetch;
mod private;
mod random;
pub mod read_once;
mod shared;
mod small;
mod stores;
mod view;
mod writable;
mod write_back;

use std::fmt;
use std::fs::File;
use std::ops::{Range, RangeBounds};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use advice::Advice;
pub use aquifer_vm::ephemeral::{HeapStats, Unmap};
pub use error::{FaultCause, FlushCause, MapError, Result};
pub use flush::Flushed;
pub use map_ahead::{MapAheadLimits, MapAheadStats};
pub use parked::CacheStats;
pub use prefetch::Prefetch;
pub use stores::Tracking;
pub use view::FileView;

use aquifer_sys::residency::{self, Backing};

use aquifer_vm::ProcessMark;
use aquifer_vm::bytes::{Bytes, bounds_of};
use aquifer_vm::ephemeral::{Heap, NoAddresses, VmaBudget};
use budget::ResidentBudget;
use descriptors::{Duplicates, FileName, Opened, path_of};
use identity::{CacheKey, Status};
use map_ahead::MapAhead;
use mapped::{Mapped, NotMapped};
use parked::{Limits, Parked};
use populate::Span;
use prefetch::Prefetcher;
use small::Packs;
use stores::Stores;
use write_back::WriteBack;

/// What a view may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileAccess {
    /// Read.
    Read,
    /// Read and write. Stores stay in this process until they are flushed, and are lost if they are not (unless a program asks for
    /// [`MapperBuilder::write_back_bytes_per_second`]).
    Write,
    /// Read and write, as an ordinary shared mapping: others see stores at once, the kernel writes them when it likes, and
    /// a store dirties as much of the file as the kernel caches together, up to megabytes.
    SharedWrite,
}

/// Sets up a [`Mapper`].
#[derive(Debug, Clone)]
pub struct MapperBuilder {
    mapping_cache_bytes: u64,
    unmap: Unmap,
    map_ahead: MapAheadLimits,
    detect_reading: bool,
    write_back_bytes_per_second: u64,
    resident_budget_bytes: Option<u64>,
    mappings_limit: Option<usize>,
}

impl Default for MapperBuilder {
    fn default() -> Self {
        MapperBuilder {
            mapping_cache_bytes: aquifer_sys::cpu::memory_bytes() / 2,
            unmap: Unmap::default(),
            map_ahead: MapAheadLimits::default(),
            detect_reading: true,
            write_back_bytes_per_second: 0,
            resident_budget_bytes: None,
            mappings_limit: None,
        }
    }
}

impl MapperBuilder {
    /// How many bytes of mappings are parked for use again; 0 for none. They are page cache of the kernel, which takes
    /// its pages back when it needs them. A file longer than this is never parked, and of such a file only the range asked
    /// for is mapped. By default half of the machine's memory.
    pub fn mapping_cache_bytes(mut self, bytes: u64) -> Self {
        self.mapping_cache_bytes = bytes;
        self
    }

    /// When mappings are unmapped.
    pub fn unmap(mut self, unmap: Unmap) -> Self {
        self.unmap = unmap;
        self
    }

    /// How much is mapped ahead of readers where that is advised ([`FileView::advise`]), and by how many threads.
    pub fn map_ahead(mut self, limits: MapAheadLimits) -> Self {
        self.map_ahead = limits;
        self
    }

    /// Whether large files in memory (tmpfs) are mapped ahead also without advice, where their reader is seen to go from the
    /// start on. It needs an idle CPU, and looks some ten times in the first second of a view. By default it does.
    pub fn detect_sequential(mut self, detects: bool) -> Self {
        self.detect_reading = detects;
        self
    }

    /// At most how many bytes a second of what was stored to private views a thread writes to the files before a flush, so that a
    /// flush has little left to do; 0 for none. By default none: stores stay in this process until they are flushed. With it, others
    /// see stores before the program has flushed them, a page here and there, and some of what it never flushes stays in the
    /// file. 64 MiB keep a flush short and take little of a disk.
    pub fn write_back_bytes_per_second(mut self, bytes: u64) -> Self {
        self.write_back_bytes_per_second = bytes;
        self
    }

    /// How much of the page cache the files mapped may fill. A thread gives their pages back to the system, first in,
    /// first out, so that what is streamed through drops behind; pages that other processes have mapped, or that are not
    /// written back yet, stay until they are. Files in memory (tmpfs) have nothing to drop. By default there is no bound but
    /// the system's own.
    ///
    /// The bound is kept on the average: for the moments until the thread looks again it can be exceeded, by what a
    /// device reads in a few milliseconds. Choose 64 MiB or more.
    pub fn resident_budget_bytes(mut self, bytes: u64) -> Self {
        self.resident_budget_bytes = Some(bytes);
        self
    }

    /// For tests: as if the process could have so many mappings.
    #[doc(hidden)]
    pub fn mappings_limit(mut self, mappings: usize) -> Self {
        self.mappings_limit = Some(mappings);
        self
    }

    /// Makes the mapper.
    ///
    /// # Errors
    /// [`MapError::Memory`] if the process has no address space for it; [`MapError::Thread`].
    pub fn build(self) -> Result<Mapper> {
        let vmas = Arc::new(self.mappings_limit.map_or_else(VmaBudget::of_process, VmaBudget::new));
        // Half of what may be mapped may be parked.
        let limits = Limits { bytes: self.mapping_cache_bytes, mappings: vmas.limit() as u64 / 2 };
        let heap = Heap::new(self.unmap, vmas);
        let duplicates = Arc::new(Duplicates::new(self.unmap != Unmap::Sync));
        let unused = duplicates.clone();
        heap.let_go_besides(move || unused.close_unused());
        let parked = Parked::new(limits);
        let budget = self.resident_budget_bytes.map(ResidentBudget::start).transpose()?;
        Ok(Mapper {
            shared: Arc::new(Shared {
                heap,
                parked,
                duplicates,
                packs: Packs::default(),
                budget,
                ahead: MapAhead::new(self.map_ahead),
                detect_reading: self.detect_reading,
                write_back: WriteBack::new(self.write_back_bytes_per_second),
                prefetcher: Prefetcher::new(),
                mark: ProcessMark::new(),
            }),
        })
    }
}

/// Maps ordinary files. Cheap to clone.
#[derive(Clone)]
pub struct Mapper {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub heap: Arc<Heap>,
    pub parked: Parked,
    pub duplicates: Arc<Duplicates>,
    pub ahead: MapAhead,
    detect_reading: bool,
    pub write_back: WriteBack,
    pub prefetcher: Prefetcher,
    pub packs: Packs,
    pub budget: Option<ResidentBudget>,
    pub mark: ProcessMark,
}

/// What a mapper has and did.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct MapperStats {
    /// The mapping cache.
    pub cache: CacheStats,
    /// Addresses.
    pub heap: HeapStats,
    /// Mapping ahead.
    pub map_ahead: MapAheadStats,
    /// Memory that holds small files, because they were too many to be mapped: see [`FileView::is_snapshot`].
    pub snapshot_bytes: u64,
    /// What the files have in the page cache, as far as is known; 0 without a
    /// [resident budget](MapperBuilder::resident_budget_bytes).
    pub resident_bytes: u64,
}

impl Mapper {
    /// Sets up a mapper.
    pub fn builder() -> MapperBuilder {
        MapperBuilder::default()
    }

    /// Maps a range of a file, or `..` for all of it. The view has the file's length as it is now.
    ///
    /// # Errors
    /// [`MapError::Open`], [`MapError::NotMappable`], [`MapError::Range`], [`MapError::TooManyMappings`],
    /// [`MapError::Map`].
    pub fn map(
        &self,
        path: impl AsRef<Path>,
        access: FileAccess,
        range: impl RangeBounds<u64>,
    ) -> Result<FileView> {
        let path = path.as_ref();
        self.shared.check_process()?;
        let status = Status::of_path(path).map_err(MapError::open(path))?;
        let named = || path.to_owned();
        check_kind(named, &status)?;
        if access != FileAccess::Read {
            let file = mapped::open_to_store(path).map_err(MapError::open(path))?;
            let status = Status::of_file(&file).map_err(MapError::open(path))?;
            return self.shared.map_stores(&file, &status, path.to_owned(), access, &range);
        }
        let there = range_of(named, &range, status.len_bytes)?;
        if let Some(mapped) = self.shared.find(&status) {
            let name = FileName::of(path.to_owned());
            return Ok(FileView::new(self.shared.clone(), Some(mapped), name, there));
        }
        // The path may lead to another file by now: what is opened has its own length.
        let file = mapped::open(path).map_err(MapError::open(path))?;
        let status = Status::of_file(&file).map_err(MapError::open(path))?;
        self.shared.map_by_path(file, &status, path, &range)
    }

    /// Maps a range of an open file. Nothing depends on the descriptor afterwards; a duplicate of it stays open for as long as
    /// the view, and at most the delay of [`Unmap`] longer.
    ///
    /// # Errors
    /// As for [`Mapper::map`].
    pub fn map_file(
        &self,
        file: &File,
        access: FileAccess,
        range: impl RangeBounds<u64>,
    ) -> Result<FileView> {
        self.shared.check_process()?;
        let named = || path_of(file);
        let status =
            Status::of_file(file).map_err(|source| MapError::Open { path: named(), source })?;
        check_kind(named, &status)?;
        if access != FileAccess::Read {
            return self.shared.map_stores(file, &status, named(), access, &range);
        }
        let range = range_of(named, &range, status.len_bytes)?;
        let (opened, name) = Opened::given(file, status.id, &self.shared.duplicates);
        if let Some(mapped) = self.shared.find(&status) {
            if let Some(kept) = opened.kept() {
                mapped.keep_file(kept);
            }
            return Ok(FileView::new(self.shared.clone(), Some(mapped), name, range));
        }
        self.shared.map_opened(&opened, &status, name, range)
    }

    /// Shows all of a file to a closure, once: read into a buffer of the thread, or mapped, whichever costs less for its length
    /// on this machine ([`read_once`]). Also for what cannot be mapped: pipes are read to their end, files in `/proc` have their content.
    ///
    /// # Errors
    /// [`MapError::Open`], [`MapError::Read`], [`MapError::TooLong`], and those of [`Mapper::map`] and [`FileView::read`].
    pub fn read_once<T>(
        &self,
        path: impl AsRef<Path>,
        look: impl FnOnce(Bytes<'_>) -> T,
    ) -> Result<T> {
        self.shared.check_process()?;
        let path = path.as_ref();
        let file = File::open(path).map_err(MapError::open(path))?;
        self.read_opened_once(path, file, |_| path.to_owned(), look)
    }

    /// As [`Mapper::read_once`], of the file with this name in a directory that is open: who goes through a tree saves the way from
    /// its root to each file.
    ///
    /// # Errors
    /// As for [`Mapper::read_once`]; they name the file relative to the directory.
    pub fn read_once_at<T>(
        &self,
        directory: impl AsFd,
        name: impl AsRef<Path>,
        look: impl FnOnce(Bytes<'_>) -> T,
    ) -> Result<T> {
        self.shared.check_process()?;
        let name = name.as_ref();
        let file =
            aquifer_sys::io::open_at(directory.as_fd(), name).map_err(MapError::open(name))?;
        self.read_opened_once(name, file, path_of, look)
    }

    fn read_opened_once<T>(
        &self,
        path: &Path,
        file: File,
        called: impl FnOnce(&File) -> PathBuf,
        look: impl FnOnce(Bytes<'_>) -> T,
    ) -> Result<T> {
        read_once::read_once_with(path, file, look, |file, status, look| {
            let (path, status) = (&called(&file), Status::new(status));
            let view = match self.shared.find(&status) {
                Some(mapped) => {
                    let (name, whole) = (FileName::of(path.to_owned()), 0..status.len_bytes);
                    FileView::new(self.shared.clone(), Some(mapped), name, whole)
                }
                None => self.shared.map_by_path(file, &status, path, &..)?,
            };
            view.read(look)
        })
    }

    /// Lets go of a file that is parked, before it is removed or its file system unmounted. Views of it keep it.
    ///
    /// # Errors
    /// [`MapError::Open`] if the path leads nowhere.
    pub fn forget(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.shared.check_process()?;
        let status = Status::of_path(path).map_err(MapError::open(path))?;
        self.shared.parked.forget(status.id.identity());
        self.shared.ahead.settle();
        if let Some(budget) = &self.shared.budget {
            budget.forget(status.id);
        }
        self.shared.heap.unmap_now();
        Ok(())
    }

    /// Lets go of all files that are parked.
    ///
    /// # Errors
    /// [`MapError::Forked`].
    pub fn forget_all(&self) -> Result<()> {
        self.shared.check_process()?;
        self.shared.parked.forget_all();
        self.shared.ahead.settle();
        if let Some(budget) = &self.shared.budget {
            budget.forget_all();
        }
        self.shared.heap.unmap_now();
        Ok(())
    }

    /// What it has and did: nothing in a fork.
    pub fn stats(&self) -> MapperStats {
        let shared = &*self.shared;
        if !shared.mark.is_current() {
            return MapperStats::default();
        }
        MapperStats {
            cache: shared.parked.stats(),
            heap: shared.heap.stats(),
            map_ahead: shared.ahead.stats(),
            snapshot_bytes: shared.packs.bytes(),
            resident_bytes: shared.budget.as_ref().map_or(0, ResidentBudget::resident_bytes),
        }
    }
}

impl fmt::Debug for Mapper {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Mapper").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        if !self.shared.mark.is_current() {
            // Another thread of the parent may have been changing any of it when it forked.
            std::mem::forget(self.shared.clone());
        }
    }
}

impl Shared {
    pub fn check_process(&self) -> Result<()> {
        if self.mark.is_current() { Ok(()) } else { Err(MapError::Forked) }
    }

    fn find(&self, status: &Status) -> Option<Arc<Mapped>> {
        match status.len_bytes {
            0 => None,
            len_bytes => self.parked.take(|| CacheKey::of(status.id), len_bytes),
        }
    }

    fn map_stores(
        self: &Arc<Self>,
        file: &File,
        status: &Status,
        path: PathBuf,
        access: FileAccess,
        range: &impl RangeBounds<u64>,
    ) -> Result<FileView> {
        check_kind(|| path.clone(), status)?;
        check_pages(|| path.clone(), file, status)?;
        let range = range_of(|| path.clone(), range, status.len_bytes)?;
        let stores = Stores::map(self, file, &path, access, range.clone())?;
        Ok(FileView::with_stores(self.clone(), stores, path, range))
    }

    /// Maps something: once more without what is parked, if that has taken up the addresses or the mappings.
    pub fn with_room<T>(
        &self,
        map: impl Fn() -> std::result::Result<T, NotMapped>,
    ) -> std::result::Result<T, NotMapped> {
        match map() {
            Err(none) if none.is_for_want_of_room() && self.parked.forget_all() > 0 => {
                self.heap.unmap_now();
                map()
            }
            mapped => mapped,
        }
    }

    /// Maps what was opened by its path, whose `status` was asked for since: whatever the path led to before.
    fn map_by_path(
        self: &Arc<Self>,
        file: File,
        status: &Status,
        path: &Path,
        range: &impl RangeBounds<u64>,
    ) -> Result<FileView> {
        check_kind(|| path.to_owned(), status)?;
        let range = range_of(|| path.to_owned(), range, status.len_bytes)?;
        let opened = Opened::by_path(file, path, status.id);
        self.map_opened(&opened, status, FileName::of(path.to_owned()), range)
    }

    /// Maps a range of a regular file, whose `status` was asked for since it was opened.
    fn map_opened(
        self: &Arc<Self>,
        opened: &Opened<'_>,
        status: &Status,
        name: FileName,
        range: Range<u64>,
    ) -> Result<FileView> {
        let path = || match opened.kept() {
            Some(kept) if name.is_unknown() => path_of(kept.file()),
            _ => name.path(None).to_owned(),
        };
        check_pages(path, opened.file(), status)?;
        if status.len_bytes == 0
            && let Some(kind) = identity::is_made_up(opened.file())
        {
            let advice = "its content is made when it is read: read it instead";
            return Err(MapError::NotMappable { path: path(), kind, advice });
        }
        if range.is_empty() {
            let name = FileName::of(path());
            return Ok(FileView::new(self.clone(), None, name, range));
        }
        let mapped = match self.mapping_of(opened, status, &range) {
            Ok(mapped) => mapped,
            Err(none) => {
                let error = none.of(path(), status.len_bytes);
                if !small::serves(&error, &range) {
                    return Err(error);
                }
                let path = path();
                let snapshot = self.packs.read(opened.file(), &path, range)?;
                return Ok(FileView::of_snapshot(self.clone(), snapshot, path));
            }
        };
        if let Some(budget) = &self.budget {
            budget.add(&mapped, opened.file(), &path(), status.len_bytes);
        }
        let watched: Option<(Arc<dyn Span>, Range<usize>)> = self
            .detects_reading(opened.file(), range.end - range.start)
            .then(|| (mapped.clone() as _, mapped.in_mapping(&range)));
        let view = FileView::new(self.clone(), Some(mapped), name, range);
        if let Some((span, watched)) = watched {
            view.advised.watch(&self.ahead, &span, watched);
        }
        Ok(view)
    }

    /// A mapping that has this range: of the whole file where others can use it too, and otherwise of the range.
    fn mapping_of(
        &self,
        opened: &Opened<'_>,
        status: &Status,
        range: &Range<u64>,
    ) -> std::result::Result<Arc<Mapped>, NotMapped> {
        let is_kept = self.parked.keeps(status.len_bytes) && identity::may_be_parked(opened.file());
        let key = is_kept.then(|| CacheKey::of(status.id));
        // A resident budget knows one mapping of each file.
        let is_whole = is_kept || self.budget.is_some();
        if !is_whole {
            return self.map_making_room(opened, status, range, None);
        }
        let mapped = match self.map_making_room(opened, status, &(0..status.len_bytes), key) {
            Err(NotMapped::NoAddresses(NoAddresses::Memory(_))) => {
                return self.map_making_room(opened, status, range, None);
            }
            mapped => mapped?,
        };
        if is_kept {
            self.parked.insert(&mapped);
        }
        Ok(mapped)
    }

    /// Maps a range; if there is no room, once more without what is parked.
    fn map_making_room(
        &self,
        opened: &Opened<'_>,
        status: &Status,
        range: &Range<u64>,
        key: Option<CacheKey>,
    ) -> std::result::Result<Arc<Mapped>, NotMapped> {
        self.with_room(|| Mapped::new(&self.heap, opened, status, range, key))
    }

    /// Whether mapping ahead of a reader who gives no advice gains anything: where every fault maps single small pages.
    fn detects_reading(&self, file: &File, len_bytes: u64) -> bool {
        self.detect_reading
            && len_bytes >= map_ahead::WATCHED_BYTES as u64
            && matches!(residency::backing(file.as_fd()), Ok(Backing::Memory))
    }
}

fn check_kind(path: impl FnOnce() -> PathBuf, status: &Status) -> Result<()> {
    match status.other {
        None => Ok(()),
        Some((kind, advice)) => Err(MapError::NotMappable { path: path(), kind, advice }),
    }
}

fn check_pages(path: impl FnOnce() -> PathBuf, file: &File, status: &Status) -> Result<()> {
    if !identity::has_huge_pages(file, status) {
        return Ok(());
    }
    let (kind, advice) = ("a file of huge pages", "read it instead");
    Err(MapError::NotMappable { path: path(), kind, advice })
}

/// The bytes of a file of this length that a range names.
fn range_of(
    path: impl FnOnce() -> PathBuf,
    range: &impl RangeBounds<u64>,
    len_bytes: u64,
) -> Result<Range<u64>> {
    let Range { start, end } = bounds_of(range, len_bytes);
    if start > end || end > len_bytes {
        return Err(MapError::Range { path: path(), start, end, len_bytes });
    }
    Ok(start..end)
}
