//! The states of the slots of one ring. Bit sets only: this module knows no addresses and makes no
//! system calls, and the caller holds the lock.
//!
//! ```text
//!            take                    retire                 claim                  finish
//!  Empty ───────────▶ Taken ───────────────────▶ Retired ─────────▶ Claimed ─────────────────▶ Drained or Empty
//!    ▲                  ▲                                              ▲                            │
//!    │                  └────────────── take ──────────────────────────│────────────────────────────┤
//!    │                                                                 └──── claim (Idle::Any) ─────┘
//!    └── a hole that was closed again
//!
//!            free   holds  retired   at its addresses
//!  Empty      1      0       0       the reservation
//!  Drained    1      1       0       an unused mapping without page-table entries, which keeps its file open
//!  Taken      0      1       0       a mapping in use, or being made
//!  Retired    0      1       1       an unused mapping with its page-table entries
//!  Claimed    0      1       0       as before, while one thread unmaps it
//!  Hole       0      0       0       nothing, or a foreign mapping (has its own bit set)
//! ```
//! Taken and Claimed have the same bits: only the thread that took or claimed a slot may change it.
//!
//! Slots are given out in address order, wrapping around. So neighbours are retired at about the
//! same time, and one call unmaps a run of them.

use std::ops::Range;

use super::unmapping::Left;

const WORD_BITS: usize = u64::BITS as usize;

/// The slots that a claim selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Idle {
    /// Retired ones.
    Retired,
    /// Retired and drained ones.
    Any,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Slots {
    free: Box<[u64]>,
    holds: Box<[u64]>,
    retired: Box<[u64]>,
    holes: Box<[u64]>,
    count: usize,
    /// Where the search for the next slot starts.
    cursor: usize,
    free_count: usize,
    held_count: usize,
    hole_count: usize,
}

fn words(count: usize) -> Box<[u64]> {
    vec![0; count.div_ceil(WORD_BITS)].into()
}

fn has(set: &[u64], slot: usize) -> bool {
    set[slot / WORD_BITS] & (1 << (slot % WORD_BITS)) != 0
}

fn put(set: &mut [u64], slot: usize) {
    set[slot / WORD_BITS] |= 1 << (slot % WORD_BITS);
}

fn remove(set: &mut [u64], slot: usize) {
    set[slot / WORD_BITS] &= !(1 << (slot % WORD_BITS));
}

impl Slots {
    /// Creates `count` empty slots.
    pub fn new(count: usize) -> Slots {
        let mut slots = Slots {
            free: words(count),
            holds: words(count),
            retired: words(count),
            holes: words(count),
            count,
            cursor: 0,
            free_count: count,
            held_count: 0,
            hole_count: 0,
        };
        (0..count).for_each(|slot| put(&mut slots.free, slot));
        slots
    }

    /// The next free slot, searching from the last one taken and wrapping around.
    pub fn next(&self) -> Option<usize> {
        if self.free_count == 0 {
            return None;
        }
        self.find(|word| self.free[word])
    }

    /// The next free slot that holds a mapping: taking it needs no further VMA.
    pub fn next_drained(&self) -> Option<usize> {
        if self.free_count == 0 {
            return None;
        }
        self.find(|word| self.free[word] & self.holds[word])
    }

    fn find(&self, bits: impl Fn(usize) -> u64) -> Option<usize> {
        let (first, within) = (self.cursor / WORD_BITS, self.cursor % WORD_BITS);
        let behind = bits(first) & (u64::MAX << within);
        if behind != 0 {
            return Some(first * WORD_BITS + behind.trailing_zeros() as usize);
        }
        let words = self.free.len();
        // The first word is checked again at the end, for the bits before the cursor.
        (1..=words).map(|step| (first + step) % words).find_map(|word| {
            let found = bits(word);
            (found != 0).then(|| word * WORD_BITS + found.trailing_zeros() as usize)
        })
    }

    /// Whether the slot holds a mapping.
    pub fn holds(&self, slot: usize) -> bool {
        has(&self.holds, slot)
    }

