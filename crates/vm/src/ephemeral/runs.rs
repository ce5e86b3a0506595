//! Mappings larger than a slot: consecutive in regions of 1 GiB.
//!
//! ```text
//! region  [ mapped | retired | unmapped | mapped |              never used            ]
//!                                                 ▲ cursor
//! ```
//! An address behind the cursor is not reused before every mapping of its region is unmapped, as in
//! DaxVM's heap: then the cursor returns to the start. This needs no search, and wastes only
//! addresses, which are plentiful.
//!
//! Retired runs are collected until the threshold is reached. Then one call unmaps each group of
//! neighbours.
//!
//! # Invariants
//! * `live` counts the mappings of a region that are in use, retired, or being unmapped. At zero
//!   nothing is mapped there.
//! * Each of them has VMAs taken from the budget: one per piece, and one for the gap behind it.
//! * Addresses where foreign code may have mapped something count as live forever.
//!
//! Lock order: `sweeping`, then `state`.

use std::sync::Arc;

use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};

use super::GRANULE_BYTES;
use super::VmaBudget;
use super::unmapping::{Left, Span, Unmapper};
use crate::sync::Mutex;

/// Most mappings unmapped by one call, which bounds how long the kernel's lock is held.
const MOST_AT_ONCE: usize = 64;

/// See the module documentation.
pub(super) struct Runs<U: Unmapper> {
    threshold_pages: usize,
    vmas: Arc<VmaBudget>,
    unmapper: U,
    sweeping: Mutex<()>,
    state: Mutex<State<U::Place>>,
}

struct State<P> {
    regions: Vec<RunRegion<P>>,
    current: usize,
    retired: Vec<Run>,
    retired_bytes: usize,
    taken: usize,
    taken_bytes: usize,
}

struct RunRegion<P> {
    place: P,
    base: usize,
    len_bytes: usize,
    cursor: usize,
    live: usize,
    has_holes: bool,
}

/// Taken addresses. Must not be copied: they are retired or released once.
#[derive(Debug)]
pub(super) struct Run {
    region: usize,
    at: usize,
    len_bytes: usize,
    /// Upper bound of its VMAs.
    vmas: usize,
}

impl Run {
    fn end(&self) -> usize {
        self.at + self.len_bytes
    }
}

/// Why no run could be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoRun {
    /// No region has room.
    Room,
    /// The mappings would exceed the VMA budget.
    Vmas,
}

/// Sizes of the runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RunsStats {
    pub taken: usize,
    pub taken_bytes: usize,
    pub retired: usize,
    pub retired_bytes: usize,
}

/// Mappings of at least 2 MiB are aligned for huge pages.
fn alignment(len_bytes: usize) -> usize {
    if len_bytes >= REGION_BYTES { REGION_BYTES } else { GRANULE_BYTES }
}

impl<P> RunRegion<P> {
    fn take(&mut self, len_bytes: usize) -> Option<usize> {
        if self.live == 0 {
            self.cursor = 0;
        }
        let at = self.cursor.next_multiple_of(alignment(len_bytes));
        let end = at.checked_add(len_bytes)?;
        if end > self.len_bytes {
            return None;
        }
        self.cursor = end;
        self.live += 1;
        Some(at)
    }
}

impl<U: Unmapper> Runs<U> {
    /// Creates runs without regions.
    pub fn new(threshold_pages: usize, vmas: Arc<VmaBudget>, unmapper: U) -> Runs<U> {
        let state = State {
            regions: Vec::new(),
            current: 0,
            retired: Vec::new(),
            retired_bytes: 0,
            taken: 0,
            taken_bytes: 0,
        };
        Runs { threshold_pages, vmas, unmapper, sweeping: Mutex::new(()), state: Mutex::new(state) }
    }

    /// Adds a region, at addresses that hold the reservation.
    pub fn add_region(&self, place: U::Place, base: usize, len_bytes: usize) {
        let region = RunRegion { place, base, len_bytes, cursor: 0, live: 0, has_holes: false };
        let mut state = self.state.lock();
        state.current = state.regions.len();
        state.regions.push(region);
    }

