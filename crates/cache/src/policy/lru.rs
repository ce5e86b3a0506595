//! LRU, approximated by sampling.
//!
//! True LRU moves a page to the head of a list on every hit, under a lock. Here a hit stamps the
//! frame with the cache's logical time, and the order is determined only when a victim is needed,
//! as in Redis since 3.0 (S. Sanfilippo, "Random notes on improving the Redis LRU algorithm", 2016;
//! sampling with a pool goes back to K. Psounis and B. Prabhakar, "A randomized web-cache
//! replacement scheme", INFOCOM 2001). For each victim [`SAMPLES`] random frames are sampled, and
//! the oldest stay in a *pool* of candidates from one call to the next. Unlike in Redis, a
//! candidate is checked again before it is evicted, and dropped if it was hit since it was sampled.
//!
//! **Distance from true LRU.** The oldest of k samples is on average among the oldest 1/(k+1) of
//! the frames. The pool improves on that, because older candidates replace younger ones. On Zipf
//! traces, with or without scans, the hit rate is within 0.002 of true LRU's (tested). On a loop
//! longer than the cache, where LRU never hits, randomness keeps some pages. Two hits between the
//! same two insertions are not distinguished.
//!
//! Limits: those of LRU. A scan of pages used once evicts as many pages as it reads.

use super::{HitMode, HitTable, Policy};
use crate::ids::{FrameId, PageKey};

/// Random frames sampled for each victim. Their words are scattered, so each costs a cache miss,
/// but the misses are independent and overlap.
const SAMPLES: usize = 8;

/// Candidates kept between calls.
const POOL: usize = 32;

/// Age given to demoted frames. A hit makes them young again.
const DEMOTED_AGE: u32 = 1 << 31;

const NOT_HELD: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Candidate {
    frame: FrameId,
    /// The frame's word when it was sampled: a different value means it was hit or reloaded.
    stamp: u32,
}

/// Sampled LRU. See the [policies' table](super).
#[derive(Debug)]
pub struct Lru {
    /// The frames held, demoted ones first, otherwise unordered.
    held: Vec<FrameId>,
    demoted: usize,
    /// By frame: its index in `held`.
    slot_of: Vec<u32>,
    /// Youngest first; at most `POOL`. A frame sampled twice has two candidates; once it is evicted
    /// or hit, neither is valid.
    pool: Vec<Candidate>,
    random: u64,
}

impl Default for Lru {
    fn default() -> Lru {
        Lru::new()
    }
}

