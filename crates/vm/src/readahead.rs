//! The reach of read-ahead: how many pages to bring in at a fault, with the one that was missed.
//!
//! The rule is map-ahead's (Choi, Kim and Han, HotStorage'17, where the reach is called a window):
//! the reach doubles at a sequential fault and halves at a random one, down to one page; some of it
//! is brought in before the access continues and the rest in the background. Added here: several
//! streams are tracked at once, so that interleaved scans keep their reaches.
//!
//! ```text
//!            expected          expected + reach
//!               ▼                     ▼
//!  ─────────────●─────────────────────●──────────────────────────
//!   elsewhere   │ sequential: exactly there, twice the reach
//!               │ near: behind it, within a reach: half of it
//!               │                     elsewhere: a new stream, one page
//! ```
//! A fault that continues no stream starts a new one in place of the least recently continued
//! stream; so random accesses get a reach of one page and do not disturb a scan in progress.
//!
//! Used where Aquifer serves faults itself: the cache's user backend sizes its read-ahead with it.
//!
//! Each stream is one atomic word, updated without a lock. Two threads that fault in one stream at
//! the same moment may both advance it; the only cost is a page brought in too early.
//!
//! ```
//! use aquifer_vm::readahead::ReadAhead;
//!
//! let ahead = ReadAhead::new(16);
//! let mut page = 0;
//! for expected in [1, 2, 4, 8, 16] {
//!     let reach = ahead.on_fault(page, 1_000_000);
//!     assert_eq!(reach.pages(), expected);
//!     page += reach.pages();
//! }
//! assert_eq!(ahead.on_fault(777_777, 1_000_000).pages(), 1);
//! ```

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// How many streams are tracked at once.
pub const STREAMS: usize = 8;
/// Largest reach: what one last-level page table maps.
pub const LARGEST_REACH_PAGES: u64 = 512;
const REACH_SHIFT: u32 = 44;

/// What to bring in at a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// Pages to bring in before the access continues, the missed one included.
    pub now: u32,
    /// Pages to bring in after those, in the background.
    pub later: u32,
}

impl Reach {
    /// Only the page that was missed.
    pub const ONE: Reach = Reach { now: 1, later: 0 };

    /// All pages of the reach.
    pub fn pages(self) -> u64 {
        u64::from(self.now) + u64::from(self.later)
    }
}

/// What the caller knows about the access pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Pattern {
    /// Detect the pattern.
    Detect = 0,
    /// Never bring in more than the missed page.
    Random = 1,
    /// Start every stream with the largest reach.
    Sequential = 2,
}

/// The streams of faults in one file or mapping.
#[derive(Debug)]
pub struct ReadAhead {
    pattern: AtomicU8,
    /// Next page expected (44 bits) and reach (20 bits); zero is an unused stream. Relaxed
    /// throughout: each word is self-contained and publishes nothing else.
    streams: [AtomicU64; STREAMS],
    /// When each stream was last continued.
    used: [AtomicU64; STREAMS],
    clock: AtomicU64,
    most_now: u64,
}

fn pack(next: u64, reach: u64) -> u64 {
    reach << REACH_SHIFT | next
}

fn unpack(word: u64) -> (u64, u64) {
    (word & ((1 << REACH_SHIFT) - 1), word >> REACH_SHIFT)
}

impl ReadAhead {
    /// At most `most_now_pages` of a reach are brought in before the access continues: what one
    /// transfer or one page table holds.
    pub fn new(most_now_pages: usize) -> ReadAhead {
        ReadAhead {
            pattern: AtomicU8::new(Pattern::Detect as u8),
            streams: Default::default(),
            used: Default::default(),
            clock: AtomicU64::new(1),
            most_now: most_now_pages.max(1) as u64,
        }
    }

    /// Sets the pattern for later faults.
    pub fn set_pattern(&self, pattern: Pattern) {
        self.pattern.store(pattern as u8, Ordering::Relaxed);
    }

    /// The reach for a fault at `page`, of `pages` in all (fewer than 2⁴⁴). It ends at the last
    /// page.
    pub fn on_fault(&self, page: u64, pages: u64) -> Reach {
        let pattern = self.pattern.load(Ordering::Relaxed);
        if pattern == Pattern::Random as u8 {
            return Reach::ONE;
        }
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let reach = match self.continue_stream(page, now) {
            Some(reach) => reach,
            None => {
                let start =
                    if pattern == Pattern::Sequential as u8 { LARGEST_REACH_PAGES } else { 1 };
                self.start_stream(page, start, now);
                start
            }
        };
        self.split(reach.min(pages.saturating_sub(page)).max(1))
    }

