//! Pages: which are used, which were freed, and when those may be used again.
//!
//! A page is used if a run of an inode names it, if a process has reserved it for something it is about to make, or if
//! it was freed and waits. Free space is what is left; nothing on media says so, and the map is computed
//! from the inodes whenever the pool is opened by its first process, or a holder of the metadata mutex died.
//!
//! # When a freed page may be used again (rules 1 and 2)
//! When the *durable tail* has passed the record that freed it. Then that record is durable and at its place, so no
//! crash brings the old name back (rule 2); and no record before it, with content for this page, will ever
//! be replayed over a new owner (rule 1), because what was logged for the page was logged before it was freed.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

use zerocopy::{FromBytes, IntoBytes};

use crate::core::{Core, Locked};
use crate::error::{PoolError, Result};
use crate::format::inode::{HEAD_SLOT, SlotBytes};
use crate::format::run::{MAX_RUN_PAGES, RawRun, Run};
use crate::format::slot::{is_free_slot, named_runs};
use crate::image::load_slot;
use crate::mutant::{self, Mutant};
use crate::point;
use crate::segment::{FREED, ProcessSlot, Segment};

fn to_word(run: Run) -> u64 {
    let raw = RawRun::pack(run).unwrap_or(RawRun::EMPTY);
    u64::from_le_bytes(raw.as_bytes().try_into().expect("eight bytes"))
}

fn from_word(word: u64) -> Run {
    RawRun::read_from_bytes(&word.to_le_bytes()).expect("eight bytes").unpack()
}

/// Marks pages in a map, a word at a time.
fn mark(map: &[AtomicU64], run: Run, is_used: bool) {
    let (mut page, end) = (run.start_page, run.end_page().min(map.len() as u64 * 64));
    while page < end {
        let bit = page % 64;
        let count = (64 - bit).min(end - page);
        let mask = if count == 64 { u64::MAX } else { ((1 << count) - 1) << bit };
        let word = &map[(page / 64) as usize];
        let bits = word.load(Relaxed);
        word.store(if is_used { bits | mask } else { bits & !mask }, Relaxed);
        page += count;
    }
}

/// The first page from `page` on, before `end`, that is used (or free); `end` if there is none.
fn next_page(map: &[AtomicU64], mut page: u64, end: u64, is_used: bool) -> u64 {
    while page < end {
        let bits = map[(page / 64) as usize].load(Relaxed);
        let wanted = (if is_used { bits } else { !bits }) >> (page % 64);
        if wanted != 0 {
            return (page + u64::from(wanted.trailing_zeros())).min(end);
        }
        page = (page / 64 + 1) * 64;
    }
    end
}

/// Free ranges of data pages, in order.
fn free_runs(core: &Core) -> impl Iterator<Item = Run> + '_ {
    let map = core.segment.used_pages();
    let end = core.layout.page_count;
    let mut page = core.layout.data_start_page;
    std::iter::from_fn(move || {
        let start_page = next_page(map, page, end, false);
        if start_page == end {
            return None;
        }
        page = next_page(map, start_page, end, true);
        Some(Run { start_page, pages: page - start_page })
    })
}

/// Computes the map of used pages from the inodes, the reservations and the freed runs that wait.
pub(crate) fn rebuild(locked: &Locked<'_>) -> Result<()> {
    let core = locked.core();
    let map = core.segment.used_pages();
    for word in map {
        word.store(0, Relaxed);
    }
    mark(map, Run { start_page: 0, pages: core.layout.data_start_page }, true);
    let mut runs = Vec::new();
    for slot in 0..core.segment.slots() {
        let bytes = load_slot(&core.segment, slot);
        note_slot(&core.segment, slot, &bytes);
        if slot != HEAD_SLOT {
            named_runs(&bytes, &mut runs);
            runs.drain(..).for_each(|run| mark(map, run, true));
        }
    }
    let control = core.control();
    for index in control.freed_first.load(Relaxed)..control.freed_next.load(Relaxed) {
        mark(map, from_word(control.freed[index as usize % FREED].run.load(Relaxed)), true);
    }
    for (index, process) in control.processes.iter().enumerate() {
        match core.membership.is_alive(index) {
            true => reservations(process).for_each(|run| mark(map, run, true)),
            false => process.reservations.iter().for_each(|word| word.store(0, Relaxed)),
        }
    }
    Ok(())
}

/// Gives back what processes had reserved that have died since. Whoever finds no room makes a checkpoint, which comes
/// here.
pub(crate) fn take_from_the_dead(locked: &Locked<'_>) -> Result<()> {
    let core = locked.core();
    // Looking for reservations is cheap, looking whether their owner lives is a system call.
    let is_left = |(index, process): (usize, &ProcessSlot)| {
        reservations(process).next().is_some() && !core.membership.is_alive(index)
    };
    match core.control().processes.iter().enumerate().any(is_left) {
        true => rebuild(locked),
        false => Ok(()),
    }
}

