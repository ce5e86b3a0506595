//! A thread that keeps the page cache of mapped files within a bound.
//!
//! Without it, the page cache grows until the kernel reclaims, on the fault path and page by page.
//! This thread acts earlier: when more than 99.9 % of the bound is resident, it sweeps through the
//! files until 99.8 % are left. It leaves more room where pages arrive faster than it would notice.
//!
//! # What is dropped
//! The sweep is CLOCK with two hands over regions of 2 MiB, and the page tables are its reference
//! bits. The hands move through the files in address order. The front hand *unmaps* a region: its
//! pages stay in the page cache, and an access maps them again without I/O. The back hand follows an
//! eighth of the resident pages later. A region of which half or more was mapped again in that time
//! is in use, and passed over; any other is *dropped* from the page cache as a whole. So streamed
//! data drops behind, and regions in use stay, although no access is seen: one unmap and one drop
//! for hundreds of pages.
//!
//! Single pages are not told apart. The kernel's fault-around maps 16 pages at once, so that most
//! pages between a few used ones look used; and a drop that finds a mapped page waits until the
//! kernel has emptied the page queues of all CPUs. Where nearly all regions look used, as under
//! random accesses to data little larger than the bound, that tells nothing, and all are dropped in
//! turn.
//!
//! Data a little larger than the bound that is scanned again and again would be dropped before each
//! use. There the sweep keeps a part, and drops the rest behind the reader (`cyclic`).
//!
//! # Short calls
//! A thread whose page arrives while its CPU executes a system call of this thread waits for the
//! end of that call (measured: the whole 6 ms that one `cachestat` of 60,000 pages takes), and often
//! for the end of this thread's time slice. So each call covers a few hundred pages, and this thread
//! naps after each such step, unless the bound is exceeded.
//!
//! # Sleeping
//! How much is resident is estimated (`resident`). The thread checks every half millisecond near
//! the bound, and less often the farther the estimate is from it, because no device fills memory
//! faster than one page per half microsecond. While nothing changes, it checks every 20 ms, or every
//! 100 ms far from the limit. Without files the thread sleeps until one is added.
//!
//! Lock order: the list of files is a leaf; it is copied, so that files are used without it.

mod cyclic;
mod page_tables;
mod resident;
#[cfg(test)]
mod tests;

pub use page_tables::PageTables;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_sys::futex::Mutex;
use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};
use aquifer_sys::residency::FileIdentity;

use self::cyclic::{Cyclic, Swept};
use self::resident::Residency;
use crate::worker::Bell;

/// Pages of a region, the unit that one call unmaps. Not smaller, because page-cache folios of 2
/// MiB exist and are dropped whole or not at all.
pub const REGION_PAGES: u64 = (REGION_BYTES / SMALL_PAGE_BYTES) as u64;
/// Bytes skipped at once if none of their pages is cached.
const SPAN: u64 = 32 * REGION;
const REGION: u64 = REGION_BYTES as u64;
/// Pages that one call drops, about. See "Short calls".
const CHUNK_PAGES: u64 = 192;
const MOST_CHUNK_REGIONS: u64 = 16;
/// The front hand is ahead of the back hand by this part of the file's resident pages, and by a
/// region at least.
const LEAD_PART: u64 = 8;
/// If more than this share of the regions swept lately looked used, none is passed over for it.
const MOST_USED: f64 = 0.75;
/// The weight of one region in that share.
const USED_WEIGHT: f64 = 1.0 / 16.0;
/// A sweep starts this many thousandths of the bound below it, and stops as many below that. Where
/// the files must be measured before each sweep, it stops lower.
const ROOM_PERMILLE: u64 = 1;
const ROOM_PERMILLE_INEXACT: u64 = 12;
/// The files are measured again when this part of the bound was dropped since the last time: what was
/// read may have been other files.
const MOST_UNMEASURED_PART: u64 = 4;
/// The fewest pages of a region to keep.
const MIN_KEPT_PAGES: u64 = REGION / SMALL_PAGE_BYTES as u64 / 2;
/// The room is at least what is brought in during this time, and at most this part of the bound
/// (less than what `cyclic` does not keep).
const ROOM_MS: u64 = 4;
const MOST_ROOM_PART: u64 = 32;

