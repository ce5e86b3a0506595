//! [`Pages`]: guards on pages of a device, found by one array index.
//!
//! Pages live in frames of an arena with huge pages and are translated in software, so a miss
//! changes no page table and costs little more than its I/O. A hit is an index into the table of
//! page words and, for a guard, one atomic increment. [`Pages::read`] avoids the increment: it
//! reads the bytes, checks that the page did not change in between, and retries if it did
//! (*optimistic read*). The processor overlaps independent reads only as far as their instructions
//! fit in its window: so a hit is inlined in the caller, some 35 instructions and usually no store, and
//! everything else is out of line.
//!
//! Versions: a page's version is odd while a writing guard holds the page, and grows whenever a
//! guard is released or the page is loaded into a frame. An optimistic read compares it before and
//! after.

pub(crate) mod arena_memory;

use std::future::Future;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use aquifer_device::Device;

use self::arena_memory::ArenaMemory;
use crate::engine::asynchronous;
use crate::engine::{InUse, Kind};
use crate::error::{CacheError, Result};
use crate::geometry::Geometry;
use crate::ids::PageId;
use crate::page_word::{PinKind, Seen, State};
use crate::running::Running;
use crate::store::claims::{Attached, Wanted};
use crate::store::{Access, PageMemory, Refused, Store};
use crate::sync::{Ordering, fence};
use aquifer_vm::Bytes;

/// A device accessed by page guards. See the module documentation.
///
/// May be used from any thread. All `Pages` of one device in one cache share their pages: each sees
/// what the others write. A mapping of the same device, or its use through another cache, is
/// possible only if both sides are read-only; otherwise the second one fails with
/// [`CacheError::AlreadyAttached`].
///
/// Dropping the last one writes dirty pages back without making them durable.
pub struct Pages {
    pub(crate) store: Arc<Store<ArenaMemory>>,
    /// After `store` in drop order: it tears the store down with its last user.
    _attached: Arc<Attached<ArenaMemory>>,
    writable: bool,
    pub(crate) running: Arc<Running>,
}

impl Pages {
    pub(crate) fn new(running: Arc<Running>, device: Arc<dyn Device>) -> Result<Pages> {
        let engine = running.engine.clone();
        let geometry = Geometry::of_device(&*device, engine.options.page_bytes)?;
        let writable = device.is_writable();
        let wanted = Wanted {
            cache: Arc::as_ptr(&engine).addr(),
            identity: device.identity(),
            device: device.clone(),
            kind: Kind::Arena,
            len_bytes: geometry.len_bytes,
            writable,
        };
        let attached = Attached::attach(&wanted, || {
            let memory = ArenaMemory::new(engine.clone(), geometry)?;
            let store = Store::new(engine.clone(), device, geometry, writable, memory)?;
            let store = Arc::new(store);
            engine.attach(store.id, store.clone(), Kind::Arena)?;
            Ok(store)
        })?;
        Ok(Pages { store: attached.store.clone(), _attached: attached, writable, running })
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        if self.running.engine.mark.is_current() { Ok(()) } else { Err(CacheError::Forked) }
    }

    /// The number of pages of the device. The last may be partial; the rest of it reads as zeros.
    pub fn page_count(&self) -> u64 {
        self.store.geometry.pages()
    }

    /// Size of a page.
    pub fn page_bytes(&self) -> usize {
        self.store.geometry.page_bytes
    }

    /// The device's length when it was opened.
    pub fn len_bytes(&self) -> u64 {
        self.store.geometry.len_bytes
    }

    pub(crate) fn check(&self, page: PageId) -> Result<()> {
        self.check_process()?;
        if page.0 < self.page_count() {
            return Ok(());
        }
        Err(CacheError::OutOfBounds {
            offset_bytes: page.0.saturating_mul(self.page_bytes() as u64),
            len_bytes: self.page_bytes() as u64,
            mapped_bytes: self.len_bytes(),
        })
    }

    fn refused(&self, page: PageId) -> impl FnOnce(Refused) -> CacheError {
        move |refused| self.store.error(page.0, refused)
    }

