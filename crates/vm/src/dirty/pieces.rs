//! Where stores are tracked, in pieces of 2 MiB (one page-table page each).
//!
//! ```text
//!   Cold ──────────────► Armed ──────────────► Full
//!        register, scan        no entry empty
//!    ▲                      ◄──────────────
//!    └ initial state           an entry was empty
//! ```
//!
//! | state | its mapping | a scan checks | ns per page |
//! |---|---|---|---|
//! | `Cold` | not tracked: loads keep fault-around | entry and page | 8 |
//! | `Armed` | tracked; every present page was write-protected | entry | 3 |
//! | `Full` | the same, and no entry is empty | entry, in the kernel's fast path | 1 |
//!
//! A piece is armed when a private page is found in it: stores happen there. A piece that is only
//! read costs each scan 8 ns a page. Arming it costs 6 µs once, and 0.4 µs for each page still
//! missing, because a tracked mapping brings in one page per fault. The number of future scans is
//! unknown, as in the ski rental problem: the piece is armed when its scans have cost as much as
//! arming it at most costs. So the total is at most twice the optimum.

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};

use super::runs::{PageIndex, PageRun};

/// Cost of arming a piece, in visits of a page by a scan of a cold piece.
const ARMING_VISITS: u64 = 800;
/// Cost of a fault that fault-around would have saved, in the same unit.
const LOST_FAULT_VISITS: u64 = 50;
/// Takes before an armed piece is first checked for being full.
const FIRST_LOOK_TAKES: u64 = 2;
const LONGEST_BACKOFF: u8 = 16;

/// The range of addresses that is tracked.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrackedRange {
    pub start: usize,
    pub pages: u64,
}

impl TrackedRange {
    pub fn end(self) -> usize {
        self.start + self.pages as usize * SMALL_PAGE_BYTES
    }

    pub fn addresses(self) -> Range<usize> {
        self.start..self.end()
    }

    pub fn address_of(self, run: PageRun) -> Range<usize> {
        let at = |page: PageIndex| self.start + page.0 as usize * SMALL_PAGE_BYTES;
        at(run.first)..at(run.end())
    }

    /// The pages of a range of addresses, which must lie inside.
    pub fn run(self, start: u64, end: u64) -> PageRun {
        let page = |address: u64| (address - self.start as u64) / SMALL_PAGE_BYTES as u64;
        PageRun::new(page(start)..page(end))
    }

    fn first_piece(self) -> usize {
        self.start / REGION_BYTES
    }

    fn pieces(self) -> usize {
        self.end().div_ceil(REGION_BYTES) - self.first_piece()
    }

    pub fn piece_of(self, page: PageIndex) -> usize {
        (self.start + page.0 as usize * SMALL_PAGE_BYTES) / REGION_BYTES - self.first_piece()
    }

    /// Calls `each` with the pieces of a run, and how many of its pages lie in each.
    pub fn by_piece(self, run: PageRun, each: &mut dyn FnMut(usize, u64)) {
        let mut addresses = self.address_of(run);
        while !addresses.is_empty() {
            let piece = addresses.start / REGION_BYTES;
            let end = ((piece + 1) * REGION_BYTES).min(addresses.end);
            let pages = (end - addresses.start) / SMALL_PAGE_BYTES;
            each(piece - self.first_piece(), pages as u64);
            addresses.start = end;
        }
    }

    /// The addresses of pieces, clipped to the range.
    pub fn addresses_of(self, pieces: Range<usize>) -> Range<usize> {
        let at = |piece| (self.first_piece() + piece) * REGION_BYTES;
        at(pieces.start).max(self.start)..at(pieces.end).min(self.end())
    }

    fn pages_of(self, piece: usize) -> u64 {
        (self.addresses_of(piece..piece + 1).len() / SMALL_PAGE_BYTES) as u64
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Cold,
    Armed,
    Full,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    state: State,
    /// Failed checks for being full: each doubles the takes until the next check.
    backoff: u8,
    /// `Cold`: visits of its pages by scans. `Armed`: the take at which to check whether it is
    /// full.
    count: u64,
}

/// The states of all pieces. Memory is used for those in which a scan found pages.
#[derive(Debug)]
pub(super) struct Pieces {
    range: TrackedRange,
    known: BTreeMap<usize, Piece>,
    /// The state of every other piece: `Cold`, or `Armed` once all are.
    rest: Piece,
    /// Cold pieces to be armed by this take.
    chosen: Vec<usize>,
    takes: u64,
    next_look: u64,
    /// Runs of pieces that are scanned alike, cached until a state changes.
    plan: Vec<Segment>,
}

/// Pieces that are scanned with one call: full ones, or a mixture of cold and armed ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub addresses: Range<usize>,
    pub full: bool,
    /// From the first to the last armed piece; empty if there is none.
    pub armed: Range<usize>,
}

