//! Visits of a kernel-backed mapping.
//!
//! Pages in the page cache are visited there. While the file's share of the budget has room, ranges
//! are read into the page cache ahead of the visit; all others are read from the device, past the
//! page cache, so that a pass over data larger than the budget drops nothing. A direct read of the
//! kernel writes dirty pages of the range back first: it is as current as a load.
//!
//! Where the kernel does not tell what is in the page cache, nothing counts as being there.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::{Device, DeviceError};
use aquifer_sys::memory::{self, SMALL_PAGE_BYTES};
use aquifer_sys::residency::Backing;
use aquifer_vm::Bytes;

use super::{Item, RUN_BYTES, Source};
use crate::engine::bounce::BouncePool;
use crate::error::{CacheError, Result};
use crate::geometry::Geometry;
use crate::kernel::KernelFile;
use crate::store::batch::GAP_PAGES;

/// Most pages whose residency one system call tells.
const WINDOW_PAGES: u64 = 512;
/// Items at most so far apart count as close together. A call costs as much as that many pages in it.
const CLOSE_PAGES: u64 = 32;
/// Share of the budget that visits fill, in percent: no more than the drop manager leaves.
const FILL_PERCENT: u64 = 98;
/// Most reads that are requested together, and most items in them.
const ASKED_RUNS: usize = 16;
const ASKED_ITEMS: usize = 4 << 10;
/// Requests ahead of the visit: 128 reads, so that the device still has some when the visit waits for
/// the oldest. With 3, 256 rows of 3 KiB took 18 % longer on a virtio disk; with 16 no less.
const AHEAD: usize = 8;
/// Pages ahead of the visit at which no further request is made: 48 of the largest reads.
const AHEAD_PAGES: u64 = 48 * RUN_BYTES / SMALL_PAGE_BYTES as u64;

/// A visit of a kernel-backed mapping.
pub(crate) struct KernelVisit<'a> {
    file: &'a KernelFile,
    /// First page, and whether it and the next ones were in the page cache.
    window: RefCell<(Range<u64>, [u8; WINDOW_PAGES as usize])>,
    scratch: RefCell<Vec<u8>>,
    /// The system's pages of the last of the cache's pages reserved that are not used yet.
    reserved: Cell<u64>,
}

