//! Reservations: pages taken for something that is about to be created.
//!
//! A page belongs to a reservation from the moment it is found free until an inode names it, the
//! reservation is dropped, or its process dies. In between it can be written to: no page is handed
//! out before the pool's head, durably, records that it is no longer fresh, so its position does
//! not mark it as zero. The head is raised in large steps, since that is a durable transaction.

use std::sync::atomic::Ordering::Relaxed;

use crate::error::{PoolError, Result};
use crate::format::inode::HEAD_SLOT;
use crate::format::run::{MAX_RUN_PAGES, Run};
use crate::format::slot::named_runs;
use crate::format::slot_bytes::SlotBytes;
use crate::log::locks::Locked;
use crate::metadata::alloc::{self, HUGE_PAGES, PageMaps, Wanted, to_word};
use crate::metadata::freed;
use crate::metadata::space::Space;
use crate::point;

/// Pages taken for something that is about to be created. Freed when dropped, or when the process
/// dies.
#[derive(Debug)]
pub struct Reservation<'a> {
    space: &'a Space,
    index: usize,
    runs: Vec<Run>,
    /// The part of them that was not known to be zero.
    pub(crate) unzeroed: Vec<Run>,
    /// Whether they were taken only to be zeroed.
    is_for_zeroing: bool,
    /// Whether they are zero when they are freed.
    pub(crate) is_zeroed: bool,
}

impl Reservation<'_> {
    /// The pages: adjacent runs, none longer than a run can be.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The same pages as one run of any length.
    pub fn whole(&self) -> Run {
        let pages = self.runs.iter().map(|run| run.pages).sum();
        Run { start_page: self.runs.first().map_or(0, |run| run.start_page), pages }
    }

    fn clear_words(&self) {
        let handle = &self.space.handle;
        let process = handle.segment.process(handle.members.locks.index());
        for word in &process.reservations[self.index..self.index + self.runs.len()] {
            word.store(0, Relaxed);
        }
        if self.is_for_zeroing {
            process.zeroing_pages.store(0, Relaxed);
        }
    }
}

/// Ends reservations because `slots` now name their pages; pages that none of them names are free
/// again.
pub(crate) fn end<'a>(
    locked: &Locked<'_>,
    reservations: Vec<Reservation<'_>>,
    slots: impl Iterator<Item = (u64, &'a SlotBytes)>,
) {
    if reservations.is_empty() {
        return;
    }
    let mut named = Vec::new();
    slots
        .filter(|(number, _)| *number != HEAD_SLOT)
        .for_each(|(_, slot)| named_runs(slot, &mut named));
    named.sort_unstable();
    for mut reservation in reservations {
        reservation.clear_words();
        point::pass("keep-cleared");
        let reserved = reservation.runs.drain(..).map(|run| (run, ())).collect();
        for (run, ()) in freed::without(reserved, named.iter().copied()) {
            alloc::mark_free(locked, run);
        }
    }
    locked.control().given_back.ring();
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.runs.is_empty() {
            return;
        }
        if let Ok(locked) = self.space.log.lock() {
            self.clear_words();
            point::pass("pages-cleared");
            if self.is_zeroed {
                self.runs.iter().for_each(|run| alloc::mark_zeroed(&locked, *run));
                point::pass("zero-noted");
            }
            self.runs.iter().for_each(|run| alloc::mark_free(&locked, *run));
            locked.control().given_back.ring();
        }
    }
}

fn no_pages() -> PoolError {
    PoolError::Parameter {
        what: "the number of pages",
        value: "0".to_owned(),
        reason: "nothing would be reserved",
    }
}

/// How long a run must be to be taken for `pages` pages although there may be a longer one of
/// another kind: with this length, a file consists of few pieces.
fn long_enough(pages: u64) -> u64 {
    const FEW: u64 = 32;
    pages.min(HUGE_PAGES).max(pages / FEW)
}

