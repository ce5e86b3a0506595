//! Tests of the policies: a cache reduced to what a policy sees of it, and checks on top.

mod advice;
mod frames;
mod hit_rates;

use std::collections::HashMap;

use aquifer_testkit::model::Model;

use super::{HitTable, Policy};
use crate::ids::{FrameId, PageId, PageKey, StoreId};

fn key(page: u64) -> PageKey {
    PageKey { store: StoreId(0), page: PageId(page) }
}

/// Drives a policy as the cache does: hits go to the table only; a miss that finds no free frame
/// requests a batch of victims.
struct Simulator {
    policy: Box<dyn Policy>,
    hits: HitTable,
    batch: usize,
    frame_of: HashMap<u64, FrameId>,
    page_of: Vec<PageKey>,
    free: Vec<FrameId>,
    victims: Vec<FrameId>,
}

impl Simulator {
    fn new(mut policy: Box<dyn Policy>, frames: usize, batch: usize) -> Simulator {
        policy.resize(frames, frames);
        Simulator::with_sized_policy(policy, frames, batch)
    }

    fn with_sized_policy(policy: Box<dyn Policy>, frames: usize, batch: usize) -> Simulator {
        Simulator {
            hits: HitTable::new(policy.hit_mode(), frames),
            policy,
            batch,
            frame_of: HashMap::new(),
            page_of: vec![key(0); frames],
            free: (0..frames as u32).map(FrameId).collect(),
            victims: Vec::with_capacity(batch),
        }
    }

    fn take_victims(&mut self, want: usize) -> &[FrameId] {
        self.victims.clear();
        let pages = &self.page_of;
        let page_of = |frame: FrameId| pages[frame.0 as usize];
        self.policy.victims(want, &self.hits, &page_of, &mut self.victims);
        &self.victims
    }

    fn evict(&mut self) {
        self.take_victims(self.batch);
        assert!(!self.victims.is_empty() && self.victims.len() <= self.batch);
        for &frame in &self.victims {
            let page = self.page_of[frame.0 as usize].page.0;
            let mapped = self.frame_of.remove(&page);
            assert_eq!(mapped, Some(frame), "a victim that holds no page");
        }
        self.free.extend_from_slice(&self.victims);
    }
}

impl Model for Simulator {
    fn access(&mut self, page: u64) -> bool {
        if let Some(&frame) = self.frame_of.get(&page) {
            self.hits.hit(frame);
            return true;
        }
        if self.free.is_empty() {
            self.evict();
        }
        let frame = self.free.pop().expect("a batch has at least one victim");
        self.frame_of.insert(page, frame);
        self.page_of[frame.0 as usize] = key(page);
        self.hits.reset(frame);
        self.policy.inserted(frame, key(page), &self.hits);
        false
    }
}
