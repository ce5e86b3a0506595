//! Visiting many ranges in the order that costs least.
//!
//! A program that knows a set of ranges, and does not care in which order it sees them, need not
//! wait for any of them in particular:
//!
//! ```text
//!  ranges ─► sorted ─► in memory? ─ yes ─► set aside, and visited in place while reads are in flight
//!                          │ no
//!                          ▼
//!            runs: neighbours, and those a few pages apart, share a read of up to 128 KiB
//!                          ▼
//!            device queue, twice its depth of runs in flight, refilled at every completion
//!                          ▼
//!            settled ─► visited from the run's buffer, as runs complete
//!               └─► kept in frames, while frames are free
//! ```
//!
//! A page that is read for a visit goes through a buffer, not through a frame: a pass over data
//! larger than the budget evicts nothing. [`Order::AsGiven`] has the same pipeline for ranges that
//! come one by one and are visited in their order.
//!
//! # No page is Loading while the caller's code runs
//! The caller's closure may access any page, take locks, or wait for another thread. So a run in
//! flight holds no state of its pages, and other threads may load them, store to them, write them
//! back and evict them in the meantime. When a run completes, *settling* decides for each page
//! whether the buffer's bytes are current:
//! * While a page is written back it is Cleaning, or Dirty. The end of a write-back is counted, for
//!   each region (`Store::write_backs_ended`), before its pages become Clean. So if a page is
//!   absent, or in another state in which its bytes equal the device's, and the count is the same
//!   as before the read, then no write of the page overlapped the read: the buffer is current.
//!   Loading is no such state: a page may be installed for stores a moment before it is Dirty.
//! * Otherwise the page's bytes are copied out of its frame; it is loaded if necessary. Since loads
//!   evict, a run whose count has changed is first read a second time.
//!
//! Each range is settled right before it is visited. So a visit sees every store that happened
//! before the call, and those that the closure made to ranges that come later.
//!
//! # Forks
//! A child that the closure forks ends the visit with [`CacheError::Forked`]: the reads in flight,
//! and the pins, are its parent's.
//!
//! # Memory
//! Runs share buffers: each has a part of one. Buffers come from a pool of their own. A caller that
//! finds it empty has runs in flight, or allocates one buffer: visits nest, and waiting for a buffer
//! that an outer visit of the same thread holds would never end.

mod interface;
mod kernel;
mod store;
#[cfg(all(test, not(loom)))]
mod tests;

pub use interface::Visited;

use std::any::Any;
use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use aquifer_device::{AlignedBuffer, Batch, Device, DeviceError, IoOperation, Request};
use aquifer_sys::memory::SMALL_PAGE_BYTES;
use aquifer_vm::Bytes;

use crate::engine::bounce::{Bounce, BouncePool, VISIT_RUN_BYTES};
use crate::error::{CacheError, Result};
use crate::geometry::Geometry;
use crate::store::batch::GAP_PAGES;

/// A range of at most this length is visited in one piece.
pub(crate) const ONE_PIECE_BYTES: u64 = 64 << 10;
/// Largest read.
const RUN_BYTES: u64 = VISIT_RUN_BYTES as u64;
/// Most runs in flight, and most bytes of them: 8 of the largest, which fit into a core's cache, unless the device asks
/// for more. With twice as many bytes a search of a local file was no faster. With twice the device's depth its queue is full for
/// longer before a batch ends: 256 rows of 3 KiB take 8 % less on a virtio disk. A server may take hundreds at once.
const MOST_RUNS: usize = 512;
const MOST_BYTES: u64 = 8 * RUN_BYTES;
/// Most items of [`Order::AsGiven`] that wait for their turn, in runs or behind them.
const MOST_ITEMS: usize = 32 << 10;
/// Most runs of items in memory that are set aside, and most items in each. They take about as long
/// as a read, and may be evicted meanwhile.
const ASIDE_RUNS: usize = 64;
const ASIDE_ITEMS: usize = 64;
/// Items for which a free run keeps memory.
const KEPT_ITEMS: usize = 4 << 10;

/// A range to visit, or a piece of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    /// The place of the range in the caller's list.
    pub index: usize,
    pub start: u64,
    pub end: u64,
}

