//! The budget, and how it is divided among the kinds of interface in use.
//!
//! Evenly at first, then by demand, a sixteenth at a time from the kind with the fewest misses per
//! page to the one with the most. Kernel-backed mappings get no more than they can fill.
//!
//! Buffers of attached devices come off first. All devices together are asked to keep to half of the
//! budget, each to half of what the others leave of that, so that one more always finds some left.
//! A device may need more than it is asked to keep to; pages get the smallest budget nevertheless.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use aquifer_device::{Device, DeviceIdentity};
use aquifer_sys::futex::MutexGuard;
use aquifer_sys::memory::{REGION_BYTES, SMALL_PAGE_BYTES};

use super::Engine;
use crate::engine::options::Options;
use crate::error::{CacheError, Result};
use crate::frames::FramePool;

/// The kinds of interface that draw on the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Mapped,
    Arena,
    Kernel,
}

/// What an attached device takes for itself.
struct Buffers {
    identity: DeviceIdentity,
    /// To be asked again. Weak, so that the budget keeps no device open.
    device: Weak<dyn Device>,
    /// What it has claimed; while it is asked, what it may claim.
    bytes: u64,
}

pub(super) struct Shares {
    budget_bytes: u64,
    /// What pages get at least.
    min_bytes: u64,
    /// Number of stores of each kind.
    users: [usize; 3],
    /// Relative weights of the kinds.
    weights: [f64; 3],
    /// Total length of all kernel-backed mappings.
    kernel_bytes: u64,
    /// Memory that devices take for themselves, for each attached one.
    buffers: Vec<Buffers>,
}

impl Shares {
    pub fn new(options: &Options) -> Shares {
        Shares {
            budget_bytes: options.budget_bytes,
            min_bytes: Options::min_budget_bytes(options.page_bytes),
            users: [0; 3],
            weights: [1.0; 3],
            kernel_bytes: 0,
            buffers: vec![],
        }
    }

    /// The buffers of all devices but one; those of a device that is attached twice count once.
    fn buffer_bytes(&self, without: Option<&DeviceIdentity>) -> u64 {
        let counted = |at: usize| {
            let identity = &self.buffers[at].identity;
            Some(identity) == without
                || self.buffers[..at].iter().any(|other| other.identity == *identity)
        };
        let buffers = (0..self.buffers.len()).filter(|&at| !counted(at));
        buffers.map(|at| self.buffers[at].bytes).sum()
    }

    /// What a device is asked to keep to.
    fn most_buffer_bytes(&self, identity: &DeviceIdentity) -> u64 {
        (self.budget_bytes / 2).saturating_sub(self.buffer_bytes(Some(identity))) / 2
    }

    fn set_buffer_bytes(&mut self, identity: &DeviceIdentity, bytes: u64) {
        for buffers in self.buffers.iter_mut().filter(|buffers| buffers.identity == *identity) {
            buffers.bytes = bytes;
        }
    }

    /// The budget without the devices' buffers.
    fn bytes_for_pages(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.buffer_bytes(None)).max(self.min_bytes)
    }
}

/// The bytes needed to keep a kernel-backed mapping of `mapped_bytes` resident: more than its
/// length, because the drop manager starts dropping below its bound.
fn kernel_need_bytes(mapped_bytes: u64) -> u64 {
    (mapped_bytes + mapped_bytes / 32).next_multiple_of(REGION_BYTES as u64)
}

impl Engine {
    /// Counts in a store of a kind and divides the budget anew. On error it is not counted in.
    pub fn join_budget(&self, kind: Kind) -> Result<()> {
        let mut shares = self.shares.lock();
        shares.users[kind as usize] += 1;
        match self.divide(&shares) {
            Err(error) if kind == Kind::Arena => {
                shares.users[kind as usize] -= 1;
                let _ = self.divide(&shares);
                Err(error)
            }
            // The arena keeps the memory that it has.
            _ => Ok(()),
        }
    }