    fn continue_stream(&self, page: u64, now: u64) -> Option<u64> {
        for (stream, used) in self.streams.iter().zip(&self.used) {
            let word = stream.load(Ordering::Relaxed);
            let (next, reach) = unpack(word);
            if word == 0 || page < next || page > next + reach {
                continue;
            }
            let reach = if page == next {
                (reach * 2).min(LARGEST_REACH_PAGES)
            } else {
                (reach / 2).max(1)
            };
            stream.store(pack(page + reach, reach), Ordering::Relaxed);
            used.store(now, Ordering::Relaxed);
            return Some(reach);
        }
        None
    }

    fn start_stream(&self, page: u64, reach: u64, now: u64) {
        let quietest = (0..STREAMS)
            .min_by_key(|&stream| self.used[stream].load(Ordering::Relaxed))
            .unwrap_or(0);
        self.streams[quietest].store(pack(page + reach, reach), Ordering::Relaxed);
        self.used[quietest].store(now, Ordering::Relaxed);
    }

    fn split(&self, reach: u64) -> Reach {
        let now = reach.min(self.most_now);
        Reach { now: now as u32, later: (reach - now) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_testkit::model::WindowModel;
    use aquifer_testkit::rng::Rng;

    #[test]
    fn doubles_in_sequence_and_stays_one_at_random() {
        let ahead = ReadAhead::new(16);
        let mut page = 0;
        let mut seen = vec![];
        for _ in 0..12 {
            let reach = ahead.on_fault(page, 1 << 30).pages();
            seen.push(reach);
            page += reach;
        }
        assert_eq!(seen, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512, 512]);
        for step in 0..100u64 {
            assert_eq!(ahead.on_fault(1_000_000 + step * 7919, 1 << 30), Reach::ONE);
        }
    }

    #[test]
    fn a_gap_halves_the_window() {
        let ahead = ReadAhead::new(16);
        let mut page = 0;
        for _ in 0..5 {
            page += ahead.on_fault(page, 1 << 30).pages();
        }
        assert_eq!(ahead.on_fault(page + 3, 1 << 30).pages(), 8);
    }

    #[test]
    fn interleaved_streams_keep_their_windows() {
        let ahead = ReadAhead::new(16);
        let mut next: Vec<u64> = (0..4).map(|stream| stream * 10_000_000).collect();
        for round in 0..6 {
            for page in &mut next {
                let reach = ahead.on_fault(*page, 1 << 30).pages();
                assert_eq!(reach, 1 << round);
                *page += reach;
            }
        }
    }

    #[test]
    fn ends_with_the_device_and_obeys_advice() {
        let ahead = ReadAhead::new(16);
        ahead.set_pattern(Pattern::Sequential);
        assert_eq!(ahead.on_fault(100, 130), Reach { now: 16, later: 14 });
        ahead.set_pattern(Pattern::Random);
        assert_eq!(ahead.on_fault(116, 130), Reach::ONE);
    }

    #[test]
    fn a_fault_behind_the_end_brings_in_one_page() {
        let ahead = ReadAhead::new(16);
        ahead.set_pattern(Pattern::Sequential);
        assert_eq!(ahead.on_fault(130, 130), Reach::ONE);
    }

    /// Scans with gaps, interleaved, among random accesses: the same reaches as the model's.
    #[test]
    fn agrees_with_the_written_model() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let ahead = ReadAhead::new(16);
            let mut model = WindowModel::new(STREAMS, LARGEST_REACH_PAGES);
            let pages = 1 + rng.below(1 << 22);
            let mut scans: Vec<u64> = (0..1 + rng.below(12)).map(|_| rng.below(pages)).collect();
            for step in 0..2_000 {
                let scan = rng.below(scans.len() as u64) as usize;
                let page = if rng.chance(0.1) { rng.below(pages) } else { scans[scan] };
                let reach = ahead.on_fault(page, pages);
                assert_eq!(
                    reach.pages(),
                    model.window_at(page, pages),
                    "seed {seed}, step {step}, page {page} of {pages}"
                );
                assert_eq!(u64::from(reach.now), reach.pages().min(16));
                let gap = if rng.chance(0.2) { rng.below(40) } else { 0 };
                scans[scan] = (page + reach.pages() + gap) % pages;
            }
        }
    }
}