impl Item {
    /// The first piece, and the rest: an item of more than `one_piece` bytes is cut where reads end,
    /// so that each piece fits into a buffer.
    fn split(self, one_piece: u64) -> (Item, Option<Item>) {
        if self.end - self.start <= one_piece {
            return (self, None);
        }
        let cut = ((self.start / RUN_BYTES + 1) * RUN_BYTES).min(self.end);
        let rest = (cut < self.end).then_some(Item { start: cut, ..self });
        (Item { end: cut, ..self }, rest)
    }

    fn pages(&self, geometry: Geometry) -> Range<u64> {
        geometry.page_of(self.start)..geometry.page_of(self.end - 1) + 1
    }
}

/// Where the bytes of a visit are: a store, or a kernel-backed mapping.
pub(crate) trait Source {
    fn geometry(&self) -> Geometry;
    fn device(&self) -> &dyn Device;
    fn buffers(&self) -> &BouncePool;

    /// Whether nothing is settled or kept by pages: then only the units of the device's alignment are
    /// read that items touch.
    fn reads_units(&self) -> bool {
        false
    }

    /// Whether an item can be visited in memory without a transfer.
    fn is_in_memory(&self, item: &Item) -> bool;

    /// Calls `look` with the bytes of an item in memory; loads them if necessary.
    fn look_in_memory<T>(&self, item: &Item, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T>;

    /// A number that has changed when the device's bytes of these pages may have been written since.
    fn stamp(&self, pages: Range<u64>) -> u64;

    /// Whether a page would be loaded to be settled.
    fn is_outdated(&self, pages: &Range<u64>, stamp: u64) -> bool;

    /// Makes the bytes of `page` in a buffer current, which a read of `pages` placed there.
    ///
    /// # Safety
    /// `target` is writable for a page.
    unsafe fn settle(
        &self,
        page: u64,
        pages: &Range<u64>,
        stamp: u64,
        target: *mut u8,
    ) -> Result<()>;

    /// Keeps pages of a buffer in memory if that evicts nothing.
    ///
    /// # Safety
    /// `data` is readable for `pages`, and holds what a read of `run` placed there.
    unsafe fn keep(&self, pages: Range<u64>, run: &Range<u64>, stamp: u64, data: *const u8);

    /// Runs `work`, which calls the device.
    fn calling<T>(&self, work: impl FnOnce() -> T) -> T;

    /// Runs `work`, the caller's code, inside of [`Source::calling`].
    fn outside<T>(&self, work: impl FnOnce() -> T) -> T;

    /// Fails in a child of the process that the visit is of.
    fn check_process(&self) -> Result<()>;

    /// The error of a page that the device did not read.
    fn failed(&self, page: u64, source: DeviceError) -> CacheError;
}

/// The order of visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// As reads complete.
    AsRead,
    /// As the ranges come.
    AsGiven,
}

/// Sorts items by their place.
pub(crate) fn sort(items: &mut [Item]) {
    if !items.is_sorted_by_key(|item| item.start) {
        items.sort_unstable_by_key(|item| item.start);
    }
}

/// The pieces of items; see [`Item::split`].
pub(crate) fn pieces(
    one_piece: u64,
    mut next: impl FnMut() -> Option<Result<Item>>,
) -> impl FnMut() -> Option<Result<Item>> {
    let mut rest: Option<Item> = None;
    move || {
        let item = match rest.take() {
            Some(item) => item,
            None => match next()? {
                Ok(item) => item,
                failed => return Some(failed),
            },
        };
        let (piece, left) = item.split(one_piece);
        rest = left;
        Some(Ok(piece))
    }
}