/// Gives up what the last owner of this process's slot had under way when it died: with a new owner, the slot
/// counts as alive, so its appends would be waited for and its pages kept for ever. The pages may belong to an inode by
/// now, so the map is computed anew.
pub(crate) fn inherit_slot(locked: &Locked<'_>) -> Result<()> {
    locked.core().abandon_appends_of(locked, locked.core().membership.index());
    let process = &locked.control().processes[locked.core().membership.index()];
    if reservations(process).next().is_none() {
        return Ok(());
    }
    process.reservations.iter().for_each(|word| word.store(0, Relaxed));
    rebuild(locked)
}

fn reservations(process: &ProcessSlot) -> impl Iterator<Item = Run> + '_ {
    process.reservations.iter().map(|word| from_word(word.load(Relaxed))).filter(|r| !r.is_empty())
}

/// The pages of `runs` that are not in `others`, in order.
fn without(mut runs: Vec<Run>, mut others: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable();
    others.sort_unstable();
    let mut left = Vec::new();
    let mut others = others.into_iter().peekable();
    for run in runs {
        let mut page = run.start_page;
        while page < run.end_page() {
            // What ends before this page takes nothing from it, nor from any page behind.
            while others.next_if(|other| other.end_page() <= page).is_some() {}
            let next = others.peek().map_or(run.end_page(), |other| other.start_page);
            if next > page {
                let end_page = next.min(run.end_page());
                left.push(Run { start_page: page, pages: end_page - page });
            }
            page = others.peek().map_or(run.end_page(), |other| other.end_page());
        }
    }
    left
}

/// Notes what a change of slots frees: pages that one of them named before, and none does after. They stay used until
/// [`release`]. A page may go from one slot to another: then it is not freed.
pub(crate) fn note_freed<'a>(
    locked: &Locked<'_>,
    slots: impl Iterator<Item = (u64, &'a SlotBytes)>,
    end_lsn: u64,
) {
    let core = locked.core();
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for (number, bytes) in slots.filter(|(number, _)| (1..core.segment.slots()).contains(number)) {
        named_runs(&load_slot(&core.segment, number), &mut before);
        named_runs(bytes, &mut after);
    }
    if before == after {
        return;
    }
    let map = core.segment.used_pages();
    for run in without(after.clone(), before.clone()) {
        mark(map, run, true);
    }
    let control = locked.control();
    for run in without(before, after) {
        let next = control.freed_next.load(Relaxed);
        // After a death in between, this is done again: what was noted for this record is behind all others.
        let noted = (control.freed_first.load(Relaxed)..next)
            .rev()
            .map(|index| &control.freed[index as usize % FREED])
            .take_while(|freed| freed.lsn.load(Relaxed) == end_lsn)
            .any(|freed| from_word(freed.run.load(Relaxed)) == run);
        if noted {
            continue;
        }
        if mutant::is(core.mutant, Mutant::EarlyReuse) {
            mark(map, run, false);
            continue;
        }
        // A transaction made sure that there is an entry; recovery frees all at its end.
        if has_room_for_freed(locked, 1) {
            let freed = &control.freed[next as usize % FREED];
            freed.run.store(to_word(run), Relaxed);
            freed.lsn.store(end_lsn, Relaxed);
            point::pass("apply-noting");
            // Release: the entry counts from here on.
            control.freed_next.store(next + 1, Release);
        }
    }
}

/// Frees the runs whose time has come. Called with the metadata mutex.
pub(crate) fn release(locked: &Locked<'_>) {
    let control = locked.control();
    let map = locked.core().segment.used_pages();
    let passed_lsn = match mutant::is(locked.core().mutant, Mutant::NoRevoke) {
        false => control.tail_lsn.load(Relaxed),
        true => control.durable_lsn.load(Relaxed),
    };
    loop {
        let first = control.freed_first.load(Relaxed);
        let freed = &control.freed[first as usize % FREED];
        if first == control.freed_next.load(Relaxed) || freed.lsn.load(Relaxed) > passed_lsn {
            return;
        }
        mark(map, from_word(freed.run.load(Relaxed)), false);
        point::pass("release-run");
        // Release: who dies before this frees the run twice, before anybody can have taken it.
        control.freed_first.store(first + 1, Release);
        point::pass("release-count");
    }
}

/// Whether `count` more runs can be noted as freed.
pub(crate) fn has_room_for_freed(locked: &Locked<'_>, count: usize) -> bool {
    let control = locked.control();
    let noted = control.freed_next.load(Relaxed) - control.freed_first.load(Relaxed);
    noted as usize + count <= FREED
}

/// Notes whether there is something in a slot.
pub(crate) fn note_slot(segment: &Segment, number: u64, bytes: &SlotBytes) {
    let word = &segment.occupied_slots()[(number / 64) as usize];
    let bit = 1 << (number % 64);
    let bits = word.load(Relaxed);
    let is_free = is_free_slot(bytes);
    word.store(if is_free { bits & !bit } else { bits | bit }, Relaxed);
    let hint = &segment.control().free_slot_hint;
    if is_free && number < hint.load(Relaxed) {
        hint.store(number, Relaxed);
    }
}

