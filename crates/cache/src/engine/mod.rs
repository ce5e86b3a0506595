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
//! The budget is divided among the kinds of interface in use: evenly at first, then by demand, a
//! sixteenth at a time from the kind with the fewest misses per page to the one with the most.
//! Kernel-backed mappings get no more than they can fill.
//!
//! Threads: one *evictor* (`evictor`) evicts ahead of demand where eviction means write-back,
//! completes shrinks and rebalances. A few *I/O workers* run prefetches and the tasks of
//! asynchronous calls. A miss takes a free frame. If there is none, it evicts a small batch itself:
//! clean pages, and dirty ones where write-back does not block. Only if that frees nothing does it
//! wait for the evictor.
//!
//! Lock order: registry → pools' locks. The fault path takes the registry's lock only to look up a
//! store.

mod evictor;

use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aquifer_sys::futex::{Mutex, MutexGuard};
use aquifer_sys::memory::REGION_BYTES;
use aquifer_sys::signal::FaultContext;
use aquifer_sys::uffd::{Delivery, Uffd};
use aquifer_vm::worker::{Bell, Ticket};
use aquifer_vm::{ProcessMark, Served};

use self::evictor::low_watermark;
use crate::arena_memory::FrameArena;
use crate::bounce::BouncePool;
use crate::duties::{self, Height};
use crate::error::{Error, Result};
use crate::frames::{BATCH, FramePool};
use crate::ids::{FrameId, PageId, PageKey, StoreId};
use crate::jobs::Jobs;
use crate::options::Options;
use crate::probation::Probation;
use crate::stats::{Counters, Stats, count};

/// No frame can be freed: every one is pinned or cannot be written back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoFrame {
    pub pinned: u64,
    pub unwritable: u64,
}

/// Whether dirty victims are written back to be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cleaning {
    /// Only clean victims are evicted. Async-signal-safe.
    No,
    /// Dirty victims are written back where a write is CPU work and does not block.
    /// Async-signal-safe.
    IfCopying,
    /// Dirty victims are written back, one transfer at a time: for a thread that is already writing
    /// back.
    Serially,
    /// Dirty victims are written back at the device's queue depth: for the evictor.
    Yes,
}

/// What keeps a page in its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeps {
    /// A pin or a writing guard.
    Pin,
    /// The page is dirty, and no thread is writing it back.
    Dirt,
    /// The page is being written back.
    Writing,
    /// A thread is loading the page and holds the frame.
    Loading,
    /// Nothing lasting: it can be evicted, or a thread is changing its state.
    Nothing,
}

/// The frames of a pool, counted by what keeps them.
#[derive(Debug, Default, Clone, Copy)]
struct Census {
    pinned: u64,
    unwritable: u64,
    /// Pages being written to a device.
    writing: u64,
    /// Other frames that will become free on their own.
    coming: u64,
}

/// The outcome of evicting a batch of victims.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Evicted {
    pub freed: usize,
    pub pinned: u64,
    pub unwritable: u64,
    /// Dirty victims met, evicted or not.
    pub dirty: u64,
}

impl Evicted {
    pub fn add(&mut self, other: Evicted) {
        self.freed += other.freed;
        self.pinned += other.pinned;
        self.unwritable += other.unwritable;
        self.dirty += other.dirty;
    }
}

/// A store as the engine sees it.
pub(crate) trait AttachedStore: Send + Sync {
    /// Evicts victims of the store's pool: gives the frames of evicted pages back to the pool, and
    /// returns the other victims to the policy.
    fn evict(&self, victims: &[(FrameId, PageId)], write_back: Cleaning) -> Evicted;

    /// The store's height above devices that use no memory of the cache. See `duties`.
    fn height(&self) -> &Height;

    /// What keeps a page in a frame that it owns.
    fn keeps(&self, page: PageId, frame: FrameId) -> Keeps;

    /// Evicts the given pages, which are sorted, after writing back the dirty ones. Skips pages
    /// that cannot be evicted.
    fn vacate(&self, pages: &[PageId]);

