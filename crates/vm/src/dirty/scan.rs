//! The form that queries the kernel for the pages stored to (PAGEMAP_SCAN and a tracking
//! userfaultfd).
//!
//! A take has four steps:
//! 1. *Look* at untracked memory. A private page there is a first store: its piece is chosen.
//! 2. *Arm* the chosen pieces: register them. Step 1 contributes only the choice, so a store
//!    between the look and the registration makes no difference.
//! 3. *Scan* tracked memory: each page without write protection is reported and protected in one
//!    atomic step. A freshly armed piece reports all its pages. This step decides which take
//!    reports a store.
//! 4. *Verify* reported pages that were not known to be private. A page of the file was only
//!    loaded. A page stored to before step 3 is private in step 4, because only this tracker drops
//!    private copies.
//!
//! So a store before the atomic step is reported by this take. A store after it removes the
//! protection and is reported by the next. A store to a piece not chosen leaves a private page that
//! the next look finds.
//!
//! A page that is swapped out when it is verified is the one doubtful case: it looks like the
//! marker of a page that was never present. The caller's comparison decides.

use std::io;
use std::ops::Range;

use aquifer_sys::pagemap::{Categories, Pagemap, Protect, Query};
use aquifer_sys::uffd::Uffd;

use super::pieces::{Pieces, TrackedRange};
use super::runs::{self, PageBits, PageIndex, PageRun};

/// Most tracked runs of pieces before the whole range is tracked: each takes two mappings of the
/// 65,530 that a process may have.
const MOST_TRACKED_RUNS: usize = 256;
/// Largest gap that a scan of some pages scans over: a page costs up to 8 ns, another call 400.
const SCANNED_GAP_PAGES: u64 = 50;

const PRESENT_OR_SWAPPED: Categories = Categories::PRESENT.or(Categories::SWAPPED);
const NO_COPY: Categories = Categories::FILE.or(Categories::ZERO);

/// Present pages that are not tracked.
const UNTRACKED: Query = Query {
    all: Categories::NONE,
    none: Categories::TRACKED,
    any: PRESENT_OR_SWAPPED,
    report: NO_COPY.or(Categories::HUGE),
};
/// Pages stored to, or loaded for the first time, in an armed piece.
const UNPROTECTED: Query = Query {
    all: Categories::TRACKED.or(Categories::WRITTEN),
    none: Categories::NONE,
    any: PRESENT_OR_SWAPPED,
    report: Categories::NONE,
};
/// Private copies. Among tracked pages, also markers: they are not present.
pub(super) const PRIVATE: Query = Query {
    all: Categories::NONE,
    none: NO_COPY,
    any: PRESENT_OR_SWAPPED,
    report: Categories::PRESENT,
};
/// Private copies stored to since they were protected, or never protected. No markers.
const PRIVATE_UNPROTECTED: Query = Query { all: Categories::WRITTEN, ..PRIVATE };
/// Private copies that were not stored to since they were protected, in memory whose stores are
/// tracked: not where the file was mapped again. Also markers.
const CLEAN: Query = Query {
    all: Categories::TRACKED,
    none: NO_COPY.or(Categories::WRITTEN),
    any: PRESENT_OR_SWAPPED,
    report: Categories::NONE,
};
/// All but empty entries.
const NOT_EMPTY: Query = Query {
    all: Categories::NONE,
    none: Categories::NONE,
    any: PRESENT_OR_SWAPPED,
    report: Categories::HUGE,
};

#[derive(Debug)]
pub(super) struct Scan {
    range: TrackedRange,
    pieces: Pieces,
    tracking: Option<Uffd>,
    /// Reported and protected, but not yet known to be private. Kept until verified, even if
    /// verification fails.
    unverified: Vec<PageRun>,
}

impl Scan {
    pub fn new(range: TrackedRange) -> Scan {
        Scan { range, pieces: Pieces::new(range), tracking: None, unverified: Vec::new() }
    }

    #[cfg(test)]
    pub fn pieces(&self) -> &Pieces {
        &self.pieces
    }