/// Consecutive numbers of an ascending list, as ranges.
fn runs_of(pieces: &[usize]) -> impl Iterator<Item = Range<usize>> {
    pieces.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[run.len() - 1] + 1)
}

impl Pieces {
    pub fn new(range: TrackedRange) -> Pieces {
        Pieces {
            range,
            known: BTreeMap::new(),
            rest: Piece { state: State::Cold, backoff: 0, count: 0 },
            chosen: Vec::new(),
            takes: 0,
            next_look: u64::MAX,
            plan: Vec::new(),
        }
    }

    #[cfg(test)]
    pub fn state(&self, piece: usize) -> State {
        self.get(piece).state
    }

    fn get(&self, piece: usize) -> Piece {
        self.known.get(&piece).copied().unwrap_or(self.rest)
    }

    fn get_mut(&mut self, piece: usize) -> &mut Piece {
        self.known.entry(piece).or_insert(self.rest)
    }

    fn known_in(&self, is_wanted: impl Fn(&Piece) -> bool) -> Vec<usize> {
        let wanted = self.known.iter().filter(|(_, piece)| is_wanted(piece));
        wanted.map(|(&index, _)| index).collect()
    }

    pub fn plan(&mut self) -> Vec<Segment> {
        if self.plan.is_empty() {
            let full = self.known_in(|piece| piece.state == State::Full);
            let mut from = 0;
            for run in runs_of(&full) {
                self.plan_mixture(from..run.start);
                from = run.end;
                let addresses = self.range.addresses_of(run);
                self.plan.push(Segment { addresses, full: true, armed: 0..0 });
            }
            self.plan_mixture(from..self.all().end);
        }
        self.plan.clone()
    }

    /// Plans a run of pieces that are not full.
    fn plan_mixture(&mut self, pieces: Range<usize>) {
        if pieces.is_empty() {
            return;
        }
        let known = self.known.range(pieces.clone());
        let mut armed = known.filter(|(_, piece)| piece.state == State::Armed).map(|(&at, _)| at);
        let armed = match armed.next() {
            _ if self.rest.state == State::Armed => self.range.addresses_of(pieces.clone()),
            Some(from) => {
                let to = armed.next_back().unwrap_or(from);
                self.range.addresses_of(from..to + 1)
            }
            None => 0..0,
        };
        let addresses = self.range.addresses_of(pieces);
        self.plan.push(Segment { addresses, full: false, armed });
    }

    /// Records that a scan of untracked memory found private pages.
    pub fn saw_private(&mut self, run: PageRun) {
        let last = PageIndex(run.end().0 - 1);
        for piece in self.range.piece_of(run.first)..=self.range.piece_of(last) {
            // Also if it is armed: a piece whose tracking was ended by other code is registered
            // again.
            self.choose(piece);
        }
    }

    /// Records that a scan of untracked memory found `pages` pages of a piece that are not private
    /// copies.
    pub fn saw_others(&mut self, piece: usize, pages: u64) {
        if pages == 0 {
            return;
        }
        let missing = self.range.pages_of(piece).saturating_sub(pages);
        let visits = self.get(piece).count.saturating_add(pages);
        if self.get(piece).state == State::Cold {
            self.get_mut(piece).count = visits;
        }
        if visits >= ARMING_VISITS + missing * LOST_FAULT_VISITS {
            self.choose(piece);
        }
    }

    fn choose(&mut self, piece: usize) {
        if self.chosen.last() != Some(&piece) {
            self.chosen.push(piece);
        }
    }

    /// Whether there are pieces to arm now.
    pub fn has_chosen(&self) -> bool {
        !self.chosen.is_empty()
    }

    /// Returns the pieces to arm now, as runs.
    pub fn chosen(&mut self) -> Vec<Range<usize>> {
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.sort_unstable();
        chosen.dedup();
        runs_of(&chosen).collect()
    }

    /// How many runs would be tracked if `more` were too.
    pub fn tracked_runs_with(&self, more: &[Range<usize>]) -> usize {
        if self.rest.state != State::Cold {
            return 1;
        }
        let mut tracked = self.known_in(|piece| piece.state != State::Cold);
        tracked.extend(more.iter().cloned().flatten());
        tracked.sort_unstable();
        tracked.dedup();
        runs_of(&tracked).count()
    }