    /// A shared guard on a page; loads the page if necessary.
    ///
    /// Any number of shared guards may be held, by any threads; a writing guard waits for them.
    #[inline]
    pub fn get(&self, page: PageId) -> Result<PageRef<'_>> {
        // The hot path: one compare-and-swap. In a forked child no page is resident.
        if let Some(entry) = self.store.memory.entry(page.0)
            && let Ok(seen) = entry.word.pin()
        {
            self.store.pool().hit(seen.frame());
            return Ok(self.pinned(page, seen));
        }
        self.load_and_get(page)
    }

    /// The guard of a page that the caller has pinned.
    #[inline]
    fn pinned(&self, page: PageId, seen: Seen) -> PageRef<'_> {
        PageRef { pages: self, page, bytes: self.store.memory.bytes(page.0, seen.frame()) }
    }

    #[cold]
    fn load_and_get(&self, page: PageId) -> Result<PageRef<'_>> {
        self.check(page)?;
        self.store
            .ensure(page.0, Access::Read, Some(PinKind::Read), false)
            .map_err(self.refused(page))?;
        Ok(self.pinned(page, self.store.seen(page.0)))
    }

    /// An exclusive guard on a page; loads the page if necessary. The page is dirty afterwards.
    ///
    /// A thread that calls this while it holds another guard on the same page deadlocks.
    pub fn get_mut(&self, page: PageId) -> Result<PageMut<'_>> {
        self.check(page)?;
        if !self.writable {
            return Err(CacheError::ReadOnly { device: self.store.device().name().to_owned() });
        }
        let word = self.store.word(page.0);
        loop {
            let seen = word.load();
            match seen.state() {
                State::Absent => {
                    self.store
                        .ensure(page.0, Access::Read, None, false)
                        .map_err(self.refused(page))?;
                }
                State::Clean | State::Dirty if seen.pins() == 0 => {
                    if word.begin_exclusive(seen).is_ok() {
                        // Marked before the word says Dirty: see `DirtyMap`.
                        self.store.dirty.mark(page.0);
                        self.store.pool().hit(seen.frame());
                        self.store.memory.version(page.0).begin_change();
                        let bytes = self.store.memory.bytes(page.0, seen.frame());
                        return Ok(PageMut { pages: self, page, bytes });
                    }
                }
                _ => word.wait(seen),
            }
        }
    }

    /// Guards on many pages, loaded at the device's queue depth, in the order of `pages`.
    ///
    /// # Errors
    /// As [`Pages::get`]; [`CacheError::Exhausted`] if the budget cannot hold them all at once.
    pub fn get_many(&self, pages: &[PageId]) -> Result<Vec<PageRef<'_>>> {
        self.load(pages)?;
        pages.iter().map(|&page| self.get(page)).collect()
    }

    /// Loads many pages at the device's queue depth, and waits for them.
    pub fn load(&self, pages: &[PageId]) -> Result<()> {
        let ranges = self.ranges(pages)?;
        self.store.touch_many(&ranges).map_err(|(page, refused)| self.store.error(page, refused))
    }

    /// As [`Pages::load`], awaitable on any executor.
    pub fn load_async(&self, pages: &[PageId]) -> impl Future<Output = Result<()>> + Send + use<> {
        let engine = &self.running.engine;
        let work = || {
            let ranges = self.ranges(pages);
            let store = InUse::new(self.store.clone(), engine.clone());
            move || store.touch_many(&ranges?).map_err(|(page, refused)| store.error(page, refused))
        };
        asynchronous::run(&engine.jobs, engine.mark.is_current().then(work))
    }

    /// Starts loading pages in the background: a hint, as [`Mapping::prefetch`](crate::Mapping::prefetch).
    pub fn prefetch(&self, first: PageId, count: u64) -> Result<()> {
        self.check(first)?;
        let run = first.0..first.0.saturating_add(count);
        self.store.hint(vec![run]);
        Ok(())
    }

    fn ranges(&self, pages: &[PageId]) -> Result<Vec<Range<u64>>> {
        pages
            .iter()
            .map(|&page| {
                self.check(page)?;
                Ok(page.0..page.0 + 1)
            })
            .collect()
    }

    /// Reads a page without a guard.
    ///
    /// `look` may run several times, and its result is used only if the page did not change while
    /// it ran. This is the cheapest way to read a few bytes of a resident page, and it scales: it
    /// writes no memory that other threads read, apart from recording the hit.
    ///
    /// `look` must be free of side effects and must not rely on consistent bytes before it returns:
    /// it may see torn bytes, and its result is then discarded.
    #[inline]
    pub fn read<T>(&self, page: PageId, mut look: impl FnMut(Bytes<'_>) -> T) -> Result<T> {
        match self.try_read(page, &mut look) {
            Some(result) => Ok(result),
            None => self.load_and_read(page, look),
        }
    }

    /// One optimistic read. `None` if the page is not resident or changed meanwhile; in a forked
    /// child, where no page is resident; and for a page beyond the end.
    #[inline]
    fn try_read<T>(&self, page: PageId, look: &mut impl FnMut(Bytes<'_>) -> T) -> Option<T> {
        let store = &*self.store;
        let entry = store.memory.entry(page.0)?;
        let version = entry.version.at_rest()?;
        let seen = entry.word.load();
        if !seen.is_readable() {
            return None;
        }
        store.pool().hit(seen.frame());
        let base = store.memory.bytes(page.0, seen.frame());
        // SAFETY: frames are always mapped, so the bytes are readable, though they may be another
        // page's.
        let bytes = unsafe { Bytes::new(base, store.geometry.page_bytes) };
        let result = look(bytes);
        // The bytes read above are not newer than the word, and the word is not newer than the
        // version. If the frame went to another page or was reused for this one in between, one
        // of the two has changed.
        fence(Ordering::Acquire);
        let is_current = entry.word.load().is_where_it_was(seen) && entry.version.is_still(version);
        is_current.then_some(result)
    }

    /// Reads a page that was not resident, or changed during the first optimistic read.
    #[cold]
    fn load_and_read<T>(&self, page: PageId, mut look: impl FnMut(Bytes<'_>) -> T) -> Result<T> {
        for _ in 1..OPTIMISTIC_TRIES {
            if let Some(result) = self.try_read(page, &mut look) {
                return Ok(result);
            }
        }
        let guard = self.get(page)?;
        // SAFETY: the guard keeps the page.
        let bytes = unsafe { Bytes::new(guard.bytes, self.page_bytes()) };
        Ok(look(bytes))
    }

    /// Copies `target.len()` bytes from `offset_bytes`; they may span pages, each read
    /// optimistically.
    pub fn read_exact_at(&self, target: &mut [u8], offset_bytes: u64) -> Result<()> {
        let geometry = self.store.geometry;
        let pages = geometry.pages_of(offset_bytes, target.len() as u64)?;
        let mut done = 0;
        for page in pages {
            let start = (offset_bytes + done as u64 - geometry.offset_of(page)) as usize;
            let len = (geometry.page_bytes - start).min(target.len() - done);
            let part = &mut target[done..done + len];
            self.read(PageId(page), |bytes| bytes.copy_to(start, part))?;
            done += len;
        }
        Ok(())
    }

    /// Whether a page is in memory now.
    pub fn is_resident(&self, page: PageId) -> Result<bool> {
        self.check(page)?;
        Ok(self.store.is_resident(page.0))
    }

    /// Writes back the dirty pages of a range and makes them durable. Errors as
    /// [`MappingMut::flush`](crate::MappingMut::flush).
    ///
    /// Waits for writing guards in the range to be dropped: a thread that holds one itself
    /// deadlocks.
    pub fn flush(&self, pages: Range<PageId>) -> Result<()> {
        self.check_process()?;
        self.store.flush(pages.start.0..pages.end.0.min(self.page_count()))
    }

    /// [`Pages::flush`] of all pages.
    pub fn flush_all(&self) -> Result<()> {
        self.flush(PageId(0)..PageId(self.page_count()))
    }
}

/// How many times an optimistic read is tried before it takes a guard.
const OPTIMISTIC_TRIES: usize = 4;

/// A shared guard on a page: the page's bytes do not change, and it is not evicted.
pub struct PageRef<'a> {
    pages: &'a Pages,
    page: PageId,
    bytes: *const u8,
}

// SAFETY: a pin may be released by another thread than the one that took it.
unsafe impl Send for PageRef<'_> {}
// SAFETY: shared access only reads.
unsafe impl Sync for PageRef<'_> {}

impl PageRef<'_> {
    /// The guarded page.
    pub fn id(&self) -> PageId {
        self.page
    }
}

