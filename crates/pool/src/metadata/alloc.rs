//! Page allocation: which pages are used and which are free, and where there is room.
//!
//! A page is used if a run of an inode names it, if a process has reserved it for something it is
//! about to create ([`reservation`](crate::metadata::reservation)), if it was freed and is waiting
//! ([`freed`](crate::metadata::freed)), or if it belongs to the [saved state](crate::metadata::saved). All other pages are
//! free. A clean close saves the map; otherwise it is computed from the inodes when the first process
//! opens the pool, and after a holder of the metadata mutex died.
//!
//! # Zeros
//! A free page is either known to be all zero or in an unknown state. Known zeros are the *fresh*
//! pages, which lie beyond all pages that were ever used (the pool's head records where they
//! start), and the pages that have a bit in a second map because they were zeroed after their last
//! owner ([`zero`](crate::metadata::zero)) or were fresh until the head was raised beyond them. This map is
//! derived, too, and empty after the first process has opened the pool. Taking a page clears its
//! bit.
//!
//! *Zero* means what a load or a read finds now. It makes no claim about the media: the record that
//! first names the page makes it durable first (rule 3), as if the page had just been written.
//!
//! # Finding room
//! | request | search order |
//! |---|---|
//! | contiguous pages, aligned | the first fit. No free run of 2ⁱ pages starts before `first_free_page[i]`, so the search skips what lies before |
//! | some pages for a file | directly behind the file's pages; else the next run that is long enough, from the last hit on; else the first fit; else the longest of many |
//!
//! Files that need zeros search for known zeros first, and other files for unknown pages first,
//! which saves the zeros for the files that need them. Each attempt searches one further gigabyte.

use std::sync::atomic::Ordering::Relaxed;

use zerocopy::{FromBytes, IntoBytes};

use crate::bitmap;
use crate::error::Result;
use crate::format::file::{LINKS_WORD, is_unlinked};
use crate::format::run::{MAX_RUN_PAGES, RawRun, Run};
use crate::format::slot::{is_free_slot, is_object_slot};
use crate::log::locks::Locked;
use crate::metadata::image_slots::load_word;
use crate::shared::handle::Handle;
use crate::shared::segment::{Control, RUN_CLASSES, Segment, SlotSet};
use crate::sync::AtomicU64;

/// Pages of a range that one huge page-table entry can map.
pub(crate) const HUGE_PAGES: u64 = 512;
/// How many pages one search for zeroed or for unzeroed pages covers.
const WINDOW_PAGES: u64 = 1 << 18;
/// How many runs a search compares for the longest one.
const MOST_RUNS: usize = 1024;

pub(crate) fn to_word(run: Run) -> u64 {
    let raw = RawRun::pack(run).unwrap_or(RawRun::EMPTY);
    u64::from_le_bytes(raw.as_bytes().try_into().expect("eight bytes"))
}

pub(crate) fn from_word(word: u64) -> Run {
    RawRun::read_from_bytes(&word.to_le_bytes()).expect("eight bytes").unpack()
}

/// Whether a run is no longer than the format allows.
pub(crate) fn is_one_run(run: Run) -> bool {
    run.pages <= MAX_RUN_PAGES
}

/// The kind of free pages a search is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    Any,
    /// Known to be zero.
    Zeroed,
    /// Not known to be zero.
    Unzeroed,
}

/// The maps that a search for free pages uses. They end where no page was ever used: all pages behind
/// that are free, and fresh unless memory for the maps was refused.
pub(crate) struct PageMaps<'a> {
    control: &'a Control,
    used: &'a [AtomicU64],
    zeroed: &'a [AtomicU64],
    fresh_from_page: u64,
    /// Where to search.
    data: Run,
}