/// Visits the items that `feed` names. It is asked whenever there is room, also after it returned
/// `None`; the visit ends with a `None` while nothing is under way, or when `visit` breaks. With
/// [`Order::AsRead`] the feed is not the caller's code.
pub(crate) fn visit<S: Source>(
    source: &S,
    order: Order,
    feed: impl FnMut() -> Option<Result<Item>>,
    visit: impl FnMut(&Item, Bytes<'_>) -> ControlFlow<()>,
) -> Result<()> {
    let units = source.reads_units().then(|| source.device().alignment_bytes() as u64);
    let mut batch = VisitBatch {
        source,
        units,
        order,
        feed,
        visit,
        pending: None,
        has_ended: false,
        runs: vec![],
        free_runs: vec![],
        buffer: None,
        turns: VecDeque::new(),
        again: vec![],
        in_flight: 0,
        most_bytes: MOST_BYTES.max(source.device().bytes_in_flight()),
        held_bytes: 0,
        waiting: 0,
        end: None,
    };
    let device = source.device();
    let left_out = source.calling(|| {
        device.run(&mut batch, device.queue_depth().saturating_mul(2).min(MOST_RUNS));
        // The device has asked for more after its last completion, and so there are none, unless it
        // ended early.
        while batch.visit_aside() {}
        batch.left_out()
    });
    match batch.end.take() {
        Some(End::Stopped) => Ok(()),
        Some(End::Failed(error)) => Err(error),
        Some(End::Panicked(payload)) => resume_unwind(payload),
        None => match left_out {
            None => Ok(()),
            Some(item) => {
                let (operation, offset_bytes) = (IoOperation::Read, item.start);
                let len_bytes = (item.end - item.start) as usize;
                let unfinished = DeviceError::Unfinished { operation, offset_bytes, len_bytes };
                Err(source.failed(source.geometry().page_of(item.start), unfinished))
            }
        },
    }
}

enum Memory<'a> {
    Pooled(Bounce<'a>),
    Own(AlignedBuffer),
}

/// Memory of several runs.
struct Buffer<'a> {
    base: *mut u8,
    _memory: Memory<'a>,
}

impl<'a> Buffer<'a> {
    fn new(mut memory: Memory<'a>) -> Buffer<'a> {
        let base = match &mut memory {
            Memory::Pooled(bounce) => bounce.as_ptr(),
            Memory::Own(buffer) => buffer.as_mut_ptr(),
        };
        Buffer { base, _memory: memory }
    }
}

/// The memory of one run: from an offset of a buffer on.
struct Part<'a> {
    buffer: Rc<Buffer<'a>>,
    offset_bytes: usize,
}

impl Part<'_> {
    fn as_ptr(&self) -> *mut u8 {
        self.buffer.base.wrapping_add(self.offset_bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Free, or visited.
    Idle,
    InFlight,
    /// Waits for its turn.
    Read,
    /// Not read here: visited in memory when it is its turn.
    InMemory,
}

/// One read, and the items in it, which are sorted.
struct Run<'a> {
    pages: Range<u64>,
    items: Vec<Item>,
    memory: Option<Part<'a>>,
    stamp: u64,
    state: Progress,
    /// Whether it is read for the second time.
    is_second: bool,
}

impl Run<'_> {
    /// What the device reads: the pages, or with `units` of at most a page only the units of that size
    /// that items touch.
    fn bytes(&self, geometry: Geometry, units: Option<u64>) -> Range<u64> {
        let end = geometry.offset_of(self.pages.end);
        match (units, self.items.first()) {
            (Some(unit), Some(first)) if unit <= geometry.page_bytes as u64 => {
                // Items are sorted by their start alone.
                let last = self.items.iter().map(|item| item.end).max().unwrap_or(end);
                first.start / unit * unit..last.next_multiple_of(unit).min(end)
            }
            _ => geometry.offset_of(self.pages.start)..end,
        }
    }
}

/// Why a visit ends early.
enum End {
    Stopped,
    Failed(CacheError),
    Panicked(Box<dyn Any + Send>),
}

struct VisitBatch<'a, S, F, V> {
    source: &'a S,
    /// The size of what is read of pages, where not all of a page has to be.
    units: Option<u64>,
    order: Order,
    feed: F,
    visit: V,
    /// Named by `feed`, not in a run yet.
    pending: Option<Item>,
    /// Whether `feed` had nothing to name while nothing was under way.
    has_ended: bool,
    runs: Vec<Run<'a>>,
    free_runs: Vec<usize>,
    /// The buffer of the latest run, and the bytes of it that runs have been given.
    buffer: Option<(Rc<Buffer<'a>>, usize)>,
    /// With [`Order::AsGiven`], the runs that are not visited yet, in order. Otherwise runs of items in
    /// memory, set aside for times at which the device is busy.
    turns: VecDeque<usize>,
    /// Runs to read a second time; they count as in flight in their state only.
    again: Vec<usize>,
    in_flight: usize,
    most_bytes: u64,
    /// Bytes of the runs that are not visited yet.
    held_bytes: u64,
    /// Items that are not visited yet.
    waiting: usize,
    end: Option<End>,
}