    /// Counts out a store of a kind and divides the budget anew. If memory is short, the arena gets
    /// only part of its share.
    pub fn leave_budget(&self, kind: Kind) {
        self.count_out(self.shares.lock(), kind);
    }

    /// Takes a device's buffers off the budget.
    pub fn join_buffers(&self, device: &Arc<dyn Device>) {
        let identity = device.identity();
        let weak = Arc::downgrade(device);
        self.shares.lock().buffers.push(Buffers { identity, device: weak, bytes: 0 });
        if self.claim_buffers(&**device) == 0 {
            self.leave_buffers(&**device);
        }
    }

    /// Asks a device that is counted in how much it takes, and divides the budget anew.
    fn claim_buffers(&self, device: &dyn Device) -> u64 {
        let identity = device.identity();
        let mut shares = self.shares.lock();
        let most = shares.most_buffer_bytes(&identity);
        // Reserved, since another device may be asked at the same time.
        shares.set_buffer_bytes(&identity, most);
        drop(shares);
        // Not under the lock: the device may be an application's.
        let bytes = device.claim_buffers(usize::try_from(most).unwrap_or(usize::MAX)) as u64;
        let mut shares = self.shares.lock();
        shares.set_buffer_bytes(&identity, bytes);
        // The arena keeps the memory that it has.
        let _ = self.divide(&shares);
        bytes
    }

    /// Gives a device's buffers back to the budget.
    pub fn leave_buffers(&self, device: &dyn Device) {
        let identity = device.identity();
        let mut shares = self.shares.lock();
        if let Some(place) = shares.buffers.iter().position(|other| other.identity == identity) {
            shares.buffers.swap_remove(place);
            let _ = self.divide(&shares);
        }
    }

    /// Counts in a kernel-backed mapping with its length and divides the budget anew.
    pub fn join_kernel(&self, len_bytes: u64) {
        let mut shares = self.shares.lock();
        shares.kernel_bytes = shares.kernel_bytes.saturating_add(len_bytes);
        shares.users[Kind::Kernel as usize] += 1;
        // The arena keeps the memory that it has.
        let _ = self.divide(&shares);
    }

    /// Counts out a kernel-backed mapping with its length.
    pub fn leave_kernel(&self, len_bytes: u64) {
        let mut shares = self.shares.lock();
        shares.kernel_bytes = shares.kernel_bytes.saturating_sub(len_bytes);
        self.count_out(shares, Kind::Kernel);
    }

    fn count_out(&self, mut shares: MutexGuard<'_, Shares>, kind: Kind) {
        let users = &mut shares.users[kind as usize];
        *users = users.saturating_sub(1);
        let _ = self.divide(&shares);
    }

    pub fn budget_bytes(&self) -> u64 {
        self.shares.lock().budget_bytes
    }

    /// Sets a new budget, and has devices lower their buffers to it. Pools grow at once and shrink in
    /// the background. On error the budget is unchanged.
    pub fn set_budget(&self, budget_bytes: u64) -> Result<()> {
        let mut shares = self.shares.lock();
        let before = std::mem::replace(&mut shares.budget_bytes, budget_bytes);
        let divided = self.divide(&shares);
        if divided.is_err() {
            shares.budget_bytes = before;
            let _ = self.divide(&shares);
            return divided;
        }
        let devices: Vec<_> = shares.buffers.iter().map(|buffers| buffers.device.clone()).collect();
        drop(shares);
        for device in devices.iter().filter_map(Weak::upgrade) {
            self.claim_buffers(&*device);
        }
        Ok(())
    }

