//! What all stores of a cache share: the budget, the frames, and the threads behind them.
//!
//! ```text
//!                     budget
//!        ┌──────────────┼───────────────┐
//!    mapped pool     arena pool     kernel share
//!   (user-backed    (`Pages`)      (kernel-backed
//!     mappings)                       mappings)
//! ```
//!
//! * `registry`: the stores, and references to them.
//! * `budget`: how the budget is divided among the kinds of interface in use.
//! * `reclaim`: how a thread that misses gets a frame.
//! * `evictor`: the thread that evicts ahead of demand where eviction means write-back, completes
//!   shrinks and rebalances.
//!
//! A few *I/O workers* run prefetches and the tasks of asynchronous calls.
//!
//! Lock order: registry → pools' locks. The fault path takes the registry's lock only to look up a
//! store.
pub(crate) mod asynchronous;
pub(crate) mod bounce;
mod budget;
pub(crate) mod duties;
mod evictor;
pub(crate) mod jobs;
pub(crate) mod options;
mod reclaim;
mod registry;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aquifer_sys::futex::Mutex;
use aquifer_sys::uffd::{Delivery, Uffd};
use aquifer_vm::ProcessMark;
use aquifer_vm::worker::Bell;

pub(crate) use self::budget::Kind;
pub(crate) use self::reclaim::NoFrame;
pub(crate) use self::registry::{Answer, AttachedStore, Cleaning, Evicted, InUse, Keeps};

use self::bounce::BouncePool;
use self::budget::Shares;
use self::duties::Callers;
use self::jobs::{Job, Jobs, Prefetch};
use self::options::Options;
use self::reclaim::Reclaim;
use self::registry::Stores;
use crate::error::{CacheError, Result};
use crate::frames::FramePool;
use crate::frames::arena::FrameArena;
use crate::ids::{PageId, StoreId};
use crate::stats::{Counters, Stats};

/// A bare access that could not be served, as plain numbers: recorded inside a signal handler.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BareFault {
    pub store: StoreId,
    pub page: PageId,
    pub cause: BareCause,
}

/// Why a bare access could not be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BareCause {
    /// An error of the operating system.
    System(i32),
    /// The device ended within the page.
    ShortRead { got_bytes: usize },
    /// The device ended before the page.
    OutOfBounds { device_bytes: u64 },
    /// An error of the device without an errno.
    Device,
    /// See [`CacheError::UnderItself`].
    UnderItself,
}

/// Shared state of a cache. See the module documentation.
pub(crate) struct Engine {
    pub mark: ProcessMark,
    pub options: Options,
    pub counters: Counters,
    pub mapped: FramePool,
    pub arena: FramePool,
    pub bounce: BouncePool,
    pub visit_buffers: BouncePool,
    pub jobs: Jobs,
    /// The threads inside of calls of its devices, if it has serving threads.
    pub callers: Option<Arc<Callers>>,
    pub vectored_discard: bool,
    arena_memory: FrameArena,
    uffd: OnceLock<Uffd>,
    shares: Mutex<Shares>,
    kernel_share_bytes: AtomicU64,
    pub kernel_resident_pages: AtomicU64,
    /// Batches of read-ahead that kernel-backed mappings requested: the count of mapped pages does not include their pages.
    pub kernel_batches_asked: AtomicU64,
    /// Pages of their files that were read past the page cache.
    pub kernel_pages_read_past: AtomicU64,
    /// System pages dropped from kernel-backed mappings so far.
    pub kernel_dropped_pages: AtomicU64,
    stores: Mutex<Stores>,
    reclaim: [Reclaim; 2],
    evictor_bell: Bell,
    stopping: AtomicBool,
    shrinking: AtomicUsize,
    bare_fault: Mutex<Option<BareFault>>,
    /// Rings whenever a reference to a store in use is dropped.
    let_go: Bell,
}

/// How long a thread without a frame waits before it checks again.
const FRAME_WAIT: Duration = Duration::from_millis(20);
/// Prefetches that a worker runs together: a full queue of the usual device.
const MOST_PREFETCHES: usize = 64;

impl Engine {
    pub fn new(options: Options) -> Result<Engine> {
        let kernel = |what| move |source| CacheError::Kernel { what, source };
        let page_bytes = options.page_bytes;
        let max_frames = options.max_frames();
        aquifer_sys::memory::prepare_advise_many();
        let vectored_discard =
            !options.without_vectored_discard && aquifer_sys::features::vectored_dontneed().is_ok();
        let pool = |what| FramePool::new(options.policy.build(), max_frames).map_err(kernel(what));
        let engine = Engine {
            mark: ProcessMark::new(),
            counters: Counters::default(),
            mapped: pool("reserving frame tables")?,
            arena: pool("reserving frame tables")?,
            bounce: BouncePool::for_transfers(page_bytes)
                .map_err(kernel("allocating transfer buffers"))?,
            visit_buffers: BouncePool::for_visits(page_bytes)
                .map_err(kernel("allocating transfer buffers"))?,
            jobs: Jobs::new(),
            callers: options.serving_thread.then(Arc::default),
            vectored_discard,
            arena_memory: FrameArena::new(page_bytes, max_frames)
                .map_err(kernel("reserving the frame arena"))?,
            uffd: OnceLock::new(),
            shares: Mutex::new(Shares::new(&options)),
            kernel_share_bytes: AtomicU64::new(0),
            kernel_resident_pages: AtomicU64::new(0),
            kernel_batches_asked: AtomicU64::new(0),
            kernel_pages_read_past: AtomicU64::new(0),
            kernel_dropped_pages: AtomicU64::new(0),
            stores: Mutex::default(),
            reclaim: Default::default(),
            evictor_bell: Bell::new(),
            stopping: AtomicBool::new(false),
            shrinking: AtomicUsize::new(0),
            bare_fault: Mutex::new(None),
            let_go: Bell::new(),
            options,
        };
        Ok(engine)
    }

