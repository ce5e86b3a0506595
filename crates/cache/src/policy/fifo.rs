//! FIFO: the page that was loaded first is evicted first.
//!
//! It needs no hits, which makes it the policy for hardware-translated mappings, where hits are
//! invisible by design. It gives a page in use no second chance. [`Fifo::with_probation`] requests
//! one from the cache: part of the budget holds copies of victims, and a page that faults while its
//! copy exists is reloaded without I/O and becomes the newest. This is *segmented FIFO* (R. Turner
//! and H. Levy, "Segmented FIFO page replacement", SIGMETRICS 1981; VAX/VMS used it because the VAX
//! had no reference bit): the larger the secondary segment, the closer to LRU, and the more faults
//! need no I/O.
//!
//! Limits: a loop one page longer than the cache never hits, a scan evicts everything, and Belady's
//! anomaly applies (more memory can mean more misses).

use super::list::{Links, Queue};
use super::{HitMode, HitTable, Policy};
use crate::ids::{FrameId, PageKey};

/// First in, first out. See the [policies' table](super).
#[derive(Debug, Default)]
pub struct Fifo {
    links: Links,
    queue: Queue,
    probation_share: f32,
}

impl Fifo {
    /// The share that [`PolicyKind::FifoProbation`](super::PolicyKind::FifoProbation) uses.
    pub const DEFAULT_PROBATION_SHARE: f32 = 0.125;

    /// Plain FIFO.
    pub fn plain() -> Fifo {
        Fifo::default()
    }

    /// FIFO that requests `share` of the budget as a probation area.
    ///
    /// # Panics
    /// Unless `share` is at least 0 and below 1.
    pub fn with_probation(share: f32) -> Fifo {
        assert!((0.0..1.0).contains(&share), "a probation share of {share} is not in 0..1");
        Fifo { probation_share: share, ..Fifo::default() }
    }
}

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        if self.probation_share > 0.0 { "fifo-probation" } else { "fifo" }
    }

    fn hit_mode(&self) -> HitMode {
        HitMode::Ignore
    }

    fn probation_share(&self) -> f32 {
        self.probation_share
    }

    fn resize(&mut self, _frames: usize, max_frames: usize) {
        self.links.grow(max_frames);
    }

    fn inserted(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        self.queue.push_newest(&mut self.links, frame);
    }

    fn removed(&mut self, frame: FrameId) {
        if self.links.linked(frame) {
            self.queue.remove(&mut self.links, frame);
        }
    }

    fn victims(
        &mut self,
        want: usize,
        _hits: &HitTable,
        _page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    ) {
        for _ in 0..want {
            let Some(frame) = self.queue.pop_oldest(&mut self.links) else {
                break;
            };
            victims.push(frame);
        }
    }

    fn returned(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
        self.queue.push_newest(&mut self.links, frame);
    }

    fn demoted(&mut self, frame: FrameId, _hits: &HitTable) {
        if self.links.linked(frame) {
            self.queue.remove(&mut self.links, frame);
            self.queue.push_oldest(&mut self.links, frame);
        }
    }
}
