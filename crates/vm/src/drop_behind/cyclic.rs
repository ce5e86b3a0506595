//! Passes over data a little larger than the bound: which part to keep.
//!
//! Under a sweep in the order of loading, a scan that starts over finds nothing: each page was
//! dropped just before it comes again. Any fixed part of the data would serve as many accesses as it
//! has pages. So when the files are being scanned again and again, a part is *kept*: the sweep
//! passes over it, and drops the rest soon behind the reader.
//!
//! # Evidence
//! Seen from the sweep, a repeated scan looks like this, and other work does not:
//! * a region that was dropped is full when the sweep comes back to it (not after a single pass,
//!   and not after random accesses to data several times the bound);
//! * in between, an eighth more than the bound was loaded (the *period*), since a scan finds nothing
//!   that is resident; and at most [`MOST_PERIOD`] times the bound, so that keeping a part saves much;
//! * until three quarters of what the period exceeds the bound by have been loaded, a region that
//!   was dropped is still empty (with other accesses to data little larger than the bound, some
//!   regions return at once).
//!
//! It takes a quarter of the bound and at least [`LEAST_EVIDENCE`], or more after it was wrong.
//!
//! # Keeping no longer than it pays
//! * One kept region in eight is unmapped, and must have been mapped again once the reader has come
//!   by: after three times the pages that a pass should load.
//! * The regions that are dropped must go on to look like a repeated scan.
//!
//! Otherwise nothing is kept any more, and the next decision needs twice the evidence.

use std::collections::{HashMap, VecDeque};

use aquifer_sys::residency::FileIdentity;

use super::REGION_PAGES;

/// The largest period, in bounds, for which a part is kept.
const MOST_PERIOD: u64 = 4;
/// The smallest period is the bound and this part of it: with a shorter one, regions would have to
/// stay empty for so short a time that they often do under random accesses.
const LEAST_PERIOD_PART: u64 = 8;
/// The evidence for keeping a part, in parts of the bound, and its largest multiple.
const EVIDENCE_PART: u64 = 4;
/// The least evidence, in pages: among random accesses to few regions, some stay empty by chance.
const LEAST_EVIDENCE: u64 = 16 * REGION_PAGES;
const MOST_EVIDENCE: u64 = 32;
/// How long a dropped region must stay empty: three quarters of what the period exceeds the bound
/// by, and at least this part of the bound.
const EMPTY_PART: u64 = 32;
/// Dropped regions that are watched at the same time.
const MOST_RECENT: usize = 1024;
const MOST_SCATTERED: i64 = 16;
/// The part of the bound that is not kept, and its least number of regions: the reader's position
/// and the kernel's read-ahead are in it.
const WINDOW_PART: u64 = 16;
const WINDOW_REGIONS: u64 = 6;
/// One kept region in so many is a probe.
const PROBE_ONE_IN: u64 = 8;
/// Regions that are remembered: so many times those of the longest period. They take about a
/// four-thousandth of the bound.
const MOST_REMEMBERED: u64 = 2;
const FEWEST_REMEMBERED: u64 = 1024;

/// What is known of a region.
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    /// The clock when it was dropped last; 0 if it never was.
    dropped_at: u64,
    is_kept: bool,
    is_probe: bool,
}

/// A region of a file.
pub(super) type Key = (FileIdentity, u64);

/// The detector, and what it keeps. All quantities are in pages; the clock is the number of pages
/// brought in so far.
#[derive(Default)]
pub(super) struct Cyclic {
    regions: HashMap<Key, Region>,
    /// Regions dropped last, with the clock, until it is known whether they stay empty.
    recent: VecDeque<(Key, u64)>,
    /// The period, as seen last.
    period: u64,
    for_it: u64,
    against_it: u64,
    /// Positive while regions that are dropped return in part.
    scattered: i64,
    /// Times the normal evidence that the next decision needs; 0 is 1.
    doubt: u64,
    keeping: Option<Keeping>,
}

/// While a part is kept.
#[derive(Debug)]
struct Keeping {
    /// The clock at which the probes are checked.
    check_at: u64,
    /// Pages that a pass loads.
    loaded_per_pass: u64,
}

/// A region that was swept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Swept {
    pub key: Key,
    /// Pages that were cached, and the pages of the region.
    pub cached: u64,
    pub capacity: u64,
}

impl Cyclic {
    /// Forgets everything. Nothing is kept.
    pub fn forget(&mut self) {
        *self = Cyclic { doubt: self.doubt, ..Cyclic::default() };
    }

    /// Whether the sweep passes over a region.
    pub fn keeps(&self, key: Key) -> bool {
        self.keeping.is_some() && self.regions.get(&key).is_some_and(|region| region.is_kept)
    }

    pub fn is_keeping(&self) -> bool {
        self.keeping.is_some()
    }

