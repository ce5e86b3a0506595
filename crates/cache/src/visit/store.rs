//! Visits of a store's pages.

use std::ops::Range;

use aquifer_device::{Device, DeviceError};
use aquifer_sys::memory;
use aquifer_vm::Bytes;

use super::{Item, Source};
use crate::engine::bounce::BouncePool;
use crate::engine::duties;
use crate::error::{CacheError, Result};
use crate::geometry::Geometry;
use crate::ids::FrameId;
use crate::page_word::{PinKind, State};
use crate::stats::count;
use crate::store::{Access, MAX_RUN_PAGES, PageMemory, Refused, Store};
use crate::sync::{Ordering, fence};

/// Pages pinned for loads.
struct Pins<'a, M: PageMemory> {
    store: &'a Store<M>,
    pages: Range<u64>,
}

impl<M: PageMemory> Drop for Pins<'_, M> {
    fn drop(&mut self) {
        // In a child of a fork the page words are wiped.
        if self.store.engine.mark.is_current() {
            self.pages.clone().for_each(|page| self.store.unpin(page));
        }
    }
}

impl<M: PageMemory> Store<M> {
    /// Calls `look` with the address of the first of `pages`, which are pinned meanwhile. More than
    /// one page only where pages are adjacent in memory.
    fn look_at_pages<T>(&self, pages: Range<u64>, look: impl FnOnce(*const u8) -> T) -> Result<T> {
        debug_assert!(M::CONTIGUOUS || pages.end - pages.start == 1);
        let mut pins = Pins { store: self, pages: pages.start..pages.start };
        for page in pages.clone() {
            self.ensure(page, Access::Read, Some(PinKind::Read), false)
                .map_err(|refused| self.error(page, refused))?;
            pins.pages.end = page + 1;
        }
        Ok(look(self.memory.bytes(pages.start, self.seen(pages.start).frame())))
    }

    /// Installs pages that are Loading, unless their bytes on the device may have changed since
    /// they were read.
    ///
    /// # Safety
    /// `data` is readable for the pages.
    unsafe fn install_kept(
        &self,
        first: u64,
        frames: &[FrameId],
        data: *const u8,
        is_current: impl FnOnce() -> bool,
    ) {
        let pages = first..first + frames.len() as u64;
        // As in `finish`: until the pages leave Loading.
        let _gate = M::PROTECTS.then(|| self.gates.shared(self.geometry.region_of(first)));
        // No page is stored to while it is Loading. So what is current now stays current.
        // SAFETY: guaranteed by the caller, and the pages are Loading.
        let is_installed =
            is_current() && unsafe { self.install(first, frames, data, true) }.is_ok();
        if is_installed {
            count(&self.engine.counters.prefetched, frames.len() as u64);
        }
        for (page, &frame) in pages.zip(frames) {
            if is_installed {
                self.hold(page, frame, false);
                self.word(page).finish_load(frame, false, None);
            } else {
                self.pool().give(&[frame]);
                self.word(page).abort_load();
            }
        }
    }
}

/// Orders what the device's read loaded before the loads that tell whether it overlapped a write: the
/// read may be a copy by this thread, in plain loads.
fn after_the_read() {
    fence(Ordering::Acquire);
}

impl<M: PageMemory> Source for Store<M> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn device(&self) -> &dyn Device {
        &**Store::device(self)
    }

    fn buffers(&self) -> &BouncePool {
        &self.engine.visit_buffers
    }

    fn is_in_memory(&self, item: &Item) -> bool {
        item.pages(self.geometry).all(|page| self.seen(page).is_resident())
    }

    fn look_in_memory<T>(&self, item: &Item, look: impl FnOnce(Bytes<'_>) -> T) -> Result<T> {
        let pages = item.pages(self.geometry);
        let at = (item.start - self.geometry.offset_of(pages.start)) as usize;
        let len = (item.end - item.start) as usize;
        self.look_at_pages(pages, |memory| {
            // SAFETY: inside the pages, which are pinned during the call.
            look(unsafe { Bytes::new(memory.wrapping_add(at), len) })
        })
    }

    fn stamp(&self, pages: Range<u64>) -> u64 {
        let (first, last) =
            (self.geometry.region_of(pages.start), self.geometry.region_of(pages.end - 1));
        let ended = |region| u64::from(self.write_backs_ended(region));
        if first == last { ended(first) } else { ended(first) << 32 | ended(last) }
    }

    fn is_outdated(&self, pages: &Range<u64>, stamp: u64) -> bool {
        after_the_read();
        self.stamp(pages.clone()) != stamp
            && pages.clone().any(|page| self.seen(page).state() == State::Absent)
    }

    unsafe fn settle(
        &self,
        page: u64,
        pages: &Range<u64>,
        stamp: u64,
        target: *mut u8,
    ) -> Result<()> {
        after_the_read();
        // The word first: a write-back is counted before its pages become Clean, so a thread that
        // sees them Clean, or evicted, also sees the count.
        let equals_device =
            matches!(self.seen(page).state(), State::Absent | State::Clean | State::Evicting);
        if equals_device && self.stamp(pages.clone()) == stamp {
            return Ok(());
        }
        self.look_at_pages(page..page + 1, |bytes| {
            // SAFETY: the page is pinned; the target is a page of the caller's.
            unsafe { memory::copy_racy(bytes, target, self.geometry.page_bytes) };
        })
    }

    unsafe fn keep(&self, pages: Range<u64>, run: &Range<u64>, stamp: u64, data: *const u8) {
        let pool = self.pool();
        let mut page = pages.start;
        while page < pages.end && pool.free() > pool.low_watermark() {
            let region_end = self.geometry.pages_of_region(self.geometry.region_of(page)).end;
            let (first, mut kept) = (page, 0);
            let mut frames = [FrameId(0); MAX_RUN_PAGES];
            while page < pages.end.min(region_end)
                && kept < MAX_RUN_PAGES
                && let Some(frame) = self.begin_extra(page)
            {
                frames[kept] = frame;
                kept += 1;
                page += 1;
            }
            if kept == 0 {
                page += 1;
                continue;
            }
            let data = data.wrapping_add(self.geometry.offset_of(first - pages.start) as usize);
            let is_current = || {
                after_the_read();
                self.stamp(run.clone()) == stamp
            };
            // SAFETY: `data` is readable for all of `pages`.
            unsafe { self.install_kept(first, &frames[..kept], data, is_current) };
        }
    }

    fn calling<T>(&self, work: impl FnOnce() -> T) -> T {
        duties::loading(&self.height, self.pool(), 0, work)
    }

    fn outside<T>(&self, work: impl FnOnce() -> T) -> T {
        duties::outside(work)
    }

    fn check_process(&self) -> Result<()> {
        if self.engine.mark.is_current() { Ok(()) } else { Err(CacheError::Forked) }
    }

    fn failed(&self, page: u64, source: DeviceError) -> CacheError {
        self.error(page, Refused::Device(source))
    }
}