impl<'a, S, F, V> VisitBatch<'a, S, F, V>
where
    S: Source,
    F: FnMut() -> Option<Result<Item>>,
    V: FnMut(&Item, Bytes<'_>) -> ControlFlow<()>,
{
    /// Runs code of the caller's. A panic in it ends the visit after the reads in flight, whatever
    /// the device does about panics.
    fn call<T>(&mut self, code: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let source = self.source;
        match source.outside(|| catch_unwind(AssertUnwindSafe(|| code(self)))) {
            Ok(value) => match source.check_process() {
                Ok(()) => Some(value),
                Err(forked) => {
                    self.end = Some(End::Failed(forked));
                    None
                }
            },
            Err(payload) => {
                self.end = Some(End::Panicked(payload));
                None
            }
        }
    }

    fn peek(&mut self) -> Option<Item> {
        if self.pending.is_none() {
            let named = match self.order {
                Order::AsRead => (self.feed)(),
                Order::AsGiven => self.call(|batch| (batch.feed)())?,
            };
            // Until then the feed may have more to name, which depends on what is visited.
            self.has_ended = named.is_none() && self.in_flight == 0 && self.turns.is_empty();
            match named? {
                Ok(item) => self.pending = Some(item),
                Err(error) => self.end = Some(End::Failed(error)),
            }
        }
        self.pending
    }

    /// After the device has returned: an item that it did not read, or did not even ask for.
    fn left_out(&mut self) -> Option<Item> {
        let mut under_way = self.runs.iter().filter(|run| run.state != Progress::Idle);
        if let Some(&item) = under_way.find_map(|run| run.items.first()) {
            return Some(item);
        }
        if self.end.is_none() && !self.has_ended { self.peek() } else { self.pending }
    }

    /// A place for a run.
    fn place(&mut self) -> usize {
        self.free_runs.pop().unwrap_or_else(|| {
            self.runs.push(Run {
                pages: 0..0,
                items: vec![],
                memory: None,
                stamp: 0,
                state: Progress::Idle,
                is_second: false,
            });
            self.runs.len() - 1
        })
    }

    /// Most bytes of a run.
    fn most_bytes(&self) -> usize {
        self.source.buffers().buffer_bytes() / 2
    }

    /// Memory for a run of any length. [`Self::begin_run`] counts what it uses.
    fn memory(&mut self) -> Option<Part<'a>> {
        let pool = self.source.buffers();
        let most_bytes = self.most_bytes();
        if let Some((buffer, given_bytes)) = &mut self.buffer {
            if Rc::strong_count(buffer) == 1 {
                *given_bytes = 0;
            }
            if *given_bytes + most_bytes <= pool.buffer_bytes() {
                return Some(Part { buffer: buffer.clone(), offset_bytes: *given_bytes });
            }
        }
        let memory = match pool.try_take() {
            Some(bounce) => Memory::Pooled(bounce),
            // Nothing that completes would call `next` again.
            None if self.in_flight == 0 => {
                Memory::Own(AlignedBuffer::new(pool.buffer_bytes(), SMALL_PAGE_BYTES))
            }
            None => return None,
        };
        let buffer = Rc::new(Buffer::new(memory));
        self.buffer = Some((buffer.clone(), 0));
        Some(Part { buffer, offset_bytes: 0 })
    }

    /// Whether no further item may come. Then something is in flight.
    fn is_full(&self) -> bool {
        self.held_bytes >= self.most_bytes || self.has_enough_items()
    }

    /// The items of [`Order::AsRead`] are in a list anyway.
    fn has_enough_items(&self) -> bool {
        self.order == Order::AsGiven && self.waiting >= MOST_ITEMS
    }

    /// Adds the pending item to a run.
    fn take_pending(&mut self, place: usize) {
        self.runs[place].items.extend(self.pending.take());
        self.waiting += 1;
    }

    /// Adds the pending item, which is in memory, to a run at the end of `turns`.
    fn take_in_memory(&mut self, item: &Item) {
        let is_long = |items: &[Item]| {
            let start = items.first().map_or(item.start, |first| first.start);
            // Pieces of a long item may come before an item that starts earlier.
            items.len() >= ASIDE_ITEMS || item.end.saturating_sub(start) > ONE_PIECE_BYTES
        };
        let place = match self.turns.back() {
            Some(&last)
                if self.runs[last].state == Progress::InMemory
                    && (self.order == Order::AsGiven || !is_long(&self.runs[last].items)) =>
            {
                last
            }
            _ => {
                let place = self.place();
                self.runs[place].state = Progress::InMemory;
                self.turns.push_back(place);
                place
            }
        };
        self.take_pending(place);
        if self.order == Order::AsRead && self.turns.len() > ASIDE_RUNS {
            self.visit_aside();
        }
    }

    /// Visits the run that was set aside first; returns whether there was one.
    fn visit_aside(&mut self) -> bool {
        if self.order == Order::AsGiven {
            return false;
        }
        let Some(place) = self.turns.pop_front() else {
            return false;
        };
        self.visit_run(place);
        true
    }

    /// The next run to read.
    fn begin_run(&mut self) -> Option<usize> {
        let geometry = self.source.geometry();
        loop {
            if self.end.is_some() {
                return None;
            }
            if let Some(place) = self.again.pop() {
                return Some(place);
            }
            if self.is_full() {
                return None;
            }
            let first = self.peek()?;
            if self.source.is_in_memory(&first) {
                self.take_in_memory(&first);
                if self.order == Order::AsGiven {
                    self.take_turns();
                }
                continue;
            }
            let memory = self.memory()?;
            let place = self.place();
            let most = (self.most_bytes() / geometry.page_bytes) as u64;
            let mut pages = first.pages(geometry);
            self.take_pending(place);
            let mut last = first.start;
            while !self.has_enough_items()
                && let Some(item) = self.peek()
            {
                let its = item.pages(geometry);
                if self.order == Order::AsRead && self.source.is_in_memory(&item) {
                    self.take_in_memory(&item);
                    continue;
                }
                if item.start < last
                    || its.start > pages.end + GAP_PAGES
                    || its.end.max(pages.end) - pages.start > most
                {
                    break;
                }
                self.take_pending(place);
                last = item.start;
                pages.end = pages.end.max(its.end);
            }
            let len_bytes = geometry.offset_of(pages.end - pages.start);
            self.held_bytes += len_bytes;
            if let Some((_, given_bytes)) = &mut self.buffer {
                *given_bytes += len_bytes as usize;
            }
            let run = &mut self.runs[place];
            run.stamp = self.source.stamp(pages.clone());
            run.pages = pages;
            run.memory = Some(memory);
            run.state = Progress::InFlight;
            run.is_second = false;
            if self.order == Order::AsGiven {
                self.turns.push_back(place);
            }
            return Some(place);
        }
    }

    /// Visits runs whose turn it is.
    fn take_turns(&mut self) {
        while let Some(&place) = self.turns.front()
            && self.runs[place].state != Progress::InFlight
        {
            self.turns.pop_front();
            self.visit_run(place);
        }
    }

    /// Visits a run, unless the visit has ended, and frees its place.
    fn visit_run(&mut self, place: usize) {
        let run = &mut self.runs[place];
        let state = std::mem::replace(&mut run.state, Progress::Idle);
        let mut items = std::mem::take(&mut run.items);
        let memory = run.memory.take();
        let pages = std::mem::replace(&mut run.pages, 0..0);
        let stamp = run.stamp;
        if self.end.is_none() {
            let data = memory.as_ref().filter(|_| state == Progress::Read).map(Part::as_ptr);
            let visited = self.call(|batch| batch.visit_items(&items, &pages, stamp, data));
            match visited {
                Some(Ok(ControlFlow::Continue(()))) | None => {}
                Some(Ok(ControlFlow::Break(()))) => self.end = Some(End::Stopped),
                Some(Err(error)) => self.end = Some(End::Failed(error)),
            }
        }
        self.held_bytes -= self.source.geometry().offset_of(pages.end - pages.start);
        self.waiting -= items.len();
        items.clear();
        items.shrink_to(KEPT_ITEMS);
        self.runs[place].items = items;
        self.free_runs.push(place);
    }

    /// Visits items: those of a read run at `data`, others in memory.
    fn visit_items(
        &mut self,
        items: &[Item],
        pages: &Range<u64>,
        stamp: u64,
        data: Option<*mut u8>,
    ) -> Result<ControlFlow<()>> {
        let source = self.source;
        let geometry = source.geometry();
        let mut kept = pages.start;
        for item in items {
            let flow = match data {
                Some(data) => {
                    let at = |page: u64| {
                        data.wrapping_add(geometry.offset_of(page - pages.start) as usize)
                    };
                    let its = item.pages(geometry);
                    // Again for a page of several items: the closure may have stored to it.
                    for page in its.clone() {
                        // SAFETY: the buffer holds `pages`, and belongs to this run.
                        unsafe { source.settle(page, pages, stamp, at(page)) }?;
                    }
                    let new = its.start.max(kept)..its.end;
                    if !new.is_empty() {
                        kept = new.end;
                        // SAFETY: as above; a page that was not current is not absent.
                        unsafe { source.keep(new.clone(), pages, stamp, at(new.start)) };
                    }
                    let at = (item.start - geometry.offset_of(pages.start)) as usize;
                    let len = (item.end - item.start) as usize;
                    // SAFETY: inside the buffer, which nothing changes during the call.
                    let bytes = unsafe { Bytes::new(data.wrapping_add(at), len) };
                    (self.visit)(item, bytes)
                }
                None => source.look_in_memory(item, |bytes| (self.visit)(item, bytes))?,
            };
            source.check_process()?;
            if flow.is_break() {
                return Ok(flow);
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

// SAFETY: a run keeps its buffer until its completion, and no other run has that part of it: what was
// given to runs is given again when none of them is left.
unsafe impl<S, F, V> Batch for VisitBatch<'_, S, F, V>
where
    S: Source,
    F: FnMut() -> Option<Result<Item>>,
    V: FnMut(&Item, Bytes<'_>) -> ControlFlow<()>,
{
    fn next(&mut self) -> Option<Request> {
        let place = loop {
            if let Some(place) = self.begin_run() {
                break place;
            }
            // One at a time while reads are in flight, so that the device can look for completions.
            if !self.visit_aside() || self.in_flight > 0 {
                return None;
            }
        };
        let geometry = self.source.geometry();
        let run = &mut self.runs[place];
        let alignment_bytes = self.source.device().alignment_bytes();
        let bytes = run.bytes(geometry, self.units);
        let wanted = (bytes.end.min(geometry.len_bytes) - bytes.start) as usize;
        let len_bytes =
            wanted.next_multiple_of(alignment_bytes).min((bytes.end - bytes.start) as usize);
        let memory = run.memory.as_ref().expect("a run that is read has memory").as_ptr();
        // Where it would be if all pages were read.
        let memory =
            memory.wrapping_add((bytes.start - geometry.offset_of(run.pages.start)) as usize);
        self.in_flight += 1;
        let (operation, offset_bytes) = (IoOperation::Read, bytes.start);
        Some(Request { operation, offset_bytes, memory, len_bytes, tag: place as u64 })
    }

    fn complete(&mut self, tag: u64, result: std::result::Result<usize, DeviceError>) {
        let place = tag as usize;
        let in_flight = self.runs.get(place).is_some_and(|run| run.state == Progress::InFlight);
        assert!(in_flight, "a device completes the transfers that it took, each once");
        self.in_flight -= 1;
        let geometry = self.source.geometry();
        let run = &mut self.runs[place];
        let bytes = run.bytes(geometry, self.units);
        let whole = (bytes.end - bytes.start) as usize;
        let wanted = (bytes.end.min(geometry.len_bytes) - bytes.start) as usize;
        // A failed read may cover pages that are not wanted, or only some that are bad: each item
        // is then loaded by itself, which tells.
        let is_read = result.is_ok_and(|got| got >= wanted);
        // Where pages are kept, so is what lies behind the device's end.
        if is_read && wanted < whole && self.units.is_none() {
            let memory = run.memory.as_ref().expect("a run that is read has memory").as_ptr();
            // SAFETY: inside the buffer, and the transfer has ended.
            unsafe { std::ptr::write_bytes(memory.add(wanted), 0, whole - wanted) };
        }
        if is_read && !run.is_second && self.source.is_outdated(&run.pages, run.stamp) {
            run.is_second = true;
            run.stamp = self.source.stamp(run.pages.clone());
            self.again.push(place);
            return;
        }
        run.state = if is_read { Progress::Read } else { Progress::InMemory };
        match self.order {
            Order::AsRead => self.visit_run(place),
            Order::AsGiven => self.take_turns(),
        }
    }
}