    /// The memory of the arena's frames.
    #[inline]
    pub fn arena_memory(&self) -> &FrameArena {
        &self.arena_memory
    }

    /// The cache's userfaultfd, opened at the first user-backed mapping.
    pub fn uffd(&self) -> Result<&Uffd> {
        if let Some(uffd) = self.uffd.get() {
            return Ok(uffd);
        }
        let delivery = if self.options.serving_thread {
            Delivery::Message { kernel_faults: true }
        } else {
            Delivery::Sigbus
        };
        let opened = if self.options.without_userfaultfd {
            Err(std::io::Error::from_raw_os_error(libc::EPERM))
        } else {
            Uffd::open(delivery)
        };
        let uffd = opened
            .map_err(|source| CacheError::Kernel { what: "opening a userfaultfd", source })?;
        let _ = self.uffd.set(uffd);
        Ok(self.uffd.get().expect("set above"))
    }

    /// The userfaultfd, if a mapping has opened it.
    pub fn uffd_if_open(&self) -> Option<&Uffd> {
        self.uffd.get()
    }

    // ---- registry -------------------------------------------------------------------------------

    pub fn record_bare_fault(&self, fault: BareFault) {
        *self.bare_fault.lock() = Some(fault);
    }

    /// The last bare access to a store that could not be served.
    pub fn bare_fault(&self, store: StoreId) -> Option<BareFault> {
        if !self.mark.is_current() {
            return None; // the lock may be held by a thread that only the parent has
        }
        (*self.bare_fault.lock()).filter(|fault| fault.store == store)
    }

    pub fn request_prefetch(&self, store: StoreId, first: u64, pages: u64) {
        self.jobs.push_prefetch(store, first, pages);
    }

    /// The loop of an I/O worker.
    pub fn run_worker(&self) {
        while let Some(job) = self.jobs.next() {
            match job {
                Job::Task(task) => task(),
                Job::Prefetch(prefetch) => self.run_prefetches(prefetch),
                Job::Hint(hint) => {
                    if let Some(store) = self.store(hint.store) {
                        store.prefetch(&hint.runs);
                    }
                }
            }
        }
    }

    /// Runs a prefetch, and with it those that wait: together they fill the device's queue.
    fn run_prefetches(&self, first: Prefetch) {
        let mut wanted = vec![first];
        wanted.extend(std::iter::from_fn(|| self.jobs.next_prefetch()).take(MOST_PREFETCHES - 1));
        wanted.sort_unstable_by_key(|one| (one.store.0, one.first));
        for of_store in wanted.chunk_by(|one, next| one.store == next.store) {
            let ranges: Vec<_> =
                of_store.iter().map(|one| one.first..one.first.saturating_add(one.pages)).collect();
            if let Some(store) = self.store(of_store[0].store) {
                store.prefetch(&ranges);
            }
        }
    }

    pub fn wake_evictor(&self) {
        self.evictor_bell.ring();
    }

    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake_evictor();
        self.jobs.stop();
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Whether a shrink is still under way.
    pub fn is_shrinking(&self) -> bool {
        self.shrinking.load(Ordering::SeqCst) > 0
    }

    pub fn stats(&self) -> Stats {
        if !self.mark.is_current() {
            return Stats::default(); // locks may be held by threads that only the parent has
        }
        let mut stats = Stats {
            budget_bytes: self.budget_bytes(),
            page_bytes: self.options.page_bytes as u64,
            resident_pages: (self.mapped.in_use() + self.arena.in_use()) as u64,
            dirty_pages: self.all_stores().iter().map(|store| store.dirty_pages()).sum(),
            kernel_resident_pages: self.kernel_resident_pages.load(Ordering::Relaxed),
            policy: self.mapped.policy_name(),
            ..Stats::default()
        };
        self.counters.fill(&mut stats);
        stats
    }

    /// The names of the devices that count something themselves, and what they count.
    pub fn device_counters(&self) -> Vec<(String, Vec<(&'static str, u64)>)> {
        let stores = self.all_stores();
        let counted = stores.iter().map(|store| store.device_counters());
        counted.filter(|(_, counters)| !counters.is_empty()).collect()
    }
}
