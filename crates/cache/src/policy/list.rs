//! Queues of frames as circular doubly linked lists threaded through one array.
//!
//! Each frame has one [`Link`] and so can be in one queue at a time; any number of queues share the
//! array. Every operation is O(1) and touches at most three links; only [`Links::grow`] allocates.
//! A queue is a ring with a reference to its newest frame; the frame after the newest is the
//! oldest:
//!
//! ```text
//!          newest ──newer──▶ oldest ──newer──▶ … ──newer──▶ newest
//! ```
//!
//! So giving the oldest frame another lap changes one index and no link, and SIEVE's hand wraps by
//! itself.
//!
//! Invariant: a frame's links are both [`NONE`] or both name frames of the queue it is in. The
//! caller knows which queue that is.

use crate::ids::FrameId;

/// No frame.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
}

const UNLINKED: Link = Link { older: NONE, newer: NONE };

/// The links of all frames.
#[derive(Debug, Default)]
pub(super) struct Links(Vec<Link>);

impl Links {
    /// Makes room for frames below `max_frames`.
    pub(super) fn grow(&mut self, max_frames: usize) {
        assert!(max_frames < NONE as usize, "frame identifiers are 32 bits wide");
        assert!(max_frames >= self.0.len(), "the number of frame identifiers never falls");
        self.0.reserve_exact(max_frames - self.0.len());
        self.0.resize(max_frames, UNLINKED);
    }

    /// Whether `frame` is in a queue.
    pub(super) fn linked(&self, frame: FrameId) -> bool {
        self.0[frame.0 as usize].newer != NONE
    }

    /// The next newer frame after `frame`; after the newest, the oldest.
    pub(super) fn newer(&self, frame: FrameId) -> FrameId {
        FrameId(self.0[frame.0 as usize].newer)
    }

    /// Links `frame` between `at` and the next older frame.
    fn insert_before(&mut self, frame: u32, at: u32) {
        let older = self.0[at as usize].older;
        self.0[frame as usize] = Link { older, newer: at };
        self.0[older as usize].newer = frame;
        self.0[at as usize].older = frame;
    }
}

/// One queue. See the module's documentation.
#[derive(Debug)]
pub(super) struct Queue {
    newest: u32,
    len: usize,
}

impl Default for Queue {
    fn default() -> Queue {
        Queue { newest: NONE, len: 0 }
    }
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn oldest(&self, links: &Links) -> Option<FrameId> {
        (self.len > 0).then(|| links.newer(FrameId(self.newest)))
    }

    pub(super) fn push_newest(&mut self, links: &mut Links, frame: FrameId) {
        self.push_oldest(links, frame);
        self.newest = frame.0;
    }

    pub(super) fn push_oldest(&mut self, links: &mut Links, frame: FrameId) {
        debug_assert!(!links.linked(frame), "{frame:?} is held already");
        if self.len == 0 {
            links.0[frame.0 as usize] = Link { older: frame.0, newer: frame.0 };
            self.newest = frame.0;
        } else {
            let oldest = links.0[self.newest as usize].newer;
            links.insert_before(frame.0, oldest);
        }
        self.len += 1;
    }

    /// Inserts `frame` on the older side of `at`, which must be in this queue.
    pub(super) fn insert_before(&mut self, links: &mut Links, frame: FrameId, at: FrameId) {
        debug_assert!(!links.linked(frame), "{frame:?} is held already");
        links.insert_before(frame.0, at.0);
        self.len += 1;
    }

    /// Makes the oldest frame the newest.
    pub(super) fn rotate(&mut self, links: &Links) {
        if let Some(oldest) = self.oldest(links) {
            self.newest = oldest.0;
        }
    }

    /// Removes `frame`, which must be in this queue.
    pub(super) fn remove(&mut self, links: &mut Links, frame: FrameId) {
        let link = std::mem::replace(&mut links.0[frame.0 as usize], UNLINKED);
        self.len -= 1;
        if self.len == 0 {
            self.newest = NONE;
            return;
        }
        links.0[link.older as usize].newer = link.newer;
        links.0[link.newer as usize].older = link.older;
        if self.newest == frame.0 {
            self.newest = link.older;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Two queues over one array against two `VecDeque`s (front = oldest).
        #[test]
        fn queues_behave_as_deques(ops in prop::collection::vec((0u8..6, 0u32..12, 0usize..2), 0..200)) {
            let mut links = Links::default();
            links.grow(12);
            let mut queues = [Queue::default(), Queue::default()];
            let mut models: [VecDeque<u32>; 2] = Default::default();
            for (op, id, which) in ops {
                let frame = FrameId(id);
                let home = models.iter().position(|model| model.contains(&id));
                prop_assert_eq!(links.linked(frame), home.is_some());
                let (queue, model) = (&mut queues[which], &mut models[which]);
                match (op, home) {
                    (0, None) => {
                        queue.push_newest(&mut links, frame);
                        model.push_back(id);
                    }
                    (1, None) => {
                        queue.push_oldest(&mut links, frame);
                        model.push_front(id);
                    }
                    (2, None) if !model.is_empty() => {
                        let slot = id as usize % model.len();
                        queue.insert_before(&mut links, frame, FrameId(model[slot]));
                        model.insert(slot, id);
                    }
                    (3, _) => {
                        queue.rotate(&links);
                        if !model.is_empty() {
                            model.rotate_left(1);
                        }
                    }
                    (4, Some(home)) => {
                        queues[home].remove(&mut links, frame);
                        models[home].retain(|&other| other != id);
                    }
                    (5, _) => {
                        let oldest = queue.oldest(&links);
                        oldest.into_iter().for_each(|frame| queue.remove(&mut links, frame));
                        let popped = oldest.map(|frame| frame.0);
                        prop_assert_eq!(popped, model.pop_front());
                    }
                    _ => {}
                }
                for (queue, model) in queues.iter().zip(&models) {
                    prop_assert_eq!(queue.len(), model.len());
                    let mut walked = VecDeque::new();
                    let mut next = queue.oldest(&links);
                    while let Some(frame) = next.filter(|_| walked.len() < model.len()) {
                        walked.push_back(frame.0);
                        next = Some(links.newer(frame));
                    }
                    prop_assert_eq!(&walked, model);
                }
            }
        }
    }
}