const SHORTEST_NAP: Duration = Duration::from_micros(500);
/// The nap between two steps of a sweep.
const STEP_NAP: Duration = Duration::from_micros(50);
const IDLE_NAP: Duration = Duration::from_millis(20);
const LONGEST_NAP: Duration = Duration::from_millis(100);
/// Longest nap after sweeps that dropped nothing: all pages are pinned, or mapped by other
/// processes.
const STUCK_NAP: Duration = Duration::from_secs(1);
const FASTEST_FILL: Duration = Duration::from_nanos(500);

/// A mapped file whose pages can be dropped because they are copies of stored data.
pub trait Droppable: Send + Sync {
    /// The identity of the file. A file that is added twice is counted once.
    fn identity(&self) -> FileIdentity;
    /// Length of the mapping, from the start of the file.
    fn len_bytes(&self) -> u64;
    /// Where the sweep is.
    fn hands(&self) -> &Hands;
    /// Number of pages in the page cache (length 0: to the end of the file); `None` if unknown.
    fn cached(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64>;
    /// Unmaps the pages of a range; they stay in the page cache.
    fn unmap(&self, pages: &Range<u64>);
    /// Drops the pages of a range from the page cache, except those that are mapped.
    fn drop_unmapped(&self, pages: &Range<u64>);
    /// Number of pages of a region that this process has mapped in; `None` if unknown.
    fn present(&self, _region: &Range<u64>, _tables: &mut PageTables) -> Option<u64> {
        None
    }
    /// Whether a region was asked for since it was unmapped, so that it is to be spared once.
    fn take_asked(&self, _region: &Range<u64>) -> bool {
        false
    }
    /// A number that changes when pages may have been brought in without being mapped.
    fn asked(&self) -> u64 {
        0
    }
    /// [`Droppable::asked`] of all files, of which there may be thousands, at every check.
    fn asked_of(files: &[Arc<Self>]) -> u64
    where
        Self: Sized,
    {
        files.iter().map(|file| file.asked()).fold(0, u64::wrapping_add)
    }
    /// Pages of all files that this process has read past the page cache.
    fn read_past_of(_files: &[Arc<Self>]) -> u64
    where
        Self: Sized,
    {
        0
    }
    /// Number of pages that this process has mapped in; `None` if unknown. Used where
    /// [`Droppable::cached`] returns `None`.
    fn mapped(&self, _tables: &mut PageTables) -> Option<u64> {
        None
    }
    /// Called before a region with `_cached` cached pages is unmapped. `_is_scattered`: of regions
    /// that were dropped, some pages come back at once, and not all. Scans do not do that, but random
    /// accesses to data little larger than the bound do.
    fn observe(
        &self,
        _region: &Range<u64>,
        _cached: u64,
        _is_scattered: bool,
        _tables: &mut PageTables,
    ) {
    }
    /// Whether the file is to be removed: it is not checked again.
    fn is_gone(&self) -> bool {
        false
    }
}

/// Where the sweep of a file is, in bytes.
#[derive(Debug, Default)]
pub struct Hands {
    back: AtomicU64,
    /// How far the front hand is ahead.
    lead: AtomicU64,
    /// Pages of the file when they were last measured.
    cached: AtomicU64,
}

impl Hands {
    /// Continues the sweep at an offset.
    pub fn start_at(&self, offset_bytes: u64) {
        // Relaxed: a sweep in progress may overwrite this; nothing but the order of dropping
        // depends on it.
        self.lead.store(0, Ordering::Relaxed);
        self.back.store(offset_bytes, Ordering::Relaxed);
    }
}

/// The files, and the commands to the thread. See the module documentation.
pub struct DropBehind<F> {
    /// Shared with the thread during a check, which then takes no reference to each file.
    files: Mutex<Arc<Vec<Arc<F>>>>,
    removals: AtomicU64,
    bell: Bell,
}

impl<F> Default for DropBehind<F> {
    fn default() -> Self {
        DropBehind { files: Mutex::default(), removals: AtomicU64::new(0), bell: Bell::new() }
    }
}

impl<F: Droppable> DropBehind<F> {
    /// Creates it without files.
    pub fn new() -> DropBehind<F> {
        DropBehind::default()
    }

