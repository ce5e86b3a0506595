//! Changing a pool's limit while its frames are in use.
//!
//! Growing takes effect at once and grants only the frames of the reserve. Shrinking lowers the
//! limit and retires the free frames above it; it is finished when those in use have been given
//! back ([`FramePool::finish_shrink`]).

use super::FramePool;
use crate::frames::frame_word::{self, FREE};
use crate::ids::FrameId;
use crate::sync::Ordering;

/// A shrink in progress, as the thread that completes it sees it.
#[derive(Default)]
pub struct Shrink {
    /// The count of limit changes that this shrink belongs to.
    change: Option<usize>,
    in_use: Vec<FrameId>,
}

impl Shrink {
    /// The frames above the limit that were in use at the last check.
    pub fn in_use(&self) -> &[FrameId] {
        &self.in_use
    }
}

impl FramePool {
    /// Sets the limit. Growing takes effect at once; shrinking when the frames above the limit have
    /// been given back, see [`FramePool::look_above_limit`]. Allocates, so it is not for the fault
    /// path.
    pub fn set_limit(&self, frames: usize) {
        let frames = frames.min(self.max_frames);
        let mut state = self.policy.lock();
        let old = self.limit.load(Ordering::SeqCst);
        let high_water = self.high_water.load(Ordering::SeqCst).max(frames);
        self.high_water.store(high_water, Ordering::SeqCst);
        if frames > old {
            // The policy may still hold frames of an unfinished shrink.
            state.resize(frames, high_water);
        }
        let granted = {
            let mut shared = self.shared.0.lock();
            let more = high_water.saturating_sub(shared.len());
            shared.reserve(more);
            // Relaxed: the lock orders it with `grant_next`, which changes it.
            let granted = self.granted.load(Ordering::Relaxed);
            self.limit.store(frames, Ordering::SeqCst);
            // After the limit: a thread that sees this change sees the new limit
            // (`look_above_limit`).
            self.changes.fetch_add(1, Ordering::SeqCst);
            let to_grant = |limit: usize| limit.saturating_sub(granted);
            // Wraps around when the limit falls; `free` wraps in the same way.
            let change = to_grant(frames).wrapping_sub(to_grant(old));
            self.free.fetch_add(change, Ordering::Relaxed);
            granted
        };
        if frames > old {
            // Empty, unless the previous shrink is unfinished. It cannot finish now, because the
            // policy lock is held.
            let returned = old..frames.min(granted);
            self.looked_at(returned.len());
            let regained: Vec<u32> = returned
                .filter(|&frame| {
                    let owner = &self.owners[frame];
                    frame_word::regain(owner) || frame_word::grant(owner)
                })
                .map(|frame| frame as u32)
                .collect();
            // The larger pool has a larger reserve.
            self.count_reserve(&self.reserve.0.lock());
            let rest = self.fill_reserve(&regained);
            self.free.fetch_add(rest.len(), Ordering::Relaxed);
            self.shared.0.lock().extend(rest);
            self.grant_to_reserve();
            drop(state);
            self.returned.ring_all();
        }
    }

    /// Retires free frames above the limit and finds those in use.
    ///
    /// A shrink is complete when none is in use and [`FramePool::finish_shrink`] returns true. The
    /// first call after a change of the limit visits all granted frames above the limit, later
    /// calls only those that were in use then. Allocates, so it is not for the fault path.
    pub fn look_above_limit(&self, shrink: &mut Shrink) {
        // Before the limit is read: if the limit changes in between, the next call sees that.
        let change = self.changes.load(Ordering::SeqCst);
        let word = |frame: usize| self.owners[frame].load(Ordering::SeqCst);
        if shrink.change != Some(change) {
            shrink.change = Some(change);
            self.retire_free();
            let above = self.limit()..self.granted.load(Ordering::SeqCst);
            self.looked_at(above.len());
            let frames = above.map(|frame| FrameId(frame as u32));
            shrink.in_use = frames
                .filter(|frame| frame_word::is_in_circulation(word(frame.0 as usize)))
                .collect();
            return;
        }
        self.looked_at(shrink.in_use.len());
        if shrink.in_use.iter().any(|frame| word(frame.0 as usize) == FREE) {
            // It was between its owner and a free list during the first check.
            self.retire_free();
        }
        shrink.in_use.retain(|frame| frame_word::is_in_circulation(word(frame.0 as usize)));
    }

    /// Retires the frames above the limit that are in free lists or in the reserve. The reserve
    /// keeps what the smaller pool's reserve needs.
    fn retire_free(&self) {
        let stays = |frame: u32| {
            let index = frame as usize;
            frame_word::is_granted(&self.limit, index)
                || frame_word::retire(&self.owners[index], &self.limit, index)
        };
        let mut reserve = self.reserve.0.lock();
        self.looked_at(reserve.len());
        reserve.retain(|&frame| stays(frame));
        let wanted = self.reserve_wanted();
        let kept = wanted.min(reserve.len());
        let too_many = reserve.split_off(kept);
        // As in `give`.
        self.free.fetch_add(too_many.len(), Ordering::Relaxed);
        self.shared.0.lock().extend(too_many);
        for list in self.cores.iter().chain(std::iter::once(&self.shared)) {
            let mut list = list.0.lock();
            self.looked_at(list.len());
            let before = list.len();
            list.retain(|&frame| stays(frame));
            let to_reserve = wanted.saturating_sub(reserve.len()).min(list.len());
            let kept = list.len() - to_reserve;
            reserve.extend(list.drain(kept..));
            self.free.fetch_sub(before - kept, Ordering::Relaxed);
        }
        self.count_reserve(&reserve);
    }

    /// Finishes a shrink if no frame at or above the limit is in use; returns whether it did.
    ///
    /// Resizes the policy for the smaller pool. Calls `release` with the limit, which cannot change
    /// during the call, if frames above it were granted.
    pub fn finish_shrink(&self, shrink: &mut Shrink, release: impl FnOnce(usize)) -> bool {
        let mut state = self.policy.lock();
        let limit = self.limit();
        // No frame above the limit is granted now, and the limit stays: the policy lock is held.
        let granted = self.granted.load(Ordering::SeqCst);
        self.looked_at((limit..granted).len());
        if !(limit..granted).all(|frame| frame_word::withdraw(&self.owners[frame])) {
            // A frame is in use, or was granted again since the last check: start over.
            shrink.change = None;
            return false;
        }
        if granted > limit {
            let shared = self.shared.0.lock();
            self.granted.store(limit, Ordering::SeqCst);
            drop(shared);
        }
        state.resize(limit, self.high_water.load(Ordering::SeqCst));
        if granted > limit {
            release(limit);
        }
        true
    }
}
