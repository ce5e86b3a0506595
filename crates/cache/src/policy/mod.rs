//! Eviction policies: which pages leave when DRAM is short.
//!
//! The cache records *hits* itself, in a [`HitTable`] with one atomic word a frame, so that a hit costs
//! at most one relaxed load and one relaxed store and never a lock. A policy is told of insertions and
//! removals, and reads the hit table when it is asked for victims: lazy promotion, as SIEVE, S3-FIFO and
//! CLOCK have it by construction.
//!
//! # Contract
//! * Every method with `&mut self` runs under the cache's policy lock, possibly inside a signal handler:
//!   it allocates nothing, logs nothing and never touches mapped memory. Memory is taken in
//!   [`Policy::resize`] only, which is never called from the fault path.
//! * A frame handed out by [`Policy::victims`] has left the policy. If it cannot be evicted after all (it
//!   was pinned), the cache gives it back with [`Policy::returned`].

use std::sync::atomic::{AtomicU32, Ordering};

use crate::ids::{FrameId, PageKey};

/// How hits are recorded for a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HitMode {
    /// Hits do not matter.
    Ignore,
    /// A counter that saturates at `max`.
    Count {
        /// Where the counter stops.
        max: u32,
    },
    /// The cache's logical time (insertions so far) of the last hit.
    Timestamp,
}

/// An eviction policy. See the module documentation for the contract.
pub trait Policy: Send {
    /// Its name, for statistics.
    fn name(&self) -> &'static str;

    /// How hits are to be recorded.
    fn hit_mode(&self) -> HitMode;

    /// The pool may hold up to `frames` frames from now on, with identifiers below `max_frames`.
    /// Called once before anything else, and again when the budget changes. May allocate.
    fn resize(&mut self, frames: usize, max_frames: usize);

    /// `frame` now holds `page`, loaded by a miss.
    fn inserted(&mut self, frame: FrameId, page: PageKey, hits: &HitTable);

    /// `frame` was emptied for another reason than `victims` (a truncation, a device detached).
    fn removed(&mut self, frame: FrameId);

    /// Appends up to `want` frames to `victims`, best victim first, and forgets them. `page_of` tells
    /// which page a frame holds. Must return at least one frame if it holds any.
    fn victims(
        &mut self,
        want: usize,
        hits: &HitTable,
        page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    );

    /// A victim could not be evicted; the policy holds it again.
    fn returned(&mut self, frame: FrameId, page: PageKey);

    /// The application said it will not need this frame soon: a good next victim.
    fn demoted(&mut self, frame: FrameId) {
        let _ = frame;
    }
}

/// One word a frame in which hits are recorded without a lock.
pub struct HitTable {
    words: Box<[AtomicU32]>,
    mode: HitMode,
    now: AtomicU32,
}

impl HitTable {
    /// A table for frames below `max_frames`.
    pub fn new(mode: HitMode, max_frames: usize) -> HitTable {
        HitTable {
            words: (0..max_frames).map(|_| AtomicU32::new(0)).collect(),
            mode,
            now: AtomicU32::new(1),
        }
    }

    /// Records a hit. Relaxed throughout: a lost increment costs a little accuracy and nothing else.
    #[inline]
    pub fn hit(&self, frame: FrameId) {
        let word = &self.words[frame.0 as usize];
        match self.mode {
            HitMode::Ignore => {}
            HitMode::Count { max } => {
                let count = word.load(Ordering::Relaxed);
                if count < max {
                    word.store(count + 1, Ordering::Relaxed);
                }
            }
            HitMode::Timestamp => word.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed),
        }
    }

    /// What is recorded for `frame`: a count or a time.
    #[inline]
    pub fn get(&self, frame: FrameId) -> u32 {
        self.words[frame.0 as usize].load(Ordering::Relaxed)
    }

    /// Sets what is recorded for `frame`.
    #[inline]
    pub fn set(&self, frame: FrameId, value: u32) {
        self.words[frame.0 as usize].store(value, Ordering::Relaxed);
    }

    /// The logical time: insertions so far, wrapping.
    pub fn now(&self) -> u32 {
        self.now.load(Ordering::Relaxed)
    }

    /// Advances the logical time by one insertion. The caller holds the policy lock.
    pub fn tick(&self) -> u32 {
        let now = self.now.load(Ordering::Relaxed).wrapping_add(1);
        self.now.store(now, Ordering::Relaxed);
        now
    }
}