impl Lru {
    /// A policy without frames.
    pub fn new() -> Lru {
        Lru {
            held: Vec::new(),
            demoted: 0,
            slot_of: Vec::new(),
            pool: Vec::with_capacity(POOL),
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    fn holds(&self, frame: FrameId) -> bool {
        self.slot_of[frame.0 as usize] != NOT_HELD
    }

    fn place(&mut self, frame: FrameId, slot: usize) {
        self.held[slot] = frame;
        self.slot_of[frame.0 as usize] = slot as u32;
    }

    fn add(&mut self, frame: FrameId) {
        debug_assert!(!self.holds(frame), "{frame:?} is held already");
        debug_assert!(self.held.len() < self.held.capacity(), "more frames than there are");
        self.held.push(frame);
        self.place(frame, self.held.len() - 1);
    }

    /// Removes `frame`: the last demoted frame fills its slot, and the last frame of all fills the
    /// gap.
    fn remove(&mut self, frame: FrameId) {
        let mut slot = self.slot_of[frame.0 as usize] as usize;
        if slot < self.demoted {
            self.demoted -= 1;
            self.place(self.held[self.demoted], slot);
            slot = self.demoted;
        }
        let last = self.held.len() - 1;
        self.place(self.held[last], slot);
        self.held.truncate(last);
        self.slot_of[frame.0 as usize] = NOT_HELD;
    }

    /// A random slot (xorshift64*, S. Vigna 2014; the high half times the length, shifted down).
    fn random_slot(&mut self) -> usize {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let high = self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        ((high * self.held.len() as u64) >> 32) as usize
    }

    fn sample(&mut self, hits: &HitTable) {
        let now = hits.now();
        for _ in 0..SAMPLES {
            let slot = self.random_slot();
            let frame = self.held[slot];
            let stamp = hits.get(frame);
            let older_than =
                |other: &Candidate| now.wrapping_sub(stamp) > now.wrapping_sub(other.stamp);
            if self.pool.len() == POOL {
                if !older_than(&self.pool[0]) {
                    continue;
                }
                self.pool.remove(0);
            }
            let rank = self.pool.partition_point(older_than);
            self.pool.insert(rank, Candidate { frame, stamp });
        }
    }

    /// The oldest candidate that was not hit or reloaded since it was sampled.
    fn oldest_candidate(&mut self, hits: &HitTable) -> Option<FrameId> {
        while let Some(Candidate { frame, stamp }) = self.pool.pop() {
            if self.holds(frame) && hits.get(frame) == stamp {
                return Some(frame);
            }
        }
        None
    }

    /// A demoted frame that was not hit since; frames that were hit become ordinary ones.
    fn demoted_frame(&mut self, hits: &HitTable) -> Option<FrameId> {
        while self.demoted > 0 {
            let frame = self.held[self.demoted - 1];
            if hits.age(frame) >= DEMOTED_AGE / 2 {
                return Some(frame);
            }
            self.demoted -= 1;
        }
        None
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn hit_mode(&self) -> HitMode {
        HitMode::Timestamp
    }

    fn resize(&mut self, _frames: usize, max_frames: usize) {
        assert!(max_frames < NOT_HELD as usize, "frame identifiers are 32 bits wide");
        assert!(max_frames >= self.slot_of.len(), "the number of frame identifiers never falls");
        self.slot_of.resize(max_frames, NOT_HELD);
        self.held.reserve_exact(max_frames - self.held.len());
    }

    fn inserted(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        self.add(frame);
    }

    fn removed(&mut self, frame: FrameId) {
        if self.holds(frame) {
            self.remove(frame);
        }
    }

    fn victims(
        &mut self,
        want: usize,
        hits: &HitTable,
        _page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    ) {
        for _ in 0..want.min(self.held.len()) {
            let frame = match self.demoted_frame(hits) {
                Some(frame) => frame,
                None => {
                    self.sample(hits);
                    // Only hits that race with the sampling can leave no candidate.
                    self.oldest_candidate(hits).unwrap_or(self.held[0])
                }
            };
            self.remove(frame);
            victims.push(frame);
        }
    }

    /// The frame is in use, so it counts as hit now.
    fn returned(&mut self, frame: FrameId, _page: PageKey, hits: &HitTable) {
        hits.set(frame, hits.now());
        self.add(frame);
    }

    fn demoted(&mut self, frame: FrameId, hits: &HitTable) {
        if !self.holds(frame) {
            return;
        }
        hits.set(frame, hits.now().wrapping_sub(DEMOTED_AGE));
        let slot = self.slot_of[frame.0 as usize] as usize;
        if slot >= self.demoted {
            self.place(self.held[self.demoted], slot);
            self.place(frame, self.demoted);
            self.demoted += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{PageId, StoreId};

    #[test]
    fn candidates_hit_since_they_were_sampled_stay() {
        const FRAMES: usize = 1000;
        let page = PageKey { store: StoreId(0), page: PageId(0) };
        let mut policy = Lru::new();
        policy.resize(FRAMES, FRAMES);
        let hits = HitTable::new(policy.hit_mode(), FRAMES);
        for frame in (0..FRAMES as u32).map(FrameId) {
            hits.reset(frame);
            policy.inserted(frame, page, &hits);
        }
        let mut victims = Vec::new();
        for _ in 0..20 {
            policy.victims(1, &hits, &|_| page, &mut victims);
            let pooled: Vec<FrameId> = policy.pool.iter().map(|other| other.frame).collect();
            assert!(!pooled.is_empty());
            pooled.iter().for_each(|&frame| hits.hit(frame));
            policy.victims(1, &hits, &|_| page, &mut victims);
            let victim = victims.pop().expect("there are frames to name");
            assert!(!pooled.contains(&victim), "{victim:?} was hit");
        }
    }
}