impl Space {
    /// Finds pages with `find` and reserves them.
    fn reserve_with(
        &self,
        wanted_pages: u64,
        is_for_zeroing: bool,
        find: impl Fn(&PageMaps<'_>) -> Option<Run>,
    ) -> Result<Option<Reservation<'_>>> {
        if wanted_pages == 0 {
            return Err(no_pages());
        }
        let locked = self.log.lock()?;
        freed::release(&locked, &self.pins);
        let reserve = |maps: &PageMaps<'_>| {
            let found = find(maps);
            found.map(|run| self.reserve_free(&locked, run, is_for_zeroing)).transpose()
        };
        match reserve(&PageMaps::of(&self.handle)) {
            // Behind what the maps have memory for. Before that there may be pages, too.
            Err(refused @ PoolError::SharedMemory(_)) => {
                reserve(&PageMaps::of(&self.handle).with_memory())?.map(Some).ok_or(refused)
            }
            reserved => reserved,
        }
    }

    fn full(&self, wanted_pages: u64) -> PoolError {
        PoolError::Full { wanted_pages, largest_free_pages: self.largest_free_pages() }
    }

    /// Reserves `pages` contiguous pages whose first is a multiple of `align_pages`, at the first
    /// fit; known zeros if they are preferred and there are any.
    pub fn reserve_pages(
        &self,
        pages: u64,
        align_pages: u64,
        prefers_zeros: bool,
    ) -> Result<Reservation<'_>> {
        let find = |maps: &PageMaps<'_>| {
            let zeroed = if prefers_zeros {
                maps.first_fit(Wanted::Zeroed, pages, align_pages)
            } else {
                None
            };
            zeroed.or_else(|| maps.first_fit(Wanted::Any, pages, align_pages))
        };
        self.reserve_with(pages, false, find)?.ok_or_else(|| self.full(pages))
    }

    /// Reserves exactly these pages; `None` if not all of them are free.
    pub fn reserve_exactly(&self, run: Run) -> Result<Option<Reservation<'_>>> {
        self.reserve_with(run.pages, false, |maps| {
            (maps.starting_at(Wanted::Any, run.start_page, run.pages)).filter(|found| *found == run)
        })
    }

    /// Reserves up to `pages` pages: from `near_page` on if it is free, else in a run of that
    /// length or nearly so.
    pub fn reserve_some(
        &self,
        pages: u64,
        near_page: Option<u64>,
        must_be_zero: bool,
    ) -> Result<Reservation<'_>> {
        let pages = pages.min(MAX_RUN_PAGES);
        // Leave zeroed pages to allocations that need zeros.
        let (near, preferred) = if must_be_zero {
            (Wanted::Zeroed, Wanted::Zeroed)
        } else {
            (Wanted::Any, Wanted::Unzeroed)
        };
        let align_pages = if pages < HUGE_PAGES { 1 } else { HUGE_PAGES };
        let find = |maps: &PageMaps<'_>| {
            (near_page.and_then(|page| maps.starting_at(near, page, pages)))
                .or_else(|| maps.next_fit(preferred, pages, long_enough(pages)))
                .or_else(|| maps.first_fit(Wanted::Any, pages, align_pages))
                .or_else(|| maps.next_fit(Wanted::Any, pages, 1))
        };
        self.reserve_with(pages, false, find)?.ok_or_else(|| self.full(pages))
    }

    /// Reserves up to `pages` pages that are known to be zero, in one run; `None` if there is no
    /// run that is long enough.
    pub fn reserve_ready(&self, pages: u64) -> Result<Option<Reservation<'_>>> {
        let pages = pages.min(MAX_RUN_PAGES);
        let ready = self.reserve_with(pages, false, |maps| {
            maps.next_fit(Wanted::Zeroed, pages, long_enough(pages))
        });
        match ready {
            // The caller can do without.
            Err(PoolError::SharedMemory(_)) => Ok(None),
            ready => ready,
        }
    }

    /// Reserves pages to be zeroed, at most `most_pages`.
    pub fn reserve_to_zero(&self, most_pages: u64) -> Result<Option<Reservation<'_>>> {
        let next_page = &self.control().next_page_to_zero;
        self.reserve_with(most_pages, true, |maps| {
            let from = next_page.load(Relaxed);
            let mut runs = (maps.runs(Wanted::Unzeroed, from, u64::MAX)).chain(maps.runs(
                Wanted::Unzeroed,
                0,
                from,
            ));
            let found = runs.next()?;
            let run = Run { pages: found.pages.min(most_pages), ..found };
            next_page.store(run.end_page(), Relaxed);
            Some(run)
        })
    }

    /// Reserves pages that are free.
    fn reserve_free(
        &self,
        locked: &Locked<'_>,
        whole: Run,
        is_for_zeroing: bool,
    ) -> Result<Reservation<'_>> {
        let Run { start_page, pages } = whole;
        let runs: Vec<Run> = (0..pages.div_ceil(MAX_RUN_PAGES))
            .map(|index| Run {
                start_page: start_page + index * MAX_RUN_PAGES,
                pages: (pages - index * MAX_RUN_PAGES).min(MAX_RUN_PAGES),
            })
            .collect();
        let process = self.handle.segment.process(self.handle.members.locks.index());
        let words = &process.reservations;
        let index = (0..words.len().saturating_sub(runs.len() - 1))
            .find(|&i| words[i..i + runs.len()].iter().all(|word| word.load(Relaxed) == 0))
            .ok_or(PoolError::TooManyReservations { limit: words.len() })?;
        let unzeroed = PageMaps::of(&self.handle).unzeroed(whole);
        self.handle.segment.allocate_maps(whole.end_page())?;
        // The words first, and before them how many there are: the repair after a death here rebuilds
        // the map from them.
        process.used_reservations.fetch_max((index + runs.len()) as u64, Relaxed);
        for (word, run) in words[index..].iter().zip(&runs) {
            word.store(to_word(*run), Relaxed);
        }
        point::pass("pages-noted");
        alloc::mark_used(locked, whole)?;
        point::pass("pages-marked");
        if is_for_zeroing {
            process.zeroing_pages.store(pages, Relaxed);
        }
        Ok(Reservation { space: self, index, runs, unzeroed, is_for_zeroing, is_zeroed: false })
    }
}