    /// Adds a file, whose pages count and are dropped from now on.
    pub fn add(&self, file: Arc<F>) {
        let is_first = {
            let mut files = self.files.lock();
            Arc::make_mut(&mut files).push(file);
            files.len() == 1
        };
        // Later files need no wake-up: the thread checks again before much can be brought in.
        if is_first {
            self.wake();
        }
    }

    /// Removes a file. Only a sweep in progress may still drop its pages.
    pub fn remove(&self, file: &Arc<F>) {
        let removed = {
            let mut files = self.files.lock();
            let at = files.iter().position(|other| Arc::ptr_eq(other, file));
            // Relaxed, here and below: changed and loaded with the lock held.
            self.removals.fetch_add(1, Ordering::Relaxed);
            at.map(|at| Arc::make_mut(&mut files).swap_remove(at))
        };
        drop(removed);
        self.wake();
    }

    /// Makes the thread check again now.
    pub fn wake(&self) {
        self.bell.ring();
    }

    /// Ends [`DropBehind::run`].
    pub fn stop(&self) {
        self.bell.stop();
    }

    /// The main function of the thread. At every check it reads `bound_bytes` and passes the
    /// resident pages, and the pages dropped since the last check, to `publish`.
    pub fn run(&self, bound_bytes: impl Fn() -> u64, publish: impl Fn(u64, u64)) {
        let mut state = State::new();
        let mut removals = 0;
        loop {
            let ticket = self.bell.ticket();
            if ticket.is_stopped() {
                return;
            }
            let (files, removals_now) = {
                let files = self.files.lock();
                (files.clone(), self.removals.load(Ordering::Relaxed))
            };
            if std::mem::replace(&mut removals, removals_now) != removals_now {
                state.resident.doubt();
            }
            let nap = if files.is_empty() {
                state.resident.forget();
                state.cyclic.forget();
                publish(0, 0);
                None
            } else {
                Some(self.check(&mut state, &files, bound_bytes(), &publish))
            };
            self.forget_gone(&mut state, &files);
            // Before the nap: this may drop the last reference to a file, which unmaps it.
            drop(files);
            self.bell.sleep(ticket, nap);
        }
    }

    fn forget_gone(&self, state: &mut State, files: &[Arc<F>]) {
        let gone: HashSet<*const F> =
            files.iter().filter(|file| file.is_gone()).map(Arc::as_ptr).collect();
        if gone.is_empty() {
            return;
        }
        let is_gone = |file: &Arc<F>| gone.contains(&Arc::as_ptr(file));
        state.turn -=
            files[..state.turn.min(files.len())].iter().filter(|file| is_gone(file)).count();
        let mut files = self.files.lock();
        self.removals.fetch_add(1, Ordering::Relaxed);
        Arc::make_mut(&mut files).retain(|file| !is_gone(file));
    }

