//! Visits of a kernel-backed mapping.
//!
//! Pages in the page cache are visited there. While the file's share of the budget has room, ranges
//! are read into the page cache ahead of the visit; all others are read from the device, past the
//! page cache, so that a pass over data larger than the budget drops nothing. A direct read of the
//! kernel writes dirty pages of the range back first: it is as current as a load.

use std::cell::RefCell;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::Ordering;

use aquifer_device::{Device, DeviceError};
use aquifer_sys::memory::{self, SMALL_PAGE_BYTES};
use aquifer_vm::Bytes;

use super::{Item, RUN_BYTES, Source};
use crate::batch::GAP_PAGES;
use crate::bounce::BouncePool;
use crate::error::{CacheError, Result};
use crate::geometry::Geometry;
use crate::kernel::KernelFile;

/// Most pages whose residency one system call tells.
const WINDOW_PAGES: u64 = 64;
/// Share of the budget that visits fill, in percent: no more than the drop manager leaves.
const FILL_PERCENT: u64 = 86;
/// Reads that are requested together, and twice as many ahead of the visit.
const ASKED_RUNS: usize = 16;

/// A visit of a kernel-backed mapping.
pub(crate) struct KernelVisit<'a> {
    file: &'a KernelFile,
    /// First page, and whether it and the next ones were in the page cache.
    window: RefCell<(Range<u64>, [u8; WINDOW_PAGES as usize])>,
    scratch: RefCell<Vec<u8>>,
}

impl<'a> KernelVisit<'a> {
    pub fn new(file: &'a KernelFile) -> KernelVisit<'a> {
        let window = RefCell::new((0..0, [0; WINDOW_PAGES as usize]));
        KernelVisit { file, window, scratch: RefCell::new(vec![]) }
    }

    /// Visits as many of the items, which are sorted, as the budget has room for, and leaves their
    /// pages in the page cache. The others remain in the list.
    pub fn visit_what_fits(
        &self,
        items: &mut Vec<Item>,
        mut visit: impl FnMut(&Item, Bytes<'_>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let geometry = self.geometry();
        let mut room = self.room_pages();
        // Page ranges to read, each with the end of its items.
        let mut runs: Vec<(Range<u64>, usize)> = vec![];
        for (index, item) in items.iter().enumerate() {
            let its = item.pages(geometry);
            let most = RUN_BYTES / SMALL_PAGE_BYTES as u64;
            let more = match runs.last_mut() {
                Some((pages, end))
                    if its.start <= pages.end + GAP_PAGES && its.end - pages.start <= most =>
                {
                    let more = its.end.saturating_sub(pages.end);
                    (pages.end, *end) = (pages.end.max(its.end), index + 1);
                    more
                }
                _ => {
                    if its.end - its.start > room {
                        break;
                    }
                    let more = its.end - its.start;
                    runs.push((its, index + 1));
                    more
                }
            };
            room = room.saturating_sub(more);
        }
        let page_bytes = SMALL_PAGE_BYTES as u64;
        let ask = |from: usize| {
            let to = runs.len().min(from + ASKED_RUNS);
            let bytes: Vec<Range<u64>> = runs[from..to]
                .iter()
                .map(|(pages, _)| {
                    pages.start * page_bytes..(pages.end * page_bytes).min(geometry.len_bytes)
                })
                .collect();
            self.file.will_need(&bytes);
            to
        };
        let pages: u64 = runs.iter().map(|(pages, _)| pages.end - pages.start).sum();
        // Until the drop manager counts again, in pages of the cache. Relaxed: an estimate.
        let engine = self.file.engine();
        engine.kernel_resident_pages.fetch_add(pages / self.cache_page(), Ordering::Relaxed);
        let (mut asked, mut done) = (0, 0);
        for index in 0..runs.len() {
            while asked < runs.len() && asked < index + 2 * ASKED_RUNS {
                asked = ask(asked);
            }
            let end = runs[index].1;
            for item in &items[done..end] {
                if self.look_in_memory(item, |bytes| visit(item, bytes))?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            done = end;
        }
        items.drain(..done);
        Ok(ControlFlow::Continue(()))
    }

    /// Pages that may come into the page cache.
    fn room_pages(&self) -> u64 {
        let engine = self.file.engine();
        let share = engine.kernel_share_bytes() / SMALL_PAGE_BYTES as u64 * FILL_PERCENT / 100;
        // Relaxed: an estimate.
        let resident = engine.kernel_resident_pages.load(Ordering::Relaxed) * self.cache_page();
        share.saturating_sub(resident)
    }

    /// The cache's page size, in the system's pages.
    fn cache_page(&self) -> u64 {
        (self.file.engine().options.page_bytes / SMALL_PAGE_BYTES) as u64
    }
}

impl Source for KernelVisit<'_> {
    fn geometry(&self) -> Geometry {
        self.file.geometry
    }

    fn device(&self) -> &dyn Device {
        &*self.file.device
    }

    fn buffers(&self) -> &BouncePool {
        &self.file.engine().visit_buffers
    }

    fn is_in_memory(&self, item: &Item) -> bool {
        let pages = item.pages(self.geometry());
        let (window, resident) = &mut *self.window.borrow_mut();
        if pages.start < window.start || pages.end > window.end {
            let first = pages.start;
            // Each page costs: only where items lie close together the next ones are asked about.
            let is_close =
                (window.end.saturating_sub(GAP_PAGES)..=window.end + GAP_PAGES).contains(&first);
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

    fn stamp(&self, _pages: Range<u64>) -> u64 {
        0
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

    fn failed(&self, page: u64, source: DeviceError) -> CacheError {
        CacheError::Load {
            device: self.file.device.name().to_owned(),
            offset_bytes: self.geometry().offset_of(page),
            source,
        }
    }
}