impl<'a> PageMaps<'a> {
    /// The maps as they are now. A consistent view only while the metadata mutex is held.
    pub fn of(handle: &'a Handle) -> PageMaps<'a> {
        let (control, start_page) = (handle.control(), handle.layout.data_start_page);
        PageMaps {
            control,
            used: handle.segment.used_pages(),
            zeroed: handle.segment.zeroed_pages(),
            fresh_from_page: control.fresh_from_page.load(Relaxed),
            data: Run { start_page, pages: handle.layout.page_count - start_page },
        }
    }

    /// The part of them for whose pages the maps have memory.
    pub fn with_memory(self) -> PageMaps<'a> {
        let end_page = self.data.end_page().min(self.used.len() as u64 * 64);
        let pages = end_page.saturating_sub(self.data.start_page);
        PageMaps { data: Run { pages, ..self.data }, ..self }
    }

    /// Pages known to be zero. Pages in the fresh part count even if they are used.
    fn zero_word(&self, index: usize) -> u64 {
        let first_page = index as u64 * 64;
        let fresh = match self.fresh_from_page.checked_sub(first_page) {
            None => u64::MAX,
            Some(before) if before < 64 => u64::MAX << before,
            Some(_) => 0,
        };
        self.zeroed.get(index).map_or(0, |word| word.load(Relaxed)) | fresh
    }

    /// Free pages of the wanted kind.
    fn word(&self, wanted: Wanted, index: usize) -> u64 {
        let free = self.used.get(index).map_or(u64::MAX, |word| !word.load(Relaxed));
        match wanted {
            Wanted::Any => free,
            Wanted::Zeroed => free & self.zero_word(index),
            Wanted::Unzeroed => free & !self.zero_word(index),
        }
    }

