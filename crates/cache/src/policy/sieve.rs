//! SIEVE: CLOCK in which survivors keep their place.
//!
//! Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson and K. V. Rashmi, "SIEVE is Simpler than LRU: an
//! Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI 2024, algorithm 1. Pages are in
//! order of insertion. A hand moves from the oldest towards the newest and back to the oldest; it
//! clears the bit of a page that was hit and evicts the first that was not. New pages are inserted
//! at the newest end and not at the hand. So once the hand has passed the popular pages, it works
//! among the new ones, and most pages used once are evicted quickly, without affecting the popular
//! ones.
//!
//! Limits: not resistant to repeated scans (the authors say so of block workloads): a page seen
//! twice during one round of the hand counts as popular. Slow to evict pages that are no longer
//! popular. A loop one page longer than the cache never hits.

use super::list::{Links, Queue};
use super::{HitMode, HitTable, Policy, pass_limit};
use crate::ids::{FrameId, PageKey};

/// SIEVE. See the [policies' table](super).
#[derive(Debug, Default)]
pub struct Sieve {
    links: Links,
    queue: Queue,
    /// The next frame to examine; `None` means the oldest.
    hand: Option<FrameId>,
}

impl Sieve {
    /// An empty queue.
    pub fn new() -> Sieve {
        Sieve::default()
    }

    /// Removes `frame` from the queue; if the hand was there it moves to the next frame.
    fn unlink(&mut self, frame: FrameId) {
        if self.hand == Some(frame) {
            self.hand = (self.queue.len() > 1).then(|| self.links.newer(frame));
        }
        self.queue.remove(&mut self.links, frame);
    }
}

impl Policy for Sieve {
    fn name(&self) -> &'static str {
        "sieve"
    }

    fn hit_mode(&self) -> HitMode {
        HitMode::Count { max: 1 }
    }

    fn resize(&mut self, _frames: usize, max_frames: usize) {
        self.links.grow(max_frames);
    }

    fn inserted(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        self.queue.push_newest(&mut self.links, frame);
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
        _page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    ) {
        let enough = victims.len() + want;
        let mut passes_left = pass_limit(want);
        while victims.len() < enough
            && let Some(frame) = self.hand.or_else(|| self.queue.oldest(&self.links))
        {
            if passes_left > 0 && hits.get(frame) > 0 {
                hits.set(frame, 0);
                self.hand = Some(self.links.newer(frame));
                passes_left -= 1;
                continue;
            }
            self.hand = Some(frame);
            self.unlink(frame);
            victims.push(frame);
            if passes_left == 0 {
                break;
            }
        }
    }

    fn returned(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        self.queue.push_newest(&mut self.links, frame);
    }

    /// Puts the frame at the hand.
    fn demoted(&mut self, frame: FrameId, hits: &HitTable) {
        if !self.links.linked(frame) {
            return;
        }
        hits.set(frame, 0);
        self.unlink(frame);
        match self.hand {
            Some(hand) => self.queue.insert_before(&mut self.links, frame, hand),
            None => self.queue.push_oldest(&mut self.links, frame),
        }
        self.hand = Some(frame);
    }
}
