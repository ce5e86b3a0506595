//! The heaps that this process has open, by address.
//!
//! A collection inside an object cannot hold a pointer to the allocator, which is in DRAM and has
//! another address after a restart. It finds the allocator by an address that it does hold.
//!
//! A forked child gets its own registry: the parent's may have been locked by a thread that does
//! not exist in the child. The parent's registry stays in the child's memory, unreachable.

use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use aquifer_vm::fork::ProcessMark;

use super::error::HeapError;
use super::shared::Shared;

struct Entry {
    start: u64,
    end: u64,
    heap: Arc<Shared>,
}

struct Registry {
    process: ProcessMark,
    /// Whether the process was forked from one that had a registry.
    is_childs: bool,
    /// Sorted by address.
    heaps: RwLock<Vec<Entry>>,
}

/// The current registry. Registries are never freed after publication.
static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(null_mut());

impl Registry {
    /// This process's registry.
    fn here() -> &'static Registry {
        // Acquire pairs with the release in the compare-exchange below.
        let mut found = REGISTRY.load(Acquire);
        loop {
            // SAFETY: null, or a registry that is never freed and only accessed by shared
            // reference.
            if let Some(registry) = unsafe { found.as_ref() }
                && registry.process.is_current()
            {
                return registry;
            }
            let fresh = Box::into_raw(Box::new(Registry {
                process: ProcessMark::new(),
                is_childs: !found.is_null(),
                heaps: RwLock::default(),
            }));
            // Release: publishes the initialized registry to the acquire load above. Acquire on
            // failure: as above.
            match REGISTRY.compare_exchange(found, fresh, Release, Acquire) {
                Ok(_) => found = fresh,
                Err(other) => {
                    // SAFETY: allocated above and not published.
                    drop(unsafe { Box::from_raw(fresh) });
                    found = other;
                }
            }
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Entry>> {
        self.heaps.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Entry>> {
        self.heaps.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, addresses: Range<u64>) {
        let heaps = self.read();
        let at = heaps.partition_point(|entry| entry.end <= addresses.start);
        if let Some(entry) = heaps.get(at).filter(|entry| entry.start <= addresses.start) {
            entry.heap.recorded().note(addresses);
        }
    }

    fn heap_at(&self, address: u64) -> Option<Arc<Shared>> {
        let heaps = self.read();
        let at = heaps.partition_point(|entry| entry.end <= address);
        let entry = heaps.get(at).filter(|entry| entry.start <= address)?;
        Some(Arc::clone(&entry.heap))
    }
}

/// Registers a heap.
pub(crate) fn insert(heap: &Arc<Shared>, len_bytes: u64) -> Result<(), HeapError> {
    let start = heap.address();
    let end = start.saturating_add(len_bytes);
    let mut heaps = Registry::here().write();
    let at = heaps.partition_point(|entry| entry.end <= start);
    if let Some(other) = heaps.get(at).filter(|entry| entry.start < end) {
        return Err(HeapError::AlreadyOpen { address: other.start });
    }
    heaps.insert(at, Entry { start, end, heap: Arc::clone(heap) });
    Ok(())
}

/// Unregisters a heap.
pub(crate) fn remove(heap: &Arc<Shared>) {
    Registry::here().write().retain(|entry| !Arc::ptr_eq(&entry.heap, heap));
}

/// Updates the length of a heap that has grown.
pub(crate) fn grow(heap: &Arc<Shared>, len_bytes: u64) {
    let mut heaps = Registry::here().write();
    if let Some(entry) = heaps.iter_mut().find(|entry| Arc::ptr_eq(&entry.heap, heap)) {
        entry.end = entry.start.saturating_add(len_bytes);
    }
}

/// The heap that contains an address.
pub(crate) fn heap_at(address: u64) -> Option<Arc<Shared>> {
    Registry::here().heap_at(address)
}

/// Notes that the heap that contains these addresses, if there is one, is stored to there.
pub(crate) fn note(addresses: Range<u64>) {
    Registry::here().note(addresses);
}

/// Whether an address is in a heap that only this process's parent has open.
pub(crate) fn is_parents(address: u64) -> bool {
    let registry = Registry::here();
    registry.is_childs && registry.heap_at(address).is_none()
}
