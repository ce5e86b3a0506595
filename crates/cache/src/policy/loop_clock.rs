//! CLOCK that keeps a part of a loop.
//!
//! CLOCK, like LRU, never hits in a loop that is longer than the cache: each page is evicted just
//! before it comes again. Any fixed part of the loop would be hit as often as it has pages. This
//! policy is [CLOCK](super::Clock) until it finds a loop. Then it keeps what it holds, and lets new
//! pages pass through a short queue.
//!
//! ```text
//!   no loop:   miss ─▶ circle ─▶ evicted
//!   a loop:    miss ─▶ fresh (1/32) ─▶ evicted        circle: kept
//! ```
//!
//! **Finding it.** The policy remembers evicted pages, one in sixteen by hash, and at each miss on
//! such a page how many evictions ago it was evicted. In a loop that is always the same number, the
//! *gap*: the length of the loop less the cache's. With random accesses it varies (popular pages
//! return soon, others late), and in a single pass no page returns. Hits are not needed, so it also
//! works for mappings, where they are invisible.
//!
//! **Keeping it no longer than it pays.** Misses without that gap end it. So do *probes*: a few of
//! the kept pages are evicted, and must return within two passes. The next decision then needs twice
//! the evidence.
//!
//! Loops longer than four times the cache are not found: keeping a part would save less than a
//! quarter.

use super::ghost::{Ghost, hash_of};
use super::list::{Links, Queue};
use super::{HitMode, HitTable, Policy, pass_limit};
use crate::ids::{FrameId, PageKey};

/// One page in so many is remembered after its eviction.
const SAMPLE_ONE_IN: usize = 16;
/// The longest gap that is remembered, in caches.
const MOST_GAP: usize = 3;
/// The part of the frames that a loop passes through, and its least number of frames: more than a
/// batch of victims.
const FRESH_PART: usize = 32;
const FEWEST_FRESH: usize = 64;
/// Evidence for a loop, and against it: misses on this part of the frames.
const FOR_PART: usize = 4;
const AGAINST_PART: usize = 8;
const FEWEST_SAMPLES: usize = 8;
const MOST_DOUBT: usize = 32;
/// The part of the frames whose pages are probes.
const PROBE_PART: usize = 128;

/// CLOCK that keeps a part of a loop. See the [policies' table](super).
#[derive(Debug, Default)]
pub struct LoopClock {
    links: Links,
    /// The hand is at the oldest frame.
    circle: Queue,
    /// Pages of a loop that is being kept; otherwise what is left of it.
    fresh: Queue,
    /// By frame; meaningless for a frame that is not linked.
    is_fresh: Vec<bool>,
    frames: usize,
    evicted: Ghost,
    /// Pages evicted so far.
    evictions: u64,
    /// Sampled evictions between an eviction and the return, as last seen.
    gap: u32,
    for_it: usize,
    against_it: usize,
    /// Times the normal evidence that the next decision needs; 0 is 1.
    doubt: usize,
    keeping: Option<Keeping>,
    probes: Ghost,
}

/// While a loop is being kept.
#[derive(Debug)]
struct Keeping {
    /// Probes that are still to be evicted.
    to_probe: usize,
    /// Probes that returned.
    returned: usize,
    /// When they are counted, in evictions.
    check_at: u64,
}

impl LoopClock {
    /// An empty circle.
    pub fn new() -> LoopClock {
        LoopClock::default()
    }

    fn is_sampled(page: PageKey) -> bool {
        // Bits that neither the bucket nor the fingerprint of the ghost queue depends on much.
        (hash_of(page) >> 20).is_multiple_of(SAMPLE_ONE_IN as u64)
    }

    fn window(&self) -> usize {
        match self.keeping {
            Some(_) => (self.frames / FRESH_PART).max(FEWEST_FRESH).min(self.frames / 2),
            None => 0,
        }
    }

    fn samples(&self, part: usize) -> usize {
        (self.frames / (SAMPLE_ONE_IN * part)).max(FEWEST_SAMPLES)
    }

    fn probe_count(&self) -> usize {
        (self.frames / PROBE_PART).max(FEWEST_SAMPLES)
    }

    /// A sampled page was loaded.
    fn watch(&mut self, page: PageKey) {
        let age = self.evicted.take(page);
        let is_same = age.is_some_and(|age| age.abs_diff(self.gap) <= self.gap / 8 + 2);
        if let Some(age) = age {
            self.gap = age;
        }
        if is_same {
            self.for_it += 1;
            self.against_it = self.against_it.saturating_sub(1);
            let is_enough = self.for_it >= self.samples(FOR_PART) * self.doubt.max(1);
            if self.keeping.is_none() && is_enough {
                self.against_it = 0;
                self.start_probes();
            }
        } else {
            self.for_it = self.for_it.saturating_sub(4);
            self.against_it += 1;
            if self.keeping.is_some() && self.against_it >= self.samples(AGAINST_PART) {
                self.give_up();
            }
        }
    }

