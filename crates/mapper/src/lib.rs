//! Maps ordinary files efficiently: a replacement for direct `mmap` calls.
//!
//! ```text
//!  map(path) ──▶ stat ──▶ mapping cache ──hit──────────────────────────▶ FileView
//!                              │ miss                                       ▲   │ dropped
//!                              ▼                                            │   ▼
//!                         open, fstat ──▶ heap: addresses ──▶ mmap ─────────┘  parked, later retired ──▶ heap: unmapped
//!                                                                                                       many at a time
//! ```
//!
//! * *Mapping cache* (`parked`): closing a view parks the mapping; mapping the file again reuses
//!   it, page tables included. A parked mapping is never reused for a different file: see
//!   `identity`.
//! * *Ephemeral heap* ([`aquifer_vm::ephemeral`]): addresses for short-lived mappings. They are
//!   unmapped in batches, with one TLB flush each ([`Unmap`]), and are not reused before that.
//! * *Map-ahead* (`map_ahead`): a helper thread maps ranges advised as sequential before the reader
//!   reaches them ([`FileView::advise`]).
//! * *Stores* ([`Stores`]): a writable view is a shared mapping. By name it is private, and a flush
//!   writes exactly the pages that were stored to (`flush`).
//! * *Prefetch* (`prefetch`): fetches many ranges at once, at the queue depth of the device
//!   ([`FileView::prefetch`]).
//! * *Read once* ([`read_once`]): a file that is read once is copied or mapped, whichever is
//!   cheaper ([`Mapper::read_once`]).
//! * *Many files* (`small`): small files beyond the process's limit of mappings are read into
//!   memory that many files share.
//! * *Resident budget* (`budget`): drops streamed pages from the page cache
//!   ([`MapperBuilder::resident_budget_bytes`]).
//! * *Faults as errors*: [`FileView::read`] survives a file that is truncated or unreadable, and
//!   reports the offset.
//!
//! # Restrictions
//! The addresses of a view belong to the mapper: do not call `munmap`, `mprotect`, `mremap` or
//! `madvise` on them.
//!
//! # Threads and processes
//! A [`Mapper`] and its views can be shared freely between threads. In a forked child they are
//! inert: calls fail with [`MapError::Forked`], and the child must create its own mapper. The memory
//! of a shared view stays mapped there, so that a child can load and store through its pointer, and
//! flush it.
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
pub use view::{FileView, Tracking};

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
use prefetch::{Prefetcher, prefetcher};
use small::Packs;
use stores::{Stored, StoredFile};
use write_back::WriteBack;

/// How a program accesses a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileAccess {
    /// It reads.
    Read,
    /// It reads and stores, in the form of [`ViewOptions::stores`].
    Write,
}

/// Where the stores of a writable view go.
///
/// | | shared | private |
/// |---|---|---|
/// | other processes see a store | at once | after a flush |
/// | two processes that store to one page | both keep their bytes | one version of the page survives, unless they store and flush in turns |
/// | memory | page cache, which the kernel writes and reclaims, within [`MapperBuilder::resident_budget_bytes`] | a copy of each page stored to, until a flush; once the program has a pointer to store through, two copies as long as the view |
/// | a flush writes | every dirty folio of the range, up to 2 MiB for one store, whichever process dirtied it | exactly the pages stored to |
/// | a crash of the process | keeps all stores | loses those that were not flushed |
/// | a flush that fails | the stores may be lost, and every later flush of the view fails | the next flush writes them again |
///
/// Shared is right for files that several processes store to, for files that are filled or changed
/// in large parts, and wherever `mmap` or `numpy.memmap` was used before. Private is right for few
/// stores, scattered over a large file, that other processes are to see together after a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Stores {
    /// An ordinary shared mapping (`MAP_SHARED`).
    #[default]
    Shared,
    /// Private copies of the pages stored to, which a flush writes to the file. Unflushed stores are
    /// lost, unless [`MapperBuilder::write_back_bytes_per_second`] is set.
    Private,
}

