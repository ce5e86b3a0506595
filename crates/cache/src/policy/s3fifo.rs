//! S3-FIFO: three FIFO queues that evict pages used once early.
//!
//! J. Yang, Y. Zhang, Z. Qiu, Y. Yue and K. V. Rashmi, "FIFO Queues are All You Need for Cache
//! Eviction", SOSP 2023, algorithm 1. New pages enter the *small* queue, a tenth of the frames. At
//! the end of *small*, a page with two hits or more moves to the *main* queue; any other page is
//! evicted and remembered in the *ghost* queue, and if it is loaded again soon it enters *main* at
//! once. *main* is a CLOCK with counters up to 3.
//!
//! ```text
//!   miss ─────────────▶ small (1/10) ── hit twice ──▶ main (9/10) ◀─┐ hit: count − 1
//!     │                     └─ evicted, into ghost ─┐   └───────────┘
//!     └─ found in ghost ──▶ main                    ▼   └─ evicted
//!                                       ghost (as many entries as main)
//! ```
//!
//! In three places the paper leaves a choice:
//! * *small* or *main*: the paper evicts from *small* if it has a tenth of the frames or more; we
//!   evict from *main* if it has more than nine tenths. In a full cache that is the same; within a
//!   batch the paper's condition would evict from *main* as soon as *small* has given one page.
//! * When a promotion overfills *main*, a page of *main* is evicted and the call ends; the paper's
//!   pseudocode evicts one of *small* as well.
//! * Counters are cleared on promotion (the paper's text, not its pseudocode).
//!
//! Frames that the application demoted wait in a separate queue that is emptied first.
//!
//! Limits: hits must be visible. A page whose second use comes after it has left both *small* and
//! *ghost* never enters *main*. In caches of a few dozen frames a tenth is too few to judge by.
//! With batches larger than *small*, pages are judged before they had time to be hit.

use super::ghost::Ghost;
use super::list::{Links, Queue};
use super::{HitMode, HitTable, Policy, pass_limit};
use crate::ids::{FrameId, PageKey};

/// Hits in *small* that promote a page to *main*.
const PROMOTION_HITS: u32 = 2;

/// The queue that a linked frame is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Small,
    Main,
    Demoted,
}

/// S3-FIFO. See the [policies' table](super).
#[derive(Debug, Default)]
pub struct S3Fifo {
    links: Links,
    small: Queue,
    main: Queue,
    demoted: Queue,
    /// By frame; meaningless for a frame that is not linked.
    places: Vec<Place>,
    ghost: Ghost,
    main_target: usize,
}

impl S3Fifo {
    /// Empty queues.
    pub fn new() -> S3Fifo {
        S3Fifo::default()
    }

    fn queue(&mut self, place: Place) -> (&mut Queue, &mut Links) {
        let queue = match place {
            Place::Small => &mut self.small,
            Place::Main => &mut self.main,
            Place::Demoted => &mut self.demoted,
        };
        (queue, &mut self.links)
    }

    fn push(&mut self, place: Place, frame: FrameId) {
        self.places[frame.0 as usize] = place;
        let (queue, links) = self.queue(place);
        queue.push_newest(links, frame);
    }

    fn unlink(&mut self, frame: FrameId) {
        let (queue, links) = self.queue(self.places[frame.0 as usize]);
        queue.remove(links, frame);
    }

    fn admit(&mut self, frame: FrameId, place: Place, hits: &HitTable) {
        hits.set(frame, 0);
        self.push(place, frame);
    }

    /// The frame that is judged next, and its queue.
    fn candidate(&self) -> Option<(FrameId, Place)> {
        let place = if self.demoted.len() > 0 {
            Place::Demoted
        } else if self.small.len() == 0 || self.main.len() > self.main_target {
            Place::Main
        } else {
            Place::Small
        };
        let queue = match place {
            Place::Small => &self.small,
            Place::Main => &self.main,
            Place::Demoted => &self.demoted,
        };
        Some((queue.oldest(&self.links)?, place))
    }

    /// Spares `frame` if it has enough hits for its queue; returns whether it did.
    fn spare(&mut self, frame: FrameId, place: Place, hits: &HitTable) -> bool {
        let count = hits.get(frame);
        match place {
            Place::Small if count >= PROMOTION_HITS => {}
            Place::Demoted if count > 0 => {}
            Place::Main if count > 0 => {
                hits.set(frame, count - 1);
                self.main.rotate(&self.links);
                return true;
            }
            _ => return false,
        }
        self.unlink(frame);
        self.admit(frame, Place::Main, hits);
        true
    }

    #[cfg(test)]
    pub(super) fn make_ghost_exact(&mut self) {
        self.ghost.resize_with_slack(self.main_target, 64);
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3-fifo"
    }

    fn hit_mode(&self) -> HitMode {
        HitMode::Count { max: 3 }
    }

    fn resize(&mut self, frames: usize, max_frames: usize) {
        self.links.grow(max_frames);
        self.places.resize(max_frames, Place::Small);
        self.main_target = frames - (frames / 10).max(1).min(frames);
        self.ghost.resize(self.main_target);
    }

    fn inserted(&mut self, frame: FrameId, page: PageKey, _hits: &HitTable) {
        let place = if self.ghost.take(page).is_some() { Place::Main } else { Place::Small };
        self.push(place, frame);
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
        let enough = victims.len() + want;
        let mut passes_left = pass_limit(want);
        while victims.len() < enough
            && let Some((frame, place)) = self.candidate()
        {
            if passes_left > 0 && self.spare(frame, place, hits) {
                passes_left -= 1;
                continue;
            }
            self.unlink(frame);
            if place == Place::Small {
                self.ghost.insert(page_of(frame));
            }
            victims.push(frame);
            if passes_left == 0 {
                break;
            }
        }
    }

    /// Puts the frame back into its queue: only victims of *small* are in the ghost queue.
    fn returned(&mut self, frame: FrameId, page: PageKey, _hits: &HitTable) {
        let place = if self.ghost.take(page).is_some() { Place::Small } else { Place::Main };
        self.push(place, frame);
    }

    fn demoted(&mut self, frame: FrameId, hits: &HitTable) {
        if self.links.linked(frame) {
            self.unlink(frame);
            self.admit(frame, Place::Demoted, hits);
        }
    }
}