    pub fn all(&self) -> Range<usize> {
        0..self.range.pieces()
    }

    /// Records that pieces were registered.
    pub fn arm(&mut self, pieces: Range<usize>) {
        if pieces == self.all() {
            let cold = self.known_in(|piece| piece.state == State::Cold);
            cold.into_iter().for_each(|piece| self.await_full(piece, 0));
            if self.rest.state == State::Cold {
                self.rest = self.armed(0);
                self.plan.clear();
            }
            return;
        }
        for piece in pieces {
            if self.get(piece).state == State::Cold {
                self.await_full(piece, 0);
            }
        }
    }

    /// An armed piece, to be checked again some takes later.
    fn armed(&mut self, backoff: u8) -> Piece {
        let due = self.takes + (FIRST_LOOK_TAKES << backoff);
        self.next_look = self.next_look.min(due);
        Piece { state: State::Armed, backoff, count: due }
    }

    fn await_full(&mut self, piece: usize, backoff: u8) {
        *self.get_mut(piece) = self.armed(backoff);
        self.plan.clear();
    }

    /// Records that an entry of a full piece was empty: its page was evicted from the page cache.
    pub fn not_full(&mut self, page: PageIndex) {
        let piece = self.range.piece_of(page);
        if self.get(piece).state == State::Full {
            self.await_full(piece, LONGEST_BACKOFF / 2);
        }
    }

    /// Counts a take, and returns the armed pieces to check.
    pub fn due(&mut self) -> Vec<Range<usize>> {
        self.takes += 1;
        if self.takes < self.next_look {
            return Vec::new();
        }
        let takes = self.takes;
        let is_due = |piece: &Piece| piece.state == State::Armed && piece.count <= takes;
        if !is_due(&self.rest) {
            return runs_of(&self.known_in(is_due)).collect();
        }
        let mut from = 0;
        let others = self.known_in(|piece| !is_due(piece)).into_iter().chain([self.all().end]);
        let between = others.map(|other| std::mem::replace(&mut from, other + 1)..other);
        between.filter(|pieces| !pieces.is_empty()).collect()
    }

    /// Marks those of `pieces` full that lie entirely in `entries`, which has no empty entry.
    pub fn found_full(&mut self, pieces: &Range<usize>, entries: Range<usize>) {
        let first = self.range.first_piece();
        let from = if entries.start <= self.range.start {
            0
        } else {
            entries.start.div_ceil(REGION_BYTES) - first
        };
        let to = if entries.end >= self.range.end() {
            self.all().end
        } else {
            entries.end / REGION_BYTES - first
        };
        for piece in from.max(pieces.start)..to.min(pieces.end) {
            self.get_mut(piece).state = State::Full;
            self.plan.clear();
        }
    }

    /// Called after the checks: pieces that are not full wait twice as long for the next one.
    pub fn looked(&mut self) {
        if self.takes < self.next_look {
            return;
        }
        self.next_look = u64::MAX;
        for index in self.known_in(|piece| piece.state == State::Armed) {
            if let Some(again) = self.look_again(self.get(index)) {
                *self.get_mut(index) = again;
            }
        }
        if self.rest.state == State::Armed
            && let Some(again) = self.look_again(self.rest)
        {
            self.rest = again;
        }
    }

