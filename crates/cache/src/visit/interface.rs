//! The visits of [`Mapping`] and [`Pages`].

use std::future::Future;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use aquifer_vm::Bytes;

use super::kernel::KernelVisit;
use super::{Item, ONE_PIECE_BYTES, Order, pieces, sort, visit};
use crate::engine::InUse;
use crate::engine::asynchronous;
use crate::engine::jobs::Jobs;
use crate::error::Result;
use crate::ids::PageId;
use crate::kernel::KernelFile;
use crate::mapping::{Mapping, Served};
use crate::pages::Pages;
use crate::store::{PageMemory, Store};

/// A range of [`Mapping::visit_many`] or [`Mapping::visit_in_order`], or a piece of one.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Visited<'a> {
    /// The place of the range among the ranges of the call.
    pub index: usize,
    /// Offset of the first byte in the mapping.
    pub offset_bytes: u64,
    /// The bytes. They are those of the range unless it is longer than 64 KiB.
    pub bytes: Bytes<'a>,
}

impl<'a> Visited<'a> {
    fn new(item: &Item, bytes: Bytes<'a>) -> Visited<'a> {
        Visited { index: item.index, offset_bytes: item.start, bytes }
    }
}

/// The caller's closure.
type Look<'a> = dyn FnMut(&Item, Bytes<'_>) -> ControlFlow<()> + 'a;

/// Visits items of a store in the order that costs least.
fn visit_store<M: PageMemory>(
    store: &Store<M>,
    mut items: Vec<Item>,
    one_piece: u64,
    look: &mut Look<'_>,
) -> Result<()> {
    sort(&mut items);
    let mut items = items.into_iter();
    visit(store, Order::AsRead, pieces(one_piece, || items.next().map(Ok)), look)
}

/// The same for a kernel-backed mapping.
fn visit_file(file: &KernelFile, mut items: Vec<Item>, look: &mut Look<'_>) -> Result<()> {
    sort(&mut items);
    let mut items = items.into_iter();
    let feed = pieces(ONE_PIECE_BYTES, || items.next().map(Ok));
    visit_fed(&KernelVisit::new(file), Order::AsRead, feed, look)
}

/// Visits what `feed` names: through the page cache while the budget has room, then past it.
fn visit_fed(
    source: &KernelVisit<'_>,
    order: Order,
    mut feed: impl FnMut() -> Option<Result<Item>>,
    look: &mut Look<'_>,
) -> Result<()> {
    if !source.has_room() {
        return visit(source, order, feed, look);
    }
    match source.visit_what_fits(&mut feed, &mut *look)? {
        ControlFlow::Continue(Some(first)) => {
            let mut first = Some(Ok(first));
            visit(source, order, || first.take().or_else(&mut feed), look)
        }
        ControlFlow::Continue(None) | ControlFlow::Break(()) => Ok(()),
    }
}

/// The pieces of ranges that come one by one.
fn feed(
    mut next: impl FnMut() -> Option<Result<Range<u64>>>,
) -> impl FnMut() -> Option<Result<Item>> {
    let mut indices = 0..;
    let next_item = move || loop {
        let range = match next()? {
            Ok(range) => range,
            Err(error) => return Some(Err(error)),
        };
        let index = indices.next()?;
        if !range.is_empty() {
            return Some(Ok(Item { index, start: range.start, end: range.end }));
        }
    };
    pieces(ONE_PIECE_BYTES, next_item)
}

/// Runs `work` on what it visits, with the closure that it calls. What is visited goes first: the
/// closure may hold the last handle of it, and dropping that waits for all other uses.
fn job<S, L>(
    source: S,
    mut look: L,
    work: impl FnOnce(&S, &mut L) -> Result<()>,
) -> impl FnOnce() -> std::thread::Result<Result<()>> {
    move || {
        let ended = catch_unwind(AssertUnwindSafe(|| work(&source, &mut look)));
        drop(source);
        catch_unwind(AssertUnwindSafe(|| drop(look))).and(ended)
    }
}

/// Runs a visit on a worker of the cache; a panic of the closure reaches the task that awaits it.
fn on_worker<W: FnOnce() -> std::thread::Result<Result<()>> + Send + 'static>(
    jobs: &Jobs,
    work: Option<W>,
) -> impl Future<Output = Result<()>> + Send + use<W> {
    let coming = asynchronous::run(jobs, work.map(|work| move || Ok(work())));
    async move { coming.await?.unwrap_or_else(|payload| resume_unwind(payload)) }
}