    /// Takes `len_bytes`, whole granules, to be mapped in `pieces` pieces. Returns the run with its
    /// address and the result of `inspect` for its place.
    pub fn take<T>(
        &self,
        len_bytes: usize,
        pieces: usize,
        inspect: impl FnOnce(&U::Place) -> T,
    ) -> Result<(Run, usize, T), NoRun> {
        debug_assert!(len_bytes.is_multiple_of(GRANULE_BYTES), "runs are whole granules");
        let vmas = pieces + 1;
        if !self.vmas.try_take(vmas) {
            return Err(NoRun::Vmas);
        }
        let mut state = self.state.lock();
        let (count, current) = (state.regions.len(), state.current);
        // The current region first, then empty ones: the others keep their remaining room until
        // they are empty.
        let found = (0..count).map(|step| (current + step) % count).find_map(|number| {
            let region = &mut state.regions[number];
            let is_open = number == current || region.live == 0;
            is_open.then(|| region.take(len_bytes)).flatten().map(|at| (number, at))
        });
        let Some((number, at)) = found else {
            drop(state);
            self.vmas.give_back(vmas);
            return Err(NoRun::Room);
        };
        state.current = number;
        state.taken += 1;
        state.taken_bytes += len_bytes;
        let region = &state.regions[number];
        Ok((Run { region: number, at, len_bytes, vmas }, region.base + at, inspect(&region.place)))
    }

    /// Retires a run that is no longer used. Returns whether the threshold is reached.
    pub fn retire(&self, run: Run) -> bool {
        let mut state = self.state.lock();
        state.taken -= 1;
        state.taken_bytes -= run.len_bytes;
        state.keep(run);
        state.retired_bytes / SMALL_PAGE_BYTES >= self.threshold_pages
    }

    /// Releases a run that is no longer used: unmaps it at once.
    pub fn release(&self, run: Run) {
        let mut state = self.state.lock();
        state.taken -= 1;
        state.taken_bytes -= run.len_bytes;
        let base = state.regions[run.region].base;
        drop(state);
        self.vacate(base, vec![run]);
    }

    /// Unmaps the retired runs, unless another thread is doing so.
    pub fn sweep_unless_sweeping(&self) {
        if let Some(_sweeping) = self.sweeping.try_lock() {
            self.sweep_alone();
        }
    }

    /// Unmaps the retired runs.
    pub fn sweep(&self) {
        let _sweeping = self.sweeping.lock();
        self.sweep_alone();
    }

    fn sweep_alone(&self) {
        let mut state = self.state.lock();
        let mut retired = std::mem::take(&mut state.retired);
        state.retired_bytes = 0;
        drop(state);
        retired.sort_unstable_by_key(|run| (run.region, run.at));
        let mut together: Vec<Run> = Vec::new();
        for run in retired {
            let goes_on = together.last().is_some_and(|last| {
                last.region == run.region && last.end() == run.at && together.len() < MOST_AT_ONCE
            });
            if !goes_on {
                self.vacate_all(std::mem::take(&mut together));
            }
            together.push(run);
        }
        self.vacate_all(together);
    }

    fn vacate_all(&self, together: Vec<Run>) {
        if let Some(first) = together.first() {
            let base = self.state.lock().regions[first.region].base;
            self.vacate(base, together);
        }
    }

    /// Unmaps neighbouring runs of one region with one call.
    fn vacate(&self, base: usize, together: Vec<Run>) {
        let (first, last) = (&together[0], &together[together.len() - 1]);
        let span = Span { address: base + first.at, len_bytes: last.end() - first.at };
        // SAFETY: no thread uses the runs, and their addresses are not given out while they count
        // as live.
        let left = unsafe { self.unmapper.vacate(span) };
        let mut state = self.state.lock();
        if left == Left::Stuck {
            together.into_iter().for_each(|run| state.keep(run));
            return;
        }
        let region = &mut state.regions[first.region];
        if left == Left::Hole {
            region.has_holes = true;
            return;
        }
        region.live -= together.len();
        drop(state);
        self.vmas.give_back(together.iter().map(|run| run.vmas).sum());
    }

    /// The unmapper of these runs.
    pub fn unmapper(&self) -> &U {
        &self.unmapper
    }

    /// Returns the current sizes.
    pub fn stats(&self) -> RunsStats {
        let state = self.state.lock();
        RunsStats {
            taken: state.taken,
            taken_bytes: state.taken_bytes,
            retired: state.retired.len(),
            retired_bytes: state.retired_bytes,
        }
    }
}

impl<P> State<P> {
    fn keep(&mut self, run: Run) {
        self.retired_bytes += run.len_bytes;
        self.retired.push(run);
    }
}

impl<U: Unmapper> Drop for Runs<U> {
    /// No run is in use any more: extents hold the runs.
    fn drop(&mut self) {
        if !self.unmapper.is_current() {
            return;
        }
        self.sweep();
        for region in &self.state.lock().regions {
            if region.has_holes || region.live > 0 {
                self.unmapper.abandon(&region.place);
            }
        }
    }
}