    #[cfg(test)]
    pub fn tracking(&self) -> Option<&Uffd> {
        self.tracking.as_ref()
    }

    /// Adds the pages stored to since the last take to `found`, and the private pages to `known`.
    /// After an error some may be missing: then the tracker compares from there on.
    pub fn take(
        &mut self,
        map: &Pagemap,
        known: &mut PageBits,
        is_changed: &mut dyn FnMut(PageIndex) -> bool,
        found: &mut Vec<PageRun>,
    ) -> io::Result<()> {
        for segment in self.pieces.plan().iter().filter(|segment| !segment.full) {
            self.look(map, segment.addresses.clone())?;
        }
        self.arm()?;
        let Scan { range, pieces, unverified, .. } = self;
        take_tracked(*range, pieces, map, &mut |run| {
            known.split(run, &mut |part, is_known| {
                runs::push(if is_known { found } else { unverified }, part);
            });
        })?;
        self.verify(map, known, is_changed, found)?;
        self.look_for_full_pieces(map)
    }

    /// [`take`](Scan::take), if no store happened outside of `pages`, which ascend.
    pub fn take_within(
        &mut self,
        pages: &[PageRun],
        map: &Pagemap,
        known: &mut PageBits,
        is_changed: &mut dyn FnMut(PageIndex) -> bool,
        found: &mut Vec<PageRun>,
    ) -> io::Result<()> {
        let clusters: Vec<PageRun> = runs::clusters(pages, SCANNED_GAP_PAGES).collect();
        // Also in armed pieces: their tracking may have been ended by other code.
        for &cluster in &clusters {
            self.look(map, self.range.address_of(cluster))?;
        }
        if self.pieces.has_chosen() {
            // A piece that becomes armed is scanned as a whole, so that all its pages are protected.
            return self.take(map, known, is_changed, found);
        }
        let Scan { range, unverified, .. } = self;
        for cluster in clusters {
            map.scan(range.address_of(cluster), UNPROTECTED, Protect::Tracked, &mut |region| {
                known.split(range.run(region.start, region.end), &mut |part, is_known| {
                    runs::push(if is_known { found } else { unverified }, part);
                });
            })?;
        }
        self.verify(map, known, is_changed, found)
    }

    fn look(&mut self, map: &Pagemap, addresses: Range<usize>) -> io::Result<()> {
        let Scan { range, pieces, .. } = self;
        // Regions ascend: sum up pages until the next piece begins.
        let (mut piece, mut pages) = (0, 0);
        map.scan(addresses, UNTRACKED, Protect::No, &mut |region| {
            let run = range.run(region.start, region.end);
            if !region.categories.intersects(NO_COPY) {
                pieces.saw_private(run);
            } else if !region.categories.intersects(Categories::HUGE) {
                range.by_piece(run, &mut |now, count| {
                    if now != piece {
                        pieces.saw_others(piece, pages);
                        (piece, pages) = (now, 0);
                    }
                    pages += count;
                });
            }
        })?;
        pieces.saw_others(piece, pages);
        Ok(())
    }

    fn arm(&mut self) -> io::Result<()> {
        let mut chosen = self.pieces.chosen();
        if chosen.is_empty() {
            return Ok(());
        }
        if self.pieces.tracked_runs_with(&chosen) > MOST_TRACKED_RUNS {
            chosen = vec![self.pieces.all()];
        }
        let tracking = match &self.tracking {
            Some(tracking) => tracking,
            None => self.tracking.insert(Uffd::open_tracking()?),
        };
        for pieces in chosen {
            let addresses = self.range.addresses_of(pieces.clone());
            tracking.register_tracking(addresses.start as *mut u8, addresses.len())?;
            self.pieces.arm(pieces);
        }
        Ok(())
    }