impl Mapping {
    /// Visits many ranges in the order that costs least: for work in which the order does not
    /// matter, such as the rows that a search has found, or a scan with a filter.
    ///
    /// The ranges are sorted, neighbours share reads of up to 128 KiB, and many reads are in
    /// flight; each range is visited when it has been read, ranges in memory meanwhile.
    /// On a disk that is several times faster than loads in the order of discovery, and faster than
    /// [`Mapping::touch_many`] followed by loads, which waits for all pages and needs frames for
    /// them: a visit evicts nothing, and keeps what it has read only while frames are free. The
    /// exception is a page whose region is written back again and again meanwhile: it is loaded.
    ///
    /// `visit` is called for each range that is not empty, with all its bytes if it has at most 64
    /// KiB, otherwise with pieces of it, in any order. It may access the mapping, also to store
    /// ([`MappingMut`](crate::MappingMut)), and visit other ranges. `Break` ends the visit early,
    /// without an error.
    ///
    /// The bytes include every store that happened before the call, and every store that `visit` has
    /// made. Those that other threads make meanwhile may be seen or not, also in part, as by loads; a
    /// write-back meanwhile is not visible. Any number of threads may visit at the same time.
    ///
    /// The call keeps a list of the ranges, some 50 bytes for each; a long range is cut into pieces as
    /// the visit reaches them.
    ///
    /// If `visit` forks, the child must not use the bytes. Where it returns from `visit` the call
    /// fails with [`CacheError::Forked`](crate::CacheError::Forked), and the parent's goes on.
    ///
    /// # Errors
    /// [`CacheError::OutOfBounds`](crate::CacheError::OutOfBounds) before anything is visited. Those of
    /// [`Mapping::read`], with the offset of the page; the visit ends, and other ranges may have been
    /// visited or not.
    ///
    /// # Panics
    /// If `visit` does, after the reads in flight have ended.
    ///
    /// ```
    /// # let file = tempfile::NamedTempFile::new()?;
    /// # std::fs::write(file.path(), [7; 100_000])?;
    /// use std::ops::ControlFlow::Continue;
    ///
    /// let cache = aquifer_cache::Cache::builder().budget_bytes(8 << 20).build()?;
    /// let mapping = cache.open(file.path())?;
    /// let rows = [60_000..60_400, 0..400, 99_000..99_400];
    /// let mut sums = [0_u64; 3];
    /// mapping.visit_many(rows, |row| {
    ///     sums[row.index] = row.bytes.iter().map(u64::from).sum();
    ///     Continue(())
    /// })?;
    /// assert_eq!(sums, [2800; 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn visit_many(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        mut visit: impl FnMut(Visited<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let items = self.items(ranges)?;
        let look = &mut |item: &Item, bytes: Bytes<'_>| visit(Visited::new(item, bytes));
        match &self.served {
            Served::User(store, _) => visit_store(store, items, ONE_PIECE_BYTES, look),
            Served::Kernel(file, _) => visit_file(file, items, look),
        }
    }

    /// [`Mapping::visit_many`], awaitable on any executor. `visit` runs on one of the cache's I/O
    /// threads; a panic in it reaches the task that awaits the visit.
    ///
    /// The visit runs even if the future is dropped.
    ///
    /// The cache has few such threads ([`CacheBuilder::io_threads`](crate::CacheBuilder::io_threads)),
    /// which also run prefetches: a long visit holds them up. `visit` must not wait for another
    /// asynchronous call of the same cache, which may need the same thread. It may own the last handle
    /// of the mapping, which is dropped after the visit, but must not drop it itself: that would wait
    /// for the visit.
    pub fn visit_many_async<R, V>(
        &self,
        ranges: R,
        mut visit: V,
    ) -> impl Future<Output = Result<()>> + Send + use<R, V>
    where
        R: IntoIterator<Item = Range<u64>>,
        V: FnMut(Visited<'_>) -> ControlFlow<()> + Send + 'static,
    {
        let items = self.items(ranges);
        let engine = &self.running.engine;
        let work = || -> Box<dyn FnOnce() -> std::thread::Result<Result<()>> + Send> {
            let look = move |item: &Item, bytes: Bytes<'_>| visit(Visited::new(item, bytes));
            match &self.served {
                Served::User(store, _) => Box::new(job(self.in_use(store), look, |store, look| {
                    visit_store(store, items?, ONE_PIECE_BYTES, look)
                })),
                Served::Kernel(file, _) => {
                    Box::new(job(file.clone(), look, |file, look| visit_file(file, items?, look)))
                }
            }
        };
        on_worker(&engine.jobs, engine.mark.is_current().then(work))
    }

    /// Visits ranges in the order in which an iterator names them, with many reads in flight.
    ///
    /// The iterator is asked for further ranges whenever there is room in the device's queue, which
    /// therefore never drains between batches: for a program that must process in order and knows
    /// what comes next. Up to 32,768 ranges are asked for ahead of the visit, not counting empty ones,
    /// which are skipped.
    ///
    /// The iterator may depend on what was visited: after `None` it is asked again, at the latest when
    /// all ranges under way have been visited, and the visit ends with a `None` while nothing is under
    /// way. Otherwise as [`Mapping::visit_many`]; the pieces of a long range come in order.
    ///
    /// # Errors
    /// As [`Mapping::visit_many`], also [`CacheError::OutOfBounds`](crate::CacheError::OutOfBounds)
    /// for a range that comes later. The ranges before the one that failed may not all have been visited.
    pub fn visit_in_order(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        mut visit_one: impl FnMut(Visited<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.check_process()?;
        let mut ranges = ranges.into_iter();
        let next = || {
            let range = ranges.next()?;
            Some(self.pages_of(&range).map(|_| range))
        };
        let look = &mut |item: &Item, bytes: Bytes<'_>| visit_one(Visited::new(item, bytes));
        match &self.served {
            Served::User(store, _) => visit(&**store, Order::AsGiven, feed(next), look),
            Served::Kernel(file, _) => {
                visit_fed(&KernelVisit::new(file), Order::AsGiven, feed(next), look)
            }
        }
    }

    fn items(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> Result<Vec<Item>> {
        self.check_process()?;
        let mut items = vec![];
        for (index, range) in ranges.into_iter().enumerate() {
            self.pages_of(&range)?;
            if !range.is_empty() {
                items.push(Item { index, start: range.start, end: range.end });
            }
        }
        Ok(items)
    }
}

/// The content of a page as a slice.
fn content<'a>(bytes: Bytes<'a>) -> &'a [u8] {
    // SAFETY: the bytes of a visit of `Pages` are a page that is pinned for loads, which no thread
    // stores to, or a buffer of the visit.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) }
}