    /// Runs of wanted pages that lie in a range, in order.
    pub fn runs(&self, wanted: Wanted, from: u64, end: u64) -> impl Iterator<Item = Run> + '_ {
        let (from, end) = (from.max(self.data.start_page), end.min(self.data.end_page()));
        let mut bit = from;
        std::iter::from_fn(move || {
            let start_page = self.first(wanted, true, bit, end);
            if start_page >= end {
                return None;
            }
            bit = self.first(wanted, false, start_page, end);
            Some(Run { start_page, pages: bit - start_page })
        })
    }

    /// The first page from `page` on, before `end`, that is a wanted one, or is not; `end` if there
    /// is none. Does not look at each page behind the maps.
    fn first(&self, wanted: Wanted, is_wanted: bool, page: u64, end: u64) -> u64 {
        let words = (self.used.len() as u64).max(self.fresh_from_page.div_ceil(64));
        // A damaged head may have any number.
        let known_end = end.min(words.saturating_mul(64));
        let word = |index| {
            let word = self.word(wanted, index);
            if is_wanted { word } else { !word }
        };
        match bitmap::first(word, page, known_end) {
            found if found < known_end => found,
            _ if is_wanted == (wanted != Wanted::Unzeroed) => page.max(known_end),
            _ => end,
        }
    }

    /// All runs of wanted pages.
    pub fn all(&self, wanted: Wanted) -> impl Iterator<Item = Run> + '_ {
        self.runs(wanted, 0, u64::MAX)
    }

    /// The parts of a free run that are not known to be zero.
    pub fn unzeroed(&self, run: Run) -> Vec<Run> {
        bitmap::runs(|index| !self.zero_word(index), run.start_page, run.end_page()).collect()
    }

    /// The first place for `pages` contiguous pages whose first is a multiple of `align_pages`.
    pub fn first_fit(&self, wanted: Wanted, pages: u64, align_pages: u64) -> Option<Run> {
        let class = (pages.max(1).ilog2() as usize).min(RUN_CLASSES - 1);
        let first_free_page = &self.control.first_free_page[class];
        let mut is_first = wanted == Wanted::Any;
        for free in self.runs(wanted, first_free_page.load(Relaxed), u64::MAX) {
            if is_first && free.pages >= 1 << class {
                first_free_page.store(free.start_page, Relaxed);
                is_first = false;
            }
            let start_page = free.start_page.checked_next_multiple_of(align_pages.max(1))?;
            let found = Run { start_page, pages };
            if start_page.checked_add(pages)? <= free.end_page() {
                return Some(found);
            }
        }
        if is_first {
            // One that begins at the end of what was searched may be long enough behind it.
            let end_page = self.data.end_page().saturating_sub((1 << class) - 1);
            first_free_page.store(end_page, Relaxed);
        }
        None
    }

    /// The wanted pages from `page` on, at most `most_pages`; `None` if `page` itself is not one.
    pub fn starting_at(&self, wanted: Wanted, page: u64, most_pages: u64) -> Option<Run> {
        let end = page.checked_add(most_pages)?;
        let run = self.runs(wanted, page, end).next()?;
        (run.start_page == page).then_some(run)
    }

    /// Whether the counters show that there may be such pages.
    fn may_have(&self, wanted: Wanted) -> bool {
        let zeroed_count = self.control.zeroed_count.load(Relaxed);
        let zeroed = zeroed_count + self.data.end_page().saturating_sub(self.fresh_from_page);
        match wanted {
            Wanted::Any => true,
            Wanted::Zeroed => zeroed > 0,
            Wanted::Unzeroed => self.control.free_count.load(Relaxed) > zeroed,
        }
    }

    /// Up to `pages` pages, and at least `least_pages` of them, from the last hit on.
    pub fn next_fit(&self, wanted: Wanted, pages: u64, least_pages: u64) -> Option<Run> {
        if !self.may_have(wanted) {
            return None;
        }
        let next_page = &self.control.next_page[wanted as usize];
        let (start, end) = (self.data.start_page, self.data.end_page());
        let from = next_page.load(Relaxed).clamp(start, end);
        let window = match wanted {
            Wanted::Any => self.data.pages,
            Wanted::Zeroed | Wanted::Unzeroed => WINDOW_PAGES.min(self.data.pages),
        };
        let behind = Run { start_page: from, pages: window.min(end - from) };
        let before = Run { start_page: start, pages: (window - behind.pages).min(from - start) };
        let free = [behind, before];
        let free = free.iter().flat_map(|part| self.runs(wanted, part.start_page, part.end_page()));
        let mut best = Run::EMPTY;
        for (index, run) in free.enumerate() {
            let found = part_of(run, pages);
            if found.pages > best.pages {
                best = found;
            }
            if best.pages == pages || index >= MOST_RUNS {
                break;
            }
        }
        let is_found = best.pages >= least_pages.max(1);
        let looked_to = match before.pages {
            0 => behind.end_page(),
            _ => before.end_page(),
        };
        next_page.store(if is_found { best.end_page() } else { looked_to }, Relaxed);
        is_found.then_some(best)
    }
}

/// The part of a free run that a request for up to `pages` pages takes: aligned for huge page-table
/// entries, if the run is long enough.
fn part_of(free: Run, pages: u64) -> Run {
    let aligned = free.start_page.next_multiple_of(HUGE_PAGES);
    let start_page = if pages >= HUGE_PAGES && aligned + HUGE_PAGES <= free.end_page() {
        aligned
    } else {
        free.start_page
    };
    Run { start_page, pages: pages.min(free.end_page() - start_page) }
}

/// Marks pages as used.
///
/// # Errors
/// [`PoolError::SharedMemory`](crate::PoolError::SharedMemory) if they are the first ones of their
/// part of the map, and there is no memory for it; then nothing has changed.
pub(crate) fn mark_used(locked: &Locked<'_>, run: Run) -> Result<()> {
    let (segment, control) = (&locked.handle().segment, locked.control());
    segment.allocate_maps(run.end_page())?;
    let taken = bitmap::set(segment.used_pages(), run, true);
    control.free_count.store(control.free_count.load(Relaxed).saturating_sub(taken), Relaxed);
    let cleared = bitmap::set(segment.zeroed_pages(), run, false);
    let zeroed = control.zeroed_count.load(Relaxed);
    control.zeroed_count.store(zeroed.saturating_sub(cleared), Relaxed);
    Ok(())
}