    fn verify(
        &mut self,
        map: &Pagemap,
        known: &mut PageBits,
        is_changed: &mut dyn FnMut(PageIndex) -> bool,
        found: &mut Vec<PageRun>,
    ) -> io::Result<()> {
        if self.unverified.is_empty() {
            return Ok(());
        }
        runs::normalise(&mut self.unverified);
        let mut private = Vec::new();
        let mut doubtful = Vec::new();
        for cluster in runs::clusters(&self.unverified, SCANNED_GAP_PAGES) {
            map.scan(self.range.address_of(cluster), PRIVATE, Protect::No, &mut |region| {
                let present = region.categories.intersects(Categories::PRESENT);
                let kind = if present { &mut private } else { &mut doubtful };
                let run = self.range.run(region.start, region.end);
                runs::intersect(&self.unverified, run, &mut |common| runs::push(kind, common));
            })?;
        }
        runs::normalise(&mut doubtful);
        for page in doubtful.iter().flat_map(|run| run.pages()) {
            self.pieces.not_full(page);
            if is_changed(page) {
                runs::push(&mut private, PageRun { first: page, count: 1 });
            }
        }
        for &run in &private {
            known.insert_run(run);
            runs::push(found, run);
        }
        self.unverified.clear();
        Ok(())
    }

    fn look_for_full_pieces(&mut self, map: &Pagemap) -> io::Result<()> {
        for due in self.pieces.due() {
            let addresses = self.range.addresses_of(due.clone());
            map.scan(addresses, NOT_EMPTY, Protect::No, &mut |region| {
                // A huge entry becomes empty entries when it is split.
                if !region.categories.intersects(Categories::HUGE) {
                    self.pieces.found_full(&due, region.start as usize..region.end as usize);
                }
            })?;
        }
        self.pieces.looked();
        Ok(())
    }

    /// The known private pages that were not stored to since the last take; normalised. `None` if that
    /// failed half-way: then the state is unknown.
    pub fn clean(&self, map: &Pagemap, known: &PageBits) -> io::Result<Option<Vec<PageRun>>> {
        let mut clean = Vec::new();
        for cluster in runs::clusters(&known.runs(), SCANNED_GAP_PAGES) {
            match self.clean_in(map, self.range.address_of(cluster))? {
                Some(mut some) => clean.append(&mut some),
                None => return Ok(None),
            }
        }
        Ok(Some(clean))
    }

    /// As [`clean`](Scan::clean), of some addresses. May contain pages that are not known to be private.
    pub fn clean_in(
        &self,
        map: &Pagemap,
        addresses: Range<usize>,
    ) -> io::Result<Option<Vec<PageRun>>> {
        let mut clean = Vec::new();
        map.scan(addresses, CLEAN, Protect::No, &mut |region| {
            runs::push(&mut clean, self.range.run(region.start, region.end));
        })?;
        runs::normalise(&mut clean);
        Ok(self.unverified.is_empty().then_some(clean))
    }

    /// Number of private copies that no take has reported yet.
    pub fn private_not_in(&self, map: &Pagemap, known: &PageBits) -> io::Result<u64> {
        let mut private = Vec::new();
        map.scan(self.range.addresses(), PRIVATE_UNPROTECTED, Protect::No, &mut |region| {
            runs::push(&mut private, self.range.run(region.start, region.end));
        })?;
        runs::normalise(&mut private);
        let pages = private.iter().flat_map(|run| run.pages());
        Ok(pages.filter(|&page| !known.contains(page)).count() as u64)
    }
}

/// Reports pages of tracked pieces without write protection, and protects them.
fn take_tracked(
    range: TrackedRange,
    pieces: &mut Pieces,
    map: &Pagemap,
    each: &mut dyn FnMut(PageRun),
) -> io::Result<()> {
    for segment in pieces.plan() {
        let (addresses, query, protection) = if segment.full {
            (segment.addresses, Query::UNPROTECTED, Protect::All)
        } else {
            (segment.armed, UNPROTECTED, Protect::Tracked)
        };
        map.scan(addresses, query, protection, &mut |region| {
            each(range.run(region.start, region.end));
        })?;
    }
    Ok(())
}
