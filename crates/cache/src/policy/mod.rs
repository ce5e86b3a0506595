//! Eviction policies: which pages are evicted when DRAM is short.
//!
//! The cache records *hits* itself, in a [`HitTable`] with one atomic word per frame, so a hit
//! costs a few relaxed accesses and never a lock. A policy is notified of insertions and removals,
//! and reads the hit table when it chooses victims: lazy promotion, as in SIEVE, S3-FIFO and CLOCK
//! by construction.
//!
//! | policy | hits | strength |
//! |---|---|---|
//! | [`Clock`] | 1 bit | an LRU-like order for the price of one bit |
//! | [`LoopClock`] | 1 bit | the default: CLOCK that keeps a part of a loop longer than the cache |
//! | [`Lru`] | time | workloads with recency and without popularity |
//! | [`S3Fifo`] | 0 to 3 | skewed popularity mixed with scans; remembers pages it evicted |
//! | [`Sieve`] | 1 bit | skewed popularity; simpler than S3-FIFO, weaker if the same pages are scanned again |
//!
//! # Contract
//! * Every method with `&mut self` runs under the cache's policy lock, possibly inside a signal
//!   handler: it must not allocate, log or touch mapped memory. Only [`Policy::resize`] may
//!   allocate; it is never called from the fault path.
//! * Before each [`Policy::inserted`] the cache calls [`HitTable::reset`] for the frame.
//! * A policy *holds* a frame from `inserted` or `returned` until `removed` or until `victims`
//!   names it. If a named victim cannot be evicted after all (it was pinned), the cache gives it
//!   back with [`Policy::returned`]. The cache skips frames that `victims` names but the policy
//!   does not hold, or names twice.
//! * The cache never inserts or returns a frame that is held. It may call `removed` and `demoted`
//!   for a frame that is not held, because the frame has just been named a victim: they must then
//!   do nothing.
//! * A returned frame becomes the last candidate, so that a cache whose victims are pinned sees
//!   other frames first and can give up after a bounded number of tries.
//! * One call of `victims` examines a bounded number of frames, and may then name fewer than
//!   requested: after a warm-up every frame has been hit, and a faulting thread must not wait for a
//!   whole lap.
//!
//! # Writing a policy
//! Random replacement, complete:
//!
//! ```
//! use aquifer_cache::{FrameId, PageId, PageKey, StoreId};
//! use aquifer_cache::policy::{HitMode, HitTable, Policy};
//!
//! #[derive(Default)]
//! struct Random {
//!     held: Vec<FrameId>,
//!     slot_of: Vec<Option<usize>>, // by frame: its place in `held`
//!     state: u64,
//! }
//!
//! impl Policy for Random {
//!     fn name(&self) -> &'static str {
//!         "random"
//!     }
//!     fn hit_mode(&self) -> HitMode {
//!         HitMode::Ignore
//!     }
//!     fn resize(&mut self, _frames: usize, max_frames: usize) {
//!         self.held.reserve(max_frames - self.held.len()); // the only place that may allocate
//!         self.slot_of.resize(max_frames, None);
//!     }
//!     fn inserted(&mut self, frame: FrameId, _page: PageKey, _hits: &HitTable) {
//!         self.slot_of[frame.0 as usize] = Some(self.held.len());
//!         self.held.push(frame);
//!     }
//!     fn removed(&mut self, frame: FrameId) {
//!         let Some(slot) = self.slot_of[frame.0 as usize].take() else {
//!             return; // just named a victim
//!         };
//!         self.held.swap_remove(slot);
//!         if let Some(moved) = self.held.get(slot) {
//!             self.slot_of[moved.0 as usize] = Some(slot);
//!         }
//!     }
//!     fn victims(
//!         &mut self,
//!         want: usize,
//!         _hits: &HitTable,
//!         _page_of: &dyn Fn(FrameId) -> PageKey,
//!         victims: &mut Vec<FrameId>,
//!     ) {
//!         for _ in 0..want.min(self.held.len()) {
//!             self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1);
//!             let frame = self.held[(self.state >> 33) as usize % self.held.len()];
//!             self.removed(frame);
//!             victims.push(frame);
//!         }
//!     }
//!     fn returned(&mut self, frame: FrameId, page: PageKey, hits: &HitTable) {
//!         self.inserted(frame, page, hits);
//!     }
//! }
//!
//! let mut policy = Random::default();
//! policy.resize(2, 4);
//! let hits = HitTable::new(policy.hit_mode(), 4);
//! let page_of = |frame: FrameId| PageKey { store: StoreId(0), page: PageId(u64::from(frame.0)) };
//! for frame in [FrameId(0), FrameId(3)] {
//!     policy.inserted(frame, page_of(frame), &hits);
//! }
//! let mut victims = Vec::with_capacity(8);
//! policy.victims(8, &hits, &page_of, &mut victims);
//! victims.sort();
//! assert_eq!(victims, [FrameId(0), FrameId(3)]);
//! ```

mod clock;
mod ghost;
mod hits;
mod kind;
mod list;
mod loop_clock;
mod lru;
mod s3fifo;
mod sieve;
#[cfg(test)]
mod tests;

pub use clock::Clock;
pub use hits::{HitMode, HitTable};
pub use kind::{PolicyKind, UnknownPolicy};
pub use loop_clock::LoopClock;
pub use lru::Lru;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;

use crate::ids::{FrameId, PageKey};

/// An eviction policy. See the [module documentation](self) for the contract and an example.
pub trait Policy: Send {
    /// The policy's name, for statistics.
    fn name(&self) -> &'static str;

    /// How hits are recorded. Constant.
    fn hit_mode(&self) -> HitMode;

    /// Sets the pool's size: up to `frames` frames, with identifiers below `max_frames`.
    ///
    /// Called once before anything else, and again when the budget changes. `max_frames` never
    /// falls. Frames held stay held even if they are more than `frames`. May allocate.
    fn resize(&mut self, frames: usize, max_frames: usize);

    /// `frame` now holds `page`, loaded by a miss.
    fn inserted(&mut self, frame: FrameId, page: PageKey, hits: &HitTable);

    /// `frame` was emptied for a reason other than `victims` (a truncation, a detached device).
    fn removed(&mut self, frame: FrameId);

    /// Appends up to `want` frames to `victims`, best victim first, and forgets them.
    ///
    /// `page_of` returns the page that a frame holds. Must name at least one frame if it holds any
    /// and `want` is not 0. `victims` already has the capacity. Batches should stay well below the
    /// number of frames (a sixteenth, for example): a policy cannot rank pages that are not loaded
    /// yet.
    fn victims(
        &mut self,
        want: usize,
        hits: &HitTable,
        page_of: &dyn Fn(FrameId) -> PageKey,
        victims: &mut Vec<FrameId>,
    );

    /// A victim could not be evicted because it is in use; the policy holds it again.
    fn returned(&mut self, frame: FrameId, page: PageKey, hits: &HitTable);

    /// The application will not need this frame soon: the next victim, unless it is hit first.
    fn demoted(&mut self, frame: FrameId, hits: &HitTable) {
        let _ = (frame, hits);
    }
}

/// How many hit frames one call of `victims` may spare. After that the next frame is a victim
/// regardless of its hits, and the call ends.
///
/// In the long run a policy spares at most one frame for each hit, so the limit bounds the longest
/// call without changing the choice. At some tens of nanoseconds a frame that is about 0.1 ms for
/// one victim.
const fn pass_limit(want: usize) -> usize {
    4096 + 64 * want
}