    /// Checks once, drops the excess, and returns when to check again.
    fn check(
        &self,
        state: &mut State,
        files: &[Arc<F>],
        bound_bytes: u64,
        publish: &impl Fn(u64, u64),
    ) -> Duration {
        let share = bound_bytes / SMALL_PAGE_BYTES as u64;
        let mut resident = state.resident.estimate(files, &mut state.tables);
        let mut freed = 0;
        state.note_rate(resident);
        let room = (state.pages_per_ms * ROOM_MS)
            .min(share / MOST_ROOM_PART)
            .max(share * ROOM_PERMILLE / 1000);
        let depth = if state.resident.is_exact() { ROOM_PERMILLE } else { ROOM_PERMILLE_INEXACT };
        let (start, stop) = (share - room, share - room - share * depth / 1000);
        // What may be dropped before the next measurement.
        let trusted =
            (share / MOST_UNMEASURED_PART).saturating_sub(state.resident.dropped_unmeasured());
        if resident > start && !(state.resident.is_exact() && trusted > 0) {
            // Foreign mappings and reads may have raised the estimate.
            resident = state.resident.measure(files, &mut state.tables);
        }
        state.bound = share;
        state.clock = state.clock.max(state.freed + state.resident.lost() + resident);
        check_dropped(state, files);
        check_probes(state, files);
        let in_steps = state.resident.is_exact() && resident <= share;
        state.is_sweeping = resident > start || (state.is_sweeping && in_steps && resident > stop);
        if state.is_sweeping {
            let excess = resident - stop;
            let wanted = match state.resident.is_exact() {
                true if in_steps => excess.min(CHUNK_PAGES),
                // Measured now, or not yet.
                true => excess.min(trusted.max(CHUNK_PAGES)),
                false => excess,
            };
            freed = self.sweep(state, files, wanted);
            if freed < wanted && state.cyclic.is_keeping() {
                resident = state.resident.measure(files, &mut state.tables);
                if resident > start {
                    // What is not kept is not enough: the bound was lowered, or it is pinned.
                    state.cyclic.give_up();
                    freed += self.sweep(state, files, resident - stop);
                }
            }
            if let Some(period) = state.period.take() {
                keep_part(state, files, period, stop);
            }
            resident = state.resident.estimate(files, &mut state.tables);
        }
        publish(resident, freed);
        let is_idle = state.resident.is_idle();
        if resident > start {
            // More was brought in during the sweep: check again at once, unless nothing can be
            // dropped.
            state.stuck = if freed == 0 { state.stuck + 1 } else { 0 };
            return match state.stuck {
                0 if in_steps => STEP_NAP,
                0 => Duration::ZERO,
                times => (LONGEST_NAP * times).min(STUCK_NAP),
            };
        }
        state.stuck = 0;
        if in_steps && freed > 0 && resident > stop {
            return STEP_NAP;
        }
        let room = u32::try_from(start - resident).unwrap_or(u32::MAX);
        let away = FASTEST_FILL.saturating_mul(room).clamp(SHORTEST_NAP, LONGEST_NAP);
        // Spend at most half of the time on measuring what foreign mappings add to the estimate.
        let away = if state.resident.is_exact() { away } else { away.max(state.resident.cost()) };
        if is_idle { away.max(IDLE_NAP) } else { away }
    }

    /// Continues through the files where the last sweep ended, for at most one round. Returns how
    /// many pages left the page cache.
    fn sweep(&self, state: &mut State, files: &[Arc<F>], wanted: u64) -> u64 {
        let mut freed = 0;
        state.turn %= files.len();
        for _ in 0..=files.len() {
            let file = &files[state.turn];
            freed += self.sweep_file(state, file, wanted - freed);
            if freed >= wanted || state.period.is_some() || self.bell.is_stopped() {
                return freed;
            }
            state.turn = (state.turn + 1) % files.len();
        }
        freed
    }

