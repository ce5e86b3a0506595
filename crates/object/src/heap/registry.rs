//! Which heaps this process has open, by address.
//!
//! A collection inside an object cannot hold a pointer to the allocator, which lies in DRAM and elsewhere after a
//! restart. It finds the allocator by an address that it does hold.

use std::sync::{Arc, PoisonError, RwLock};

use super::error::HeapError;
use super::shared::Shared;

struct Entry {
    start: u64,
    end: u64,
    heap: Arc<Shared>,
}

/// Sorted by address.
static HEAPS: RwLock<Vec<Entry>> = RwLock::new(Vec::new());

/// Enters a heap.
pub(crate) fn insert(heap: &Arc<Shared>, len_bytes: u64) -> Result<(), HeapError> {
    let start = heap.address();
    let end = start.saturating_add(len_bytes);
    let mut heaps = HEAPS.write().unwrap_or_else(PoisonError::into_inner);
    // What a forked child inherited is not its own.
    heaps.retain(|entry| entry.heap.is_ours());
    let at = heaps.partition_point(|entry| entry.end <= start);
    if let Some(other) = heaps.get(at).filter(|entry| entry.start < end) {
        return Err(HeapError::AlreadyOpen { address: other.start });
    }
    heaps.insert(at, Entry { start, end, heap: Arc::clone(heap) });
    Ok(())
}

/// Forgets a heap.
pub(crate) fn remove(heap: &Arc<Shared>) {
    let mut heaps = HEAPS.write().unwrap_or_else(PoisonError::into_inner);
    heaps.retain(|entry| !Arc::ptr_eq(&entry.heap, heap));
}

/// Notes that a heap has become longer.
pub(crate) fn grow(heap: &Arc<Shared>, len_bytes: u64) {
    let mut heaps = HEAPS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(entry) = heaps.iter_mut().find(|entry| Arc::ptr_eq(&entry.heap, heap)) {
        entry.end = entry.start.saturating_add(len_bytes);
    }
}

/// The heap that an address lies in.
pub(crate) fn heap_at(address: u64) -> Option<Arc<Shared>> {
    let heaps = HEAPS.read().unwrap_or_else(PoisonError::into_inner);
    let at = heaps.partition_point(|entry| entry.end <= address);
    let entry = heaps.get(at).filter(|entry| entry.start <= address)?;
    Some(Arc::clone(&entry.heap))
}