impl<'a> KernelVisit<'a> {
    pub fn new(file: &'a KernelFile) -> KernelVisit<'a> {
        let window = RefCell::new((0..0, [0; WINDOW_PAGES as usize]));
        KernelVisit { file, window, scratch: RefCell::new(vec![]), reserved: Cell::new(0) }
    }

    /// Visits items in their order while the budget has room for them, and leaves their pages in
    /// the page cache. Returns the first item without room; without one, `feed` has ended.
    pub fn visit_what_fits(
        &self,
        mut feed: impl FnMut() -> Option<Result<Item>>,
        mut visit: impl FnMut(&Item, Bytes<'_>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<(), Option<Item>>> {
        let mut batches = VecDeque::new();
        let mut asked_pages = 0;
        let mut next = None;
        let mut has_room = true;
        loop {
            while has_room && batches.len() < AHEAD && asked_pages < AHEAD_PAGES {
                let (batch, pages);
                (batch, pages, has_room) = self.ask(&mut feed, &mut next)?;
                if batch.is_empty() {
                    break;
                }
                asked_pages += pages;
                batches.push_back((batch, pages));
            }
            let Some((batch, pages)) = batches.pop_front() else {
                return Ok(ControlFlow::Continue(next));
            };
            asked_pages -= pages;
            for item in &batch {
                let flow = self.look_in_memory(item, |bytes| visit(item, bytes))?;
                self.check_process()?;
                if flow.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
    }

    /// Requests the pages of further items; returns the items, how many pages were requested, and
    /// whether there was room for the next item. `next` is an item that `feed` has named and that is
    /// in no batch yet.
    fn ask(
        &self,
        mut feed: impl FnMut() -> Option<Result<Item>>,
        next: &mut Option<Item>,
    ) -> Result<(Vec<Item>, u64, bool)> {
        let geometry = self.geometry();
        let page_bytes = SMALL_PAGE_BYTES as u64;
        let (mut items, mut runs) = (vec![], Vec::<Range<u64>>::with_capacity(ASKED_RUNS));
        let mut has_room = true;
        while items.len() < ASKED_ITEMS {
            let item = match next.take() {
                Some(item) => item,
                None => {
                    let named = feed();
                    self.check_process()?;
                    match named {
                        Some(item) => item?,
                        None => break,
                    }
                }
            };
            if self.is_in_memory(&item) {
                items.push(item);
                continue;
            }
            let its = item.pages(geometry);
            let joins = |pages: &&mut Range<u64>| {
                (pages.start..=pages.end + GAP_PAGES).contains(&its.start)
                    && its.end.max(pages.end) - pages.start <= RUN_BYTES / page_bytes
            };
            let is_full = runs.len() == ASKED_RUNS;
            match runs.last_mut().filter(joins) {
                Some(pages) if self.reserve(its.end.saturating_sub(pages.end)) => {
                    pages.end = pages.end.max(its.end);
                }
                None if is_full => {
                    *next = Some(item);
                    break;
                }
                None if self.reserve(its.end - its.start) => runs.push(its),
                _ => {
                    *next = Some(item);
                    has_room = false;
                    break;
                }
            }
            items.push(item);
        }
        let bytes = |pages: &Range<u64>| {
            pages.start * page_bytes..(pages.end * page_bytes).min(geometry.len_bytes)
        };
        self.file.will_need(&runs.iter().map(bytes).collect::<Vec<_>>());
        Ok((items, runs.iter().map(|pages| pages.end - pages.start).sum(), has_room))
    }

    /// Most of the cache's pages that visits fill.
    fn most_pages(&self) -> u64 {
        let engine = self.file.engine();
        engine.kernel_share_bytes() / engine.options.page_bytes as u64 * FILL_PERCENT / 100
    }

    /// Whether the budget has room for a run. Without it a visit is faster that does not try.
    pub fn has_room(&self) -> bool {
        if self.file.backing != Backing::Storage {
            return true;
        }
        let run_pages = RUN_BYTES / SMALL_PAGE_BYTES as u64 / self.cache_page();
        // Relaxed: a count, which publishes nothing.
        let resident = self.file.engine().kernel_resident_pages.load(Ordering::Relaxed);
        resident + run_pages <= self.most_pages()
    }

    /// Counts pages that are about to come into the page cache, if the budget has room for them. The
    /// drop manager corrects the count when it measures.
    fn reserve(&self, pages: u64) -> bool {
        if self.file.backing != Backing::Storage {
            // Such a file is in memory as it is, and the drop manager does not count it.
            return true;
        }
        let reserved = self.reserved.get();
        let more = pages.saturating_sub(reserved).div_ceil(self.cache_page());
        let resident = &self.file.engine().kernel_resident_pages;
        let has_room = more == 0 || add_up_to(resident, more, self.most_pages());
        if has_room {
            self.reserved.set(reserved + more * self.cache_page() - pages);
        }
        has_room
    }

    /// The cache's page size, in the system's pages.
    fn cache_page(&self) -> u64 {
        (self.file.engine().options.page_bytes / SMALL_PAGE_BYTES) as u64
    }
}

/// Adds to a count if that makes it no larger than `most`.
fn add_up_to(count: &AtomicU64, more: u64, most: u64) -> bool {
    let sum = |count: u64| Some(count + more).filter(|&sum| sum <= most);
    // Relaxed: a count, which publishes nothing.
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok()
}

impl Source for KernelVisit<'_> {
    fn geometry(&self) -> Geometry {
        self.file.geometry
    }

    fn device(&self) -> &dyn Device {
        &*self.file.device
    }

    fn reads_units(&self) -> bool {
        true
    }

    fn buffers(&self) -> &BouncePool {
        &self.file.engine().visit_buffers
    }

    fn is_in_memory(&self, item: &Item) -> bool {
        if !self.file.residency_is_revealed {
            return false;
        }
        let pages = item.pages(self.geometry());
        let (window, resident) = &mut *self.window.borrow_mut();
        if pages.start < window.start || pages.end > window.end {
            let first = pages.start;
            // Each page costs: only where items lie close together the next ones are asked about.
            let is_close = (window.start..=window.end + CLOSE_PAGES).contains(&first);
            let next = if is_close { 2 * (window.end - window.start) } else { 0 };
            let len = next.max(pages.end - first).min(WINDOW_PAGES);
            *window = first..(first + len).min(self.geometry().pages());
            let len = (window.end - first) as usize * SMALL_PAGE_BYTES;
            let address = self.file.address(first * SMALL_PAGE_BYTES as u64);
            if memory::residency(address, len, resident).is_err() {
                resident.fill(0);
            }
        }
        pages.into_iter().all(|page| resident[(page - window.start) as usize] & 1 == 1)
    }

    /// Copies: the bytes of the mapping may vanish while the closure looks at them.
    fn look_in_memory<T>(&self, item: &Item, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        let mut scratch = self.scratch.borrow_mut();
        let len = (item.end - item.start) as usize;
        if scratch.len() < len {
            scratch.resize(len, 0);
        }
        // SAFETY: the scratch memory has that length; the item lies in the mapping.
        unsafe { self.file.copy_to(item.start, scratch.as_mut_ptr(), len) }?;
        Ok(look(Bytes::from(&scratch[..len])))
    }

    fn stamp(&self, pages: Range<u64>) -> u64 {
        // Relaxed: counts, which publish nothing.
        if self.device().alignment_bytes() > 1 {
            // Direct reads, which fill nothing.
            let read_past = &self.file.engine().kernel_pages_read_past;
            read_past.fetch_add(pages.end - pages.start, Ordering::Relaxed);
        } else {
            // They fill the page cache: the drop manager is to look.
            self.file.engine().kernel_batches_asked.fetch_add(1, Ordering::Relaxed);
        }
        0
    }

    fn is_outdated(&self, _pages: &Range<u64>, _stamp: u64) -> bool {
        false
    }

    unsafe fn settle(&self, _: u64, _: &Range<u64>, _: u64, _: *mut u8) -> Result<()> {
        Ok(())
    }

    unsafe fn keep(&self, _: Range<u64>, _: &Range<u64>, _: u64, _: *const u8) {}

    fn calling<T>(&self, work: impl FnOnce() -> T) -> T {
        work()
    }

    fn outside<T>(&self, work: impl FnOnce() -> T) -> T {
        work()
    }

    fn check_process(&self) -> Result<()> {
        if self.file.engine().mark.is_current() { Ok(()) } else { Err(CacheError::Forked) }
    }

    fn failed(&self, page: u64, source: DeviceError) -> CacheError {
        CacheError::Load {
            device: self.file.device.name().to_owned(),
            offset_bytes: self.geometry().offset_of(page),
            source,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn threads_together_reserve_no_more_than_the_room() {
        let count = AtomicU64::new(7);
        let reserve =
            || std::iter::repeat(()).take_while(|()| add_up_to(&count, 3, 30_000)).count();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(reserve)).collect();
            let reserved: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert_eq!(reserved, (30_000 - 7) / 3);
        });
    }
}