    /// Loads absent pages of a run while frames are free.
    fn prefetch(&self, first: u64, pages: u64);

    /// Drops a page's reference to its probation slot, which is being reused.
    fn forget(&self, page: PageId, slot: FrameId);

    /// The number of pages that are dirty now.
    fn dirty_pages(&self) -> u64;

    /// Stops prefetches: the store is about to be detached.
    fn leave(&self);
}

/// A reference to a store beyond its owner's: [`Engine::detach`] waits until it is dropped.
pub(crate) struct InUse<S: ?Sized, E: Deref<Target = Engine>> {
    store: Option<Arc<S>>,
    engine: E,
}

/// A store of the registry in use.
type UsedBy<'a> = InUse<dyn AttachedStore, &'a Engine>;

impl<S: ?Sized, E: Deref<Target = Engine>> InUse<S, E> {
    pub fn new(store: Arc<S>, engine: E) -> InUse<S, E> {
        InUse { store: Some(store), engine }
    }
}

impl<S: ?Sized, E: Deref<Target = Engine>> Deref for InUse<S, E> {
    type Target = S;
    fn deref(&self) -> &S {
        self.store.as_deref().expect("it is there until this is dropped")
    }
}

impl<S: ?Sized, E: Deref<Target = Engine>> Drop for InUse<S, E> {
    fn drop(&mut self) {
        // Drop the reference before ringing: a thread that waits checks the reference count after
        // the ring.
        self.store = None;
        self.engine.let_go.ring_all();
    }
}

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
}

/// An entry of the registry; its index is the store's identifier.
enum Slot {
    Free,
    Reserved,
    Attached(Arc<dyn AttachedStore>),
}

impl Slot {
    fn store(&self) -> Option<&Arc<dyn AttachedStore>> {
        match self {
            Slot::Attached(store) => Some(store),
            _ => None,
        }
    }
}

/// The kinds of interface that draw on the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Mapped,
    Arena,
    Kernel,
}

struct Shares {
    budget_bytes: u64,
    /// Number of stores of each kind.
    users: [usize; 3],
    /// Relative weights of the kinds.
    weights: [f64; 3],
    /// Total length of all kernel-backed mappings.
    kernel_bytes: u64,
}

/// The bytes needed to keep a kernel-backed mapping of `mapped_bytes` resident: more than its
/// length, because the drop manager starts dropping below its bound.
fn kernel_need_bytes(mapped_bytes: u64) -> u64 {
    (mapped_bytes + mapped_bytes / 8).next_multiple_of(REGION_BYTES as u64)
}

/// Per-pool state of the evictor.
#[derive(Default)]
struct Reclaim {
    /// Counts of pinned and unwritable frames in the last full pass that freed nothing.
    stuck_pinned: AtomicU64,
    stuck_unwritable: AtomicU64,
    stuck_passes: AtomicU32,
    /// Whether the last batch of victims contained dirty pages.
    dirty: AtomicBool,
    /// Whether other threads preempted the evictor recently.
    crowded: AtomicBool,
}