    /// Gives each kind in use its share. Fails if the system has no memory for the arena's share;
    /// the arena then has the frames that there is memory for.
    fn divide(&self, shares: &Shares) -> Result<()> {
        let weight = |kind: Kind| {
            if shares.users[kind as usize] > 0 { shares.weights[kind as usize] } else { 0.0 }
        };
        let part = |of_bytes: u64, kind: Kind, total: f64| {
            if weight(kind) == 0.0 {
                return 0;
            }
            let bytes = of_bytes as f64 * weight(kind) / total;
            // Whole regions, so that the arena can give back whole huge pages.
            (bytes as u64 / REGION_BYTES as u64).max(1) * REGION_BYTES as u64
        };
        let others = weight(Kind::Mapped) + weight(Kind::Arena);
        // The kernel's share first: what its mappings cannot fill goes to the others.
        let budget_bytes = shares.bytes_for_pages();
        let kernel = part(budget_bytes, Kind::Kernel, others + weight(Kind::Kernel))
            .min(kernel_need_bytes(shares.kernel_bytes));
        let share = |kind| part(budget_bytes.saturating_sub(kernel), kind, others);
        let frames = |bytes: u64| (bytes / self.options.page_bytes as u64) as usize;
        let mapped = frames(share(Kind::Mapped));
        self.set_pool(&self.mapped, mapped);
        let arena = frames(share(Kind::Arena));
        let provided = self.arena_memory.provide(arena);
        self.set_pool(&self.arena, arena.min(self.arena_memory.provided()));
        self.kernel_share_bytes.store(kernel, Ordering::Relaxed);
        self.wake_evictor();
        provided.map_err(|source| CacheError::Kernel {
            what: "making the frames of a budget writable; choose a smaller budget",
            source,
        })
    }

    fn set_pool(&self, pool: &FramePool, frames: usize) {
        let old = pool.limit();
        if frames != old {
            pool.set_limit(frames);
        }
        if frames < old {
            // After the limit: an evictor that sees the request must also see the new limit, or it
            // would take the shrink for finished.
            self.shrinking.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The bytes that kernel-backed mappings may keep resident.
    pub fn kernel_share_bytes(&self) -> u64 {
        self.kernel_share_bytes.load(Ordering::Relaxed)
    }

    // ---- frames ---------------------------------------------------------------------------------

    /// Shifts budget from the kind of interface with the fewest misses per page to the one with the
    /// most.
    pub(super) fn rebalance(&self, seen: &mut [u64; 3]) {
        // The kernel's misses cannot be counted. Pages that the drop manager dropped were loaded
        // before, so their number stands in for the misses.
        let dropped_bytes =
            self.kernel_dropped_pages.load(Ordering::Relaxed) * SMALL_PAGE_BYTES as u64;
        let page_bytes = self.options.page_bytes as u64;
        let now = [self.mapped.insertions(), self.arena.insertions(), dropped_bytes / page_bytes];
        let misses: [f64; 3] =
            std::array::from_fn(|kind| now[kind].wrapping_sub(seen[kind]) as f64);
        *seen = now;
        let mut shares = self.shares.lock();
        let in_use = |kind: &usize| shares.users[*kind] > 0;
        if (0..3).filter(in_use).count() < 2 || misses.iter().sum::<f64>() < 4096.0 {
            return;
        }
        let kernel_pages = (self.kernel_share_bytes() / page_bytes) as usize;
        let pages = [self.mapped.limit(), self.arena.limit(), kernel_pages];
        let density = |kind: usize| misses[kind] / pages[kind].max(1) as f64;
        let by_density = |a: &usize, b: &usize| density(*a).total_cmp(&density(*b));
        let from = (0..3).filter(in_use).min_by(by_density).expect("two are in use");
        let to = (0..3).filter(in_use).max_by(by_density).expect("two are in use");
        let step = (0..3).filter(in_use).map(|kind| shares.weights[kind]).sum::<f64>() / 16.0;
        if density(to) > 2.0 * density(from) && shares.weights[from] > 2.0 * step {
            shares.weights[from] -= step;
            shares.weights[to] += step;
            // Share that the system has no memory for stays unused.
            let _ = self.divide(&shares);
        }
    }
}