impl<'a> PageRef<'a> {
    /// The guard as two plain words, for programs in other languages: the page stays guarded until
    /// [`PageRef::from_raw`] takes the guard back.
    ///
    /// ```
    /// use aquifer_cache::{Cache, PageId, PageRef};
    ///
    /// let cache = Cache::builder().budget_bytes(8 << 20).build()?;
    /// let pages = cache.pages(aquifer_device::MemoryDevice::new(1 << 20)?)?;
    /// let raw = pages.get(PageId(3))?.into_raw();
    /// assert_eq!(raw.page, PageId(3));
    /// // SAFETY: from these pages, and used once.
    /// drop(unsafe { PageRef::from_raw(&pages, raw) });
    /// let _alone = pages.get_mut(PageId(3))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_raw(self) -> RawPage {
        let raw = RawPage { page: self.page, bytes: self.bytes.cast_mut() };
        std::mem::forget(self);
        raw
    }

    /// The guard that [`PageRef::into_raw`] gave away.
    ///
    /// # Safety
    /// `raw` comes from `into_raw` of a [`PageRef`] of these `pages`, and is used for one guard
    /// only.
    pub unsafe fn from_raw(pages: &'a Pages, raw: RawPage) -> PageRef<'a> {
        PageRef { pages, page: raw.page, bytes: raw.bytes }
    }
}