/// How a file is mapped. A [`FileAccess`] converts to the options with the defaults.
///
/// ```
/// use aquifer_mapper::{Mapper, Stores, ViewOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("index");
/// # std::fs::write(&path, vec![0; 8192])?;
/// let exact = ViewOptions::write().stores(Stores::Private);
/// let view = Mapper::builder().build()?.map(&path, exact, ..)?;
/// view.set(4096, 7_u64)?;
/// assert_eq!(view.flush()?.bytes_written, 4096);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ViewOptions {
    access: FileAccess,
    stores: Stores,
    allocate: bool,
}

impl ViewOptions {
    /// A view to read.
    pub const fn read() -> ViewOptions {
        ViewOptions { access: FileAccess::Read, stores: Stores::Shared, allocate: false }
    }

    /// A view to read and store to, by a shared mapping.
    pub const fn write() -> ViewOptions {
        ViewOptions { access: FileAccess::Write, ..ViewOptions::read() }
    }

    /// Where stores go. A view to read ignores it.
    pub const fn stores(mut self, stores: Stores) -> ViewOptions {
        self.stores = stores;
        self
    }

    /// Reserves disk blocks for the view when it is made and when it grows, without writing them, so
    /// that no store finds the disk full. Otherwise files stay sparse; only what a private view grows
    /// by is reserved in any case. Blocks that a file shares with a reflinked one are not reserved.
    pub const fn allocate(mut self, allocate: bool) -> ViewOptions {
        self.allocate = allocate;
        self
    }
}

impl From<FileAccess> for ViewOptions {
    fn from(access: FileAccess) -> ViewOptions {
        ViewOptions { access, ..ViewOptions::read() }
    }
}

/// Configures a [`Mapper`].
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
    /// The bytes of mappings that are parked for reuse; 0 for none. They consist of page cache,
    /// which the kernel reclaims when it needs the memory. A file longer than this is never parked,
    /// and only its requested range is mapped. The default is half of the machine's memory.
    pub fn mapping_cache_bytes(mut self, bytes: u64) -> Self {
        self.mapping_cache_bytes = bytes;
        self
    }

    /// When retired mappings are unmapped.
    pub fn unmap(mut self, unmap: Unmap) -> Self {
        self.unmap = unmap;
        self
    }

    /// Limits how much is mapped ahead of readers where that is advised ([`FileView::advise`]), and
    /// by how many threads.
    pub fn map_ahead(mut self, limits: MapAheadLimits) -> Self {
        self.map_ahead = limits;
        self
    }

    /// Whether large files in memory (tmpfs) are also mapped ahead without advice, once their
    /// reader is seen to read in order from the start. Needs an idle CPU, and checks a view some
    /// ten times in its first second. On by default.
    pub fn detect_sequential(mut self, detects: bool) -> Self {
        self.detect_reading = detects;
        self
    }

    /// The rate, in bytes per second, at which a thread writes stores to private views to their
    /// files before a flush, so that a flush has little left to write; 0 for none, which is the
    /// default: stores then stay in this process until they are flushed. With write-back, other
    /// processes see single pages before the program has flushed them, and some stores that are
    /// never flushed stay in the file. 64 MiB keep a flush short and use little of a disk's
    /// bandwidth.
    pub fn write_back_bytes_per_second(mut self, bytes: u64) -> Self {
        self.write_back_bytes_per_second = bytes;
        self
    }

    /// Bounds the page cache that the mapped files occupy. A thread returns their pages to the
    /// system, first in, first out, so that streamed data drops behind. Pages that were stored to
    /// through shared views are written before they are dropped; where stores outpace the disk, pages
    /// that are not written yet exceed the bound. Pages that other processes have mapped are kept
    /// until that changes; [`MapperStats::resident_bytes`] includes them. Files in memory (tmpfs)
    /// have nothing to drop. By default only the system's own bound applies.
    ///
    /// The bound holds on average: between two passes of the thread it can be exceeded, by what a
    /// device reads in a few milliseconds. Choose 64 MiB or more.
    pub fn resident_budget_bytes(mut self, bytes: u64) -> Self {
        self.resident_budget_bytes = Some(bytes);
        self
    }

    /// For tests: overrides the limit of mappings of the process.
    #[doc(hidden)]
    pub fn mappings_limit(mut self, mappings: usize) -> Self {
        self.mappings_limit = Some(mappings);
        self
    }

    /// Creates the mapper.
    ///
    /// # Errors
    /// [`MapError::Memory`] if the process has no address space left for it; [`MapError::Thread`].
    pub fn build(self) -> Result<Mapper> {
        let vmas = Arc::new(self.mappings_limit.map_or_else(VmaBudget::of_process, VmaBudget::new));
        // At most half of the permitted mappings may be parked.
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
                prefetcher: prefetcher(),
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

/// Counters and current sizes of a mapper.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct MapperStats {
    /// The mapping cache.
    pub cache: CacheStats,
    /// Addresses.
    pub heap: HeapStats,
    /// Mapping ahead.
    pub map_ahead: MapAheadStats,
    /// Memory that holds small files for which no mapping was left: see [`FileView::is_snapshot`].
    pub snapshot_bytes: u64,
    /// The page cache that the files occupy, as last measured; 0 without a [resident
    /// budget](MapperBuilder::resident_budget_bytes).
    pub resident_bytes: u64,
}