    /// The regions whose emptiness is to be told to [`Cyclic::refilled`] now.
    pub fn due(&mut self, clock: u64, bound: u64) -> Option<Key> {
        let &(key, at) = self.recent.front()?;
        if clock - at < (bound / EMPTY_PART).max(self.period.saturating_sub(bound) * 3 / 4) {
            return None;
        }
        self.recent.pop_front();
        Some(key)
    }

    /// A region that was dropped a little while ago has this many pages again.
    pub fn refilled(&mut self, cached: u64, capacity: u64) {
        let (is_empty, is_full) = (cached * 16 <= capacity, cached * 8 >= capacity * 7);
        if !is_empty {
            self.against(capacity);
        }
        let step = if is_empty || is_full { -1 } else { 4 };
        self.scattered = (self.scattered + step).clamp(-MOST_SCATTERED, MOST_SCATTERED);
    }

    /// Whether some pages of regions that are dropped come back at once, and not all of them.
    pub fn is_scattered(&self) -> bool {
        self.scattered > 0
    }

    fn against(&mut self, pages: u64) {
        self.for_it = self.for_it.saturating_sub(4 * pages);
        self.against_it += pages;
    }

    /// A region was dropped. Returns the period if it is time to keep a part: then the caller
    /// chooses with [`Cyclic::keep`].
    pub fn dropped(&mut self, swept: Swept, clock: u64, bound: u64) -> Option<u64> {
        let most = MOST_REMEMBERED * MOST_PERIOD * bound / REGION_PAGES;
        if self.regions.len() as u64 > most.max(FEWEST_REMEMBERED) {
            self.forget();
        }
        let was_keeping = self.is_keeping();
        let region = self.regions.entry(swept.key).or_default();
        let last = std::mem::replace(&mut region.dropped_at, clock.max(1));
        let period = clock - last.min(clock);
        if self.recent.len() < MOST_RECENT {
            self.recent.push_back((swept.key, clock));
        }
        let least = if was_keeping { 0 } else { bound + bound / LEAST_PERIOD_PART };
        let is_full = swept.cached * 8 >= swept.capacity * 7;
        let repeats = last > 0 && is_full && (least..=MOST_PERIOD * bound).contains(&period);
        if !repeats {
            self.against(swept.capacity);
            if was_keeping && self.against_it > bound / 8 {
                self.give_up();
            }
            return None;
        }
        self.period = period;
        self.for_it += swept.capacity;
        self.against_it = self.against_it.saturating_sub(swept.capacity);
        let needed = (bound / EVIDENCE_PART).max(LEAST_EVIDENCE) * self.doubt.max(1);
        (!was_keeping && self.for_it > needed).then_some(period)
    }

    /// How much may be kept of a bound that is held by dropping to `stop` pages.
    pub fn room(bound: u64, stop: u64) -> u64 {
        let window = (bound / WINDOW_PART).max(WINDOW_REGIONS * REGION_PAGES);
        stop.saturating_sub(window)
    }

    /// Keeps a region. Returns whether it is a probe, which the caller unmaps.
    pub fn keep(&mut self, key: Key) -> bool {
        let region = self.regions.entry(key).or_default();
        region.is_kept = true;
        region.is_probe = key.1.is_multiple_of(PROBE_ONE_IN);
        region.is_probe
    }

    /// All regions to be kept are chosen: `kept` pages of a scan with this period.
    pub fn start_keeping(&mut self, clock: u64, period: u64, kept: u64) {
        let loaded_per_pass = period.saturating_sub(kept).max(1);
        let check_at = clock + 3 * loaded_per_pass;
        self.keeping = Some(Keeping { check_at, loaded_per_pass });
        self.against_it = 0;
    }

    /// The probes, if it is time to check them.
    pub fn probes_due(&self, clock: u64) -> Option<Vec<Key>> {
        if clock < self.keeping.as_ref()?.check_at {
            return None;
        }
        let probes = self.regions.iter().filter(|(_, region)| region.is_probe);
        Some(probes.map(|(&key, _)| key).collect())
    }

    /// So many of the probes were mapped again. Returns whether the part is kept further; then the
    /// caller unmaps the probes again.
    pub fn probed(&mut self, used: usize, probes: usize, clock: u64) -> bool {
        let Some(keeping) = &mut self.keeping else { return false };
        if used * 2 < probes || probes == 0 {
            self.give_up();
            return false;
        }
        keeping.check_at = clock + 3 * keeping.loaded_per_pass;
        self.doubt = 0;
        true
    }

    /// Keeps nothing any more.
    pub fn give_up(&mut self) {
        let doubt = (self.doubt.max(1) * 2).min(MOST_EVIDENCE);
        *self = Cyclic { doubt, scattered: self.scattered, ..Cyclic::default() };
    }
}
