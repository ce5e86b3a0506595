//! The stores of a cache: their identifiers, and references that a detaching store waits for.
//!
//! The evictor, the workers and the server of faults reach a store only through the registry. Its
//! lock is held while a reference is taken, never while it is used.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_sys::uffd::FaultMessage;

use super::{Engine, FRAME_WAIT, Kind};
use crate::engine::duties::Height;
use crate::error::Result;
use crate::ids::{FrameId, PageId, StoreId};

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

    /// Loads absent pages of runs while frames are free.
    fn prefetch(&self, runs: &[Range<u64>]);

    /// The number of pages that are dirty now.
    fn dirty_pages(&self) -> u64;

    /// The name of its device, and what that counts itself.
    fn device_counters(&self) -> (String, Vec<(&'static str, u64)>);

    /// Stops prefetches: the store is about to be detached.
    fn leave(&self);

    /// The addresses of its pages; empty if their bytes are in frames.
    fn addresses(&self) -> Range<usize>;

    /// Answers a fault of another thread at one of its addresses.
    fn answer(&self, fault: &FaultMessage, may_wait: bool) -> Answer;

    /// Has the next access to an address try again after [`Answer::Failed`]; returns false if that has to be asked for once more.
    fn try_again(&self, address: usize) -> bool;
}

/// The outcome of a fault of another thread. Unless the fault waits, that thread can be woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The thread finds the page, or faults again.
    Served,
    /// Accesses raise SIGBUS, and fail in system calls, until the page is loaded.
    Failed,
    /// It takes a wait that was not allowed, or no frame can be freed.
    Waits,
}

/// A reference to a store beyond its owner's: [`Engine::detach`] waits until it is dropped.
pub(crate) struct InUse<S: ?Sized, E: Deref<Target = Engine>> {
    store: Option<Arc<S>>,
    engine: E,
}

/// A store of the registry in use.
pub(crate) type UsedBy<'a> = InUse<dyn AttachedStore, &'a Engine>;

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

/// An entry of the registry; its index is the store's identifier.
pub(super) enum Slot {
    /// Of a store that is being made or emptied, or of none.
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

/// The stores of a cache.
#[derive(Default)]
pub(super) struct Stores {
    slots: Vec<Slot>,
    /// Identifiers that were released.
    free: Vec<StoreId>,
    /// The attached stores with addresses, by the first one.
    by_address: BTreeMap<usize, StoreId>,
}

impl Stores {
    fn get(&self, id: StoreId) -> Option<&Arc<dyn AttachedStore>> {
        self.slots.get(id.0 as usize)?.store()
    }
}

impl Engine {
    /// Reserves an identifier for a store that is about to be attached.
    pub fn reserve_id(&self) -> StoreId {
        let mut stores = self.stores.lock();
        if let Some(id) = stores.free.pop() {
            return id;
        }
        stores.slots.push(Slot::Reserved);
        StoreId(stores.slots.len() as u32 - 1)
    }

    /// Registers a store and counts it in the budget. On error the identifier is free again.
    pub fn attach(&self, id: StoreId, store: Arc<dyn AttachedStore>, kind: Kind) -> Result<()> {
        let addresses = store.addresses();
        let mut stores = self.stores.lock();
        if !addresses.is_empty() {
            stores.by_address.insert(addresses.start, id);
        }
        stores.slots[id.0 as usize] = Slot::Attached(store);
        drop(stores);
        self.join_budget(kind).inspect_err(|_| {
            self.detach(id);
            self.release_id(id);
        })
    }

    /// Takes a store out of the registry and waits until no thread but its owner uses it.
    ///
    /// So its memory is never freed by the evictor, by a worker, by a server, or on another thread's
    /// fault path.
    pub fn detach(&self, id: StoreId) {
        if let Some(store) = self.stores.lock().get(id) {
            // A prefetch ends with the transfers in flight.
            store.leave();
        }
        self.jobs.forget_hints(id);
        loop {
            let ticket = self.let_go.ticket();
            {
                let mut stores = self.stores.lock();
                // One reference is the registry's and one the owner's; the others are in an
                // `InUse`. The evictor, the workers and the server get theirs only from the
                // registry, whose lock is held.
                let Some(store) = stores.get(id) else { break };
                if Arc::strong_count(store) <= 2 {
                    let first = store.addresses().start;
                    stores.by_address.remove(&first);
                    stores.slots[id.0 as usize] = Slot::Reserved;
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
        self.stores.lock().free.push(id);
    }

    pub(super) fn store(&self, id: StoreId) -> Option<UsedBy<'_>> {
        let store = self.stores.lock().get(id)?.clone();
        Some(InUse::new(store, self))
    }

    /// The store whose page is at an address.
    pub(crate) fn store_at(&self, address: usize) -> Option<UsedBy<'_>> {
        let stores = self.stores.lock();
        let (_, &id) = stores.by_address.range(..=address).next_back()?;
        let store = stores.get(id).filter(|store| store.addresses().contains(&address))?;
        Some(InUse::new(store.clone(), self))
    }

    pub(super) fn all_stores(&self) -> Vec<UsedBy<'_>> {
        let stores = self.stores.lock();
        stores.slots.iter().filter_map(Slot::store).map(|s| InUse::new(s.clone(), self)).collect()
    }

    // ---- budget ---------------------------------------------------------------------------------
}