impl Mapper {
    /// Returns a builder with the defaults.
    pub fn builder() -> MapperBuilder {
        MapperBuilder::default()
    }

    /// Maps a range of a file, or `..` for all of it. The length of `..` is the file's length at
    /// the time of the call.
    ///
    /// # Errors
    /// [`MapError::Open`], [`MapError::NotMappable`], [`MapError::Range`],
    /// [`MapError::TooManyMappings`], [`MapError::Map`].
    pub fn map(
        &self,
        path: impl AsRef<Path>,
        options: impl Into<ViewOptions>,
        range: impl RangeBounds<u64>,
    ) -> Result<FileView> {
        let options = options.into();
        let path = path.as_ref();
        self.shared.check_process()?;
        let status = Status::of_path(path).map_err(MapError::open(path))?;
        let named = || path.to_owned();
        check_kind(named, &status)?;
        if options.access == FileAccess::Write {
            let file = mapped::open_to_store(path).map_err(MapError::open(path))?;
            let status = Status::of_file(&file).map_err(MapError::open(path))?;
            return self.shared.map_stores(&file, &status, path.to_owned(), options, &range);
        }
        let there = range_of(named, &range, status.len_bytes)?;
        if let Some(mapped) = self.shared.find(&status) {
            let name = FileName::of(path.to_owned());
            return Ok(FileView::new(self.shared.clone(), Some(mapped), name, there));
        }
        // The path may name another file since the `stat`: use the length of the file that was
        // opened.
        let file = mapped::open(path).map_err(MapError::open(path))?;
        let status = Status::of_file(&file).map_err(MapError::open(path))?;
        self.shared.map_by_path(file, &status, path, &range)
    }

