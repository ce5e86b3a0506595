//! CLOCK: FIFO in which a page that was hit gets another lap.
//!
//! F. J. Corbató, "A Paging Experiment with the Multics System", MIT Project MAC report MAC-M-384,
//! 1968. Frames form a circle. A hand moves around it, clears the bit of each frame that was hit
//! since its last visit, and evicts the first frame that was not.
//!
//! One choice is ours: a page is inserted with its bit *clear*, so the access that loaded it does
//! not count, and a page used once is evicted after one lap. (In Multics the hardware set the bit
//! on the access that had faulted; then a page read once by a scan stays two laps.)
//!
//! Limits: one bit does not distinguish one hit from many, so a scan of one lap evicts the pages
//! that were not hit during that lap, and a loop one page longer than the cache never hits. If
//! every page has been hit, the hand moves a whole lap for one victim; `pass_limit` cuts that
//! short.

use super::list::{Links, Queue};
use super::{HitMode, HitTable, Policy, pass_limit};
use crate::ids::{FrameId, PageKey};

/// CLOCK. See the [policies' table](super).
#[derive(Debug, Default)]
pub struct Clock {
    links: Links,
    /// The hand is at the oldest frame.
    circle: Queue,
}

impl Clock {
    /// An empty circle.
    pub fn new() -> Clock {
        Clock::default()
    }
}

impl Policy for Clock {
    fn name(&self) -> &'static str {
        "clock"
    }

    fn hit_mode(&self) -> HitMode {
        HitMode::Count { max: 1 }
    }

    fn resize(&mut self, _frames: usize, max_frames: usize) {
        self.links.grow(max_frames);
    }

    fn inserted(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        self.circle.push_newest(&mut self.links, frame);
    }

    fn removed(&mut self, frame: FrameId) {
        if self.links.linked(frame) {
            self.circle.remove(&mut self.links, frame);
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
            && let Some(frame) = self.circle.oldest(&self.links)
        {
            if passes_left > 0 && hits.get(frame) > 0 {
                hits.set(frame, 0);
                self.circle.rotate(&self.links);
                passes_left -= 1;
                continue;
            }
            self.circle.remove(&mut self.links, frame);
            victims.push(frame);
            if passes_left == 0 {
                break;
            }
        }
    }

    fn returned(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        self.circle.push_newest(&mut self.links, frame);
    }

    fn demoted(&mut self, frame: FrameId, hits: &HitTable) {
        if self.links.linked(frame) {
            hits.set(frame, 0);
            self.circle.remove(&mut self.links, frame);
            self.circle.push_oldest(&mut self.links, frame);
        }
    }
}