/// A slot with nothing in it, from `from` on. Called with the metadata mutex.
pub(crate) fn free_slot(locked: &Locked<'_>, from: u64) -> Option<u64> {
    let segment = &locked.core().segment;
    let free = next_page(segment.occupied_slots(), from, segment.slots(), false);
    (free < segment.slots()).then_some(free)
}

/// Pages taken for something that is about to be made. Given back when dropped, or when its process dies.
#[derive(Debug)]
pub struct Reservation<'a> {
    core: &'a Core,
    index: usize,
    runs: Vec<Run>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Core").field("uuid", &self.uuid).finish_non_exhaustive()
    }
}

impl Reservation<'_> {
    /// The pages: adjacent runs, none longer than a run can be.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The same as one run, however long.
    pub fn whole(&self) -> Run {
        let pages = self.runs.iter().map(|run| run.pages).sum();
        Run { start_page: self.runs.first().map_or(0, |run| run.start_page), pages }
    }

    /// Forgets the reservation because an inode names the pages now. With the metadata mutex.
    pub(crate) fn keep(mut self, _locked: &Locked<'_>) {
        self.clear_words();
        point::pass("keep-cleared");
        self.runs.clear();
    }

    fn clear_words(&self) {
        let process = &self.core.control().processes[self.core.membership.index()];
        for word in &process.reservations[self.index..self.index + self.runs.len()] {
            word.store(0, Relaxed);
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.runs.is_empty() {
            return;
        }
        if let Ok(_locked) = self.core.lock() {
            self.clear_words();
            point::pass("pages-cleared");
            let map = self.core.segment.used_pages();
            self.runs.iter().for_each(|run| mark(map, *run, false));
        }
    }
}

impl Core {
    /// Takes `pages` contiguous pages whose first is a multiple of `align_pages`; the first place that fits.
    pub fn reserve_pages(&self, pages: u64, align_pages: u64) -> Result<Reservation<'_>> {
        let locked = self.lock()?;
        release(&locked);
        let fits = |free: Run| {
            let start_page = free.start_page.checked_next_multiple_of(align_pages.max(1))?;
            (start_page.checked_add(pages)? <= free.end_page()).then_some(start_page)
        };
        let start_page = free_runs(self).find_map(fits).ok_or_else(|| PoolError::Full {
            wanted_pages: pages,
            largest_free_pages: free_runs(self).map(|run| run.pages).max().unwrap_or(0),
        })?;
        self.reserve_free(&locked, Run { start_page, pages })
    }

    /// Takes exactly these pages; `None` if not all of them are free.
    pub fn reserve_exactly(&self, run: Run) -> Result<Option<Reservation<'_>>> {
        let locked = self.lock()?;
        release(&locked);
        let fits =
            |free: Run| free.start_page <= run.start_page && run.end_page() <= free.end_page();
        match free_runs(self).any(fits) {
            true => self.reserve_free(&locked, run).map(Some),
            false => Ok(None),
        }
    }

    /// Takes pages that are free.
    fn reserve_free(&self, _locked: &Locked<'_>, whole: Run) -> Result<Reservation<'_>> {
        let Run { start_page, pages } = whole;
        if pages == 0 {
            return Err(PoolError::Parameter {
                what: "the number of pages",
                value: "0".to_owned(),
                reason: "nothing would be reserved",
            });
        }
        let runs: Vec<Run> = (0..pages.div_ceil(MAX_RUN_PAGES))
            .map(|index| Run {
                start_page: start_page + index * MAX_RUN_PAGES,
                pages: (pages - index * MAX_RUN_PAGES).min(MAX_RUN_PAGES),
            })
            .collect();
        let words = &self.control().processes[self.membership.index()].reservations;
        let index = (0..words.len().saturating_sub(runs.len() - 1))
            .find(|&i| words[i..i + runs.len()].iter().all(|word| word.load(Relaxed) == 0))
            .ok_or(PoolError::Parameter {
                what: "the number of pages",
                value: pages.to_string(),
                reason: "too many allocations are under way in this process, or it is too large",
            })?;
        // The words first: who repairs after a death here rebuilds the map from them.
        for (word, run) in words[index..].iter().zip(&runs) {
            word.store(to_word(*run), Relaxed);
        }
        point::pass("pages-noted");
        mark(self.segment.used_pages(), whole, true);
        point::pass("pages-marked");
        Ok(Reservation { core: self, index, runs })
    }

    /// Pages that are free now, and the longest range of them.
    pub fn free_pages(&self) -> (u64, u64) {
        free_runs(self).fold((0, 0), |(sum, max), run| (sum + run.pages, max.max(run.pages)))
    }
}