impl Pages {
    /// Visits many pages in the order that costs least: see [`Mapping::visit_many`]. Takes the pages
    /// in any order, for example the set bits of a bitmap; each is visited once.
    ///
    /// `visit` may access other pages, but must not take a writing guard on the page that it looks
    /// at, nor wait for a thread that takes one: the page may be pinned meanwhile. `Break` ends the
    /// visit early, without an error.
    ///
    /// # Errors
    /// As [`Pages::get`]; the visit ends, and other pages may have been visited or not.
    ///
    /// # Panics
    /// If `visit` does, after the reads in flight have ended.
    ///
    /// ```
    /// # let file = tempfile::NamedTempFile::new()?;
    /// # std::fs::write(file.path(), [7; 100_000])?;
    /// use aquifer_cache::{Cache, PageId};
    /// use std::ops::ControlFlow::Continue;
    ///
    /// let cache = Cache::builder().budget_bytes(8 << 20).build()?;
    /// let pages = cache.pages(aquifer_device::FileDevice::open(file.path())?)?;
    /// let mut found = vec![];
    /// pages.visit_many([9, 2, 2].map(PageId), |page, bytes| {
    ///     assert_eq!(bytes[0], 7);
    ///     found.push(page.0);
    ///     Continue(())
    /// })?;
    /// found.sort();
    /// assert_eq!(found, [2, 9]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn visit_many(
        &self,
        pages: impl IntoIterator<Item = PageId>,
        mut visit: impl FnMut(PageId, &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        let items = self.items(pages)?;
        let look =
            &mut |item: &Item, bytes: Bytes<'_>| visit(PageId(item.index as u64), content(bytes));
        visit_store(&self.store, items, u64::MAX, look)
    }

    /// [`Pages::visit_many`], awaitable on any executor. `visit` runs on one of the cache's I/O
    /// threads; a panic in it reaches the task that awaits the visit.
    ///
    /// The visit runs even if the future is dropped. What `visit` must not do:
    /// [`Mapping::visit_many_async`].
    pub fn visit_many_async<P, V>(
        &self,
        pages: P,
        mut visit: V,
    ) -> impl Future<Output = Result<()>> + Send + use<P, V>
    where
        P: IntoIterator<Item = PageId>,
        V: FnMut(PageId, &[u8]) -> ControlFlow<()> + Send + 'static,
    {
        let items = self.items(pages);
        let engine = &self.running.engine;
        let work = || {
            let store = InUse::new(self.store.clone(), engine.clone());
            let look = move |item: &Item, bytes: Bytes<'_>| {
                visit(PageId(item.index as u64), content(bytes))
            };
            job(store, look, |store, look| visit_store(store, items?, u64::MAX, look))
        };
        on_worker(&engine.jobs, engine.mark.is_current().then(work))
    }

    /// Visits pages in the order in which an iterator names them, with many reads in flight: see
    /// [`Mapping::visit_in_order`]. Errors as [`Pages::visit_many`].
    pub fn visit_in_order(
        &self,
        pages: impl IntoIterator<Item = PageId>,
        mut visit_one: impl FnMut(PageId, &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        self.check_process()?;
        let mut pages = pages.into_iter();
        let next = || Some(self.item(pages.next()?));
        visit(&*self.store, Order::AsGiven, next, |item, bytes| {
            visit_one(PageId(item.index as u64), content(bytes))
        })
    }

    fn item(&self, page: PageId) -> Result<Item> {
        self.check(page)?;
        let geometry = self.store.geometry;
        Ok(Item {
            index: page.0 as usize,
            start: geometry.offset_of(page.0),
            end: geometry.offset_of(page.0 + 1),
        })
    }

    fn items(&self, pages: impl IntoIterator<Item = PageId>) -> Result<Vec<Item>> {
        self.check_process()?;
        let mut items: Vec<Item> =
            pages.into_iter().map(|page| self.item(page)).collect::<Result<_>>()?;
        sort(&mut items);
        items.dedup();
        Ok(items)
    }
}