/// Shared state of a cache. See the module documentation.
pub(crate) struct Engine {
    pub mark: ProcessMark,
    pub options: Options,
    pub counters: Counters,
    pub mapped: FramePool,
    pub arena: FramePool,
    pub bounce: BouncePool,
    pub jobs: Jobs,
    pub vectored_discard: bool,
    probation: Probation,
    arena_memory: FrameArena,
    uffd: OnceLock<Uffd>,
    shares: Mutex<Shares>,
    kernel_share_bytes: AtomicU64,
    pub kernel_resident_pages: AtomicU64,
    /// System pages dropped from kernel-backed mappings so far.
    pub kernel_dropped_pages: AtomicU64,
    stores: Mutex<Vec<Slot>>,
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
/// How many times a thread that is writing back waits like this before it fails.
const MOST_WAITS: u32 = 500;
/// Full passes of the evictor that must free nothing before a caller without a frame fails.
const STUCK_PASSES: u32 = 3;
/// Transfer buffers: enough for two full batches besides the fault path.
const BOUNCE_BUFFERS: usize = 160;
const BOUNCE_BYTES: usize = 64 << 10;

impl Engine {
    pub fn new(options: Options) -> Result<Engine> {
        let kernel = |what| move |source| Error::Kernel { what, source };
        let page_bytes = options.page_bytes;
        let max_frames = options.max_frames();
        aquifer_sys::memory::prepare_advise_many();
        let vectored_discard =
            !options.without_vectored_discard && aquifer_sys::features::vectored_dontneed().is_ok();
        let pool = |what| FramePool::new(options.policy.build(), max_frames).map_err(kernel(what));
        let mapped = pool("reserving frame tables")?;
        let probation_slots = if mapped.probation_share() > 0.0 { max_frames } else { 0 };
        let engine = Engine {
            mark: ProcessMark::new(),
            counters: Counters::default(),
            arena: pool("reserving frame tables")?,
            mapped,
            bounce: BouncePool::new(BOUNCE_BYTES.max(page_bytes), BOUNCE_BUFFERS)
                .map_err(kernel("allocating transfer buffers"))?,
            jobs: Jobs::new(),
            vectored_discard,
            probation: Probation::new(page_bytes, probation_slots)
                .map_err(kernel("reserving the probation area"))?,
            arena_memory: FrameArena::new(page_bytes, max_frames)
                .map_err(kernel("reserving the frame arena"))?,
            uffd: OnceLock::new(),
            shares: Mutex::new(Shares {
                budget_bytes: options.budget_bytes,
                users: [0; 3],
                weights: [1.0; 3],
                kernel_bytes: 0,
            }),
            kernel_share_bytes: AtomicU64::new(0),
            kernel_resident_pages: AtomicU64::new(0),
            kernel_dropped_pages: AtomicU64::new(0),
            stores: Mutex::new(Vec::new()),
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
        let uffd =
            opened.map_err(|source| Error::Kernel { what: "opening a userfaultfd", source })?;
        let _ = self.uffd.set(uffd);
        Ok(self.uffd.get().expect("set above"))
    }

    /// The userfaultfd, if a mapping has opened it.
    pub fn uffd_if_open(&self) -> Option<&Uffd> {
        self.uffd.get()
    }

    // ---- registry -------------------------------------------------------------------------------

    /// Reserves an identifier for a store that is about to be attached.
    pub fn reserve_id(&self) -> StoreId {
        let mut stores = self.stores.lock();
        let free = stores.iter().position(|slot| matches!(slot, Slot::Free));
        let index = free.unwrap_or(stores.len());
        if index == stores.len() {
            stores.push(Slot::Reserved);
        } else {
            stores[index] = Slot::Reserved;
        }
        StoreId(index as u32)
    }

    /// Registers a store and counts it in the budget. On error the identifier is free again.
    pub fn attach(&self, id: StoreId, store: Arc<dyn AttachedStore>, kind: Kind) -> Result<()> {
        self.stores.lock()[id.0 as usize] = Slot::Attached(store);
        self.join_budget(kind).inspect_err(|_| {
            self.detach(id);
            self.release_id(id);
        })
    }

    /// Takes a store out of the registry and waits until no thread but its owner uses it.
    ///
    /// So its memory is never freed by the evictor, by a worker, or on another thread's fault path.
    pub fn detach(&self, id: StoreId) {
        let index = id.0 as usize;
        if let Some(store) = self.stores.lock()[index].store() {
            // A prefetch ends with the transfers in flight.
            store.leave();
        }
        loop {
            let ticket = self.let_go.ticket();
            {
                let mut stores = self.stores.lock();
                // One reference is the registry's and one the owner's; the others are in an
                // `InUse`. The evictor and the workers get theirs only from the registry, whose
                // lock is held.
                let in_use =
                    stores[index].store().is_some_and(|store| Arc::strong_count(store) > 2);
                if !in_use {
                    stores[index] = Slot::Reserved;
                    break;
                }
            }
            // Keep the store registered until then, so that its pages can be evicted: an
            // asynchronous call that still uses it may need their frames. The caller may itself be
            // a worker (a future's waker dropped the mapping): then run queued tasks here, because
            // they may hold references.
            if !self.jobs.help() {
                // A worker polls for tasks, because posting one does not ring this bell.
                let nap = self.jobs.is_served_here().then_some(FRAME_WAIT);
                self.let_go.sleep(ticket, nap);
            }
        }
        // Pairs with the release when an `Arc` is dropped: the other threads' accesses to the store
        // are complete.
        std::sync::atomic::fence(Ordering::Acquire);
    }

    /// Frees the identifier of a detached, empty store.
    pub fn release_id(&self, id: StoreId) {
        // A fault recorded for the old store must not be reported for the next one.
        self.bare_fault.lock().take_if(|fault| fault.store == id);
        self.stores.lock()[id.0 as usize] = Slot::Free;
    }

    fn store(&self, id: StoreId) -> Option<UsedBy<'_>> {
        let store = self.stores.lock().get(id.0 as usize)?.store()?.clone();
        Some(InUse::new(store, self))
    }

