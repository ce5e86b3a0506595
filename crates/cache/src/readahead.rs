//! The read-ahead window: how much to load beyond a page that was missed.
//!
//! The algorithm is map-ahead's (HotStorage'17): the window doubles while misses follow one another and
//! halves when they do not quite, down to one page. A few streams are followed at once, so that
//! interleaved scans keep their windows. A miss that continues no stream starts a new one in the place of
//! the stream that was quiet for longest.
//!
//! Streams live in single atomic words updated without a lock. Two threads that miss in one stream at the
//! same moment may both advance it, which costs a page of read-ahead and nothing else.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const STREAMS: usize = 8;
/// Largest window, in pages.
const MAX_WINDOW: u64 = 512;
const WINDOW_SHIFT: u32 = 44;

/// What to load at a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    /// Pages to load with the missed one, itself included, before the access goes on.
    pub now: u32,
    /// Pages to load after those, in the background.
    pub later: u32,
}

impl Window {
    /// Only the page that was missed.
    pub const ONE: Window = Window { now: 1, later: 0 };
}

/// How read-ahead was advised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Pattern {
    /// Find out.
    Detect = 0,
    /// Never read ahead.
    Random = 1,
    /// Always with the largest window.
    Sequential = 2,
}

/// The streams of one store.
pub(crate) struct ReadAhead {
    pattern: AtomicU8,
    /// Next page expected (44 bits) and window (20 bits); zero is an unused stream.
    streams: [AtomicU64; STREAMS],
    /// When each stream was last continued.
    used: [AtomicU64; STREAMS],
    clock: AtomicU64,
    most_now: u64,
}

fn pack(next: u64, window: u64) -> u64 {
    window << WINDOW_SHIFT | next
}

fn unpack(word: u64) -> (u64, u64) {
    (word & ((1 << WINDOW_SHIFT) - 1), word >> WINDOW_SHIFT)
}

impl ReadAhead {
    /// `most_now` pages fit into one transfer of the fault path.
    pub fn new(most_now: usize) -> ReadAhead {
        ReadAhead {
            pattern: AtomicU8::new(Pattern::Detect as u8),
            streams: Default::default(),
            used: Default::default(),
            clock: AtomicU64::new(1),
            most_now: most_now.max(1) as u64,
        }
    }

    /// Follows advice from now on.
    pub fn set_pattern(&self, pattern: Pattern) {
        self.pattern.store(pattern as u8, Ordering::Relaxed);
    }

    /// The window for a miss at `page` of a store of `pages`.
    pub fn on_miss(&self, page: u64, pages: u64) -> Window {
        let pattern = self.pattern.load(Ordering::Relaxed);
        if pattern == Pattern::Random as u8 {
            return Window::ONE;
        }
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let window = match self.continue_stream(page, now) {
            Some(window) => window,
            None => {
                let start = if pattern == Pattern::Sequential as u8 { MAX_WINDOW } else { 1 };
                self.start_stream(page, start, now);
                start
            }
        };
        self.split(window.min(pages - page))
    }

    fn continue_stream(&self, page: u64, now: u64) -> Option<u64> {
        for (stream, used) in self.streams.iter().zip(&self.used) {
            let word = stream.load(Ordering::Relaxed);
            let (next, window) = unpack(word);
            if word == 0 || page < next || page > next + window {
                continue;
            }
            let window =
                if page == next { (window * 2).min(MAX_WINDOW) } else { (window / 2).max(1) };
            stream.store(pack(page + window, window), Ordering::Relaxed);
            used.store(now, Ordering::Relaxed);
            return Some(window);
        }
        None
    }

    fn start_stream(&self, page: u64, window: u64, now: u64) {
        let quietest = (0..STREAMS)
            .min_by_key(|&stream| self.used[stream].load(Ordering::Relaxed))
            .unwrap_or(0);
        self.streams[quietest].store(pack(page + window, window), Ordering::Relaxed);
        self.used[quietest].store(now, Ordering::Relaxed);
    }

    fn split(&self, window: u64) -> Window {
        let now = window.min(self.most_now);
        Window { now: now as u32, later: (window - now) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(window: Window) -> u64 {
        u64::from(window.now) + u64::from(window.later)
    }

    #[test]
    fn doubles_in_sequence_and_stays_one_at_random() {
        let ahead = ReadAhead::new(16);
        let mut page = 0;
        let mut windows = vec![];
        for _ in 0..12 {
            let window = total(ahead.on_miss(page, 1 << 30));
            windows.push(window);
            page += window;
        }
        assert_eq!(windows, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512, 512]);
        for step in 0..100u64 {
            assert_eq!(ahead.on_miss(1_000_000 + step * 7919, 1 << 30), Window::ONE);
        }
    }

    #[test]
    fn a_gap_halves_the_window() {
        let ahead = ReadAhead::new(16);
        let mut page = 0;
        for _ in 0..5 {
            page += total(ahead.on_miss(page, 1 << 30));
        }
        assert_eq!(total(ahead.on_miss(page + 3, 1 << 30)), 8);
    }

    #[test]
    fn interleaved_streams_keep_their_windows() {
        let ahead = ReadAhead::new(16);
        let mut next: Vec<u64> = (0..4).map(|stream| stream * 10_000_000).collect();
        for round in 0..6 {
            for page in &mut next {
                let window = total(ahead.on_miss(*page, 1 << 30));
                assert_eq!(window, 1 << round);
                *page += window;
            }
        }
    }

    #[test]
    fn ends_with_the_device_and_obeys_advice() {
        let ahead = ReadAhead::new(16);
        ahead.set_pattern(Pattern::Sequential);
        assert_eq!(ahead.on_miss(100, 130), Window { now: 16, later: 14 });
        ahead.set_pattern(Pattern::Random);
        assert_eq!(ahead.on_miss(116, 130), Window::ONE);
    }
}
