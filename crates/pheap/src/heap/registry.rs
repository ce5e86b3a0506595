//! What belongs to the heaps that this process has open, by the heaps' addresses.
//!
//! A collection inside an object cannot hold a pointer to the allocator, which is in DRAM and has
//! another address after a restart. It finds the allocator by an address that it does hold.
//!
//! A forked child gets its own registry: the parent's may have been locked by a thread that does
//! not exist in the child. The parent's registry stays in the child's memory, unreachable.

use std::ptr::null_mut;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use aquifer_vm::fork::ProcessMark;

use super::error::HeapError;

struct Entry<T> {
    start: u64,
    end: u64,
    value: Arc<T>,
}

/// The entries of one process.
struct Table<T> {
    process: ProcessMark,
    /// Whether the process was forked from one that had a table.
    is_childs: bool,
    /// Sorted by address.
    entries: RwLock<Vec<Entry<T>>>,
}

impl<T> Table<T> {
    fn read(&self) -> RwLockReadGuard<'_, Vec<Entry<T>>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Entry<T>>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `use_it` with what belongs to the heap that contains an address.
    fn with<R>(&self, address: u64, use_it: impl FnOnce(&Arc<T>) -> R) -> Option<R> {
        let entries = self.read();
        let at = entries.partition_point(|entry| entry.end <= address);
        let entry = entries.get(at).filter(|entry| entry.start <= address)?;
        Some(use_it(&entry.value))
    }
}

/// Values of the calling process, by ranges of addresses. Tables are never freed after publication.
pub(crate) struct Registry<T>(AtomicPtr<Table<T>>);

impl<T> Registry<T> {
    pub const fn new() -> Registry<T> {
        Registry(AtomicPtr::new(null_mut()))
    }

    /// This process's table.
    fn here(&self) -> &Table<T> {
        // Acquire pairs with the release in the compare-exchange below.
        let mut found = self.0.load(Acquire);
        loop {
            // SAFETY: null, or a table that is never freed and only accessed by shared reference.
            if let Some(table) = unsafe { found.as_ref() }
                && table.process.is_current()
            {
                return table;
            }
            let fresh = Box::into_raw(Box::new(Table {
                process: ProcessMark::new(),
                is_childs: !found.is_null(),
                entries: RwLock::default(),
            }));
            // Release: publishes the initialized table to the acquire load above. Acquire on
            // failure: as above.
            match self.0.compare_exchange(found, fresh, Release, Acquire) {
                Ok(_) => found = fresh,
                Err(other) => {
                    // SAFETY: allocated above and not published.
                    drop(unsafe { Box::from_raw(fresh) });
                    found = other;
                }
            }
        }
    }

    /// Registers what belongs to a heap.
    pub fn insert(&self, start: u64, len_bytes: u64, value: Arc<T>) -> Result<(), HeapError> {
        let end = start.saturating_add(len_bytes);
        let mut entries = self.here().write();
        let at = entries.partition_point(|entry| entry.end <= start);
        if let Some(other) = entries.get(at).filter(|entry| entry.start < end) {
            return Err(HeapError::AlreadyOpen { address: other.start });
        }
        entries.insert(at, Entry { start, end, value });
        Ok(())
    }

    /// Unregisters it.
    pub fn remove(&self, value: &Arc<T>) {
        self.here().write().retain(|entry| !Arc::ptr_eq(&entry.value, value));
    }

    /// Updates the length of a heap that has grown.
    pub fn grow(&self, value: &Arc<T>, len_bytes: u64) {
        let mut entries = self.here().write();
        if let Some(entry) = entries.iter_mut().find(|entry| Arc::ptr_eq(&entry.value, value)) {
            entry.end = entry.start.saturating_add(len_bytes);
        }
    }

    /// Calls `use_it` with what belongs to the heap that contains an address.
    pub fn with<R>(&self, address: u64, use_it: impl FnOnce(&Arc<T>) -> R) -> Option<R> {
        self.here().with(address, use_it)
    }

    /// Whether an address is in a heap that only this process's parent has open.
    pub fn is_parents(&self, address: u64) -> bool {
        let table = self.here();
        table.is_childs && table.with(address, |_| ()).is_none()
    }
}