    /// An armed piece after a check of those that were due; `None` if it was not.
    fn look_again(&mut self, piece: Piece) -> Option<Piece> {
        if piece.count <= self.takes {
            return Some(self.armed((piece.backoff + 1).min(LONGEST_BACKOFF)));
        }
        self.next_look = self.next_look.min(piece.count);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = (REGION_BYTES / SMALL_PAGE_BYTES) as u64;

    fn pieces(start_page: usize, pages: u64) -> Pieces {
        let start = 64 * REGION_BYTES + start_page * SMALL_PAGE_BYTES;
        Pieces::new(TrackedRange { start, pages })
    }

    #[test]
    fn a_range_that_is_not_aligned_has_short_pieces_at_its_ends() {
        let range = pieces(500, PAGES + 13).range;
        assert_eq!(range.pieces(), 3);
        assert_eq!((0..3).map(|piece| range.pages_of(piece)).collect::<Vec<_>>(), [12, PAGES, 1]);
        assert_eq!(range.piece_of(PageIndex(11)), 0);
        assert_eq!(range.piece_of(PageIndex(12)), 1);
        assert_eq!(range.piece_of(PageIndex(12 + PAGES)), 2);
        assert_eq!(range.addresses_of(0..3), range.addresses());
        let mut parts = Vec::new();
        range.by_piece(PageRun::new(3..PAGES + 13), &mut |piece, pages| parts.push((piece, pages)));
        assert_eq!(parts, [(0, 9), (1, PAGES), (2, 1)]);
    }

    #[test]
    fn pieces_that_are_only_read_are_armed_when_scanning_them_has_cost_as_much() {
        let mut pieces = pieces(0, 4 * PAGES);
        let mut takes_until_armed = [0; 3];
        let present = [PAGES, PAGES - 16, PAGES / 2];
        for take in 1..200 {
            for piece in 0..3 {
                if pieces.state(piece) == State::Cold {
                    pieces.saw_others(piece, present[piece]);
                    takes_until_armed[piece] = take;
                }
            }
            for run in pieces.chosen() {
                pieces.arm(run);
            }
        }
        assert_eq!(takes_until_armed, [2, 4, 54]);
        assert_eq!(pieces.state(3), State::Cold);
    }

    /// As with random stores to a large mapping.
    #[test]
    fn of_pieces_that_are_all_armed_only_those_with_pages_take_memory() {
        let mut pieces = pieces(0, (1 << 20) * PAGES);
        let range = pieces.range;
        pieces.saw_others(7, 1);
        pieces.saw_private(PageRun::new(9 * PAGES..9 * PAGES + 1));
        let chosen = pieces.chosen();
        pieces.arm(pieces.all());
        assert_eq!(pieces.tracked_runs_with(&chosen), 1);
        assert_eq!(pieces.plan().len(), 1);
        assert_eq!(pieces.plan()[0].armed, range.addresses());
        assert!(pieces.due().is_empty());
        assert_eq!(pieces.due(), [pieces.all()]);
        pieces.found_full(&pieces.all(), range.addresses_of(9..10));
        pieces.looked();
        let states = [7, 8, 9].map(|piece| pieces.state(piece));
        assert_eq!(states, [State::Armed, State::Armed, State::Full]);
        let armed: Vec<_> = pieces.plan().into_iter().map(|segment| segment.armed).collect();
        let (before, after) = (range.addresses_of(0..9), range.addresses_of(10..1 << 20));
        assert_eq!(armed, [before, 0..0, after]);
        // The others are checked again after twice as many takes.
        assert!((1..4).all(|_| pieces.due().is_empty()));
        assert_eq!(pieces.due(), [0..9, 10..1 << 20]);
        pieces.looked();
        pieces.not_full(PageIndex(9 * PAGES));
        assert_eq!(pieces.plan()[0].armed, range.addresses());
        assert_eq!(pieces.known.len(), 2);
    }

    #[test]
    fn plans_separate_full_pieces() {
        let mut pieces = pieces(0, 6 * PAGES);
        let range = pieces.range;
        assert_eq!(pieces.plan().len(), 1);
        assert!(pieces.plan()[0].armed.is_empty());
        pieces.saw_private(PageRun::new(PAGES - 1..PAGES + 1));
        pieces.saw_private(PageRun::new(3 * PAGES..3 * PAGES + 1));
        let chosen = pieces.chosen();
        assert_eq!(chosen, [0..2, 3..4]);
        assert_eq!(pieces.tracked_runs_with(&chosen), 2);
        chosen.into_iter().for_each(|run| pieces.arm(run));
        assert_eq!(pieces.tracked_runs_with(&[4..5, 0..1]), 2);
        assert_eq!(pieces.tracked_runs_with(&[5..6, 0..1]), 3);
        assert_eq!(pieces.plan()[0].armed, range.addresses_of(0..4));

        assert!(pieces.due().is_empty());
        assert_eq!(pieces.due(), [0..2, 3..4]);
        // All entries of the first piece, but not all of the second.
        let end = range.addresses_of(1..2).end - SMALL_PAGE_BYTES;
        pieces.found_full(&(0..2), range.start..end);
        pieces.looked();
        assert_eq!((pieces.state(0), pieces.state(1)), (State::Full, State::Armed));
        let plan = pieces.plan();
        assert_eq!(plan.len(), 2);
        assert!(plan[0].full && plan[0].addresses == range.addresses_of(0..1));
        assert_eq!(plan[1].armed, range.addresses_of(1..4));

        // The others are checked again after twice as many takes.
        let takes_until_due = (1..).find(|_| !pieces.due().is_empty()).unwrap();
        assert_eq!(takes_until_due, 2 * FIRST_LOOK_TAKES);
        pieces.not_full(PageIndex(7));
        assert_eq!(pieces.state(0), State::Armed);
    }
}
