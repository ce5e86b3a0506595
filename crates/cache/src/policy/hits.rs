//! The record of hits: one atomic word per frame, no lock.
//!
//! A hit is by far the most frequent event in a cache, so it touches only the word of its own
//! frame, and does not write it if the value would not change (a counter at its maximum, a current
//! time stamp): a hot page's word then stays shared between the cores' caches.
//!
//! All accesses are relaxed. Nothing is published through these words: a lost increment, or a hit
//! recorded for the next page in the frame, only costs a little accuracy.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::ids::FrameId;
use crate::lazy::LazyArray;

/// How hits are recorded for a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HitMode {
    /// Hits are not recorded.
    Ignore,
    /// A counter that saturates at `max`.
    Count {
        /// The counter's maximum.
        max: u32,
    },
    /// The cache's logical time (insertions so far) of the last hit. Hits between the same two
    /// insertions are not distinguished.
    Timestamp,
}

/// One word per frame in which hits are recorded without a lock.
///
/// ```
/// use aquifer_cache::{FrameId, policy::{HitMode, HitTable}};
///
/// let hits = HitTable::new(HitMode::Count { max: 3 }, 16);
/// for _ in 0..5 {
///     hits.hit(FrameId(7));
/// }
/// assert_eq!(hits.get(FrameId(7)), 3);
/// hits.reset(FrameId(7)); // another page lies in the frame now
/// assert_eq!(hits.get(FrameId(7)), 0);
/// ```
pub struct HitTable {
    words: LazyArray<AtomicU32>,
    mode: HitMode,
    /// The value of a word that a hit does not change: the maximum of a counter, or the logical
    /// time.
    full: AtomicU32,
}

impl HitTable {
    /// A table for frames below `max_frames`. Uses memory only for frames that are used.
    ///
    /// # Panics
    /// If the process has no address space left for it.
    pub fn new(mode: HitMode, max_frames: usize) -> HitTable {
        let words = LazyArray::new(max_frames).expect("address space for the hit table");
        let full = match mode {
            HitMode::Count { max } => max,
            HitMode::Ignore | HitMode::Timestamp => 0,
        };
        HitTable { words, mode, full: AtomicU32::new(full) }
    }

    /// How hits are recorded.
    pub fn mode(&self) -> HitMode {
        self.mode
    }

    /// Records a hit. Called without any lock.
    #[inline]
    pub fn hit(&self, frame: FrameId) {
        let word = &self.words[frame.0 as usize];
        let (value, full) = (word.load(Ordering::Relaxed), self.full.load(Ordering::Relaxed));
        // Nearly always equal for a page that is hit often: one comparison, whatever the mode.
        if value != full {
            self.change(word, value, full);
        }
    }

    #[inline(never)]
    fn change(&self, word: &AtomicU32, value: u32, full: u32) {
        match self.mode {
            HitMode::Ignore => {}
            // A policy may have set a larger value.
            HitMode::Count { .. } if value < full => word.store(value + 1, Ordering::Relaxed),
            HitMode::Count { .. } => {}
            HitMode::Timestamp => word.store(full, Ordering::Relaxed),
        }
    }

    /// Resets `frame` for a new page: clears its count, or advances the logical time by one and
    /// stamps the frame with it.
    ///
    /// The cache calls this under its policy lock before each
    /// [`Policy::inserted`](super::Policy::inserted), so that no page inherits the hits of an
    /// evicted one.
    pub fn reset(&self, frame: FrameId) {
        let value = match self.mode {
            HitMode::Ignore => return,
            HitMode::Count { .. } => 0,
            HitMode::Timestamp => {
                // A load and a store suffice: the policy lock makes this the only writer.
                let now = self.full.load(Ordering::Relaxed).wrapping_add(1);
                self.full.store(now, Ordering::Relaxed);
                now
            }
        };
        self.set(frame, value);
    }

    /// The value recorded for `frame`: a count or a time.
    #[inline]
    pub fn get(&self, frame: FrameId) -> u32 {
        self.words[frame.0 as usize].load(Ordering::Relaxed)
    }

    /// Sets the value recorded for `frame`.
    #[inline]
    pub fn set(&self, frame: FrameId, value: u32) {
        self.words[frame.0 as usize].store(value, Ordering::Relaxed);
    }

    /// The logical time: insertions so far, wrapping. 0 unless the mode is [`HitMode::Timestamp`].
    pub fn now(&self) -> u32 {
        match self.mode {
            HitMode::Timestamp => self.full.load(Ordering::Relaxed),
            HitMode::Ignore | HitMode::Count { .. } => 0,
        }
    }

    /// How many insertions ago `frame` was last hit or loaded ([`HitMode::Timestamp`] only).
    #[inline]
    pub fn age(&self, frame: FrameId) -> u32 {
        self.now().wrapping_sub(self.get(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_count_insertions_and_wrap() {
        let hits = HitTable::new(HitMode::Timestamp, 2);
        hits.full.store(u32::MAX, Ordering::Relaxed);
        hits.hit(FrameId(0));
        hits.reset(FrameId(1));
        assert_eq!(hits.now(), 0);
        assert_eq!(hits.age(FrameId(0)), 1);
        assert_eq!(hits.age(FrameId(1)), 0);
        hits.hit(FrameId(0));
        assert_eq!(hits.age(FrameId(0)), 0);
    }

    #[test]
    fn ignored_hits_leave_no_trace() {
        let hits = HitTable::new(HitMode::Ignore, 1);
        hits.hit(FrameId(0));
        hits.reset(FrameId(0));
        assert_eq!((hits.get(FrameId(0)), hits.now()), (0, 0));
    }
}