    /// Sweeps a file from its back hand to its end, where the hand wraps around.
    fn sweep_file(&self, state: &mut State, file: &F, wanted: u64) -> u64 {
        let end = file.len_bytes().next_multiple_of(REGION);
        let mut hands = Position::of(file.hands(), end);
        let identity = file.identity();
        let lead_regions = match state.cyclic.is_keeping() {
            // Not beyond the reader: pages that it maps then would look as if used again.
            true => 0,
            false => {
                let pages = file.hands().cached.load(Ordering::Relaxed) / LEAD_PART;
                (pages / state.region_pages.max(1)).max(1)
            }
        };
        let mut freed = 0;
        while hands.at < end && freed < wanted && state.period.is_none() && !self.bell.is_stopped()
        {
            let at = hands.at;
            if state.cyclic.keeps((identity, at / REGION)) {
                hands.pass(at + REGION);
                continue;
            }
            let span_end = ((at / SPAN + 1) * SPAN).min(end);
            if at.is_multiple_of(SPAN) && file.cached(at, SPAN) == Some(0) {
                hands.pass(span_end);
                continue;
            }
            let regions = match state.cyclic.is_keeping() {
                true => 1,
                false => (CHUNK_PAGES / state.region_pages.max(1)).clamp(1, MOST_CHUNK_REGIONS),
            };
            let chunk = at..(at + regions * REGION).min(span_end);
            let lead = (chunk.end - at + lead_regions * REGION).min(end);
            while hands.lead < lead {
                let front = (at + hands.lead) % end;
                let step = (regions * REGION).min(lead - hands.lead);
                let ahead = front..(front + step).min(end);
                unmap_chunk(state, file, &ahead);
                hands.lead += ahead.end - ahead.start;
            }
            let spared = chunk.clone().step_by(REGION_BYTES).find(|&start| {
                let region = start..start + REGION;
                // Both, since each clears what it tells.
                let is_asked = file.take_asked(&region);
                is_used(state, file, &region) || is_asked
            });
            let chunk = at..spared.unwrap_or(chunk.end);
            if !chunk.is_empty() {
                let gone = drop_chunk(state, file, &chunk);
                freed += gone;
                watch_cycles(state, file, &chunk, gone);
            }
            hands.pass(spared.map_or(chunk.end, |spared| spared + REGION));
        }
        hands.store(file.hands(), end);
        freed
    }
}

/// Tells the detector of repeated scans what was swept: `gone` pages of whole regions.
fn watch_cycles<F: Droppable>(state: &mut State, file: &F, chunk: &Range<u64>, gone: u64) {
    let identity = file.identity();
    let regions = (chunk.end - chunk.start) / REGION;
    for at in chunk.clone().step_by(REGION_BYTES).filter(|_| gone > 0) {
        let capacity = capacity(file, at);
        let swept = Swept { key: (identity, at / REGION), cached: gone / regions, capacity };
        let period = state.cyclic.dropped(swept, state.clock, state.bound);
        state.period = state.period.or(period);
    }
}

/// Tells the detector whether regions that were dropped a little while ago are still empty.
fn check_dropped<F: Droppable>(state: &mut State, files: &[Arc<F>]) {
    while let Some((owner, region)) = state.cyclic.due(state.clock, state.bound) {
        if let Some(file) = files.iter().find(|file| file.identity() == owner) {
            let cached = file.cached(region * REGION, REGION).unwrap_or(0);
            state.cyclic.refilled(cached, capacity(&**file, region * REGION));
        }
    }
}

/// The pages of the region at an offset.
fn capacity<F: Droppable>(file: &F, at: u64) -> u64 {
    let region = whole_pages(file, &(at..at + REGION));
    (region.end - region.start) / SMALL_PAGE_BYTES as u64
}

/// Keeps a part of what is resident, the oldest first: the reader is about to come back to it.
fn keep_part<F: Droppable>(state: &mut State, files: &[Arc<F>], period: u64, stop: u64) {
    let room = Cyclic::room(state.bound, stop);
    let mut kept = 0;
    for turn in 0..files.len() {
        let file = &*files[(state.turn + turn) % files.len()];
        let (identity, end) = (file.identity(), file.len_bytes().next_multiple_of(REGION));
        let back = Position::of(file.hands(), end).at;
        let mut empty = 0..0;
        for at in (back..end).step_by(REGION_BYTES).chain((0..back).step_by(REGION_BYTES)) {
            if kept + MIN_KEPT_PAGES > room {
                break;
            }
            if empty.contains(&at) {
                continue;
            }
            if at.is_multiple_of(SPAN) && file.cached(at, SPAN) == Some(0) {
                empty = at..at + SPAN;
                continue;
            }
            let cached = file.cached(at, REGION).unwrap_or(0);
            if cached * 2 < capacity(file, at) || kept + cached > room {
                continue;
            }
            kept += cached;
            if state.cyclic.keep((identity, at / REGION)) {
                file.unmap(&whole_pages(file, &(at..at + REGION)));
            }
        }
        file.hands().start_at(back);
    }
    state.cyclic.start_keeping(state.clock, period, kept);
}

/// Checks whether what is kept is used, when it is time.
fn check_probes<F: Droppable>(state: &mut State, files: &[Arc<F>]) {
    let Some(probes) = state.cyclic.probes_due(state.clock) else { return };
    let (mut used, mut known, mut again) = (0, 0, vec![]);
    for (identity, region) in probes {
        let Some(file) = files.iter().find(|file| file.identity() == identity) else { continue };
        let range = whole_pages(&**file, &(region * REGION..(region + 1) * REGION));
        let Some(present) = file.present(&range, &mut state.tables) else { continue };
        known += 1;
        used += usize::from(present * 2 >= capacity(&**file, range.start));
        again.push((file, range));
    }
    if state.cyclic.probed(used, known, state.clock) {
        again.iter().for_each(|(file, range)| file.unmap(range));
    }
}

/// The hands, while the thread moves them.
struct Position {
    at: u64,
    lead: u64,
}

impl Position {
    fn of(hands: &Hands, end: u64) -> Position {
        let at = hands.back.load(Ordering::Relaxed) / REGION * REGION;
        if at >= end {
            return Position { at: 0, lead: 0 };
        }
        Position { at, lead: hands.lead.load(Ordering::Relaxed).min(end) }
    }