/// Marks pages as free.
pub(crate) fn mark_free(locked: &Locked<'_>, run: Run) {
    for (class, first_free_page) in locked.control().first_free_page.iter().enumerate() {
        // If this run now belongs to a free run of 2^class pages, that one starts less than 2^class
        // pages before it: the free run before it was shorter, or is noted.
        let from = run.start_page.saturating_sub((1 << class) - 1);
        if from < first_free_page.load(Relaxed) {
            first_free_page.store(from, Relaxed);
        }
    }
    let freed = bitmap::set(locked.handle().segment.used_pages(), run, false);
    let free_count = &locked.control().free_count;
    free_count.store(free_count.load(Relaxed) + freed, Relaxed);
}

/// How many pages are free, including those that are being zeroed.
pub(crate) fn free_count(segment: &Segment) -> u64 {
    let being_zeroed = segment.processes().map(|(_, one)| one.zeroing_pages.load(Relaxed));
    segment.control().free_count.load(Relaxed) + being_zeroed.sum::<u64>()
}

/// Marks pages as all zero; they are free, or are about to be.
pub(crate) fn mark_zeroed(locked: &Locked<'_>, run: Run) {
    let set = bitmap::set(locked.handle().segment.zeroed_pages(), run, true);
    let control = locked.control();
    control.zeroed_count.store(control.zeroed_count.load(Relaxed) + set, Relaxed);
}

/// Notes that pages before `page` are no longer fresh. Those of them that are free stay known to be
/// zero.
pub(crate) fn raise_fresh(locked: &Locked<'_>, page: u64) {
    let control = locked.control();
    let before = control.fresh_from_page.load(Relaxed);
    if page <= before {
        return;
    }
    // Without memory it is forgotten that they are zero.
    let _ = locked.handle().segment.allocate_maps(page);
    let free: Vec<Run> = PageMaps::of(locked.handle()).runs(Wanted::Any, before, page).collect();
    free.into_iter().for_each(|run| mark_zeroed(locked, run));
    control.fresh_from_page.store(page, Relaxed);
}

/// Forgets which pages are zero: after the records that are being replayed, the pages may have been
/// written to.
pub(crate) fn forget_zeroed(locked: &Locked<'_>) {
    locked.handle().segment.zeroed_pages().iter().for_each(|word| word.store(0, Relaxed));
    locked.control().zeroed_count.store(0, Relaxed);
}

/// Updates the slot sets after a slot of the image has changed.
pub(crate) fn note_slot(segment: &Segment, number: u64) {
    let word = |index| load_word(segment, number, index);
    let is_free = is_free_slot(word(0));
    let sets = [
        (SlotSet::Occupied, !is_free),
        (SlotSet::Objects, !is_free && is_object_slot(word(0))),
        (SlotSet::Orphans, is_unlinked(word(0), word(LINKS_WORD))),
    ];
    for (set, is_in) in sets {
        let word = &segment.slot_set(set)[(number / 64) as usize];
        let (bit, bits) = (1 << (number % 64), word.load(Relaxed));
        let after = if is_in { bits | bit } else { bits & !bit };
        if bits != after {
            word.store(after, Relaxed);
        }
    }
    if is_free {
        bitmap::clear_shared(segment.slot_set(SlotSet::WithRoom), number);
    }
    let hint = &segment.control().free_slot_hint;
    if is_free && number < hint.load(Relaxed) {
        hint.store(number, Relaxed);
    }
}

/// Returns an empty slot, from `from` on. Requires the metadata mutex.
pub(crate) fn free_slot(locked: &Locked<'_>, from: u64) -> Option<u64> {
    let segment = &locked.handle().segment;
    let occupied = segment.slot_set(SlotSet::Occupied);
    let free = bitmap::first(|index| !occupied[index].load(Relaxed), from, segment.slots());
    (free < segment.slots()).then_some(free)
}
