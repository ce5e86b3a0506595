//! Eviction of pages.
//!
//! A page-table change for one page costs a TLB shootdown, so pages are evicted in batches. Clean
//! victims are discarded page by page in one vectored call. Dirty ones are evicted by region: the
//! whole region is cleaned (see `writeback`), and then every page of it that is neither pinned nor
//! recently hit is discarded with one call. If the kernel has no vectored call, clean victims are
//! evicted by region too.
//!
//! A page is evicted only from Clean, through Evicting: its bytes are on the device, a store to it
//! waits, and its frame is given back after its memory is discarded.

use crate::engine::{Cleaning, Evicted};
use crate::frames::BATCH;
use crate::geometry::MAX_REGION_PAGES;
use crate::ids::{FrameId, PageId};
use crate::page_word::State;
use crate::stats::count;
use crate::store::{PageMemory, Store};

impl<M: PageMemory> Store<M> {
    /// Evicts victims that the policy named; see `AttachedStore::evict`.
    pub fn evict_victims(&self, victims: &[(FrameId, PageId)], write_back: Cleaning) -> Evicted {
        let mut evicted = Evicted::default();
        for batch in victims.chunks(BATCH) {
            evicted.add(self.evict_batch(batch, write_back));
        }
        evicted
    }

    /// Evicts one batch; everything it needs is on the stack.
    fn evict_batch(&self, victims: &[(FrameId, PageId)], write_back: Cleaning) -> Evicted {
        let by_page = self.memory.discards_vectored();
        let mut leaving = [(FrameId(0), PageId(0)); BATCH];
        let mut later = [(FrameId(0), PageId(0)); BATCH];
        let (mut leaving_count, mut later_count) = (0, 0);
        let mut evicted = Evicted::default();
        for &(frame, page) in victims {
            // A victim's frame is claimed, so the page still holds it, or is about to: the policy
            // learns of a page before its word says Clean.
            debug_assert!({
                let seen = self.seen(page.0);
                seen.state() == State::Loading || seen.frame() == frame
            });
            if by_page && self.word(page.0).begin_evict().is_ok() {
                leaving[leaving_count] = (frame, page);
                leaving_count += 1;
            } else {
                evicted.dirty += u64::from(self.seen(page.0).state() == State::Dirty);
                later[later_count] = (frame, page);
                later_count += 1;
            }
        }
        evicted.freed += self.discard_pages(&leaving[..leaving_count]);
        let later = &mut later[..later_count];
        let write_back = match write_back {
            Cleaning::IfCopying if !self.writes_are_copies() => Cleaning::No,
            as_asked => as_asked,
        };
        if write_back != Cleaning::No || !by_page {
            self.evict_regions_of(later, victims.len(), write_back, &mut evicted);
        } else {
            self.keep(later, &mut evicted);
        }
        evicted
    }

    /// Evicts by region, starting with the best victim's, until `want` frames are free: a region
    /// yields more frames than its victims.
    fn evict_regions_of(
        &self,
        victims: &mut [(FrameId, PageId)],
        want: usize,
        write_back: Cleaning,
        evicted: &mut Evicted,
    ) {
        let Some(&(_, best)) = victims.first() else { return };
        victims.sort_unstable_by_key(|&(_, page)| page);
        let region_of = |page: PageId| self.geometry.region_of(page.0);
        let first = victims.partition_point(|&(_, page)| region_of(page) < region_of(best));
        victims.rotate_left(first);
        for region in victims.chunk_by(|a, b| region_of(a.1) == region_of(b.1)) {
            if evicted.freed < want {
                evicted.add(self.evict_in_region(region, write_back));
            } else {
                self.keep(region, evicted);
            }
        }
    }

    /// Discards pages that are Evicting and gives their frames back.
    fn discard_pages(&self, leaving: &[(FrameId, PageId)]) -> usize {
        if leaving.is_empty() {
            return 0;
        }
        let mut runs = [const { 0..0 }; BATCH];
        let mut frames = [FrameId(0); BATCH];
        for (run, &(_, page)) in runs.iter_mut().zip(leaving) {
            *run = page.0..page.0 + 1;
        }
        let discarded = self.memory.discard(&runs[..leaving.len()]).is_ok();
        let gone = self.end_evictions(leaving, discarded, &mut frames);
        self.pool().give(&frames[..gone]);
        count(&self.engine.counters.evictions, gone as u64);
        gone
    }

    /// Evicting → Absent for pages whose memory was discarded; puts their frames first in `frames`
    /// and returns their number.
    ///
    /// If the common call failed, it is unknown which pages it discarded: each is retried alone,
    /// and a page that cannot be discarded is Clean again, which loses nothing.
    fn end_evictions(
        &self,
        leaving: &[(FrameId, PageId)],
        discarded: bool,
        frames: &mut [FrameId],
    ) -> usize {
        let mut gone = 0;
        for &(frame, page) in leaving {
            let alone = page.0..page.0 + 1;
            if discarded || self.memory.discard(std::slice::from_ref(&alone)).is_ok() {
                self.word(page.0).finish_evict();
                frames[gone] = frame;
                gone += 1;
            } else {
                self.restore(page, frame);
            }
        }
        gone
    }

    /// Undoes an eviction: the page is Clean again.
    fn restore(&self, page: PageId, frame: FrameId) {
        self.word(page.0).cancel_evict();
        self.pool().returned(&[frame]);
    }

    /// Returns victims that cannot be evicted now to the policy.
    fn keep(&self, victims: &[(FrameId, PageId)], evicted: &mut Evicted) {
        for &(frame, page) in victims {
            let seen = self.seen(page.0);
            if seen.pins() > 0 || seen.state() == State::Exclusive {
                evicted.pinned += 1;
            } else if seen.state() == State::Dirty {
                evicted.unwritable += 1;
            }
            self.pool().returned(&[frame]);
        }
    }