/// A guard without its type and lifetime: [`PageRef::into_raw`], [`PageMut::into_raw`]. Dropping it
/// does not release the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawPage {
    /// The guarded page.
    pub page: PageId,
    /// Its first byte. Only a writing guard may be stored through.
    pub bytes: *mut u8,
}

impl Deref for PageRef<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the pin keeps the page in its frame, and no thread gets a writing guard while it
        // is held.
        unsafe { std::slice::from_raw_parts(self.bytes, self.pages.page_bytes()) }
    }
}

impl Drop for PageRef<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.pages.running.engine.mark.is_current() {
            self.pages.store.unpin(self.page.0);
        }
    }
}

/// An exclusive guard on a page.
///
/// Must be dropped: after `mem::forget` of one, every thread that accesses or flushes the page or
/// drops the [`Pages`] blocks forever.
pub struct PageMut<'a> {
    pages: &'a Pages,
    page: PageId,
    bytes: *mut u8,
}

// SAFETY: exclusive ownership may move between threads.
unsafe impl Send for PageMut<'_> {}
// SAFETY: shared access to the guard only reads.
unsafe impl Sync for PageMut<'_> {}

impl PageMut<'_> {
    /// The guarded page.
    pub fn id(&self) -> PageId {
        self.page
    }
}

impl<'a> PageMut<'a> {
    /// The guard as two plain words, for programs in other languages: the page stays guarded until
    /// [`PageMut::from_raw`] takes the guard back, and until then the [`Pages`] must not be dropped.
    pub fn into_raw(self) -> RawPage {
        let raw = RawPage { page: self.page, bytes: self.bytes };
        std::mem::forget(self);
        raw
    }

    /// The guard that [`PageMut::into_raw`] gave away.
    ///
    /// # Safety
    /// `raw` comes from `into_raw` of a [`PageMut`] of these `pages`, and is used for one guard
    /// only.
    pub unsafe fn from_raw(pages: &'a Pages, raw: RawPage) -> PageMut<'a> {
        PageMut { pages, page: raw.page, bytes: raw.bytes }
    }
}

impl Deref for PageMut<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: Exclusive: no other thread reads or writes the frame.
        unsafe { std::slice::from_raw_parts(self.bytes, self.pages.page_bytes()) }
    }
}

impl DerefMut for PageMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the guard is borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.bytes, self.pages.page_bytes()) }
    }
}

impl Drop for PageMut<'_> {
    fn drop(&mut self) {
        if self.pages.running.engine.mark.is_current() {
            self.pages.store.memory.version(self.page.0).end_change();
            self.pages.store.word(self.page.0).finish_exclusive();
        }
    }
}