    /// Empty or Drained → Taken.
    pub fn take(&mut self, slot: usize) {
        assert!(has(&self.free, slot), "a slot that is not free was taken");
        remove(&mut self.free, slot);
        self.free_count -= 1;
        if !self.holds(slot) {
            put(&mut self.holds, slot);
            self.held_count += 1;
        }
        self.cursor = (slot + 1) % self.count;
    }

    /// Taken → Retired.
    pub fn retire(&mut self, slot: usize) {
        assert!(
            self.holds(slot) && !has(&self.free, slot) && !has(&self.retired, slot),
            "a slot was retired that was not taken"
        );
        put(&mut self.retired, slot);
    }

    /// Claims at most `most` slots from `from` on, and appends them to `claimed` as runs. Returns
    /// where to continue; the number of slots at the end.
    pub fn claim(
        &mut self,
        which: Idle,
        from: usize,
        most: usize,
        claimed: &mut Vec<Range<usize>>,
    ) -> usize {
        let mut left = most;
        for word in from / WORD_BITS..self.retired.len() {
            let mut idle = self.retired[word];
            if which == Idle::Any {
                idle |= self.free[word] & self.holds[word];
            }
            if word == from / WORD_BITS {
                idle &= u64::MAX << (from % WORD_BITS);
            }
            while idle != 0 {
                if left == 0 {
                    return word * WORD_BITS + idle.trailing_zeros() as usize;
                }
                let slot = word * WORD_BITS + idle.trailing_zeros() as usize;
                idle &= idle - 1;
                left -= 1;
                self.claim_one(slot);
                match claimed.last_mut() {
                    Some(run) if run.end == slot => run.end += 1,
                    _ => claimed.push(slot..slot + 1),
                }
            }
        }
        self.count
    }

    fn claim_one(&mut self, slot: usize) {
        remove(&mut self.retired, slot);
        if has(&self.free, slot) {
            remove(&mut self.free, slot);
            self.free_count -= 1;
        }
    }

    /// Finishes slots that were claimed, or taken and released, with the result of unmapping them.
    pub fn finish(&mut self, run: Range<usize>, left: Left) {
        for slot in run {
            assert!(
                self.holds(slot) && !has(&self.free, slot) && !has(&self.retired, slot),
                "a slot was unmapped that was not claimed"
            );
            if left == Left::Stuck {
                put(&mut self.retired, slot);
                continue;
            }
            if left != Left::Drained {
                remove(&mut self.holds, slot);
                self.held_count -= 1;
            }
            if left == Left::Hole {
                put(&mut self.holes, slot);
                self.hole_count += 1;
            } else {
                put(&mut self.free, slot);
                self.free_count += 1;
            }
        }
    }

    /// The first hole from `from` on.
    pub fn next_hole(&self, from: usize) -> Option<usize> {
        if self.hole_count == 0 {
            return None;
        }
        (from..self.count).find(|&slot| has(&self.holes, slot))
    }

    /// Hole → Empty.
    pub fn close_hole(&mut self, slot: usize) {
        remove(&mut self.holes, slot);
        self.hole_count -= 1;
        put(&mut self.free, slot);
        self.free_count += 1;
    }

    /// Whether there are holes.
    pub fn has_holes(&self) -> bool {
        self.hole_count > 0
    }

    /// Number of free slots.
    pub fn free_count(&self) -> usize {
        self.free_count
    }

    /// Number of free slots that hold a mapping.
    pub fn drained_count(&self) -> usize {
        self.free.iter().zip(&self.holds).map(|(a, b)| (a & b).count_ones() as usize).sum()
    }

    /// Upper bound of the ring's additional VMAs: one for each mapping, and one for each gap
    /// between two. That is twice the mappings, until there is no room for gaps.
    pub fn vmas(&self) -> usize {
        (2 * self.held_count).min(self.count)
    }

    /// The value of [`Slots::vmas`] after one more slot holds a mapping.
    pub fn vmas_with_one_more(&self) -> usize {
        (2 * (self.held_count + 1)).min(self.count)
    }
}