    fn all_stores(&self) -> Vec<UsedBy<'_>> {
        let stores = self.stores.lock();
        stores.iter().filter_map(Slot::store).map(|s| InUse::new(s.clone(), self)).collect()
    }

    // ---- budget ---------------------------------------------------------------------------------

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

    /// Sets a new budget. Pools grow at once and shrink in the background. On error the budget is
    /// unchanged.
    pub fn set_budget(&self, budget_bytes: u64) -> Result<()> {
        let mut shares = self.shares.lock();
        let before = std::mem::replace(&mut shares.budget_bytes, budget_bytes);
        let divided = self.divide(&shares);
        if divided.is_err() {
            shares.budget_bytes = before;
            let _ = self.divide(&shares);
        }
        divided
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
        let kernel = part(shares.budget_bytes, Kind::Kernel, others + weight(Kind::Kernel))
            .min(kernel_need_bytes(shares.kernel_bytes));
        let share = |kind| part(shares.budget_bytes.saturating_sub(kernel), kind, others);
        let frames = |bytes: u64| (bytes / self.options.page_bytes as u64) as usize;
        let mapped = frames(share(Kind::Mapped));
        let probation = (mapped as f64 * f64::from(self.mapped.probation_share())) as usize;
        self.probation.set_slots(probation);
        self.set_pool(&self.mapped, mapped.saturating_sub(probation));
        let arena = frames(share(Kind::Arena));
        let provided = self.arena_memory.provide(arena);
        self.set_pool(&self.arena, arena.min(self.arena_memory.provided()));
        self.kernel_share_bytes.store(kernel, Ordering::Relaxed);
        self.wake_evictor();
        provided.map_err(|source| Error::Kernel {
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

    /// Acquires a frame for `page`. Waits until a frame is free or none can be freed.
    pub fn acquire(
        &self,
        pool: &FramePool,
        page: PageKey,
    ) -> std::result::Result<FrameId, NoFrame> {
        if duties::is_in_a_call()
            && let Some(store) = self.store(page.store)
        {
            duties::with_caller(store.height(), |above| above.is_above(store.height().get()));
        }
        let mut stalled_at = None;
        loop {
            let ticket = pool.ticket();
            if let Some(frame) = pool.take(page) {
                if pool.free() < low_watermark(pool) && self.wants_evictor(pool) {
                    self.wake_evictor();
                }
                return Ok(frame);
            }
            if self.wants_evictor(pool) {
                self.wake_evictor();
            }
            // Cleaning a dirty region frees many more frames than its victims: ask for few, to keep
            // the wait short.
            let dirty = self.reclaim_of(pool).dirty.load(Ordering::Relaxed);
            let want = if dirty { BATCH / 4 } else { BATCH };
            if self.evict(pool, want, Cleaning::IfCopying).freed > 0 {
                continue;
            }
            if duties::writing().is_some() {
                return self.acquire_to_write_back(pool, page);
            }
            let stalled_at = *stalled_at.get_or_insert_with(|| {
                count(&self.counters.stalls, 1);
                self.reclaim_of(pool).stuck_passes.load(Ordering::Acquire)
            });
            self.wake_evictor();
            if let Some(no_frame) = self.stuck(pool, stalled_at) {
                return Err(no_frame);
            }
            self.wait_with_frames_in_hand(pool, ticket);
        }
    }

    /// Acquires a frame for `page`, which the calling thread needs to complete a write-back.
    ///
    /// If the heights in `duties` are right, a frame is free or will be. But heights are learnt,
    /// and a device may touch memory from its own threads. So the thread waits a bounded number of
    /// times and then fails. The write fails with it; its page stays dirty and is written again
    /// later.
    #[cold]
    fn acquire_to_write_back(
        &self,
        pool: &FramePool,
        page: PageKey,
    ) -> std::result::Result<FrameId, NoFrame> {
        let height = self.store(page.store).map_or(0, |store| store.height().get());
        let mut waits = 0;
        loop {
            let ticket = pool.ticket();
            if let Some(frame) = pool.take(page).or_else(|| pool.take_reserved(page, height)) {
                return Ok(frame);
            }
            if self.evict_a_pass(pool) {
                continue;
            }
            let census = self.census(pool);
            if census.coming == 0 || waits == MOST_WAITS {
                return Err(NoFrame { pinned: census.pinned, unwritable: census.unwritable });
            }
            waits += 1;
            self.wait_with_frames_in_hand(pool, ticket);
        }
    }

    /// Evicts a few frames of a pool in the calling thread. Returns false if a whole pass freed
    /// none.
    fn evict_a_pass(&self, pool: &FramePool) -> bool {
        let mut asked = 0;
        while asked <= 2 * pool.limit() + BATCH {
            if self.evict(pool, BATCH / 4, Cleaning::Serially).freed > 0 {
                return true;
            }
            asked += BATCH / 4;
        }
        false
    }

    fn wait_with_frames_in_hand(&self, pool: &FramePool, ticket: Ticket) {
        self.count_as_held(pool, |held, frames| _ = held.fetch_add(frames, Ordering::Relaxed));
        pool.wait_for_frame(ticket, FRAME_WAIT);
        self.count_as_held(pool, |held, frames| _ = held.fetch_sub(frames, Ordering::Relaxed));
    }

    /// Applies `change` to the counters of the frames that this thread holds while it waits for a
    /// frame of `pool`.
    fn count_as_held(&self, pool: &FramePool, change: impl Fn(&AtomicUsize, usize)) {
        duties::for_each_load(|of, frames| {
            // SAFETY: the load borrows the pool and has not returned.
            let held = unsafe { &(*of).held };
            let held = if ptr::eq(of, pool) {
                &held.own
            } else if ptr::eq(of, &self.mapped) || ptr::eq(of, &self.arena) {
                &held.beside
            } else {
                &held.elsewhere
            };
            change(held, frames);
        });
    }

    /// Counts the granted frames of a pool by what keeps them.
    fn census(&self, pool: &FramePool) -> Census {
        let (mut census, loading) = self.count_frames(pool);
        let mut held = self.held_up(pool);
        let beside = pool.held.beside.load(Ordering::Relaxed);
        // A thread that waits for the other pool proceeds if that pool gets a frame by itself.
        let other = if ptr::eq(pool, &self.arena) { &self.mapped } else { &self.arena };
        if beside > 0 && loading > held {
            let (there, loading_there) = self.count_frames(other);
            let held_there = self.held_up(other) + other.held.beside.load(Ordering::Relaxed);
            if there.coming + there.writing == 0 && loading_there <= held_there {
                held += beside;
            }
        }
        census.coming += loading.saturating_sub(held) as u64;
        census
    }

    /// The number of frames held by threads that wait for a frame of this pool or of another cache,
    /// and by this thread, which cannot proceed during the census.
    fn held_up(&self, pool: &FramePool) -> usize {
        let (own, elsewhere) = (&pool.held.own, &pool.held.elsewhere);
        let waiting = own.load(Ordering::Relaxed) + elsewhere.load(Ordering::Relaxed);
        waiting + duties::frames_in_hand(pool)
    }

    /// Counts every granted frame of a pool. Returns the frames of pages in Loading separately.
    fn count_frames(&self, pool: &FramePool) -> (Census, usize) {
        let mut census = Census::default();
        let mut loading = 0;
        let mut last: Option<(StoreId, Option<UsedBy<'_>>)> = None;
        for frame in pool.granted() {
            let Some(page) = pool.owner(frame) else { continue };
            if last.as_ref().is_none_or(|&(id, _)| id != page.store) {
                last = Some((page.store, self.store(page.store)));
            }
            let store = last.as_ref().and_then(|(_, store)| store.as_ref());
            // A store that was removed from the registry is being torn down.
            let keeps = store.map_or(Keeps::Nothing, |store| store.keeps(page.page, frame));
            match keeps {
                Keeps::Loading => loading += 1,
                // Also if an evictor holds the frame: it will return it to the policy, not free it.
                Keeps::Pin => census.pinned += 1,
                Keeps::Dirt => census.unwritable += 1,
                Keeps::Writing => census.writing += 1,
                Keeps::Nothing => census.coming += 1,
            }
        }
        (census, loading)
    }

    /// Sleeps until a frame may be free. Async-signal-safe.
    pub fn wait_for_frame(&self, pool: &FramePool) {
        let ticket = pool.ticket();
        self.wake_evictor();
        if pool.free() == 0 {
            self.wait_with_frames_in_hand(pool, ticket);
        }
    }

    /// Whether the evictor should evict ahead: eviction means write-back, and the evictor gets a
    /// CPU.
    ///
    /// The thread that needs a frame evicts clean pages itself: each additional thread that changes
    /// page tables makes every change more expensive. It also evicts dirty pages while the evictor
    /// does not get a CPU to itself, because then the evictor would only take turns with the
    /// threads it works for.
    fn wants_evictor(&self, pool: &FramePool) -> bool {
        let reclaim = self.reclaim_of(pool);
        reclaim.dirty.load(Ordering::Relaxed) && !reclaim.crowded.load(Ordering::Relaxed)
    }

    fn reclaim_of(&self, pool: &FramePool) -> &Reclaim {
        &self.reclaim[usize::from(std::ptr::eq(pool, &self.arena))]
    }

    /// Whether the evictor found nothing to evict, and no frame about to become free, in several
    /// whole passes.
    ///
    /// One of the passes must have started after the stall, at which the count was `stalled_at`:
    /// what kept pages before may no longer hold.
    fn stuck(&self, pool: &FramePool, stalled_at: u32) -> Option<NoFrame> {
        let reclaim = self.reclaim_of(pool);
        let passes = reclaim.stuck_passes.load(Ordering::Acquire);
        // The next pass to end may have started before the stall. A smaller count means a success
        // since then.
        let whole_pass_since = passes < stalled_at || passes - stalled_at >= 2;
        (passes >= STUCK_PASSES && whole_pass_since).then(|| NoFrame {
            pinned: reclaim.stuck_pinned.load(Ordering::Relaxed),
            unwritable: reclaim.stuck_unwritable.load(Ordering::Relaxed),
        })
    }

    /// Takes up to `want` victims, one batch at most, from the policy and evicts them.
    pub fn evict(&self, pool: &FramePool, want: usize, write_back: Cleaning) -> Evicted {
        let mut victims = [FrameId(0); BATCH];
        let found = pool.victims(&mut victims[..want.min(BATCH)]);
        let mut evicted = Evicted::default();
        let mut batch = [(FrameId(0), PageId(0)); BATCH];
        let store_of = |frame: FrameId| pool.owner(frame).map(|key| key.store);
        let victims = &mut victims[..found];
        // Write back victims of one store only, and last. Its device may take long to write, and
        // may drop a mapping of another store, whose teardown waits for its frames: so no frames of
        // other stores may be held then. Their victims are handled first, and the dirty ones
        // returned to the policy.
        let written = match write_back {
            Cleaning::No => None,
            _ => victims.iter().find_map(|&frame| {
                store_of(frame).filter(|&id| {
                    // While this thread writes back, it may write only to lower stores: a higher
                    // one may wait for it.
                    duties::writing().is_none_or(|height| {
                        self.store(id).is_some_and(|store| store.height().get() < height)
                    })
                })
            }),
        };
        if victims.iter().any(|&frame| store_of(frame) != written) {
            victims.sort_unstable_by_key(|&frame| {
                let store = store_of(frame);
                (store == written, store.map(|store| store.0))
            });
        }
        let mut rest = &victims[..];
        while let Some(first) = rest.first() {
            // A victim keeps its owner until its frame is given back, which only this thread does.
            let Some(id) = store_of(*first) else {
                rest = &rest[1..];
                continue;
            };
            let mut count = 0;
            while let Some((&frame, tail)) = rest.split_first()
                && let Some(key) = pool.owner(frame)
                && key.store == id
            {
                batch[count] = (frame, key.page);
                count += 1;
                rest = tail;
            }
            match self.store(id) {
                Some(store) => {
                    let write_back = if Some(id) == written { write_back } else { Cleaning::No };
                    evicted.add(store.evict(&batch[..count], write_back));
                }
                None => {
                    // Being detached: its own teardown frees these frames.
                    for &(frame, _) in &batch[..count] {
                        pool.returned(&[frame]);
                    }
                }
            }
        }
        if found > 0 {
            self.reclaim_of(pool).dirty.store(evicted.dirty > 0, Ordering::Relaxed);
        }
        evicted
    }

    pub fn probation_copy(&self, slot: FrameId, page: PageKey, target: *mut u8) -> bool {
        // SAFETY: `target` is a bounce buffer of at least a page that the caller owns.
        unsafe { self.probation.copy_out(slot, page, target) }
    }

    /// Keeps a copy of a victim's bytes. `None` if the policy wants no probation area.
    pub fn probation_keep(&self, page: PageKey, source: *const u8) -> Option<FrameId> {
        // SAFETY: the page is Evicting, so its bytes are readable and do not change.
        unsafe {
            self.probation.keep(page, source, |old, slot| {
                if let Some(store) = self.store(old.store) {
                    store.forget(old.page, slot);
                }
            })
        }
    }

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

    /// The serving thread of thread mode: answers fault messages until the cache stops.
    pub fn run_server(&self, uffd: &Uffd) {
        while !self.is_stopping() {
            let Ok(Some(message)) = uffd.next_fault(100) else {
                continue;
            };
            let fault = FaultContext {
                signal: libc::SIGBUS,
                address: message.address,
                write: Some(message.write || message.write_protected),
                fallible: false,
                hardware_error: false,
            };
            let page = message.address & !(self.options.page_bytes - 1);
            match aquifer_vm::router::serve(&fault) {
                Served::Yes => {
                    let _ = uffd.wake(page as *mut u8, self.options.page_bytes);
                }
                // The access must not hang: it gets SIGBUS, as in signal mode.
                Served::No => {
                    let _ = uffd.poison(page as *mut u8, self.options.page_bytes);
                }
            }
        }
    }

    // ---- background -----------------------------------------------------------------------------

    pub fn request_prefetch(&self, store: StoreId, first: u64, pages: u64) {
        self.jobs.push_prefetch(store, first, pages);
    }

    pub fn run_prefetch(&self, store: StoreId, first: u64, pages: u64) {
        if let Some(store) = self.store(store) {
            store.prefetch(first, pages);
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
}