    /// Maps a range of an open file. The caller may close the descriptor afterwards; a duplicate of
    /// it stays open as long as the view, and at most the delay of [`Unmap`] longer.
    ///
    /// # Errors
    /// As for [`Mapper::map`].
    pub fn map_file(
        &self,
        file: &File,
        options: impl Into<ViewOptions>,
        range: impl RangeBounds<u64>,
    ) -> Result<FileView> {
        let options = options.into();
        self.shared.check_process()?;
        let named = || path_of(file);
        let status =
            Status::of_file(file).map_err(|source| MapError::Open { path: named(), source })?;
        check_kind(named, &status)?;
        if options.access == FileAccess::Write {
            return self.shared.map_stores(file, &status, named(), options, &range);
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

    /// Passes all of a file to a closure, once: read into a thread-local buffer or mapped,
    /// whichever costs less for its length on this machine ([`read_once`]). Also works for files
    /// that cannot be mapped: pipes are read to their end, and files in `/proc` have their content.
    ///
    /// # Errors
    /// [`MapError::Open`], [`MapError::Read`], [`MapError::TooLong`], and those of [`Mapper::map`]
    /// and [`FileView::read`].
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

    /// As [`Mapper::read_once`], for a name in an open directory: saves a tree walk the path
    /// resolution from the root for each file.
    ///
    /// # Errors
    /// As for [`Mapper::read_once`]; the path in them is relative to the directory.
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

    /// Evicts a parked file, before it is removed or its file system unmounted. Views of it keep
    /// their mapping.
    ///
    /// # Errors
    /// [`MapError::Open`] if the path does not exist.
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

    /// Evicts all parked files.
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

    /// Changes the [resident budget](MapperBuilder::resident_budget_bytes). Returns false if the mapper
    /// was built without one, or in a forked child. A smaller budget takes effect as fast as pages can
    /// be written and dropped.
    pub fn set_resident_budget(&self, bytes: u64) -> bool {
        let budget = self.shared.budget.as_ref().filter(|_| self.shared.mark.is_current());
        budget.map(|budget| budget.set(bytes)).is_some()
    }

    /// Returns the statistics; all zero in a forked child.
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
            // Another thread of the parent may have been changing it during the fork: leak it.
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
        options: ViewOptions,
        range: &impl RangeBounds<u64>,
    ) -> Result<FileView> {
        check_kind(|| path.clone(), status)?;
        check_pages(|| path.clone(), file, status)?;
        let range = range_of(|| path.clone(), range, status.len_bytes)?;
        let stores = Stored::map(self, file, &path, options, range.clone())?;
        if let (Some(budget), StoredFile::Shared(view)) = (&self.budget, &stores.file) {
            budget.add(view, status.id, file.as_fd(), &path, status.len_bytes);
        }
        Ok(FileView::with_stores(self.clone(), stores, path, range))
    }

    /// Maps something; if addresses or mappings have run out, evicts all parked files and retries
    /// once.
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

    /// Maps a file that was opened by `path`. `status` is that of the open file, not an earlier one
    /// of the path.
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

    /// Maps a range of a regular file. `status` was read after it was opened.
    fn map_opened(
        self: &Arc<Self>,
        opened: &Opened<'_>,
        status: &Status,
        name: FileName,
        range: Range<u64>,
    ) -> Result<FileView> {
        let path = || match opened.kept() {
            Some(kept) if name.is_unknown() => path_of(kept.file()),
            _ => name.path(|| None).to_owned(),
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
            budget.add(&mapped, status.id, opened.file().as_fd(), &path(), status.len_bytes);
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

    /// Returns a mapping that covers this range: of the whole file where it can be parked or counts
    /// towards the resident budget, and otherwise of the range.
    fn mapping_of(
        &self,
        opened: &Opened<'_>,
        status: &Status,
        range: &Range<u64>,
    ) -> std::result::Result<Arc<Mapped>, NotMapped> {
        let is_kept = self.parked.keeps(status.len_bytes) && identity::may_be_parked(opened.file());
        let key = is_kept.then(|| CacheKey::of(status.id));
        // The resident budget tracks one mapping per file, of all of it.
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

    /// Maps a range; if there is no room, evicts all parked files and retries once.
    fn map_making_room(
        &self,
        opened: &Opened<'_>,
        status: &Status,
        range: &Range<u64>,
        key: Option<CacheKey>,
    ) -> std::result::Result<Arc<Mapped>, NotMapped> {
        self.with_room(|| Mapped::new(&self.heap, opened, status, range, key))
    }

    /// Whether mapping ahead without advice is worthwhile: only where every fault maps single small
    /// pages.
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

/// The range of bytes that `range` selects in a file of this length.
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