    /// Cleans a region that contains victims and discards its pages that are clean and cold.
    ///
    /// Not inlined: its arrays are too large for the stack of the usual eviction by page on the
    /// fault path.
    #[inline(never)]
    fn evict_in_region(&self, victims: &[(FrameId, PageId)], write_back: Cleaning) -> Evicted {
        let region = self.geometry.region_of(victims[0].1.0);
        let pages = self.geometry.pages_of_region(region);
        let dirty = |&(_, page): &(FrameId, PageId)| self.seen(page.0).state() == State::Dirty;
        if write_back != Cleaning::No && victims.iter().any(dirty) {
            self.clean_region(region, write_back != Cleaning::Yes);
        }
        let mut evicted = Evicted::default();
        let gate = M::PROTECTS.then(|| self.gates.exclusive(region));
        let mut leaving = [(FrameId(0), PageId(0)); MAX_REGION_PAGES];
        let mut leaving_count = 0;
        for page in pages.clone() {
            let named = victims.iter().any(|&(_, victim)| victim.0 == page);
            let seen = self.seen(page);
            if seen.state() != State::Clean || (!named && self.pool().is_hot(seen.frame())) {
                continue;
            }
            if let Ok(seen) = self.word(page).begin_evict() {
                if !named && !self.pool().claim(seen.frame()) {
                    self.word(page).cancel_evict();
                    continue;
                }
                leaving[leaving_count] = (seen.frame(), PageId(page));
                leaving_count += 1;
            }
        }
        let leaving = &leaving[..leaving_count];
        let mut runs = [const { 0..0 }; MAX_REGION_PAGES];
        let run_count = self.runs_around(pages, leaving, &mut runs);
        let discarded = leaving.is_empty() || self.memory.discard(&runs[..run_count]).is_ok();
        let mut frames = [FrameId(0); MAX_REGION_PAGES];
        let gone = self.end_evictions(leaving, discarded, &mut frames);
        drop(gate);
        self.pool().give(&frames[..gone]);
        count(&self.engine.counters.evictions, gone as u64);
        evicted.freed += gone;
        for &(frame, page) in victims {
            if !leaving.iter().any(|&(_, gone)| gone == page) {
                self.keep(&[(frame, page)], &mut evicted);
            }
        }
        evicted
    }

    /// The longest runs of a region in which every page is in `leaving`, or absent and kept so by
    /// the gate. So discarding a run is safe while the gate is held.
    ///
    /// A page that another evictor moved to Evicting ends a run: that evictor may move it back to
    /// Clean without holding the gate.
    fn runs_around(
        &self,
        pages: std::ops::Range<u64>,
        leaving: &[(FrameId, PageId)],
        runs: &mut [std::ops::Range<u64>; MAX_REGION_PAGES],
    ) -> usize {
        let mut leaving = leaving.iter().map(|&(_, page)| page.0).peekable();
        let mut count = 0;
        let mut start = None;
        let mut discards = false;
        for page in pages.start..=pages.end {
            let leaves = leaving.next_if_eq(&page).is_some();
            let stays = page == pages.end
                || !leaves && !matches!(self.seen(page).state(), State::Absent | State::Loading);
            match (stays, start) {
                (false, None) => (start, discards) = (Some(page), leaves),
                (false, Some(_)) => discards |= leaves,
                (true, Some(first)) => {
                    if discards {
                        runs[count] = first..page;
                        count += 1;
                    }
                    start = None;
                }
                (true, None) => {}
            }
        }
        count
    }

    /// Discards those of the given pages that are clean and not pinned.
    pub fn discard_clean(&self, pages: impl Iterator<Item = u64>) {
        let mut leaving = [(FrameId(0), PageId(0)); BATCH];
        let mut count = 0;
        for page in pages {
            let Ok(seen) = self.word(page).begin_evict() else {
                continue;
            };
            if !self.pool().claim(seen.frame()) {
                self.word(page).cancel_evict();
                continue;
            }
            leaving[count] = (seen.frame(), PageId(page));
            count += 1;
            if count == BATCH {
                self.discard_pages(&leaving);
                count = 0;
            }
        }
        self.discard_pages(&leaving[..count]);
    }

    /// Empties a detached store: writes back dirty pages and gives every frame back to the pool.
    /// Pages that cannot be written are lost.
    ///
    /// No thread uses the store any more. An evictor that still holds victims of it will find that
    /// the store was removed from the registry and return them; this waits for that.
    ///
    /// Visits only the regions that pages were loaded into: its cost depends on them, not on the
    /// budget.
    pub fn teardown(&self) {
        // As a flush does: pages may be pinned for writing, by pins that were forgotten.
        let _ = self.write_back_all(0..self.geometry.pages(), true);
        let mut frames = vec![];
        for region in self.loaded_regions() {
            let pages = self.geometry.pages_of_region(region);
            self.pool().looked_at((pages.end - pages.start) as usize);
            frames.extend(pages.filter_map(|page| self.take_frame_of(page)));
        }
        count(&self.engine.counters.dropped, frames.len() as u64);
        self.pool().give(&frames);
    }

    /// Takes the frame of a page out of the policy; `None` if the page has none.
    fn take_frame_of(&self, page: u64) -> Option<FrameId> {
        let word = self.word(page);
        loop {
            let seen = word.load();
            if seen.is_transient() {
                word.wait(seen);
            } else if !seen.is_resident() {
                return None;
            } else if self.pool().claim(seen.frame()) {
                return Some(seen.frame());
            } else {
                // An evictor holds the frame, and will return it when it finds that the store was
                // removed.
                std::thread::yield_now();
            }
        }
    }
}