    fn start_probes(&mut self) {
        let passes = 2 * u64::from(self.gap) * SAMPLE_ONE_IN as u64;
        let to_probe = self.probe_count();
        let check_at = self.evictions + passes + to_probe as u64 + self.frames as u64 / 16;
        self.keeping = Some(Keeping { to_probe, returned: 0, check_at });
    }

    fn check_probes(&mut self) {
        let Some(keeping) = &self.keeping else { return };
        if self.evictions < keeping.check_at {
            return;
        }
        if (keeping.returned + keeping.to_probe) * 2 < self.probe_count() {
            self.give_up();
        } else {
            self.doubt = 0;
            self.start_probes();
        }
    }

    fn give_up(&mut self) {
        self.keeping = None;
        (self.for_it, self.against_it) = (0, 0);
        self.doubt = (self.doubt.max(1) * 2).min(MOST_DOUBT);
    }

    fn push(&mut self, frame: FrameId, is_fresh: bool) {
        self.is_fresh[frame.0 as usize] = is_fresh;
        let queue = if is_fresh { &mut self.fresh } else { &mut self.circle };
        queue.push_newest(&mut self.links, frame);
    }

    fn unlink(&mut self, frame: FrameId) {
        let is_fresh = self.is_fresh[frame.0 as usize];
        let queue = if is_fresh { &mut self.fresh } else { &mut self.circle };
        queue.remove(&mut self.links, frame);
    }
}

impl Policy for LoopClock {
    fn name(&self) -> &'static str {
        "loop-clock"
    }

    fn hit_mode(&self) -> HitMode {
        HitMode::Count { max: 1 }
    }

    fn resize(&mut self, frames: usize, max_frames: usize) {
        self.links.grow(max_frames);
        if self.is_fresh.is_empty() {
            // Zeroed by the system: takes memory only where frames are used.
            self.is_fresh = vec![false; max_frames];
        }
        self.is_fresh.resize(max_frames, false);
        self.frames = frames;
        self.evicted.resize(frames * MOST_GAP / SAMPLE_ONE_IN);
        self.probes.resize(2 * self.probe_count());
        // The gap changes with the size.
        self.keeping = None;
        (self.for_it, self.against_it) = (0, 0);
    }

    fn inserted(&mut self, frame: FrameId, page: PageKey, _hits: &HitTable) {
        if let Some(keeping) = &mut self.keeping
            && self.probes.take(page).is_some()
        {
            keeping.returned += 1;
            self.push(frame, false);
            return;
        }
        if LoopClock::is_sampled(page) {
            self.watch(page);
        }
        self.push(frame, self.keeping.is_some());
    }

    fn removed(&mut self, frame: FrameId) {
        if self.links.linked(frame) {
            self.unlink(frame);
        }
    }

    fn victims(
        &mut self,
        want: usize,
        hits: &HitTable,
        page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    ) {
        self.check_probes();
        let enough = victims.len() + want;
        let mut passes_left = pass_limit(want);
        while victims.len() < enough {
            let is_keeping = self.keeping.is_some();
            let is_probe = self.keeping.as_ref().is_some_and(|keeping| keeping.to_probe > 0);
            let from_fresh = !is_probe && self.fresh.len() > self.window();
            let first = if from_fresh { &self.fresh } else { &self.circle };
            let second = if from_fresh { &self.circle } else { &self.fresh };
            let oldest = first.oldest(&self.links).or_else(|| second.oldest(&self.links));
            let Some(frame) = oldest else { break };
            // A page that was read ahead and then read has been hit, too: in a loop, hits of fresh
            // pages say nothing.
            let passes = is_keeping && self.is_fresh[frame.0 as usize];
            if passes_left > 0 && !is_probe && !passes && hits.get(frame) > 0 {
                hits.set(frame, 0);
                self.unlink(frame);
                self.push(frame, false);
                passes_left -= 1;
                continue;
            }
            self.unlink(frame);
            victims.push(frame);
            self.evictions += 1;
            let page = page_of(frame);
            match &mut self.keeping {
                Some(keeping) if keeping.to_probe > 0 => {
                    keeping.to_probe -= 1;
                    self.probes.insert(page);
                }
                _ if LoopClock::is_sampled(page) => self.evicted.insert(page),
                _ => {}
            }
            if passes_left == 0 {
                break;
            }
        }
    }

    fn returned(&mut self, frame: FrameId, page: PageKey, _hits: &HitTable) {
        let was_probe = self.probes.take(page).is_some();
        if !was_probe && LoopClock::is_sampled(page) {
            self.evicted.take(page);
        }
        self.push(frame, false);
    }

    fn demoted(&mut self, frame: FrameId, hits: &HitTable) {
        if self.links.linked(frame) {
            hits.set(frame, 0);
            self.unlink(frame);
            let is_fresh = self.fresh.len() > self.window();
            self.is_fresh[frame.0 as usize] = is_fresh;
            let queue = if is_fresh { &mut self.fresh } else { &mut self.circle };
            queue.push_oldest(&mut self.links, frame);
        }
    }
}