    /// Moves the back hand to an offset.
    fn pass(&mut self, offset_bytes: u64) {
        self.lead = self.lead.saturating_sub(offset_bytes - self.at);
        self.at = offset_bytes;
    }

    fn store(&self, hands: &Hands, end: u64) {
        let at = if self.at >= end { 0 } else { self.at };
        hands.back.store(at, Ordering::Relaxed);
        hands.lead.store(self.lead, Ordering::Relaxed);
    }
}

/// A range of whole regions, as far as the file has pages: it may be shorter by now.
fn whole_pages<F: Droppable>(file: &F, regions: &Range<u64>) -> Range<u64> {
    let end = file.len_bytes().next_multiple_of(SMALL_PAGE_BYTES as u64);
    regions.start..regions.end.min(end).max(regions.start)
}

/// Unmaps whole regions.
fn unmap_chunk<F: Droppable>(state: &mut State, file: &F, regions: &Range<u64>) {
    let mut may_be_mapped = false;
    for start in regions.clone().step_by(REGION_BYTES) {
        let region = whole_pages(file, &(start..start + REGION));
        if region.is_empty() {
            break;
        }
        match file.cached(start, REGION) {
            Some(0) => {}
            Some(cached) => {
                may_be_mapped = true;
                let is_scattered = state.cyclic.is_scattered();
                file.observe(&region, cached, is_scattered, &mut state.tables);
            }
            None => may_be_mapped = true,
        }
        // What was asked for before does not count.
        file.take_asked(&region);
    }
    if may_be_mapped {
        unmap(state, file, &whole_pages(file, regions));
    }
}

fn unmap<F: Droppable>(state: &mut State, file: &F, pages: &Range<u64>) {
    let before = state.resident.mapped();
    file.unmap(pages);
    let unmapped = before.saturating_sub(state.resident.mapped());
    state.resident.unmapped(unmapped);
    state.unmapped += unmapped;
}

/// Whether a region is in use, and to be passed over: half of its cached pages were mapped again
/// since it was unmapped, and that is an exception.
fn is_used<F: Droppable>(state: &mut State, file: &F, region: &Range<u64>) -> bool {
    let pages = whole_pages(file, region);
    // What is being dropped behind the reader was unmapped just now.
    if pages.is_empty() || state.cyclic.is_keeping() {
        return false;
    }
    let Some(present) = file.present(&pages, &mut state.tables) else { return false };
    let looks_used = present > 0
        && file.cached(region.start, REGION).is_some_and(|cached| present * 2 >= cached);
    state.used_share += (f64::from(u8::from(looks_used)) - state.used_share) * USED_WEIGHT;
    looks_used && state.used_share <= MOST_USED
}

/// Drops a range, except what is mapped elsewhere. Returns how many pages left the page cache.
fn drop_chunk<F: Droppable>(state: &mut State, file: &F, regions: &Range<u64>) -> u64 {
    let len_bytes = regions.end - regions.start;
    let before = file.cached(regions.start, len_bytes);
    let pages = whole_pages(file, regions);
    if before == Some(0) || pages.is_empty() {
        state.unmapped = 0;
        return 0;
    }
    // Again: what was mapped since stays otherwise, and makes the drop wait for all CPUs.
    unmap(state, file, &pages);
    let unmapped = std::mem::take(&mut state.unmapped);
    file.drop_unmapped(&pages);
    let freed = match (before, file.cached(regions.start, len_bytes)) {
        (Some(before), Some(after)) => {
            let average = before / (len_bytes / REGION);
            state.region_pages = (state.region_pages * 3 + average) / 4;
            before.saturating_sub(after)
        }
        // What was unmapped is dropped.
        _ => unmapped,
    };
    state.resident.dropped(freed);
    state.freed += freed;
    freed
}

/// The state of the thread between checks.
struct State {
    resident: Residency,
    tables: PageTables,
    /// Index of the file being swept.
    turn: usize,
    /// The sweep goes on until enough is free.
    is_sweeping: bool,
    /// Sweeps in a row that freed nothing.
    stuck: u32,
    /// Cached pages of a region, a moving average over what was swept.
    region_pages: u64,
    /// Pages unmapped since the last drop.
    unmapped: u64,
    /// The share of the regions swept lately that looked used.
    used_share: f64,
    /// How fast pages are brought in, and since when that is being measured: time and clock.
    pages_per_ms: u64,
    rate_since: (Instant, u64),
    cyclic: Cyclic,
    /// Pages dropped so far.
    freed: u64,
    /// Pages brought in so far.
    clock: u64,
    /// The bound, in pages.
    bound: u64,
    /// The period of a repeated scan that was found in this sweep.
    period: Option<u64>,
}

impl State {
    fn new() -> State {
        State {
            resident: Residency::new(),
            tables: PageTables::new(),
            turn: 0,
            is_sweeping: false,
            stuck: 0,
            region_pages: REGION_PAGES,
            unmapped: 0,
            used_share: 0.0,
            pages_per_ms: 0,
            rate_since: (Instant::now(), 0),
            cyclic: Cyclic::default(),
            freed: 0,
            clock: 0,
            bound: 0,
            period: None,
        }
    }

    /// Measures how fast pages are brought in.
    fn note_rate(&mut self, resident: u64) {
        let (since, before) = self.rate_since;
        let (now, clock) = (Instant::now(), self.freed + self.resident.lost() + resident);
        let elapsed_us = now.duration_since(since).as_micros() as u64;
        if elapsed_us < 1000 {
            return;
        }
        let per_ms = clock.saturating_sub(before) * 1000 / elapsed_us;
        // Rises at once, falls slowly.
        self.pages_per_ms = per_ms.max((self.pages_per_ms * 15 + per_ms) / 16);
        self.rate_since = (now, clock);
    }
}
